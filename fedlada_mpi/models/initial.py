"""The flat vector of a saved model, checked against the network that it is for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from .layout import Layout


def load_initial(path: Path, layout: Layout, model: str, dtype: torch.dtype) -> Tensor:
    """The parameters of ``--init PATH``, which must be those of ``model``."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"--init: cannot read {path} as a state_dict: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
    expected = {e.name: e.shape for e in layout.entries}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if given != expected:
        odd = sorted({name for name, _ in {*given.items()} ^ {*expected.items()}})[:3]
        raise UserError(f"--init: {path} does not fit {model} (differs in {', '.join(odd)})")
    return layout.pack(state, dtype)
