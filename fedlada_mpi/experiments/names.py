"""Names of run directories: the data set, the method, settings, and the seed.

    digits_fedavg_lr=0.05_seed=0

Named are the settings that differ from their presets and the axes of the plan. So one run may have several names: where
0.1 is the preset's rate, a plan with ``lr = [0.05, 0.1]`` calls it ``digits_fedavg_lr=0.1_seed=0``, and a plan without
that axis, as earlier versions, ``digits_fedavg_seed=0``. A directory that already exists under any of them is the
run's, so that none is trained twice. A name that no file can have is cut, and told apart from others by a hash.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import settings
from ..algorithms import resolve, settings_of

APART = ("dataset", "algorithm", "seed")  # which stand first and last in every name
LONGEST = 255  # bytes of a file name


class RunName:
    """The names that a run with these settings may have."""

    def __init__(self, values: Mapping[str, Any]):
        dataset, method = values["dataset"], values["algorithm"]
        chosen = {name: values[name] for name in ("dataset", "algorithm", "preset")}
        preset = {**resolve(chosen).config.record(), "preset": settings.SETTINGS["preset"].default}
        names = [n for n, setting in settings_of(method).items() if not setting.runtime and n not in APART]
        self.head = f"{_safe(dataset)}_{method if ':' not in method else _safe(method)}"
        self.values = {n: _safe(values[n]) for n in (*names, "seed")}
        self.departures = {n for n in names if values[n] != preset[n]} | {"seed"}

    def text(self, axes: Collection[str] = ()) -> str:
        """The name that a plan with these axes gives; without axes it is the same for equal runs of all plans."""
        parts = [f"{n}={v}" for n, v in self.values.items() if n in self.departures or n in axes]
        text = "_".join([self.head, *parts])
        if len(text) <= LONGEST:
            return text
        if axes:
            return self.text()
        end = f"-{_hash(text)}_seed={self.values['seed']}"
        return text[: LONGEST - len(end)] + end

    def matches(self, name: str) -> bool:
        """Whether the name is one of those that this run may have."""
        found = _parts(name, self.values)
        right = found.items() <= self.values.items() and found.keys() >= self.departures
        return right and name == "_".join([self.head, *(f"{n}={v}" for n, v in found.items())])

    def choose(self, axes: Collection[str], existing: Iterable[str]) -> str:
        """The plan's own name, unless only others exist: then the shortest of those."""
        own = self.text(axes)
        known = [name for name in existing if name.startswith(self.head) and self.matches(name)]
        return own if own in known or not known else min(known, key=lambda name: (len(name), name))


def entries(root: Path) -> list[str]:
    """The names in a directory, none where it cannot be read."""
    try:
        return os.listdir(root)
    except OSError:
        return []


def named(name: str, values: Mapping[str, Any]) -> set[str]:
    """The settings that a run's directory names, with the values that they have."""
    return {n for n, v in _parts(name, values).items() if v == _safe(values[n]) and n not in APART}


def _parts(name: str, known: Iterable[str]) -> dict[str, str]:
    """The values in a name, by setting."""
    either = "|".join(map(re.escape, known))
    return dict(re.findall(rf"_({either})=([^_]*)(?=_|$)", name))


def _safe(value: Any) -> str:
    """The value as a part of a file name; what has to be changed for that gets a hash, so that names stay distinct."""
    text = str(value)
    clean = re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-.")
    if clean == text and len(text) <= 40:
        return text
    return f"{clean[-30:]}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]
