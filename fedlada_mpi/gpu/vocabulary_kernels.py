"""Cross-entropy over a large vocabulary: the loss of every token, and its gradient in place of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import await_inputs, check, jit, power, tl

LOWEST = tl.constexpr(-3.0e38) if tl else None  # finite, so that its difference from another is a number
LANES = 4096  # logits side by side: 16 bytes of bfloat16 for each of 512 threads
WARPS = 16  # few programs on a multiprocessor, so that their logits are still in the L2 cache when they are read again


@jit
def _some(
    logits, bias, begin, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A tile of a token's logits, -inf behind the last, and their places."""
    at = begin + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # Up to the width, which is even: loads are 16 bytes wide.
    value = tl.load(logits + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    value = tl.where(at < WORDS, value, float("-inf"))
    if bias is not None:
        value += tl.load(bias + at, mask=at < WORDS, other=0.0).to(tl.float32)
    return value, at


@jit(do_not_specialize=["tokens", "stride"])
def _token_cross_entropy(
    logits, bias, targets, weight, losses, tokens, stride, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    token = tl.program_id(0).to(tl.int64)
    logits += token * WIDTH
    label = tl.maximum(tl.load(targets + token), 0).to(tl.int32)
    right = tl.load(logits + label).to(tl.float32)  # before it is overwritten
    if bias is not None:
        bias += token // tokens * stride
        right += tl.load(bias + label).to(tl.float32)
    # Every lane has a maximum and a sum of its own until the end: no thread waits for another.
    highest = tl.full([1, LANES], LOWEST, tl.float32)
    sums = tl.zeros([1, LANES], tl.float32)
    for begin in range(0, WORDS, ROWS * LANES):
        value, _ = _some(logits, bias, begin, WORDS, WIDTH, ROWS, LANES)
        before = highest
        highest = tl.maximum(before, tl.max(value, 0, keep_dims=True))
        sums = sums * tl.exp(before - highest) + tl.sum(tl.exp(value - highest), 0, keep_dims=True)
    peak = tl.max(tl.max(highest, 1), 0)
    total = tl.sum(tl.sum(sums * tl.exp(highest - peak), 1), 0)
    share = tl.load(weight + token).to(tl.float32)
    tl.store(losses + token, share * (tl.log(total) + (peak - right)))
    factor = share / total
    for begin in range(0, WIDTH, ROWS * LANES):
        value, at = _some(logits, bias, begin, WORDS, WIDTH, ROWS, LANES)
        gradient = tl.exp(value - peak) * factor - tl.where(at == label, share, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < WIDTH)


def token_cross_entropy(
    logits: Tensor, bias: Tensor | None, words: int, targets: Tensor, weight: Tensor
) -> Tensor:  # fmt: skip
    """The losses [C, N] of tokens, times their weights; ``logits`` [C, N, words or more] become their gradients.

    Logits behind the first ``words`` do not count, and have no gradient. ``bias`` [C, words] is added to the others.
    """
    count, tokens, width = logits.shape
    check("cross-entropy over a vocabulary", logits)
    assert logits.is_contiguous()
    targets, weight = targets.contiguous(), weight.contiguous()
    losses = torch.empty(count, tokens, dtype=torch.float32, device=logits.device)
    lanes = min(power(words), LANES)
    rows, stride = 2 if words > lanes else 1, 0 if bias is None else bias.stride(0)
    _token_cross_entropy[(count * tokens,)](
        logits, bias, targets, weight, losses, tokens, stride, words, width, rows, lanes, num_warps=WARPS
    )
    return losses
