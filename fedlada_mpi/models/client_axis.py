"""torch's operations on the tensors of all clients at once.

Tensors are [C, ...] here, with the axes of the user's code behind that of the clients, or [1, ...] where all clients
have the same one. ``OPERATIONS`` has, for a function or the name of a tensor's method, what acts on every client as
the operation does on one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import pieces
from .resample import repeatable
from .written_out import added_mask, mask_of_heads

# What acts on every number by itself, so on any order of the axes.
ELEMENTWISE_FUNCTIONS: tuple[Any, ...] = (
    *(F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.relu6, F.hardswish, F.hardtanh, F.hardsigmoid),
    *(F.softplus, F.mish, F.selu, F.celu, F.logsigmoid, F.softsign, operator.neg, operator.pow),
)
ELEMENTWISE_METHODS: tuple[Any, ...] = (  # in torch, and of tensors by the same name
    *(torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt),
    *(torch.rsqrt, torch.abs, torch.square, torch.neg, torch.sin, torch.cos, torch.reciprocal, torch.clamp, torch.pow),
)
ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    **{f: f for f in (*ELEMENTWISE_FUNCTIONS, *ELEMENTWISE_METHODS)},
    **{f.__name__ + end: f for f in ELEMENTWISE_METHODS for end in ("", "_")},
}

# Of two or three tensors or numbers, whose last axes belong together.
BROADCASTING = (
    *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "pow", "maximum", "minimum", "where"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"),
    *("masked_fill", "lerp", "addcmul", "atan2", "clamp"),
)
OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_),
)
IN_PLACE_OPERATORS = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip
# Of one tensor, on its numbers or on its last axes alone.
AS_WRITTEN = (
    *("float", "double", "half", "bfloat16", "bool", "long", "int", "to", "type_as", "clone", "contiguous", "detach"),
    *("logical_not", "bitwise_not", "sign", "floor", "ceil", "round", "isnan", "isfinite", "tril", "triu", "softplus"),
    *("nan_to_num", "logical_not", "log2", "exp2", "erfinv", "tan", "sinh", "cosh", "atan", "trunc"),
    *("zeros_like", "ones_like", "full_like"),
)
REDUCTIONS = (
    *("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "prod", "logsumexp", "all", "any"),
    *("cumsum", "cumprod", "softmax", "log_softmax"),
)
# Of maps [N, channels, ...], each by itself.
OF_MAPS: tuple[Any, ...] = (
    *(F.pixel_shuffle, F.pixel_unshuffle, F.unfold, F.fold, F.lp_pool1d, F.lp_pool2d, F.interpolate),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
)


def shifted(dim: int) -> int:
    """The place of a user's axis behind that of the clients."""
    return dim + 1 if dim >= 0 else dim


def aligned(*values: Any) -> list[Any]:
    """Tensors with as many axes as the longest, so that their last ones belong together."""
    rank = max(value.dim() for value in values if isinstance(value, Tensor))

    def with_axes(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == rank:
            return value
        return value.reshape(len(value), *(1,) * (rank - value.dim()), *value.shape[1:])

    return [with_axes(value) for value in values]


def of_clients(*values: Any) -> list[Any]:
    """Tensors with a row for every client."""
    count = max(len(value) for value in values if isinstance(value, Tensor))
    return [value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value for value in values]


def _numbers(values: Sequence[Any]) -> Sequence[Any]:
    """Arguments that torch takes one by one, or as one sequence."""
    return values[0] if len(values) == 1 and isinstance(values[0], (list, tuple)) else values


def _broadcasting(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **options: function(*aligned(*values), **options)


def _reducing(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Tensor, dim: Any = None, *others: Any, **options: Any) -> Any:
        if isinstance(dim, Tensor):  # the larger of two
            return function(*aligned(x, dim))
        if dim is None:
            whole = {"max": torch.amax, "min": torch.amin}.get(function.__name__, function)
            return whole(x.flatten(1), 1, *others, **options)
        places = [shifted(d) for d in dim] if isinstance(dim, (list, tuple)) else shifted(dim)
        return function(x, places, *others, **options)

    return reduced


def permute(x: Tensor, *dims: Any) -> Tensor:
    return x.permute(0, *map(shifted, _numbers(dims)))


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return x.transpose(shifted(dim0), shifted(dim1))


def movedim(x: Tensor, source: Any, destination: Any) -> Tensor:
    places = [[shifted(d) for d in _numbers([dims])] for dims in (source, destination)]
    return x.movedim(*places)


def unbind(x: Tensor, dim: int = 0) -> Any:
    return pieces.unbind(x, shifted(dim))


def chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    return pieces.chunk(x, chunks, shifted(dim))


def split(x: Tensor, split_size_or_sections: Any = None, dim: int = 0, split_size: Any = None) -> Any:
    return pieces.split(x, split_size_or_sections if split_size is None else split_size, shifted(dim))


def select(x: Tensor, dim: int, index: int) -> Tensor:
    return x.select(shifted(dim), index)


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x.narrow(shifted(dim), start, length)


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    return x.unsqueeze(shifted(dim))


def flip(x: Tensor, *dims: Any) -> Tensor:
    return x.flip([shifted(d) for d in _numbers(dims)])


def roll(x: Tensor, shifts: Any, dims: Any) -> Tensor:
    return x.roll(shifts, shifted(dims) if isinstance(dims, int) else [shifted(d) for d in dims])


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    return x.repeat_interleave(repeats, shifted(dim))


def expand(x: Tensor, *sizes: Any) -> Tensor:
    numbers = _numbers(sizes)
    x = x.reshape(len(x), *(1,) * (len(numbers) + 1 - x.dim()), *x.shape[1:])
    return x.expand(-1, *numbers)


def expand_as(x: Tensor, other: Tensor) -> Tensor:
    return expand(x, other.shape[1:])


def repeat(x: Tensor, *sizes: Any) -> Tensor:
    numbers = _numbers(sizes)
    x = x.reshape(len(x), *(1,) * (len(numbers) + 1 - x.dim()), *x.shape[1:])
    return x.repeat(1, *numbers)


def cat(tensors: Sequence[Tensor], dim: int = 0, axis: int | None = None) -> Tensor:
    some = [tensor for tensor in tensors if tensor.shape[1:] != (0,)]  # torch leaves out empty vectors
    return torch.cat(of_clients(*some), shifted(dim if axis is None else axis))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack(of_clients(*tensors), shifted(dim))


def getitem(x: Tensor, index: Any) -> Tensor:
    places = (slice(None), *(index if isinstance(index, tuple) else (index,)))
    return x[places]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 2:  # a user's vector
        return matmul(a.unsqueeze(1), b).squeeze(-2)
    if b.dim() == 2:
        return matmul(a, b.unsqueeze(-1)).squeeze(-1)
    if b.dim() == 3 and len(b) == 1:
        return torch.matmul(a, b[0])  # one product for all clients
    if b.dim() == 3:
        a, b = of_clients(a, b)
        return torch.bmm(a.flatten(1, -2), b).view(*a.shape[:-1], b.shape[-1])
    return torch.matmul(*aligned(a, b))


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.add(*aligned(matmul(a, b), bias))


def indexed(x: Tensor, *indices: Tensor) -> Tensor:
    """The elements of the first axes at integers of every client."""
    rows = aligned(*indices)
    places = (torch.arange(len(x), device=x.device).view(-1, *(1,) * (rows[0].dim() - 1)), *rows)
    return x[places]


def diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    x, prepend, append = of_clients(x, prepend, append)
    return torch.diff(x, n, shifted(dim), prepend, append)


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return torch.gather(*of_clients(x, shifted(dim), index))


def einsum(equation: str, *operands: Any) -> Tensor:
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = "..." * ("..." in left) + "".join(once)
    client = next(letter for letter in ascii_letters if letter not in equation)
    terms = ",".join(client + term for term in left.split(","))
    return torch.einsum(f"{terms}->{client}{right}", *_numbers(operands))


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return F.normalize(x, p, shifted(dim), eps)


def norm(x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None:
        x, dim = x.flatten(1), 0
    places = [shifted(d) for d in dim] if isinstance(dim, (list, tuple)) else shifted(dim)
    return torch.norm(x, 2 if p == "fro" else p, places, keepdim, dtype=dtype)


def softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return x.softmax(shifted(dim), dtype)


def log_softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return x.log_softmax(shifted(dim), dtype)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    return F.glu(x, shifted(dim))


def convert(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """To another type, on the same device."""
    return x if dtype is None else x.to(dtype)


def on_first_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first axis is a batch: clients are folded into it."""
    return lambda x, *others, **options: function(x.flatten(0, 1), *others, **options).unflatten(0, x.shape[:2])


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    if mode == "constant":
        return F.pad(x, pad, mode, value)
    return on_first_axis(repeatable(F.pad))(x, pad, mode)


def _by_name(names: Sequence[str], adapted: Callable[[Any], Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Functions of torch and methods of tensors with these names."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        if (function := getattr(torch, name, None)) is not None:
            found[function] = adapted(function)
        if (method := getattr(Tensor, name, None)) is not None:
            found[name] = adapted(method)
            if hasattr(Tensor, f"{name}_"):
                found[f"{name}_"] = found[name]
    return found


def _under_their_names(*functions: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    return {key: f for f in functions for key in (f.__name__, getattr(torch, f.__name__, f))}


OPERATIONS: dict[Any, Callable[..., Any]] = {
    **ELEMENTWISE,
    **_by_name(AS_WRITTEN, lambda function: function),
    **_by_name(BROADCASTING, _broadcasting),
    **_by_name(REDUCTIONS, _reducing),
    **{function: _broadcasting(function) for function in OPERATORS},
    **{function: _broadcasting(plain) for function, plain in IN_PLACE_OPERATORS.items()},
    **_under_their_names(permute, transpose, movedim, unbind, chunk, split, select, narrow, unsqueeze, flip, roll),
    **_under_their_names(
        repeat_interleave, expand, expand_as, repeat, cat, stack, matmul, addmm, diff, gather, einsum, norm
    ),
    torch.linalg.vector_norm: norm,
    **dict.fromkeys((torch.concat, torch.concatenate), cat),
    **dict.fromkeys((torch.swapaxes, "swapaxes", torch.swapdims, "swapdims"), transpose),
    **dict.fromkeys((torch.bmm, "bmm", torch.mm, "mm", operator.matmul), matmul),
    added_mask: added_mask,
    mask_of_heads: lambda mask, heads: mask.unflatten(1, (-1, heads)) if mask.dim() == 4 else mask,
    convert: convert,
    operator.getitem: getitem,
    operator.invert: torch.bitwise_not,
    F.softmax: softmax,
    F.log_softmax: log_softmax,
    F.normalize: normalize,
    F.pad: pad,
    F.one_hot: F.one_hot,
    F.glu: glu,
    **{function: on_first_axis(repeatable(function)) for function in OF_MAPS},
}
