"""The initial values of a saved model, checked against the network that they are for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from . import Network
from .trial import tensors


def load_initial(path: Path, network: Network) -> None:
    """Give ``network`` the values of ``--init PATH``, constants included; its precision is kept."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"--init: cannot read {path} as a state_dict: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
    expected = {name: tuple(value.shape) for name, value in network.module.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if given != expected:
        odd = sorted({name for name, _ in {*given.items()} ^ {*expected.items()}})[:3]
        raise UserError(f"--init: {path} does not fit {network.name} (differs in {', '.join(odd)})")
    for name, value in tensors(network.module).items():
        if name in state:
            value.data = state[name]
    network.constants |= {name: state[name] for name in network.constants if name in state}
