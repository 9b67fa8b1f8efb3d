"""The initial values of a saved model, checked against the network that they are for."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError, first_line
from ..inputs import reason, require_regular
from . import Network
from .trial import tensors


def load_initial(path: Path, network: Network, dtype: torch.dtype) -> None:
    """Give ``network`` the values of ``--init PATH``, constants included; its precision is kept."""
    try:
        require_regular(path)
        with warnings.catch_warnings():  # torch's remarks on kinds of tensors that are refused below
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a file make the unpickler raise
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        raise UserError(f"--init: cannot read {path} as a state_dict: {why}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
    expected = {name: tuple(value.shape) for name, value in network.module.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if given != expected:
        odd = sorted({str(name) for name, _ in {*given.items()} ^ {*expected.items()}})[:3]
        raise UserError(f"--init: {path} does not fit {network.name} (differs in {', '.join(odd)})")
    for name, value in network.module.state_dict().items():
        _check_values(f"--init: {path}: {name}", state[name], value, dtype)
    for name, value in tensors(network.module).items():
        if name in state:
            value.data = state[name]
    network.constants |= {name: state[name] for name in network.constants if name in state}


def _check_values(what: str, given: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    """Numbers of the kind of the module's ``own``, and finite in the type that the run uses."""
    kind = "quantised" if given.is_quantized else "meta" if given.is_meta else f"{given.layout} {given.dtype}"
    plain = given.layout == torch.strided and not given.is_meta and not given.is_quantized
    if not own.is_floating_point():
        if not plain or given.dtype != own.dtype:
            raise UserError(f"{what} is a {kind} tensor, expected {own.dtype}")
    elif not plain or not given.is_floating_point():
        raise UserError(f"{what} is a {kind} tensor, expected plain floating-point numbers")
    elif not given.to(dtype).isfinite().all():
        raise UserError(f"{what} has values that are not finite in {dtype}: expected numbers")
