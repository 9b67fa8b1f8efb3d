"""Hostile inputs by the thousand: command lines, settings files, metrics, run directories, checkpoints.

    python tests/campaigns/inputs.py --trials 10000
    python tests/campaigns/inputs.py --trials 500 --only reports --seed 7

Prints a row of a table for each kind: how many inputs were tried, and how they were taken. An input that the package
does not take as it promises is printed, reduced to the smallest that fails; keep it as an @example of the tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import hostile_trials as trials  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402

from fedlada_mpi.mpi import World  # noqa: E402


def kinds(world: World, folder: Path) -> dict[str, tuple[Any, Callable[[Any], str]]]:
    """What is drawn, and what is tried with it."""
    original = trials.write_checkpoint(world, folder / "original")
    (folder / "run").mkdir()
    return {
        "command lines": (trials.flags, trials.try_flags),
        "settings files": (trials.settings_files, lambda file: trials.try_settings(file, folder)),
        "metrics files": (trials.metrics_files, lambda content: trials.try_metrics(content, folder)),
        "reports": (trials.run_files, lambda files: trials.try_report(files, folder / "run")),
        "checkpoints": (
            trials.checkpoint_files,
            lambda drawn: trials.try_checkpoint(drawn, world, original, folder / "damaged"),
        ),
    }


def attempt_all(kind: str, strategy: Any, attempt: Callable[[Any], str], trials: int, first: int) -> bool:
    """Try so many inputs and print what happened; whether all were taken as promised."""
    taken: Counter[str] = Counter()

    @settings(deadline=None, max_examples=trials, database=None, suppress_health_check=[*HealthCheck])
    @seed(first)
    @given(strategy)
    def each(drawn: Any) -> None:
        taken[attempt(drawn)] += 1

    start, good = time.perf_counter(), True
    try:
        each()
    except Exception:
        good = False
        traceback.print_exc()
    how = ", ".join(f"{count} {word}" for word, count in taken.most_common())
    print(f"| {kind} | {taken.total()} | {how}{'' if good else ', FAILED'} | {time.perf_counter() - start:.0f} s |")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000, help="of each kind [1000]")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the inputs [the time]")
    parser.add_argument("--only", default="", metavar="KIND", help="one kind of input [all]")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    world = World()
    with tempfile.TemporaryDirectory() as name:
        chosen = {k: v for k, v in kinds(world, Path(name)).items() if arguments.only in ("", k)}
        good = [attempt_all(k, *v, arguments.trials, arguments.seed) for k, v in chosen.items()]
    world.close()
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
