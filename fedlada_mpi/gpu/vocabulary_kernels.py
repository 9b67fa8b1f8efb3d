"""Cross-entropy over a large vocabulary: the loss of every token, and its gradient in place of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import LOG2_E, await_inputs, check, exp2, jit, power, tl, triton

LOWEST = tl.constexpr(-2.0e38) if tl else None  # finite even times LOG2_E: its difference from another is a number
LN_2 = tl.constexpr(0.6931471805599453) if tl else None
# Logits side by side, 16 bytes of bfloat16 for each of 512 threads, and such rows in a tile.
LANES, ROWS = 4096, 4
WARPS = 16  # few programs on a multiprocessor, so that their logits are still in a cache when they are read again


@jit
def _some(
    logits, bias, begin, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of a token's logits, -inf behind the last, and their places; a ``WHOLE`` one has no end to look for."""
    at = begin + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if WHOLE:
        value = tl.load(logits + at).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + at).to(tl.float32)
    else:
        # Up to the width, which is even: loads are 16 bytes wide.
        value = tl.load(logits + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        value = tl.where(at < WORDS, value, float("-inf"))
        if bias is not None:
            value += tl.load(bias + at, mask=at < WORDS, other=0.0).to(tl.float32)
    return value, at


@jit
def _added(value, level, sums):
    """With a tile: a lane's largest logit to the base 2, and its sum of powers over the power of that."""
    before = level
    level = tl.maximum(before, tl.max(value, 0, keep_dims=True) * LOG2_E)
    return level, sums * exp2(before - level) + tl.sum(exp2(value * LOG2_E - level), 0, keep_dims=True)


@jit
def _overwrite(
    logits, bias, begin, peak, factor, WORDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    value, at = _some(logits, bias, begin, WORDS, WIDTH, ROWS, LANES, WHOLE)
    gradient = (exp2(value * LOG2_E - peak) * factor).to(logits.dtype.element_ty)
    if WHOLE:
        tl.store(logits + at, gradient)
    else:
        tl.store(logits + at, gradient, mask=at < WIDTH)


@jit(do_not_specialize=["tokens", "stride"])
def _token_cross_entropy(
    logits, bias, targets, weight, losses, tokens, stride, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, IN_TILES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    await_inputs()
    token = tl.program_id(0).to(tl.int64)
    logits += token * WIDTH
    label = tl.maximum(tl.load(targets + token), 0).to(tl.int32)
    right = tl.load(logits + label).to(tl.float32)  # before it is overwritten
    if bias is not None:
        bias += token // tokens * stride
        right += tl.load(bias + label).to(tl.float32)
    # Every lane has a level and a sum of its own until the end: no thread waits for another.
    level = tl.full([1, LANES], LOWEST, tl.float32)
    sums = tl.zeros([1, LANES], tl.float32)
    for begin in range(0, IN_TILES, ROWS * LANES):
        value, _ = _some(logits, bias, begin, WORDS, WIDTH, ROWS, LANES, True)
        level, sums = _added(value, level, sums)
    if IN_TILES < WIDTH:
        rest, _ = _some(logits, bias, IN_TILES, WORDS, WIDTH, LAST, LANES, False)
        level, sums = _added(rest, level, sums)
    peak = tl.max(tl.max(level, 1), 0)
    total = tl.sum(tl.sum(sums * exp2(level - peak), 1), 0)
    share = tl.load(weight + token).to(tl.float32)
    tl.store(losses + token, share * LN_2 * (tl.log2(total) + (peak - right * LOG2_E)))
    factor = share / total
    if IN_TILES < WIDTH:
        _overwrite(logits, bias, IN_TILES, peak, factor, WORDS, WIDTH, LAST, LANES, False)
    for step in range(0, IN_TILES, ROWS * LANES):  # from the end, which was read last
        begin = IN_TILES - ROWS * LANES - step
        _overwrite(logits, bias, begin, peak, factor, WORDS, WIDTH, ROWS, LANES, True)
    # The label's alone has a further part: a store after all others is less than to compare every place with it.
    tl.debug_barrier()
    gradient = exp2(right * LOG2_E - peak) * factor - share
    tl.store(logits + label, gradient.to(logits.dtype.element_ty))


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
    lanes, stride = min(power(words), LANES), 0 if bias is None else bias.stride(0)
    in_tiles = words // (ROWS * lanes) * (ROWS * lanes)  # of the words, those in whole tiles
    last = power(triton.cdiv(width - in_tiles, lanes)) if in_tiles < width else 1
    _token_cross_entropy[(count * tokens,)](
        logits, bias, targets, weight, losses, tokens, stride, words, width, ROWS, lanes, in_tiles, last,
        num_warps=WARPS,
    )  # fmt: skip
    return losses
