"""What a setting may be in a search: one of several values, or any in a range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from ..settings import Setting, check_value, coerce, flag
from ..support.errors import UserError, shortened
from ..support.suggestions import did_you_mean

DIGITS = 4  # of a drawn number, so that names and files stay readable
KEYS = ("low", "high", "log", "int")


@dataclass(frozen=True)
class Choices:
    """Values in the order of the plan."""

    values: tuple[Any, ...]
    log: bool = False

    @property
    def count(self) -> float:
        """How many different values there are."""
        return len(self.values)

    def draw(self, share: float) -> Any:
        """The value at a share of all of them, from 0 to 1."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    @property
    def numeric(self) -> bool:
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; ``log``: their logarithms are drawn evenly."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    numeric = True

    @property
    def count(self) -> float:
        return self.high - self.low + 1 if self.whole else math.inf

    def draw(self, share: float) -> Any:
        # Each whole number has a piece of the range of its own, those at the ends as well.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        value = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return min(max(value, self.low), self.high)


Domain = Choices | Range


def parse(name: str, setting: Setting, given: Any) -> Domain:
    """The domain that a plan gives for a setting: a list, or a table of low and high."""
    if isinstance(given, list):
        return _choices(name, setting, given)
    if not isinstance(given, Mapping):
        raise UserError(
            f"search.{name}: got {shortened(given)}, expected a list of values or {{low = ..., high = ...}}; one value "
            "for all trials belongs into [base]"
        )
    for key in given:
        if key not in KEYS:
            raise UserError(f"search.{name}: unknown key {key!r}{did_you_mean(key, KEYS)}, expected {', '.join(KEYS)}")
    if missing := [key for key in ("low", "high") if key not in given]:
        raise UserError(f"search.{name}: {missing[0]} is missing, expected {{low = ..., high = ...}}")
    return _range(name, setting, given)


def _choices(name: str, setting: Setting, given: list[Any]) -> Choices:
    if not given:
        raise UserError(f"search.{name}: got an empty list, expected at least one value")
    values = tuple(coerce(setting, value) for value in given)
    for value in values:
        check_value(setting, value, name)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise UserError(f"search.{name}: got {value!r} twice, expected each value once")
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    # As 0.001, 0.01 and 0.1 are meant; only drawings depend on it.
    log = len(numbers) == len(values) > 2 and min(numbers) > 0 and max(numbers) / min(numbers) >= 30
    return Choices(values, log)


def _range(name: str, setting: Setting, given: Mapping[str, Any]) -> Range:
    if setting.kind not in ("int", "float"):
        raise UserError(f"search.{name}: got a range, expected a list of values, as it is no number")
    for key in ("log", "int"):
        if not isinstance(given.get(key, False), bool):
            raise UserError(f"search.{name}: {key}: got {shortened(given[key])}, expected true or false")
    low, high = (coerce(setting, given[key]) for key in ("low", "high"))
    whole, log = setting.kind == "int" or given.get("int", False), given.get("log", False)
    for key, value in (("low", low), ("high", high)):
        check_value(setting, value, name)
        if whole and value != int(value):
            raise UserError(f"search.{name}: {key}: got {value}, expected an integer")
    if low >= high:
        raise UserError(f"search.{name}: got low {low} and high {high}, expected low to be less than high")
    if log and low <= 0:
        raise UserError(f"search.{name}: got low {low} with log = true, expected more than 0, or log = false")
    return Range(low, high, log, whole)


def drawn(space: Mapping[str, Domain], seed: int, trial: int, again: int) -> dict[str, Any]:
    """The settings of a random trial. Each is a function of its name and of these numbers, so that methods get the same
    values of the settings that they share; ``again`` counts the draws that were trials before."""
    return {
        name: domain.draw(Random(f"{seed}/{trial}/{again}/{flag(name)}").random()) for name, domain in space.items()
    }
