"""A user's own method tried on random vectors: rounds of three small clients, in which every hook is watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..support.contents import contents, global_generators
from ..support.errors import UserError
from ..support.randomness import mix
from .base import Algorithm, ClientVectors, Round, Vectors, rows
from .declarations import check_sent, own_classes
from .hook_draws import HookDraws
from .step import local_step

STEPS = (3, 2, 2)  # K_i of the clients
SPREAD = (1.0, 0.01, 100.0)  # of their gradients: what depends on all of them depends on the largest
HOOKS = (
    *("start", "enter", "begin", "point", "before_clip", "direction", "after_decay", "finish", "server", "derive"),
    "communicates",
)
GIVEN = ("tensors", "hypers")  # attributes of every method, which are not its own
IN_STEP = ("before_clip", "direction", "after_decay")
INSTEAD = "slots (of a round), client_state (of a client, from round to round) or private (of the server)"

# What a client had after each hook: the hook, the name of the vector, its values.
Trace: TypeAlias = "list[tuple[str, str, Tensor]]"
# By hook and step, where the hook reads a number of a tensor, as every ``if`` does: its clients, and all single numbers
# that it has computed.
Decided: TypeAlias = "dict[tuple[str, int], tuple[list[int], list[float]]]"


class Trial:
    """The rounds of one method, with vectors of ``size`` elements and gradients of the order of ``scale``.

    >>> trial = Trial(method, size=7)
    >>> alone, together = trial.train((0,), t=0), trial.train((0, 1, 2), t=0)
    """

    def __init__(
        self,
        a: Algorithm,
        size: int,
        scale: float = 1.0,
        thorough: bool = True,
        slots: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        """``thorough``: trace, and look for what hooks must not change; ``slots``: what others have left in them."""
        self.a, self.size, self.thorough, self.slots = a, size, thorough, slots
        self.dtype = torch.float64 if a.config.precision == "fp64" else dtype
        self.keys: Tensor | None = None  # of the clients whose hook is called; None: the server's
        self.k = 0  # the local step
        self.drew: Counter[str] = Counter()  # calls of each hook that draw with torch, or move a global generator
        self.moved: Counter[str] = Counter()
        self.traces: dict[int, Trace] = {}
        self.decided: Decided = {}
        self.scale = scale
        self.state: dict[int, dict[str, Tensor]] = {}  # what each client keeps
        self.on_root = Vectors(**{n: torch.zeros(size, dtype=self.dtype) for n in (*a.down, *a.derived, *a.private)})
        self.on_root.x.copy_(torch.randn(size, generator=torch.Generator().manual_seed(0)))
        self.hooks = cast(Algorithm, _Watched(a, self._call))
        self.hooks.start(self.on_root)

    def round(self, t: int) -> Round:
        mean = sum(STEPS) / len(STEPS)
        return Round(t, self.a.config.lr, mean, len(STEPS), max(len(STEPS), self.a.config.clients))

    def train(self, clients: Sequence[int], t: int, steps: int = max(STEPS)) -> dict[int, dict[str, Tensor]]:
        """What each of ``clients`` sends and keeps (``client_state``) after a round together; traced."""
        a, hooks, r = self.a, self.hooks, self.round(t)
        self.traces, self.decided = {client: [] for client in clients}, {}
        group = list(clients)
        c, s = self._clients(group), self._server()
        for i, client in enumerate(group):
            for name in a.client_state:
                if client in self.state:
                    getattr(c, name)[i].copy_(self.state[client][name])
            if a.client_state and client not in self.state:
                self._of([client])
                hooks.enter(rows(c, slice(i, i + 1)), s)
        self._of(group)
        hooks.begin(c, s, r)
        self._trace("begin", group, c)
        lr = torch.tensor(r.lr, dtype=self.dtype)
        for k in range(steps):
            running = [client for client in group if STEPS[client] > k]
            if running:
                self._step(running, rows(c, slice(0, len(running))), s, lr, k)
        self.k = 0
        self._of(group)
        sent = hooks.finish(c, s, r)
        check_sent(a, sent)
        for name in (*a.up, *a.scalars):
            width, kind = (self.size, "[C, d]") if name in a.up else (1, "[C, 1]")
            _check(f"finish, {name}", sent[name], (len(group), width), kind)
        self._trace("finish", group, c, {name: sent[name] for name in (*a.up, *a.scalars)})
        every = {**sent, **{f"c.{name}": getattr(c, name) for name in a.client_state}}
        return {client: {name: v[i].clone() for name, v in every.items()} for i, client in enumerate(group)}

    def _step(self, running: list[int], c: ClientVectors, s: Vectors, lr: Tensor, k: int) -> None:
        a, hooks, self.k = self.a, self.hooks, k
        self._of(running)
        c.g.copy_(self._gradients(running, k))
        if a.gradients == 2:
            c.g1.copy_(self._gradients(running, k + 1))
        if a.moves_point:
            point = hooks.point(c, s, lr)
            if point is not None:
                _check("point", point, (len(running), self.size))
            self._trace("point", running, c, {} if point is None else {"the point": point})
        local_step(hooks, c, s, lr, gradient_free=False, preserve_g=True)
        if a.step_index:
            c.k.add_(1)

    def serve(self, t: int, done: dict[int, dict[str, Tensor]]) -> None:
        """The server's step from what all clients sent, and what follows on every rank; clients keep their state."""
        a, r = self.a, self.round(t)
        self.keys = None
        self.state |= {i: {name: kept[f"c.{name}"] for name in a.client_state} for i, kept in done.items()}
        previous, first = self.on_root.x.clone(), Vectors(**{n: v.clone() for n, v in vars(self.on_root).items()})
        for root in (first, self.on_root) if self.thorough else (self.on_root,):
            sent = {name: torch.stack([each[name] for each in done.values()]) for name in (*a.up, *a.scalars)}
            mean = {name: sent[name].mean(0) if name in a.up else sent[name].double().mean() for name in sent}
            self.hooks.server(root, mean, r)
            everywhere = Vectors(**{name: getattr(root, name) for name in (*a.down, *a.derived)})
            self.hooks.derive(everywhere, previous, r)
        for name, vector in vars(first).items():
            if self.thorough and contents(vector) != contents(getattr(self.on_root, name)):
                raise UserError(unrepeatable("derive" if name in a.derived else "server"))

    def _clients(self, clients: list[int]) -> ClientVectors:
        a, shape = self.a, (len(clients), self.size)
        c = ClientVectors(**{name: torch.zeros(shape, dtype=self.dtype) for name in ("x", "g", *a.client_state)})
        vars(c).update({name: torch.full(shape, self.slots, dtype=self.dtype) for name in a.slots})
        c.steps = torch.tensor([[float(STEPS[client])] for client in clients], dtype=self.dtype)
        c.compute_copy = None
        if a.gradients == 2:
            c.g1 = torch.zeros(shape, dtype=self.dtype)
        if a.full_gradient:
            c.full_g = self._gradients(clients, max(STEPS))
        if a.step_index:
            c.k = torch.zeros(len(clients), 1, dtype=self.dtype)
        return c

    def _gradients(self, clients: list[int], k: int) -> Tensor:
        """Of these clients in step k, [C, d]."""
        draws = (torch.Generator().manual_seed(1 + client * 100 + k) for client in clients)
        gradients = [torch.randn(self.size, generator=draw, dtype=self.dtype) for draw in draws]
        return torch.stack(gradients) * self.scale * torch.tensor([[SPREAD[client]] for client in clients])

    def _server(self) -> Vectors:
        """As clients see it."""
        names = (*self.a.down, *self.a.derived)
        decays = {"decays": torch.ones(self.size, dtype=self.dtype)} if self.a.config.decay_on == "weights" else {}
        return Vectors(**{name: getattr(self.on_root, name) for name in names}, **decays)

    def _of(self, clients: list[int]) -> None:
        """The next hooks are those of ``clients``."""
        self.keys = torch.tensor(clients)

    def _call(self, hook: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """A hook, with random numbers of its own; refused if it changes what it must not."""
        stacked = self.keys is not None
        keys = torch.zeros(1, dtype=torch.int64) if self.keys is None else self.keys
        keys = mix(keys * 1000 + self.k * len(HOOKS) + HOOKS.index(hook))
        fixed = self._fixed(hook, *arguments) if self.thorough else {}
        before = {name: _written(value) for name, value in fixed.items()}
        own, generators = (self._own(), global_generators()) if self.thorough else ({}, None)
        with _Watching(keys, stacked, hook) as draws:
            result = call(*arguments)
        self.drew[hook] += draws.count > 0
        if self.keys is not None and draws.reads:
            self.decided[hook, self.k] = (self.keys.tolist(), draws.numbers)
        if self.thorough:
            self.moved[hook] += global_generators() != generators
            self._refuse_changes(hook, fixed, before, own)
        if hook in IN_STEP:
            c, s = arguments[:2]
            _check(hook, result, (len(c.x), self.size))
            _refuse_vectors(hook, result, c, s)
            assert self.keys is not None
            self._trace(hook, self.keys.tolist(), c, {"the result": result})
        return result

    def _fixed(self, hook: str, *arguments: Any) -> dict[str, Any]:
        """What the hook must not change, by name."""
        if hook in ("start", "communicates"):
            return {}
        if hook == "server":
            return {f"s.{name}": getattr(arguments[0], name) for name in self.a.derived}
        if hook == "derive":
            return {"x_previous": arguments[1]}
        c, s, *rest = arguments
        fixed = {f"s.{name}": vector for name, vector in vars(s).items()} | {"c.steps": c.steps}
        if self.a.step_index:
            fixed["c.k"] = c.k
        return fixed | ({"lr": rest[0]} if hook == "point" else {})

    def _own(self) -> dict[str, Any]:
        """The attributes of the method, and of the user's classes."""
        of_classes = {
            n: v for cls in reversed(own_classes(type(self.a))) for n, v in vars(cls).items() if not n.startswith("__")
        }
        every = {**of_classes, **vars(self.a)}
        return {name: contents(value) for name, value in every.items() if name not in GIVEN}

    def _refuse_changes(self, hook: str, fixed: dict[str, Any], before: dict[str, Any], own: dict[str, Any]) -> None:
        after = self._own()
        changed = [name for name in after if name not in own or own[name] != after[name]]
        if changed:
            raise UserError(
                f"{hook} changes self.{changed[0]}, which other ranks do not see and a resume does not bring back: "
                f"keep it in {INSTEAD}; set what stays as it is in __init__"
            )
        for name, value in fixed.items():
            if _written(value) != before[name]:
                raise UserError(f"{hook} writes to {name}, {_why(hook, name)}")

    def _trace(self, hook: str, clients: list[int], c: ClientVectors, more: dict[str, Tensor] | None = None) -> None:
        if not self.thorough:
            return
        named = {f"c.{name}": getattr(c, name) for name in ("x", *self.a.slots, *self.a.client_state)}
        for name, values in {**(more or {}), **named}.items():
            for i, client in enumerate(clients):
                self.traces[client].append((hook, name, values[i].clone()))


class _Watching(HookDraws):
    """The draws of a hook; also what single numbers it computes, and how often it reads one."""

    def __init__(self, keys: Tensor, stacked: bool, what: str):
        super().__init__(keys, stacked, what)
        self.numbers: list[float] = []
        self.reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        elif isinstance(result, Tensor) and result.ndim == 0 and not result.is_complex():
            self.numbers.append(float(result))
        return result


class _Watched:
    """A method whose hooks are called by ``around``."""

    def __init__(self, a: Algorithm, around: Callable[..., Any]):
        self._a, self._around = a, around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._a, name)
        return partial(self._around, name, value) if name in HOOKS else value


def _written(vector: Tensor) -> tuple[int, Any]:
    """Another value after every write, also of the same numbers."""
    return vector._version, contents(vector)


def unrepeatable(hook: str) -> str:
    return (
        f"{hook} gives another result for the same vectors, which no other rank and no resume would repeat: draw "
        "random numbers with torch, not with random or numpy, and keep state only in slots, client_state and private"
    )


def _why(hook: str, name: str) -> str:
    """Why the hook must not write to it, and what to do."""
    if hook == "server":
        return "which every rank computes for itself: write it in derive, or declare it in down"
    if hook == "derive":
        return "which others read after it: write to a clone"
    if name.startswith("s."):
        return "which belongs to all clients: only start, server and derive may; keep what is a client's own in slots"
    return "which later steps read: write to a clone"


def _check(what: str, value: object, shape: tuple[int, int], kind: str = "[C, d]") -> None:
    got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if got != list(shape):
        raise UserError(f"{what} returns {got}, expected a tensor {kind}, here {list(shape)}")


def _refuse_vectors(hook: str, value: Tensor, c: ClientVectors, s: Vectors) -> None:
    """The step multiplies what it gets by the rate, in place: that must not be a vector that lives on."""
    for owner, vectors in (("c", c), ("s", s)):
        for name, vector in vars(vectors).items():
            if vector is not None and value.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr():
                itself = f"{owner}.{name}"
                raise UserError(f"{hook} returns {itself}, which the step would overwrite: return {itself}.clone()")
