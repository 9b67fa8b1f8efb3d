"""A last layer over a large vocabulary together with its cross-entropy, in blocks of tokens.

The logits of all tokens are never in memory at once, nor are their gradients: of GPT-2's 50,257 tokens they would take
more than all the rest of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .by_autograd import linear

LARGE = 4096  # outputs of a last layer from which on it is computed in blocks
BLOCK_BYTES = 1 << 28  # of the logits of a block, in float32


def backward(hidden: Tensor, table: Tensor, bias: Tensor | None, targets: Tensor, weight: Tensor) -> Tensor:
    """The losses [C] of tokens [C, N, T], after their gradients have gone back through ``hidden`` [C, N, T, width].

    The layer is ``table`` [C, V, width] and ``bias`` [C, V], or [1, ...] where they are frozen; ``weight`` [C, N, T] is
    what a token counts, 0 where there is none.
    """
    clients, width = len(hidden), hidden.shape[-1]
    with torch.no_grad():
        rows, right = hidden.reshape(clients, -1, width), targets.reshape(clients, -1, 1).clamp(min=0)
        counts = weight.reshape(clients, -1, 1)
        drows = torch.empty_like(rows)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        dtable, dbias = (
            torch.zeros_like(p, dtype=wide) if p is not None and p.requires_grad else None for p in (table, bias)
        )
        losses = counts.new_zeros(clients, dtype=wide)
        size = max(BLOCK_BYTES // (4 * clients * table.shape[1]), 1)
        for start in range(0, rows.shape[1], size):
            block = slice(start, start + size)
            logits = linear(rows[:, block], table, bias).to(wide)
            logits -= logits.logsumexp(-1, keepdim=True)
            at_right = logits.gather(-1, right[:, block])
            losses -= (at_right * counts[:, block]).sum((1, 2))
            dlogits = logits.exp_().scatter_(-1, right[:, block], at_right.exp() - 1)
            dlogits = dlogits.mul_(counts[:, block]).to(hidden.dtype)
            drows[:, block] = torch.matmul(dlogits, table[0] if len(table) == 1 else table)
            if dtable is not None:
                dtable += torch.bmm(dlogits.mT, rows[:, block])
            if dbias is not None:
                dbias += dlogits.sum(1, dtype=wide)
    reached = [(hidden, drows.view(hidden.shape)), (table, dtable), (bias, dbias)]
    found = [(v, d.to(v.dtype)) for v, d in reached if v is not None and d is not None and v.requires_grad]
    torch.autograd.backward([v for v, _ in found], [d for _, d in found])
    return losses
