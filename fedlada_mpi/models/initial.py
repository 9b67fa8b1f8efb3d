"""The initial values of a saved model, checked against the network that they are for."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Mapping
from errno import EINVAL
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..support.errors import UserError, first_line, some
from ..support.inputs import reason, require_regular
from ..support.warning_filters import warning_filter
from .lora import adapters
from .network import Network
from .parameters import tensors


def load_initial(path: Path, network: Network, dtype: torch.dtype, partial: bool = False) -> None:
    """Give ``network`` the values of ``--init PATH``, constants included; its precision is kept.

    ``partial``: what has the same name, shape and kind; the rest stays as it is.
    """
    state = _read(path)
    if _has_adapters(state):
        raise UserError(
            f"--init: {path} has the adapters of a run with --lora alone: expected a state_dict of a whole model; "
            "torch.save(fedlada_mpi.load(DIR).model.module.state_dict(), FILE) merges them"
        )
    if partial:
        state = _fitting(path, network, state)
    elif not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
    own = _own(network)
    expected = {name: tuple(value.shape) for name, value in own.items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if not partial and given != expected:
        odd = sorted({str(name) for name, _ in {*given.items()} ^ {*expected.items()}})[:3]
        hint = "; --init-partial takes what fits" if {*given.items()} & {*expected.items()} else ""
        raise UserError(f"--init: {path} does not fit {network.name} (differs in {', '.join(odd)}){hint}")
    for name in state:
        _check_values(f"--init: {path}: {name}", state[name], own[name], dtype)
    for name, value in tensors(network.module).items():
        if name in state:
            value.data = state[name]
    network.constants |= {name: state[name] for name in network.constants if name in state}


def load_trained(path: Path, network: Network, dtype: torch.dtype) -> None:
    """Give ``network`` the values of a run's model file; adapters only where it has the base that they belong to."""
    if network.lora is None:
        load_initial(path, network, dtype)
        return
    state = _read(path)
    if not _has_adapters(state) or not isinstance(state.get("state_dict"), dict):
        raise UserError(f"--init: {path} has no adapters: expected a file of a run with --lora {network.lora.rank}")
    if state["base"] != network.digest():
        raise UserError(
            f"--init: {path} has adapters of a model with other frozen values: got {network.digest()[:12]}, expected "
            f"{state['base'][:12]}: give the run the base and the --init that it was trained with"
        )
    given, own = state["state_dict"], tensors(network.module)
    names = {*(entry.name for entry in network.layout.entries), *adapters(network.module)} & own.keys()
    expected = {name: tuple(own[name].shape) for name in names}
    if {name: tuple(value.shape) for name, value in given.items()} != expected:
        raise UserError(f"--init: {path} does not fit the adapters of {network.name}")
    for name, value in given.items():
        _check_values(f"--init: {path}: {name}", value, own[name], dtype)
        own[name].data = value


def _has_adapters(state: Any) -> bool:
    return isinstance(state, dict) and isinstance(state.get("lora"), dict) and isinstance(state.get("base"), str)


def _own(network: Network) -> dict[str, Tensor]:
    """What a file of a whole model has: adapters are not among it."""
    added = adapters(network.module)
    return {name: value for name, value in network.module.state_dict().items() if name not in added}


def _read(path: Path) -> Any:
    try:
        require_regular(path)
        if tarfile.is_tarfile(path):  # as torch 0.1 wrote them; up to 2.5, it can run code to read one
            raise ValueError("it is a tar file: save it again with torch.save")
        _refuse_damage(path)
        with warning_filter("ignore"):  # torch's remarks on kinds of tensors that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a file make the unpickler raise
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        cut = getattr(error, "errno", None) == EINVAL or why.startswith("PytorchStreamReader")
        if cut or isinstance(error, (KeyError, EOFError)):  # also of other bytes
            why = "it is damaged, or no file of torch.save"
        raise UserError(f"--init: cannot read {path} as a state_dict: {why}") from None


def _refuse_damage(path: Path) -> None:
    """Raise ValueError if values are not what was saved; torch does not compare them with their checksums."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if any(entry.CRC for entry in archive.infolist()) and (name := archive.testzip()):
            raise ValueError(f"it is damaged: the checksum of {name} in it is another one; copy it again")


WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which training scripts save a state_dict


def _fitting(path: Path, network: Network, state: Any) -> dict[str, Tensor]:
    """The tensors of a file that fit the network, in its types; its notes say which these are."""
    own, about = _own(network), path.name
    for wrapper in WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state, about = state[wrapper], f"{about}[{wrapper!r}]"
    if not isinstance(state, dict):
        raise UserError(f"--init: {path} holds {type(state).__name__}, expected a state_dict")
    given = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    # Wrappers such as DataParallel put one more name before all others.
    columns = zip(*(name.split(".") for name in given), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]
    shortened = [{name.split(".", n)[-1]: value for name, value in given.items()} for n in range(len(common) + 1)]
    fits = [len(_fits(own, names)) for names in shortened]
    dropped = fits.index(max(fits))
    given, about = shortened[dropped], about + "".join(f" without {part!r}" for part in common[:dropped])
    taken = _fits(own, given)
    if not taken:
        raise UserError(
            f"--init-partial: nothing in {path} fits {network.name}: got {some(given) or 'no tensors'}; expected "
            f"{some(own)}"
        )
    left, unused = ([name for name in names if name not in taken] for names in (own, given))
    note = f"--init-partial: {len(taken)} of {len(own)} tensors from {about}"
    note += f"; at their initial values: {some(left)}" if left else ""
    note += f"; not used: {some(unused)}" if unused else ""
    network.notes.append(note)
    return {name: value.to(own[name].dtype) for name, value in taken.items()}


def _fits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of ``given`` has the name, shape and kind of one of the network's ``own`` tensors."""
    return {
        name: value
        for name, value in given.items()
        if name in own and value.shape == own[name].shape and _is_plain(value) and _same_kind(value, own[name])
    }


def _is_plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta and not value.is_quantized


def _same_kind(value: Tensor, own: Tensor) -> bool:
    return value.is_floating_point() if own.is_floating_point() else value.dtype == own.dtype


def _check_values(what: str, given: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    """Numbers of the kind of the module's ``own``, and finite in the type that the run uses."""
    kind = "quantised" if given.is_quantized else "meta" if given.is_meta else f"{given.layout} {given.dtype}"
    if not _is_plain(given) or not _same_kind(given, own):
        expected = "plain floating-point numbers" if own.is_floating_point() else own.dtype
        raise UserError(f"{what} is a {kind} tensor, expected {expected}")
    if own.is_floating_point() and not given.to(dtype).isfinite().all():
        raise UserError(f"{what} has values that are not finite in {dtype}: expected numbers")
