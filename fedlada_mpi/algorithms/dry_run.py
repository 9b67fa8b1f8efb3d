"""Methods tried on random vectors before a run: a user's own with all its hooks, and whether parameters step alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from ..support.errors import UserError
from ..support.rng import torch_seeded
from .base import Algorithm, ClientVectors, Round, Vectors
from .step import local_step

CLIENTS = 2
PER_CLIENT = ("x", "g", "g1", "full_g", "k", "steps", "compute_copy")


def check_declarations(a: Algorithm) -> None:
    """Raise ``UserError`` where what a method declares contradicts itself."""
    for kind in ("down", "derived", "private", "up", "uniform", "scalars", "slots", "client_state"):
        names = getattr(a, kind)
        if not isinstance(names, tuple) or not all(isinstance(n, str) and n.isidentifier() for n in names):
            raise UserError(f'{kind}: got {names!r}, expected a tuple of names, such as ("x",)')
    server, client = (*a.down, *a.derived, *a.private), (*a.slots, *a.client_state)
    for kinds, names in (
        ("down, derived and private", server),
        ("up and scalars", (*a.up, *a.scalars)),
        ("slots and client_state", client),
    ):
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"{twice[0]} is declared twice in {kinds}: leave one of them")
    if "x" not in a.down:
        raise UserError(f'down: got {a.down!r}, expected x among them, such as ("x",)')
    if "decays" in server:
        raise UserError("down, derived and private: decays is one that all methods have: rename it")
    taken = [name for name in client if name in PER_CLIENT]
    if taken:
        raise UserError(f"slots and client_state: {taken[0]} is one that all clients have: leave it out or rename it")
    other = [name for name in a.uniform if name not in (*a.up, *a.scalars)]
    if other:
        raise UserError(f"uniform: {other[0]} is neither in up nor in scalars")
    if a.gradients not in (1, 2):
        raise UserError(f"gradients: got {a.gradients!r}, expected 1 or 2")


def dry_run(a: Algorithm, tensors: Sequence[Sequence[slice]]) -> None:
    """One round of two clients with one step; raises ``UserError`` for a result that is not a declared one."""
    check_declarations(a)
    size = max((place.stop or 1 for place in chain.from_iterable(tensors)), default=1)
    # What a client finds in its slots is what another one left there.
    if _round(a, size, left_in_slots=0.0) and not _round(a, size, left_in_slots=torch.nan):
        raise UserError(
            f"begin leaves values of another client in {' or '.join(f'c.{n}' for n in a.slots)}: set all slots"
        )


def _round(a: Algorithm, size: int, left_in_slots: float) -> bool:
    """Whether all that is sent is finite."""
    shape = (CLIENTS, size)
    with torch_seeded(0), torch.no_grad():
        on_root = Vectors(**{name: torch.zeros(size) for name in (*a.down, *a.derived, *a.private)})
        on_root.x.normal_()
        a.start(on_root)
        s = Vectors(**{name: getattr(on_root, name) for name in (*a.down, *a.derived)}, decays=torch.ones(size))
        c = ClientVectors(**{name: torch.zeros(shape) for name in ("x", *a.client_state)})
        vars(c).update({name: torch.full(shape, left_in_slots) for name in a.slots})
        c.g, c.steps, c.compute_copy = torch.randn(shape), torch.ones(CLIENTS, 1), None
        for name, used in (("g1", a.gradients == 2), ("full_g", a.full_gradient)):
            if used:
                setattr(c, name, torch.randn(shape))
        if a.step_index:
            c.k = torch.zeros(CLIENTS, 1)
        r = Round(0, a.config.lr, 1.0, CLIENTS, max(CLIENTS, a.config.clients))
        if a.client_state:
            a.enter(c, s)
        a.begin(c, s, r)
        point = a.point(c, s, torch.tensor(r.lr))
        if point is not None:
            _check("point", point, shape)
        d = c.g.clone()
        for hook in (a.before_clip, a.direction, a.after_decay):
            d = hook(c, s, d)
            _check(hook.__name__, d, shape)
            _refuse_state(hook.__name__, d, c, s)
        c.x.sub_(d.mul_(r.lr))
        sent = a.finish(c, s, r)
        for name, expected in _sent(a, size):
            if not isinstance(sent, Mapping) or name not in sent:
                got = ", ".join(map(str, sent)) if isinstance(sent, Mapping) else type(sent).__name__
                raise UserError(
                    f"finish returns {got}, expected a dict with {name}, which is declared in up or scalars"
                )
            _check(f"finish, {name}", sent[name], expected, "[C, d]" if name in a.up else "[C, 1]")
        mean = {name: sent[name].mean(0) for name in a.up}
        mean |= {name: sent[name].double().mean() for name in a.scalars}
        before = s.x.clone()
        a.server(on_root, mean, r)
        a.derive(s, before, r)
        return all(bool(value.isfinite().all()) for value in sent.values())


def steps_alone(a: Algorithm) -> bool:
    """Whether the step of a parameter without a gradient is the same on every client, whatever the others do.

    It is not where clients keep state, where a norm over several parameters enters the step, or where ``before_clip``
    makes the gradient non-zero, as the clip then scales it by the norm of all.
    """
    if a.client_state:
        return False
    size = 4
    tried = type(a)(replace(a.config, clip=1e-3))
    with torch_seeded(1), torch.no_grad():
        s = Vectors(**{name: torch.rand(2 * size) for name in (*a.down, *a.derived, "decays")})
        c = ClientVectors(**{name: torch.rand(1, 2 * size) for name in ("x", "g", "g1", "full_g", *a.slots)})
        c.steps, c.k, c.compute_copy = torch.full((1, 1), 3.0), torch.ones(1, 1), None
        for gradient in (c.g, c.g1):
            gradient[:, size:] = 0
        apart = {name: v[:, size:].clone() for name, v in vars(c).items() if v is not None and v.shape[1] > 1}
        alone = ClientVectors(**{**vars(c), **apart})
        try:
            local_step(tried, c, s, torch.tensor(0.1), gradient_free=False, preserve_g=True)
            tail = Vectors(**{name: vector[size:] for name, vector in vars(s).items()})
            local_step(tried, alone, tail, torch.tensor(0.1), gradient_free=True, preserve_g=True)
        except Exception:  # a method may need its own number of parameters
            return False
    return all(torch.equal(getattr(c, name)[:, size:], getattr(alone, name)) for name in ("x", *a.slots))


def _refuse_state(hook: str, value: torch.Tensor, c: ClientVectors, s: Vectors) -> None:
    """The step multiplies what it gets by the rate, in place: that must not be a vector that lives on."""
    for owner, vectors in (("c", c), ("s", s)):
        for name, vector in vars(vectors).items():
            if vector is not None and value.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr():
                itself = f"{owner}.{name}"
                raise UserError(f"{hook} returns {itself}, which the step would overwrite: return {itself}.clone()")


def _sent(a: Algorithm, size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from ((name, (CLIENTS, size)) for name in a.up)
    yield from ((name, (CLIENTS, 1)) for name in a.scalars)


def _check(what: str, value: object, shape: tuple[int, int], kind: str = "[C, d]") -> None:
    got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if got != list(shape):
        raise UserError(f"{what} returns {got}, expected a tensor {kind}, here {list(shape)}")
