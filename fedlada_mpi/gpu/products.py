"""Products of many models' matrices by torch's library, also where a GPU would have too little to do with them."""

from __future__ import annotations

import torch
from torch import Tensor

# A weight gradient sums over all pixels of all images: a long product with few rows and columns. Cut into this
# many products of the same batch, it fills a GPU.
PIECES = 8


def library_product(a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """a [C, m, length] times b [C, length, n], plus bias [C, n]."""
    if bias is not None:
        return torch.baddbmm(bias.unsqueeze(1), a, b)
    (count, m, length), n = a.shape, b.shape[-1]
    few = a.is_cuda and count * -(-m // 64) * -(-n // 64) < 200
    if out is None or not few or length % PIECES or length < 128 * PIECES:
        return torch.bmm(a, b, out=out)
    left = a.mT.reshape(count * PIECES, length // PIECES, m)
    parts = torch.bmm(left.mT, b.reshape(count * PIECES, length // PIECES, n))
    return torch.sum(parts.view(count, PIECES, m, n), 1, dtype=out.dtype, out=out)
