"""Random damage to shards and manifests, and hostile raw data: how often it was refused, harmless, or accepted.

    python -m tests.campaigns.data_damage                     1,500 bit flips and as many of each other damage
    python -m tests.campaigns.data_damage --trials 100 --seed 3

Data that is accepted although it is different, and any exception but a refusal, is printed with its trial, and the
status is then 1. Reading itself is what a run does at its start.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.support.errors import UserError
from tests.helpers.damage import (
    MANIFEST,
    ODD_VALUES,
    contents,
    edited,
    flip,
    is_one_line,
    outcome,
    places,
    splice,
    truncate,
)  # fmt: skip
from tests.helpers.hostile_data import HOSTILE

Trials = Iterator[tuple[Path, bytes]]


def damages(shards: Path, damage: Callable[[bytes, random.Random], bytes], at: random.Random) -> Trials:
    """One file at a time, the larger the more often."""
    files = {path: path.read_bytes() for path in [*sorted(shards.glob("*.h5")), shards / MANIFEST]}
    while True:
        path = at.choices(list(files), [len(content) for content in files.values()])[0]
        yield path, damage(files[path], at)


def edits(shards: Path, at: random.Random) -> Trials:
    """A value of the manifest, at any depth, is replaced or deleted; each field as often as any other."""
    text = (shards / MANIFEST).read_text()
    paths = list(places(json.loads(text)))
    fields = sorted({path[:1] for path in paths})
    while True:
        field = at.choice(fields)
        path = at.choice([path for path in paths if path[:1] == field])
        yield shards / MANIFEST, edited(text, path, at.choice(ODD_VALUES), delete=at.random() < 0.2).encode()


def campaign(shards: Path, trials: Trials, count: int) -> Counter[str]:
    """The outcomes of ``count`` trials."""
    original, outcomes = contents(shards), Counter[str]()
    for number, (path, content) in zip(range(count), trials, strict=False):
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            result = outcome(shards, original)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        path.write_bytes(before)
        outcomes[result] += 1
        if result not in ("refused", "same"):
            print(f"  trial {number}, {path.name}: {result[:300]}")
    return outcomes


def hostile() -> Counter[str]:
    """Each kind of hostile raw data once."""
    outcomes = Counter[str]()
    for make, message in HOSTILE:
        with tempfile.TemporaryDirectory() as folder:
            (raw := Path(folder, "raw")).mkdir()
            kind, path = make(raw)
            start = time.monotonic()
            try:
                prepare(PrepareSettings(kind, Path(folder, "out"), path, clients=2, silos=1, workers=1))
                result = "accepted"
            except UserError as error:
                result = "refused" if is_one_line(error) and re.search(message, str(error)) else str(error)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            outcomes[result] += 1
            if result != "refused" or time.monotonic() - start > 10:
                print(f"  {make.__name__}: {result} after {time.monotonic() - start:.1f} s")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1500, help="of each damage [1500]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    at = random.Random(options.seed)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "digits")
        prepare(PrepareSettings("digits", shards, clients=6, silos=3))
        kinds = {
            "bit flips": damages(shards, flip, at),
            "truncated files": damages(shards, truncate, at),
            "bytes replaced, inserted, removed": damages(shards, splice, at),
            "edits of the manifest": edits(shards, at),
        }
        for name, trials in kinds.items():
            bad += report(name, campaign(shards, trials, options.trials))
    bad += report("hostile raw data", hostile())
    return int(bad > 0)


def report(name: str, outcomes: Counter[str]) -> int:
    """One line of numbers; returns how many trials ended badly."""
    bad = sum(number for result, number in outcomes.items() if result not in ("refused", "same"))
    refused, same = outcomes["refused"], outcomes["same"]
    print(f"{name}: {outcomes.total()} tried, {refused} refused, {same} the same data, {bad} wrong", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
