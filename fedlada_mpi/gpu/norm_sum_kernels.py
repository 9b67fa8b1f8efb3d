"""The gradients of norms' parameters from the sums of single programs, of several norms in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from .side_stream import SideStream
from .triton_support import await_inputs, jit, power, tl, triton

SUMMANDS = 64  # partial sums added at a time
NORMS = 8  # in a launch: most have so few sums that one of their own would take longer than these


def _coded(number: int) -> int:
    """A number in a tuple, which Triton would compile anew for where it is 1, and where it is a multiple of 16."""
    return 2 * number + 3


@jit
def _decoded(number):
    return (number - 3) >> 1


@jit
def _add_partials(
    partials, gamma_grads, beta_grads, blocks, units, stride, UNIT: tl.constexpr, NORMS: tl.constexpr,
    SUMMANDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of several norms, each with programs of its own; they have ``units`` of UNIT channels each, or none."""
    await_inputs()
    client, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    partial, gamma_grad, beta_grad = partials[0], gamma_grads[0], beta_grads[0]
    count, channels = _decoded(blocks[0]), _decoded(units[0])
    begin, first = 0, 0
    for norm in tl.static_range(1, NORMS):
        begin += (2 * _decoded(units[norm - 1]) * UNIT + LANES - 1) // LANES
        reached = program >= begin
        partial = tl.where(reached, partials[norm], partial)
        gamma_grad = tl.where(reached, gamma_grads[norm], gamma_grad)
        beta_grad = tl.where(reached, beta_grads[norm], beta_grad)
        count = tl.where(reached, _decoded(blocks[norm]), count)
        channels = tl.where(reached, _decoded(units[norm]), channels)
        first = tl.where(reached, begin, first)
    channels *= UNIT
    lane = (program - first) * LANES + tl.arange(0, LANES)
    partial += client * count * (2 * channels)
    total = tl.zeros([LANES], tl.float32)
    for summed in range(0, count, SUMMANDS):
        block = summed + tl.arange(0, SUMMANDS)[:, None]
        mask = (block < count) & (lane < 2 * channels)[None, :]
        total += tl.sum(tl.load(partial + block * (2 * channels) + lane[None, :], mask=mask, other=0.0), 0)
    total = total.to(gamma_grad.dtype.element_ty)
    tl.store(gamma_grad + client * stride + lane, total, mask=lane < channels)
    tl.store(beta_grad + client * stride + lane - channels, total, mask=(lane >= channels) & (lane < 2 * channels))


def submit_sums(partial: Tensor, gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream) -> None:
    """Add up partial [C, programs, 2, channels], the parts of gamma's gradient and of beta's; None is frozen."""
    if gamma_grad is not None or beta_grad is not None:
        side_stream.submit_together(_of_parameters, (partial, gamma_grad, beta_grad), NORMS)


Sums = tuple[Tensor, Tensor, Tensor]  # partial ones, and where those of gamma and of beta go


def _of_parameters(norms: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
    """Add up the programs' sums of up to NORMS norms; one of a norm's two parameters may be frozen."""
    alike: dict[tuple[int, int, int, int, torch.dtype], list[Sums]] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for partial, gamma_grad, beta_grad in norms:
        count, _, _, channels = partial.shape
        if gamma_grad is None or beta_grad is None:
            gamma_sum, beta_sum = partial.new_empty(2, count, channels).unbind()
            pairs = ((gamma_grad, gamma_sum), (beta_grad, beta_sum))
            copies += [(grad, total) for grad, total in pairs if grad is not None]
        else:
            gamma_sum, beta_sum = gamma_grad, beta_grad
        # With what decides how a program's sums are laid out over its threads, and so their order.
        unit, lanes = 16 if channels % 16 == 0 else 1, min(power(2 * channels), 32)
        form = (unit, lanes, count, gamma_sum.stride(0), gamma_sum.dtype)
        alike.setdefault(form, []).append((partial, gamma_sum, beta_sum))
    for (unit, lanes, *_), sums in alike.items():
        _add_up(sums, unit, lanes)
    for grad, total in copies:
        grad.copy_(total)


def _add_up(sums: list[Sums], unit: int, lanes: int) -> None:
    missing = NORMS - len(sums)
    units = (*(partial.shape[3] // unit for partial, *_ in sums), *([0] * missing))
    partials, gamma_grads, beta_grads = zip(*sums, *[sums[0]] * missing, strict=True)
    programs = sum(triton.cdiv(2 * unit * of_one, lanes) for of_one in units)
    blocks = tuple(_coded(partial.shape[1]) for partial in partials)
    _add_partials[(programs, len(partials[0]))](
        partials, gamma_grads, beta_grads, blocks, tuple(map(_coded, units)), gamma_grads[0].stride(0), unit, NORMS,
        SUMMANDS, lanes,
    )  # fmt: skip
