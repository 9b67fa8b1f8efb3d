"""The random numbers of users' layers and methods, as a function of one key per client and step.

What torch's own generator gives depends on everything drawn before. ``Draws`` replaces every random operation, below
autograd and vmap, by one whose numbers depend on the client's key, the place of the operation in the step and the
element alone: the same on any number of ranks, after a resume, and in a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .dispatch import DispatchMode
from .errors import UserError

# SplitMix64 (Steele, Lea and Flood 2014), in the two's complement of int64, whose products wrap around.
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Bits of a uniform number in [0, 1) that every value of the type can hold.
MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# Of values, clients' keys, the place of the operation and a probability: the result and which elements are kept.
Dropout: TypeAlias = Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]

KINDS = ("bernoulli", "rand", "uniform", "randn", "normal", "exponential", "randint")


def _wrapped(n: int) -> int:
    """As int64."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(z: Tensor, count: int) -> Tensor:
    """Shifted to the right, with zeros from the left."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


class Draws(DispatchMode):
    """Random operations of C clients at once (``keys`` [C]: their rows, or under vmap), or of one (``keys`` [1])."""

    example = ""  # of an operation with a row for each client

    def __init__(self, keys: Tensor, stacked: bool, what: str = "--model", dropout: Dropout | None = None):
        """``what`` draws, for messages; ``dropout``: a kernel for up to 32 bits, with the same numbers."""
        super().__init__()
        self.keys, self.stacked, self.what, self.count, self.dropout = keys, stacked, what, 0, dropout

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | dict(kwargs or {})
        name = func.overloadpacket.__name__
        if given.get("dropout_p") == 0:  # attention that could draw, and does not
            return func(*args, **(kwargs or {}))
        if name == "native_dropout":
            return self._dropout(given["input"], given["p"], given["train"])
        drawn = self._draw(name.removesuffix("_").removesuffix("_like"), given)
        return given["self"].copy_(drawn) if name.endswith("_") else drawn

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if self.dropout is not None and p < 1 and x.numel() and x.dtype != torch.float64:
            return self.dropout(x, self.keys, self._place(x.shape), p)
        kept = self._uniform(x.shape, x.device) < 1 - p
        return (x * kept / (1 - p) if p < 1 else torch.zeros_like(x)), kept

    def _draw(self, kind: str, given: Mapping[str, Any]) -> Tensor:
        """What the operation ``kind`` gives for its arguments, by the names of torch's schema."""
        if kind not in KINDS:
            raise UserError(
                f"{self.what}: the random operation {kind} cannot be repeated on other ranks or after a resume; "
                f"expected dropout, {', '.join(KINDS[:-1])} or {KINDS[-1]}"
            )
        like = next((a for name in ("self", "mean", "std") if isinstance(a := given.get(name), Tensor)), None)
        shape = tuple(like.shape if given.get("size") is None and like is not None else given["size"])
        device = like.device if like is not None else given.get("device") or self.keys.device
        default = torch.int64 if kind == "randint" else torch.get_default_dtype()
        dtype = given.get("dtype")
        if not isinstance(dtype, torch.dtype):  # a schema's own default is a number
            dtype = like.dtype if like is not None else default
        if kind in ("rand", "uniform"):
            low, high = (given["from"], given["to"]) if kind == "uniform" else (0.0, 1.0)
            return (low + (high - low) * self._uniform(shape, device, MANTISSA[dtype])).to(dtype)
        u = self._uniform(shape, device)
        if kind == "bernoulli":
            p = given.get("p")
            return (u < (given["self"] if p is None else p)).to(dtype)
        if kind in ("randn", "normal"):
            z = (-2 * torch.log1p(-u)).sqrt() * torch.cos(2 * pi * self._uniform(shape, device))
            return (z * given.get("std", 1.0) + given.get("mean", 0.0)).to(dtype)
        if kind == "exponential":
            return (-torch.log1p(-u) / given["lambd"]).to(dtype)
        low = given.get("low") or 0
        return (low + (u * (given["high"] - low)).floor()).to(dtype)

    def _uniform(self, shape: Sequence[int], device: torch.device | str, bits: int = 53) -> Tensor:
        """Uniform numbers in [0, 1), float64."""
        key = mix(self.keys.to(device) + self._place(shape)).unsqueeze(1)
        size = torch.Size(shape).numel() // len(self.keys)
        elements = torch.arange(1, 1 + size, device=device).unsqueeze(0)
        return (_shifted(mix(key + elements * GOLDEN), 64 - bits).double() * 2.0**-bits).view(tuple(shape))

    def _place(self, shape: Sequence[int]) -> int:
        """Of an operation that draws numbers of this shape, which is the next one of its step."""
        rows = (shape or (0,))[0] if self.stacked else 1
        if rows != len(self.keys):
            found, count = list(shape), len(self.keys)
            raise UserError(
                f"{self.what}: got random numbers of shape {found} for {count} clients at once, expected "
                f"[{count}, ...]{self.example}"
            )
        self.count += 1
        return _wrapped(self.count * FIRST)


class SameDraws(Draws):
    """One number for all elements: what is drawn does not depend on the number of images, or their order."""

    NUMBER = 0.125  # in [0, 1): Dropout keeps everything, and a normal number is not zero

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, dtype=torch.int64), stacked=False)

    def _uniform(self, shape: Sequence[int], device: torch.device | str, bits: int = 53) -> Tensor:
        return torch.full(tuple(shape), self.NUMBER, dtype=torch.float64, device=device)
