"""One check per type of JSON: returns the value, or raises ValueError with what it is and what was expected."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

MANY = 1 << 40  # more images, bytes or pixels than any data set has, and still safe to add and multiply
LARGEST = 1e38  # of the numbers of arrays, and of those that they are normalised by
ANY = (-1,)  # for the length of a list


def mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {short(value)}, expected an object")
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {short(value)}, expected text")
    return value


def checksum(value: object, what: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text(value, what)):
        raise ValueError(f"{what} is {short(value)}, expected 64 hexadecimal digits")
    return str(value)


def integer(value: object, what: str, least: int = 0, most: int = MANY) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} is {short(value)}, expected an integer from {least} to {most}")
    return value


def boolean(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {short(value)}, expected true or false")
    return value


def share(value: object, what: str, of: str) -> float:
    share = number(value, what)
    if not 0 <= share < 1:
        raise ValueError(f"{what} is {short(share)}, expected a share {of}")
    return share


def real(value: object, what: str) -> float:
    """A number of any size that a float32 can have."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{what} is {short(value)}, expected a number")
    return value


def number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MANY:
        raise ValueError(f"{what} is {short(value)}, expected a number")
    return value


def sequence(value: object, what: str, *lengths: int) -> list[Any]:
    """A list of one of these lengths, of ``ANY``, or without any a list that is not empty."""
    if isinstance(value, list) and lengths == ANY:
        return value
    if not isinstance(value, list) or (len(value) not in lengths if lengths else not value):
        expected = " or ".join(map(str, lengths)) or "one or more"
        raise ValueError(f"{what} is {short(value)}, expected a list of {expected}")
    return value


def items(value: object, what: str, check: Callable[..., Any], lengths: tuple[int, ...], *arguments: Any) -> list[Any]:
    """Such a list whose elements all pass ``check``."""
    return [check(item, f"an element of {what}", *arguments) for item in sequence(value, what, *lengths)]


def short(value: object) -> str:
    """The value in a few words on one line."""
    return reprlib.repr(value)
