"""A method's local step as two GPU kernels, made from its own code.

``local_step`` is run once on symbols instead of tensors; what it does to them becomes a Triton kernel that reads
every vector once and writes what changed and, where gradients are clipped, another one before it that sums their
squares. Gradient-free parameters take any number of steps in one kernel, as nothing reads them in between. So a method
is written once, in plain torch, and a new one is fused without any work of its own. Whatever is not understood here
stops the tracing; the step then runs as written.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..algorithms import Algorithm, ClientVectors, Vectors
from ..algorithms.base import RebindError
from .triton_support import TILE, await_inputs, jit, tl, triton

Operand: TypeAlias = "Symbol | float"
PARTS = 256  # partial sums of squares per client


class Unfusable(Exception):
    """The step uses an operation that has no translation."""


class KernelProgram:
    """Statements in the order of execution."""

    def __init__(self) -> None:
        self.loads: dict[str, str] = {}  # of every buffer that is read, where from
        self.lines: list[str] = []
        self.before_norm: list[str] | None = None
        self.squared = ""
        self.stored: dict[str, Symbol] = {}

    def load(self, buffer: str, at: str) -> str:
        self.loads[buffer] = f"tl.load({buffer} + {at}).to(tl.float32)"
        return f"in_{buffer}"

    def let(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def loaded(self) -> list[str]:
        return [f"in_{buffer} = {text}" for buffer, text in self.loads.items()]


def _text(value: Operand) -> str:
    """An operand in the kernel: a variable, or a number."""
    if isinstance(value, Symbol):
        return str(value)
    if type(value) in (int, float) and math.isfinite(value):
        return repr(value)
    raise Unfusable(f"the operand {value!r}")


class Symbol:
    """Stands for a tensor in the traced step; in-place methods rebind it and mark its buffer as written."""

    def __init__(self, program: KernelProgram, name: str = "", buffer: str = "", per_client: bool = False):
        self.program, self.name, self.buffer, self.per_client = program, name, buffer, per_client
        self.dtype = torch.float32

    def __str__(self) -> str:
        if not self.name:
            at = (
                "at, mask=inside, other=0.0"
                if self.buffer.startswith("s_")
                else "row * size + at, mask=inside, other=0.0"
            )
            at = "row" if self.per_client else at
            self.name = self.program.load(self.buffer, at)
        return self.name

    def new(self, text: str) -> Symbol:
        return Symbol(self.program, self.program.let(text))

    def set(self, text: str) -> Symbol:
        if self.buffer.startswith("s_"):
            raise Unfusable("a step that writes to the server's vectors")
        if self.per_client:
            raise Unfusable("a step that writes to a number of its clients")
        self.name = self.program.let(text)
        if self.buffer:
            self.program.stored[self.buffer] = self
        return self

    def to(self, dtype: torch.dtype, copy: bool = False) -> Symbol:
        if dtype is not torch.float32:
            raise Unfusable(f"Tensor.to({dtype})")
        return Symbol(self.program, str(self))

    def sqrt(self) -> Symbol:
        return self.new(f"tl.sqrt_rn({self})")

    def sign_(self) -> Symbol:
        return self.set(f"tl.where({self} > 0, 1.0, tl.where({self} < 0, -1.0, 0.0))")

    def copy_(self, other: Operand) -> Symbol:
        return self.set(_text(other))

    def mul_(self, other: Operand) -> Symbol:
        return self.set(f"{self} * {_text(other)}")

    def div_(self, other: Operand) -> Symbol:
        return self.set(f"tl.div_rn({self}, {other})" if isinstance(other, Symbol) else f"{self} / {_text(other)}")

    def add_(self, other: Operand, alpha: float = 1) -> Symbol:
        return self.set(f"{self} + {_text(other)}" if alpha == 1 else f"{self} + {_text(alpha)} * {_text(other)}")

    def sub_(self, other: Operand, alpha: float = 1) -> Symbol:
        return self.set(f"{self} - {_text(other)}" if alpha == 1 else f"{self} - {_text(alpha)} * {_text(other)}")

    def addcmul_(self, first: Operand, second: Operand, value: float = 1) -> Symbol:
        return self.set(f"{self} + {_text(value)} * {_text(first)} * {_text(second)}")

    def clamp_(self, min: Operand | None = None, max: Operand | None = None) -> Symbol:
        if min is not None:
            self.set(f"tl.maximum({self}, {_text(min)})")
        if max is not None:
            self.set(f"tl.minimum({self}, {_text(max)})")
        return self

    def __truediv__(self, other: Operand) -> Symbol:
        return self.new(f"tl.div_rn({self}, {_text(other)})")

    def __rtruediv__(self, other: Operand) -> Symbol:
        return self.new(f"{_text(other)} / {self}")

    def __neg__(self) -> Symbol:
        return self.new(f"-{self}")

    def __pow__(self, exponent: float) -> Symbol:
        if exponent != 2:
            raise Unfusable(f"the power {exponent!r}")
        return self.new(f"{self} * {self}")

    def __rpow__(self, base: float) -> Symbol:
        if type(base) not in (int, float) or not 0 < base < math.inf:
            raise Unfusable(f"a power of {base!r}")
        return self.new(f"tl.exp2({math.log2(base)!r} * {self})")

    __iadd__, __isub__, __imul__, __itruediv__ = add_, sub_, mul_, div_

    def __getattr__(self, name: str) -> Any:
        raise Unfusable(f"Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Symbol:
        first = args[0]
        if function is torch.linalg.vector_norm:
            program = first.program
            if program.stored or program.before_norm is not None:
                raise Unfusable("a norm after the state has moved")
            if len(args) > 1 or kwargs != {"dim": 1, "keepdim": True}:
                raise Unfusable("a norm other than that of a client's whole vector")
            program.squared = str(first)
            program.before_norm = program.loaded() + program.lines
            return first.new("norm")
        if function is torch.zeros_like:
            return Symbol(first.program, "zero")
        raise Unfusable(str(function))


def _binary(sign: str) -> tuple[Callable[[Symbol, Operand], Symbol], Callable[[Symbol, Operand], Symbol]]:
    return (
        lambda self, other: self.new(f"{self} {sign} {_text(other)}"),
        lambda self, other: self.new(f"{_text(other)} {sign} {self}"),
    )


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
    for _method, _function in zip((f"__{_name}__", f"__r{_name}__"), _binary(_sign), strict=True):
        setattr(Symbol, _method, _function)


def _unfusable(name: str) -> Callable[..., Any]:
    def refuse(self: Symbol, *_: Any) -> Any:
        raise Unfusable(f"Tensor.{name}")

    return refuse


# Python has an answer of its own for these, or would raise an error that a tensor does not.
for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__len__", "__iter__", "__getitem__"),
    *("__setitem__", "__contains__", "__float__", "__int__", "__abs__", "__invert__", "__matmul__"),
    *("__and__", "__or__", "__xor__", "__mod__", "__floordiv__", "__rfloordiv__", "__rmod__", "__ipow__"),
):
    setattr(Symbol, _name, _unfusable(_name))


# Names of the vectors that the kernels take, the kernel that sums squares (where gradients are clipped), and the one
# that updates; of gradient-free parameters, by any number of steps.
Made = tuple[tuple[str, ...], Any, Any]


class Fused:
    """``local_step`` for given vectors: traced at the first call, launched at every one."""

    def __init__(self, step: Callable[..., None]):
        self.step = step
        self._made: dict[tuple[tuple[str, ...], bool], Made | None] = {}

    def __call__(
        self, algorithm: Algorithm, c: ClientVectors, s: Vectors, lr: Tensor, gradient_free: bool, preserve_g: bool
    ) -> None:
        made = self._find(algorithm, c, s, gradient_free)
        if made is None:
            self.step(algorithm, c, s, lr, gradient_free, preserve_g)
            return
        if gradient_free:
            self.repeat(algorithm, c, s, lr, 1)
            return
        names, squares, update = made
        count, size = c.x.shape
        pointers = _pointers(names, c, s)
        partial = torch.empty(count, PARTS, dtype=torch.float32, device=c.x.device) if squares else lr
        if squares:
            steps = -(-size // (PARTS * TILE))
            squares[(PARTS, count)](*pointers, lr, partial, size, steps, TILE, num_warps=8)
        update[(triton.cdiv(size, TILE), count)](*pointers, lr, partial, size, PARTS, TILE, num_warps=8)

    def repeats(self, algorithm: Algorithm, c: ClientVectors, s: Vectors) -> bool:
        """Whether one kernel takes all steps of these gradient-free parameters."""
        return self._find(algorithm, c, s, True) is not None

    def repeat(self, algorithm: Algorithm, c: ClientVectors, s: Vectors, lr: Tensor, steps: int) -> None:
        """``steps`` steps of gradient-free parameters; where they have an index, it is not moved on."""
        made = self._find(algorithm, c, s, True)
        assert made is not None
        names, _, update = made
        count, size = c.x.shape
        update[(triton.cdiv(size, TILE), count)](*_pointers(names, c, s), lr, size, steps, TILE, num_warps=8)

    def _find(self, algorithm: Algorithm, c: ClientVectors, s: Vectors, gradient_free: bool) -> Made | None:
        """The kernels for vectors of these names; None if the step runs as written."""
        key = (tuple(sorted(_tensors(c, s))), gradient_free)
        if key not in self._made:
            try:
                self._made[key] = self._make(algorithm, c, s, gradient_free)
            except Unfusable as error:
                warnings.warn(f"{algorithm.name}: {error} cannot be fused; its steps run as written", stacklevel=3)
                self._made[key] = None
        return self._made[key]

    def _make(self, algorithm: Algorithm, c: ClientVectors, s: Vectors, gradient_free: bool) -> Made:
        program = KernelProgram()
        clients, server = _symbols(program, "c", c), _symbols(program, "s", s)
        try:
            self.step(algorithm, clients, server, Symbol(program, "rate"), gradient_free, True)
        except (Unfusable, RebindError):
            raise
        except Exception as error:
            # If the method itself is at fault, running it as written shows the same.
            raise Unfusable(f"{type(error).__name__} ({error})") from None
        names = tuple(sorted({*program.loads, *program.stored}))
        stored = sorted(program.stored.items())
        if gradient_free:
            carried = [f"in_{b} = tl.where(inside, {v}, 0.0)" for b, v in stored]  # also a number, as a vector
            carried += ["in_c_k = in_c_k + 1"] if "c_k" in program.loads else []
            stores = [f"tl.store({b} + row * size + at, in_{b}, mask=inside)" for b, _ in stored]
            loads = {**{b: "zero" for b, _ in stored}, **program.loads}
            initial = [f"in_{b} = {text}" for b, text in loads.items()]
            return names, None, _compile("steps", _STEPS, names, initial, [*program.lines, *carried], stores)
        squares = None
        if program.before_norm is not None:
            total = f"total += {program.squared} * {program.squared}"
            squares = _compile("squares", _SQUARES, names, [*program.before_norm, total])
        stores = [f"tl.store({b} + row * size + at, {v}, mask=inside)" for b, v in stored]
        norm = ["norm = tl.sqrt_rn(tl.sum(tl.load(partial + row * PARTS + tl.arange(0, PARTS)), 0))"] if squares else []
        return names, squares, _compile("update", _UPDATE, names, [*norm, *program.loaded(), *program.lines, *stores])


def _tensors(c: ClientVectors, s: Vectors) -> dict[str, Tensor]:
    return {f"c_{n}": v for n, v in vars(c).items() if v is not None} | {f"s_{n}": v for n, v in vars(s).items()}


def _pointers(names: tuple[str, ...], c: ClientVectors, s: Vectors) -> list[Tensor]:
    tensors = _tensors(c, s)
    pointers = [tensors[n] for n in names]
    assert all(t.is_contiguous() and t.shape[-1] in (1, c.x.shape[1]) for t in pointers)
    return pointers


def _symbols(program: KernelProgram, kind: str, vectors: Vectors) -> Any:
    """The same names with symbols for tensors."""

    def symbol(name: str, value: Tensor | None) -> Any:
        return None if value is None else Symbol(program, "", f"{kind}_{name}", per_client=value.shape[-1:] == (1,))

    return Vectors(**{name: symbol(name, value) for name, value in vars(vectors).items()})


_SQUARES = """\
def squares({names}, lr, partial, size, steps, TILE: tl.constexpr):
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    total = tl.zeros([TILE], tl.float32)
    for step in range(steps):
        at = (step * tl.num_programs(0) + tl.program_id(0)) * TILE + tl.arange(0, TILE)
        inside = at < size
        zero = tl.zeros([TILE], tl.float32)
        {body}
    tl.store(partial + row * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))
"""
_TILE_OF_A_CLIENT = """\
    await_inputs()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    zero = tl.zeros([TILE], tl.float32)
    rate = tl.load(lr)
"""
_UPDATE = f"""\
def update({{names}}, lr, partial, size, PARTS: tl.constexpr, TILE: tl.constexpr):
{_TILE_OF_A_CLIENT}    {{body}}
"""
_STEPS = f"""\
def steps({{names}}, lr, size, count, TILE: tl.constexpr):
{_TILE_OF_A_CLIENT}    {{body}}
    for step in range(count):
        {{body}}
    {{body}}
"""


def _compile(name: str, template: str, names: tuple[str, ...], *bodies: list[str]) -> Any:
    """The kernel of a source text; Triton reads the text back through linecache, and caches by it."""
    source = template.replace("{names}", ", ".join(names))
    for lines in bodies:
        indent = source.partition("{body}")[0].rpartition("\n")[2]
        source = source.replace("{body}", f"\n{indent}".join(lines), 1)
    file = f"<fedlada_mpi.gpu.fuse.{name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = {"tl": tl, "await_inputs": await_inputs, "__name__": __name__}
    exec(compile(source, file, "exec"), space)
    return jit(do_not_specialize={"squares": ["steps"], "steps": ["count"]}.get(name, []))(space[name])
