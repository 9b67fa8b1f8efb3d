"""Autograd from given gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """As ``torch.autograd.backward(outputs, gradients)``, which imports sympy to compare shapes: 0.7 s of a start."""
    Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(gradients),
        False,  # retain_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )
