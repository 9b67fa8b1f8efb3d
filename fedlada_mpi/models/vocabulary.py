"""A last layer over a large vocabulary together with its cross-entropy, in blocks of tokens.

The logits of all tokens are never in memory at once, nor are their gradients: of GPT-2's 50,257 tokens they would take
more than all the rest of the model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support import autograd
from .by_autograd import linear
from .stack import Kernels

LARGE = 4096  # outputs of a last layer from which on it is computed in blocks
BLOCK_BYTES = 1 << 28  # of the logits of a block, in float32
KERNEL_BLOCK_BYTES = 1 << 30  # of those that a kernel overwrites with their gradients, in the type of the products
ALIGNED = 64  # rows of a table in multiples of which cuBLAS has its fast kernels

Found = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # losses [C]; gradients of the inputs, the table, the bias


class PaddedTables:
    """Tables with rows of zeros at the end, up to a multiple of ``ALIGNED``; that of a frozen one is kept."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, int, Tensor] | None = None  # of which table, in which version

    def __call__(self, table: Tensor) -> Tensor:
        rows = table.shape[1]
        if rows % ALIGNED == 0:
            return table
        if self._kept is not None:
            source, version, padded = self._kept
            if source.is_set_to(table) and version == table._version:
                return padded
        padded = F.pad(table, (0, 0, 0, -rows % ALIGNED))
        # What a graph computes has its values in a replay only.
        capturing = table.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(table) == 1 and not table.requires_grad and not capturing:
            self._kept = table, table._version, padded
        return padded


def backward(
    hidden: Tensor, table: Tensor, bias: Tensor | None, targets: Tensor, weight: Tensor,
    kernels: Kernels | None = None, padded: PaddedTables | None = None,
) -> Tensor:  # fmt: skip
    """The losses [C] of tokens [C, N, T], after their gradients have gone back through ``hidden`` [C, N, T, width].

    The layer is ``table`` [C, V, width] and ``bias`` [C, V], or [1, ...] where they are frozen; ``weight`` [C, N, T] is
    what a token counts, 0 where there is none.
    """
    with torch.no_grad():
        if kernels is None:
            losses, drows, dtable, dbias = _in_blocks(hidden, table, bias, targets, weight)
        else:
            tables = padded or PaddedTables()
            losses, drows, dtable, dbias = _by_kernel(kernels, tables, hidden, table, bias, targets, weight)
    reached = [(hidden, drows.view(hidden.shape)), (table, dtable), (bias, dbias)]
    found = [(v, d.to(v.dtype)) for v, d in reached if v is not None and d is not None and v.requires_grad]
    autograd.backward([v for v, _ in found], [d for _, d in found])
    return losses


def _in_blocks(hidden: Tensor, table: Tensor, bias: Tensor | None, targets: Tensor, weight: Tensor) -> Found:
    clients, width = len(hidden), hidden.shape[-1]
    rows, right = hidden.reshape(clients, -1, width), targets.reshape(clients, -1, 1).clamp(min=0)
    counts = weight.reshape(clients, -1, 1)
    drows = torch.empty_like(rows)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    dtable, dbias = _zeros(table, wide), _zeros(bias, wide)
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
    return losses, drows, dtable, dbias


def _by_kernel(
    kernels: Kernels, padded: PaddedTables, hidden: Tensor, table: Tensor, bias: Tensor | None, targets: Tensor,
    weight: Tensor,
) -> Found:  # fmt: skip
    """The logits of a block are written once, and overwritten once, with their gradients."""
    words, width = table.shape[1:]
    shared = len(table) == 1 and (bias is None or len(bias) == 1)
    groups = 1 if shared else len(hidden)  # of tokens, each with a table of its own
    rows, right, counts = hidden.reshape(groups, -1, width), targets.reshape(groups, -1), weight.reshape(groups, -1)
    full, drows = padded(table).expand(groups, -1, -1), torch.empty_like(rows)
    dtable, dbias = _zeros(table, torch.float32), _zeros(bias, torch.float32)
    losses = []
    length = rows.shape[1]
    most = max(KERNEL_BLOCK_BYTES // (groups * full.shape[1] * rows.element_size()), 1)
    size = -(-length // -(-length // most))  # as even as can be
    for start in range(0, length, size):
        block = slice(start, start + size)
        dlogits = torch.bmm(rows[:, block], full.mT)
        losses.append(kernels.token_cross_entropy(dlogits, bias, words, right[:, block], counts[:, block]))
        torch.bmm(dlogits, full, out=drows[:, block])
        if dtable is not None:
            dtable += torch.bmm(dlogits[..., :words].mT, rows[:, block])
        if dbias is not None:
            dbias += dlogits[..., :words].sum(1, dtype=torch.float32)
    return torch.cat(losses, 1).view(len(hidden), -1).sum(1), drows, dtable, dbias


def _zeros(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Where the gradient of a parameter is added up, if it has one."""
    if parameter is None or not parameter.requires_grad:
        return None
    return torch.zeros_like(parameter, dtype=dtype)
