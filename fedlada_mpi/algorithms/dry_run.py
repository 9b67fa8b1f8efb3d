"""Methods tried on random vectors before a run: a user's own with all its hooks, and whether parameters step alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from ..settings import Config
from ..support import rng
from ..support.contents import contents
from ..support.errors import UserError
from .base import Algorithm, ClientVectors, Round, Traits, Vectors
from .declarations import check_declarations, check_names, may_draw
from .step import local_step
from .trial import HOOKS, STEPS, Decided, Trace, Trial, unrepeatable

ELEMENTS = 5  # of a parameter in a trial, at most
SCALES = (1e-3, 1.0, 1e3)  # of the gradients: a threshold lies between two of them
# Of a vector: differences that are no more are rounding, as are those of a few last digits of x. In a double trial, a
# method may still compute something in single precision.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
SEVERAL = 3  # calls of a hook that move a global generator; other threads may move it, too, but not at each


def construct(cls: type[Algorithm], config: Config, tensors: Sequence[Sequence[slice]]) -> Algorithm:
    """A user's method; what its ``__init__`` draws with torch is the same on every rank and after a resume."""
    with rng.torch_seeded(config.seed):
        return cls(config, tensors)


def dry_run(a: Algorithm, tensors: Sequence[Sequence[slice]]) -> Traits:
    """Rounds of three clients, alone and together; raises ``UserError`` for what would be wrong or not repeatable."""
    check_declarations(a)
    notes = check_names(a)
    with torch.no_grad():
        first = _try_sizes(a, tensors)
        small = _small(a, tensors, first)
        trials = [first, *_compare_groups(*small)]
        _refuse_old_slots(*small)
    _refuse_other_values(a, tensors)
    _refuse_changing_rounds(first)
    for hook in HOOKS:
        if sum(trial.moved[hook] for trial in trials) >= SEVERAL:
            raise UserError(unrepeatable(hook))
    return Traits(may_draw(type(a)) or any(trial.drew.total() for trial in trials), tuple(notes))


def _try_sizes(a: Algorithm, tensors: Sequence[Sequence[slice]]) -> Trial:
    """One step of two clients with all parameters of the model."""
    size = max((place.stop or 1 for place in chain.from_iterable(tensors)), default=1)
    trial = Trial(a, size, thorough=False)
    done = trial.train((0, 1), t=0, steps=1)
    trial.serve(0, done)
    return trial


def _small(a: Algorithm, tensors: Sequence[Sequence[slice]], first: Trial) -> tuple[Algorithm, int, torch.dtype]:
    """The method for a few elements of every parameter, their number and type: double, where rounding hides least.

    As it is in a run, if it takes no others.
    """
    size, small_tensors = 0, []
    for places in tensors:
        lengths = [ELEMENTS if p.stop is None else min(ELEMENTS, p.stop - (p.start or 0)) for p in places]
        ends = [size + end for end in accumulate(lengths)]
        small_tensors.append([slice(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        size = ends[-1]
    for dtype in (torch.float64, torch.float32):
        with suppress(Exception):
            small = construct(type(a), a.config, small_tensors)
            Trial(small, size, thorough=False, dtype=dtype).train((0, 1), t=0, steps=1)
            return small, size, dtype
    return a, first.size, first.dtype


def _compare_groups(a: Algorithm, size: int, dtype: torch.dtype) -> list[Trial]:
    """Raise ``UserError`` where a client's results depend on who trains with it, or are others each time."""
    trials, last = [], a.config.rounds
    for scale in SCALES:
        trial = Trial(a, size, scale, dtype=dtype)
        trials.append(trial)
        for t in sorted({0, 1, last // 2, max(0, last - 1)}) if scale == 1 else (0, 1):
            alone: dict[int, dict[str, Tensor]] = {}
            traces: dict[int, Trace] = {}
            decided: list[Decided] = []
            for client in range(len(STEPS)):
                alone |= trial.train((client,), t)
                traces |= trial.traces
                decided.append(trial.decided)
            for group in ((0,), (0, 1), (0, 1, 2)):
                trial.train(group, t)
                for client in group:
                    _compare(traces[client], trial.traces[client], together=len(group) > 1)
                _compare_decisions(decided, trial.decided)
            trial.serve(t, alone)
    return trials


def _compare(alone: Trace, again: Trace, together: bool) -> None:
    x = max((float(value.abs().max()) for _, name, value in alone if name == "c.x"), default=0.0)
    for (hook, name, expected), (_, _, value) in zip(alone, again, strict=True):
        floor = 10 * torch.finfo(value.dtype).eps * x if value.is_floating_point() else 0.0
        if not together and contents(value) != contents(expected):
            raise UserError(unrepeatable(hook))
        if _differ(expected, value, floor):
            raise UserError(
                f"{hook} mixes clients: {name} of one depends on who trains with it; g is [C, d], a row for each "
                "client: reduce over dim=1, keepdim=True"
            )


def _compare_decisions(alone: Sequence[Decided], together: Decided) -> None:
    """Raise ``UserError`` where an ``if`` depends on several clients, although it has gone the same way here.

    Numbers of single clients, one after the other, and those that have nothing to do with clients, are no such.
    """
    for (hook, k), (clients, numbers) in together.items():
        own = [alone[client].get((hook, k), ([], []))[1] for client in clients]
        if not _same_numbers(numbers, [*chain(*own)]) and not all(_same_numbers(numbers, each) for each in own):
            raise UserError(
                f"{hook} mixes clients: it decides by a number of all that train together, as in if g.norm() > 1; g is "
                "[C, d], a row for each client: take torch.where and a number for each, over dim=1, keepdim=True"
            )


def _same_numbers(a: Sequence[float], b: Sequence[float]) -> bool:
    """Up to rounding."""
    found, expected = (torch.tensor(numbers, dtype=torch.float64) for numbers in (a, b))
    return len(a) == len(b) and bool(torch.isclose(found, expected, rtol=1e-5, atol=1e-12, equal_nan=True).all())


def _differ(a: Tensor, b: Tensor, floor: float) -> bool:
    """By more than rounding; what is not finite must be the same."""
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return False
    gap = (a - b)[~same].abs().max()
    return not bool(gap <= ROUNDING.get(a.dtype, 1e-4) * torch.maximum(a.abs(), b.abs()).max() + floor)


def _refuse_old_slots(a: Algorithm, size: int, dtype: torch.dtype) -> None:
    """What a client finds in its slots is what another one left there."""

    def finite(left: float) -> bool:
        sent = Trial(a, size, thorough=False, slots=left, dtype=dtype).train((0, 1), t=0)
        return all(bool(value.isfinite().all()) for each in sent.values() for value in each.values())

    if a.slots and finite(0.0) and not finite(torch.nan):
        raise UserError(
            f"begin leaves values of another client in {' or '.join(f'c.{n}' for n in a.slots)}: set all slots"
        )


def _refuse_other_values(a: Algorithm, tensors: Sequence[Sequence[slice]]) -> None:
    """Every rank makes the method itself, and a resume makes it again."""
    first, second = (vars(construct(type(a), a.config, tensors)) for _ in range(2))
    other = [name for name, value in first.items() if contents(value) != contents(second.get(name))]
    if other:
        raise UserError(
            f"__init__ gives self.{other[0]} another value each time, so that ranks would differ: draw random numbers "
            "with torch, not with random or numpy"
        )


def _refuse_changing_rounds(trial: Trial) -> None:
    """All ranks ask whether a round communicates, and wait for each other if they do not agree."""
    asked = [[bool(trial.hooks.communicates(t)) for t in range(20)] for _ in range(2)]
    if asked[0] != asked[1] or trial.drew["communicates"]:
        raise UserError("communicates(t) gives another answer each time, expected a function of t, as self.coin(t) is")


def steps_alone(a: Algorithm) -> bool:
    """Whether the step of a parameter without a gradient is the same on every client, whatever the others do.

    It is not where clients keep state or draw random numbers, where a norm over several parameters enters the round, or
    where ``before_clip`` makes the gradient non-zero, as the clip then scales it by the norm of all.
    """
    if a.client_state or a.traits.draws:
        return False
    size = 4
    with rng.torch_seeded(1), torch.no_grad():
        tried = type(a)(replace(a.config, clip=1e-3))
        s = Vectors(**{name: torch.rand(2 * size) for name in (*a.down, *a.derived, "decays")})
        c = ClientVectors(**{name: torch.rand(1, 2 * size) for name in ("x", "g", "g1", "full_g", *a.slots)})
        c.steps, c.k, c.compute_copy = torch.full((1, 1), 3.0), torch.ones(1, 1), None
        for gradient in (c.g, c.g1):
            gradient[:, size:] = 0
        try:
            head, tail = (
                _one_round(tried, _part(c, where), _part(s, where), gradient_free)
                for where, gradient_free in ((slice(0, size), False), (slice(size, None), True))
            )
            whole = _one_round(tried, c, s, gradient_free=False)
        except Exception:  # a method may need its own number of parameters
            return False
    exact = all(torch.equal(whole[name][:, size:], tail[name]) for name in ("x", *a.slots))
    return exact and not any(
        _differ(whole[name][:, where], part[name], 0.0)
        for where, part in ((slice(0, size), head), (slice(size, None), tail))
        for name in part
        if part is head or whole[name].shape[1] > 1  # numbers are taken from the first part
    )


def _part(vectors: Vectors, where: slice) -> Any:
    """The elements of all vectors, as copies; numbers of clients as they are."""
    pieces = {n: v if v is None or v.shape[-1] == 1 else v[..., where].clone() for n, v in vars(vectors).items()}
    return type(vectors)(**pieces)


def _one_round(a: Algorithm, c: ClientVectors, s: Vectors, gradient_free: bool) -> dict[str, Tensor]:
    """What the hooks of a client give: ``begin``, and from its vectors as they are one step and ``finish``."""
    r, lr = Round(1, 0.1, 3.0, 2, 4), torch.tensor(0.1)
    begun = _part(c, slice(None))
    a.begin(begun, s, r)
    found = {f"begin, {name}": getattr(begun, name) for name in ("x", *a.slots)}
    if a.moves_point and not gradient_free and (point := a.point(c, s, lr)) is not None:
        found["point"] = point.clone()
    local_step(a, c, s, lr, gradient_free, preserve_g=True)
    found |= {name: getattr(c, name).clone() for name in ("x", *a.slots)}
    return found | {f"finish, {name}": value for name, value in a.finish(c, s, r).items()}
