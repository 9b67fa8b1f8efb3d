"""Dropout between recurrent layers whose random numbers belong to an example, whatever the others of its batch.

torch's own draws them for tensors whose first axis is time, so that those of an example depend on the number of
examples, and batches are padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _ByExample(nn.RNNBase):
    """One layer after another, with the outputs dropped in the order of the examples."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        if not self.training or not isinstance(input, Tensor) or input.dim() != 3:
            return super().forward(input, hx)
        directions = 2 if self.bidirectional else 1
        examples = input.shape[0 if self.batch_first else 1]
        lstm, x = self.mode == "LSTM", input
        if hx is None:
            zeros = input.new_zeros(self.num_layers * directions, examples, self.hidden_size)
            hx = (zeros, zeros) if lstm else zeros
        run = getattr(torch._VF, self.mode.lower())
        each = len(self._all_weights[0]) * directions
        last: list[Any] = []
        for depth in range(self.num_layers):
            own = slice(depth * directions, (depth + 1) * directions)
            initial = tuple(state[own] for state in hx) if lstm else hx[own]
            weights = [getattr(self, name) for name in self._flat_weights_names[depth * each : (depth + 1) * each]]
            settings = (self.bias, 1, 0.0, True, self.bidirectional, self.batch_first)
            x, *states = run(x, initial, weights, *settings)
            last.append(states)
            if depth < self.num_layers - 1:
                x = self._dropped(x)
        joined = tuple(torch.cat(states) for states in zip(*last, strict=True))
        return x, joined if lstm else joined[0]

    def _dropped(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return F.dropout(x, self.dropout)
        return F.dropout(x.transpose(0, 1).contiguous(), self.dropout).transpose(0, 1)


class _RNN(_ByExample, nn.RNN):
    pass


class _GRU(_ByExample, nn.GRU):
    pass


class _LSTM(_ByExample, nn.LSTM):
    pass


BY_EXAMPLE: dict[type[nn.RNNBase], type[nn.RNNBase]] = {nn.RNN: _RNN, nn.GRU: _GRU, nn.LSTM: _LSTM}


def draw_by_example(module: nn.Module) -> None:
    """Let the recurrent layers of a module draw for each example by itself."""
    for layer in module.modules():
        if (
            isinstance(layer, nn.RNNBase)
            and type(layer) in BY_EXAMPLE
            and layer.dropout
            and layer.num_layers > 1
            and not layer.proj_size
        ):
            layer.__class__ = BY_EXAMPLE[type(layer)]


def is_recurrent(layer: nn.Module | None) -> bool:
    """Whether a layer is one of torch's, and not another one that is derived from it."""
    return layer is not None and type(layer).forward in {kind.forward for kind in (*BY_EXAMPLE, *BY_EXAMPLE.values())}
