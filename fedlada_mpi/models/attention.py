"""Scaled dot-product attention of all clients at once, clients folded into the batch.

This is the one place that says how attention is computed. On a CPU it is torch's own function, whose kernels give the
same bits every time. On a GPU it is a kernel of this package, as torch's fused ones add up gradients in no fixed order.
What that does not take, such as a mask, is products and a softmax there. With dropout it is written out everywhere, as
what is dropped comes from the draws of the step.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from .stack import Stack


def attention(
    p: Stack, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Of queries, keys and values [C, N, ..., tokens, width]; a mask is [C or 1, ...], with axes as in torch."""
    shape = query.shape[:2]
    mask = None if attn_mask is None else _folded_mask(attn_mask, query)
    q, k, v = (x.expand(p.count, *x.shape[1:]).flatten(0, 1) for x in (query, key, value))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    if dropout_p == 0 and mask is None and p.kernels and p.kernels.takes_attention(q, k, v):
        return p.kernels.attention(q, k, v, is_causal, scale).unflatten(0, shape)
    if dropout_p == 0 and not p.on_gpu:
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)
        return out.unflatten(0, shape)
    scores = torch.matmul(q * scale, k.mT)
    seen = mask if mask is not None and mask.dtype == torch.bool else None
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)  # finite, for tokens that see none
    elif mask is not None:
        scores = scores + mask
    wide = None if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=wide).to(q.dtype)
    if dropout_p:
        with p.draws or nullcontext():
            weights = F.dropout(weights.unflatten(0, shape), dropout_p).flatten(0, 1)
    out = torch.matmul(weights, v)
    if seen is not None and not is_causal:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0)  # as torch has it for them
    return out.unflatten(0, shape)


def _folded_mask(mask: Tensor, query: Tensor) -> Tensor:
    """A mask without the axis of clients; one with an axis of images has all of them."""
    if len(mask) == 1 and (mask.dim() < query.dim() or mask.shape[1] == 1):
        return mask[0]
    mask = mask.reshape(len(mask), *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
    return mask.expand(len(query), query.shape[1], *mask.shape[2:]).flatten(0, 1)
