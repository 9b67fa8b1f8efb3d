"""Scaled dot-product attention with scores that are never in memory; forward and backward in one launch each.

Every program adds up its own part of a gradient in a fixed order: one has a block of keys and goes over all queries,
another has a block of queries and goes over all keys. So scores are computed twice, and no sum needs atomics, whose
order is another one every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .triton_support import LOG2_E, await_inputs, exp2, jit, power, tl, triton

WIDEST = 128  # a head; the blocks of wider ones do not fit into the registers
# Tokens in a block and in a step of its loop, warps, and steps that are loaded ahead.
FORWARD, BACKWARD = (64, 64, 4, 3), (64, 64, 4, 1)
NARROW, REGISTERS = 128, 168  # up to so many bytes of a head, three backward programs share a multiprocessor, not two


@jit
def _load(x, row, lane, stride, rows, WIDTH: tl.constexpr):
    mask = (row < rows)[:, None] & (lane < WIDTH)[None, :]
    return tl.load(x + row[:, None] * stride + lane[None, :], mask=mask, other=0.0)


@jit
def _store(x, value, row, lane, stride, rows, WIDTH: tl.constexpr):
    mask = (row < rows)[:, None] & (lane < WIDTH)[None, :]
    tl.store(x + row[:, None] * stride + lane[None, :], value.to(x.dtype.element_ty), mask=mask)


@jit
def _seen(row, column, keys, CAUSAL: tl.constexpr):
    """Which keys a query sees."""
    seen = (column < keys)[None, :]
    if CAUSAL:
        seen = seen & (row[:, None] >= column[None, :])
    return seen


@jit
def _scores(q, k, scale, row, column, keys, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """To the base 2; what a query does not see is -inf."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return tl.where(_seen(row, column, keys, CAUSAL), scores, float("-inf"))


@jit
def _part(blocks, HEADS: tl.constexpr):
    """The program's block of tokens, which sequence and head it is of, and these two.

    All programs along one axis, as a GPU takes at most 65,535 along the others: not 16 heads of 5,000 sequences.
    """
    which = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, which, (which // HEADS).to(tl.int64), which % HEADS


@jit(do_not_specialize=["queries", "keys"])
def _attention(
    q, k, v, out, logs, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    queries, keys, scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_inputs()
    block, which, batch, head = _part((queries + ROWS - 1) // ROWS, HEADS)
    row, lane = block * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    query = _load(q + batch * q_batch + head * q_head, row, lane, q_row, queries, WIDTH)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (block + 1) * ROWS)
    for begin in range(0, end, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        scores = _scores(
            query, _load(k, column, lane, k_row, keys, WIDTH), scale * LOG2_E, row, column, keys, CAUSAL, PRECISION
        )
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = exp2(scores - now[:, None])
        smaller = exp2(largest - now)
        total = total * smaller + tl.sum(weights, 1)
        value = _load(v, column, lane, v_row, keys, WIDTH)
        sums = sums * smaller[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = now
    _store(out + batch * o_batch + head * o_head, sums / total[:, None], row, lane, o_row, queries, WIDTH)
    tl.store(logs + which.to(tl.int64) * queries + row, largest + tl.log2(total), mask=row < queries)


@jit
def _common(dout, out):
    """What the gradients of a query's scores have in common."""
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)


@jit
def _weights_and_gradient(
    query, key, value, dout, common, log, scale, row, column, keys, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """Of a block: the weights of the values, and the gradient of the scores but for their factor ``scale``."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    seen = _seen(row, column, keys, CAUSAL)
    weights = tl.where(seen, exp2(scores * (scale * LOG2_E) - log[:, None]), 0.0)
    return weights, weights * (tl.dot(dout, tl.trans(value), input_precision=PRECISION) - common[:, None])


@jit(do_not_specialize=["queries", "keys"])
def _attention_backward(
    dout, q, k, v, out, logs, dq, dk, dv, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, d_batch, d_head, d_row, dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch,
    dv_head, dv_row, queries, keys, scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_inputs()
    blocks = (keys + BLOCK - 1) // BLOCK
    block, which, batch, head = _part(blocks + (queries + BLOCK - 1) // BLOCK, HEADS)
    lane = tl.arange(0, LANES)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    out += batch * o_batch + head * o_head
    dout += batch * d_batch + head * d_head
    logs += which.to(tl.int64) * queries
    if block < blocks:
        column = block * BLOCK + tl.arange(0, BLOCK)
        key = _load(k, column, lane, k_row, keys, WIDTH)
        value = _load(v, column, lane, v_row, keys, WIDTH)
        key_sums = tl.zeros([BLOCK, LANES], tl.float32)
        value_sums = tl.zeros([BLOCK, LANES], tl.float32)
        first = 0
        if CAUSAL:
            first = block * BLOCK // STEP * STEP
        for begin in range(first, queries, STEP):
            row = begin + tl.arange(0, STEP)
            query = _load(q, row, lane, q_row, queries, WIDTH)
            do = _load(dout, row, lane, d_row, queries, WIDTH)
            common = _common(do, _load(out, row, lane, o_row, queries, WIDTH))
            log = tl.load(logs + row, mask=row < queries, other=0.0)
            weights, dscores = _weights_and_gradient(
                query, key, value, do, common, log, scale, row, column, keys, CAUSAL, PRECISION
            )
            value_sums += tl.dot(tl.trans(weights.to(do.dtype)), do, input_precision=PRECISION)
            key_sums += tl.dot(tl.trans(dscores.to(query.dtype)), query, input_precision=PRECISION)
        _store(dk + batch * dk_batch + head * dk_head, key_sums * scale, column, lane, dk_row, keys, WIDTH)
        _store(dv + batch * dv_batch + head * dv_head, value_sums, column, lane, dv_row, keys, WIDTH)
    else:
        row = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        query = _load(q, row, lane, q_row, queries, WIDTH)
        do = _load(dout, row, lane, d_row, queries, WIDTH)
        common = _common(do, _load(out, row, lane, o_row, queries, WIDTH))
        log = tl.load(logs + row, mask=row < queries, other=0.0)
        sums = tl.zeros([BLOCK, LANES], tl.float32)
        end = keys
        if CAUSAL:
            end = tl.minimum(keys, (block - blocks + 1) * BLOCK)
        for begin in range(0, end, STEP):
            column = begin + tl.arange(0, STEP)
            key = _load(k, column, lane, k_row, keys, WIDTH)
            value = _load(v, column, lane, v_row, keys, WIDTH)
            _, dscores = _weights_and_gradient(
                query, key, value, do, common, log, scale, row, column, keys, CAUSAL, PRECISION
            )
            sums += tl.dot(dscores.to(key.dtype), key, input_precision=PRECISION)
        _store(dq + batch * dq_batch + head * dq_head, sums * scale, row, lane, dq_row, queries, WIDTH)


def _known(q: Tensor, causal: bool) -> dict[str, Any]:
    """What is known at compile time."""
    # For other types the two are the same, but would be compiled twice.
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 and q.dtype == torch.float32 else "ieee"
    sizes = {"HEADS": q.shape[1], "WIDTH": q.shape[3], "LANES": max(power(q.shape[3]), 16)}
    return {**sizes, "CAUSAL": causal, "PRECISION": precision}


def _blocks(q: Tensor, k: Tensor, *largest: int) -> list[int]:
    """So many of the longer sequence's tokens in a block; of float32 half as many."""
    tokens = max(power(max(q.shape[2], k.shape[2])), 16)
    return [max(min(tokens, number * 2 // q.element_size()), 16) for number in largest]


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        q, k, v = map(_in_rows, (q, k, v))
        batch, heads, queries, _ = q.shape
        # Tokens before heads, as the product that follows reads them.
        out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        logs = torch.empty(batch * heads, queries, dtype=torch.float32, device=q.device)
        rows, columns = _blocks(q, k, *FORWARD[:2])
        _attention[(triton.cdiv(queries, rows) * batch * heads,)](
            q, k, v, out, logs, *_strides(q, k, v, out), queries, k.shape[2], scale, ROWS=rows, COLUMNS=columns,
            num_warps=FORWARD[2], num_stages=FORWARD[3], **_known(q, causal),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.settings = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        causal, scale = ctx.settings
        dout, (batch, heads, queries, _), keys = _in_rows(dout), q.shape, k.shape[2]
        dq, dk, dv = _like_pieces(q, k, v)
        block, step = _blocks(q, k, *BACKWARD[:2])
        _attention_backward[((triton.cdiv(keys, block) + triton.cdiv(queries, block)) * batch * heads,)](
            dout, q, k, v, out, logs, dq, dk, dv, *_strides(q, k, v, out, dout, dq, dk, dv), queries, keys, scale,
            BLOCK=block, STEP=step, num_warps=BACKWARD[2], num_stages=BACKWARD[3],
            maxnreg=REGISTERS if q.shape[3] * q.element_size() <= NARROW else None, **_known(q, causal),
        )  # fmt: skip
        return dq, dk, dv, None, None


def _like_pieces(*pieces: Tensor) -> list[Tensor]:
    """New tensors that lie to each other as these do, where these are the whole of one dense tensor."""
    first = min(piece.storage_offset() for piece in pieces)
    same = all(piece.untyped_storage().data_ptr() == pieces[0].untyped_storage().data_ptr() for piece in pieces)
    size = sum(piece.numel() for piece in pieces)
    ends = (sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) + p.storage_offset() for p in pieces)
    if not same or max(ends) + 1 - first != size:
        return [torch.empty_like(piece) for piece in pieces]
    whole = pieces[0].new_empty(size)
    return [whole.as_strided(p.shape, p.stride(), p.storage_offset() - first) for p in pieces]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Of [N, heads, tokens, width]; a causal query sees the keys up to its own place."""
    out: Tensor = _Attention.apply(q, k, v, causal, scale)
    return out


def takes_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute attention of such tensors."""
    narrow = q.shape[-1] == v.shape[-1] <= WIDEST
    known = (torch.float32, torch.bfloat16, torch.float16)
    return narrow and q.dim() == 4 and q.dtype in known and q.dtype == k.dtype == v.dtype
