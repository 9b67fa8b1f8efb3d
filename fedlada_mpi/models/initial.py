"""The flat vector of a saved model, checked against the network that it is for."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..inputs import reason, require_regular
from .layout import Layout


def load_initial(path: Path, layout: Layout, model: str, dtype: torch.dtype) -> Tensor:
    """The parameters of ``--init PATH``, which must be those of ``model``."""
    try:
        require_regular(path)
        with warnings.catch_warnings():  # torch's remarks on kinds of tensors that are refused below
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a file make the unpickler raise
        why = reason(error) if isinstance(error, OSError) else (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--init: cannot read {path} as a state_dict: {why}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
    expected = {e.name: e.shape for e in layout.entries}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if given != expected:
        odd = sorted({str(name) for name, _ in {*given.items()} ^ {*expected.items()}})[:3]
        raise UserError(f"--init: {path} does not fit {model} (differs in {', '.join(odd)})")
    for name, value in state.items():
        if not value.is_floating_point() or value.is_quantized or value.layout != torch.strided or value.is_meta:
            kind = "quantised" if value.is_quantized else "meta" if value.is_meta else f"{value.layout} {value.dtype}"
            raise UserError(f"--init: {path}: {name} is a {kind} tensor, expected plain floating-point numbers")
        if not value.to(dtype).isfinite().all():
            raise UserError(f"--init: {path}: {name} has values that are not finite in {dtype}: expected numbers")
    return layout.pack(state, dtype)
