"""Kills and failing writes at chosen moments of a run; ``tests/campaigns/kills.py`` tries all of them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess

import pytest
from limits import LIMIT
from ranks import find_mpirun, python
from repository import ROOT
from tiers import slow
from training_runs import Run, arguments, make_data, run_here, same

SETTINGS = dict(algorithm="scaffold", rounds=3, local_steps=1, participation=0.5, checkpoint_every=1, eval_every=1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("faults"), [4, 6, 5], silos=2)


def start(data, out, ranks, fault, *more):
    """The run on ``ranks`` ranks; ``fault`` is what happens, at which write, on which rank."""
    launcher = [find_mpirun() or pytest.skip("no mpirun"), "-n", str(ranks)] if ranks > 1 else []
    words = [*map(str, fault), str(out), *arguments(data, out, SETTINGS), *more]
    line = [*launcher, python(), str(ROOT / "tests" / "helpers" / "faults.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT)


def undisturbed(data, out, ranks, *more) -> Run:
    if ranks == 1:
        return run_here(data, out, **SETTINGS, **dict.fromkeys((word.strip("-") for word in more), True))
    done = start(data, out, ranks, ("kill", 0, 0), *more)
    assert done.returncode == 0, done.stderr
    return Run(out, data)


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The run that nothing happens to, made once for each number of ranks."""
    return functools.cache(lambda ranks: undisturbed(data, tmp_path_factory.mktemp("whole") / "run", ranks))


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (1, ("kill", 60, 0)),
        slow(1, ("ENOSPC", 40, 0)),
        slow(3, ("ENOSPC", 12, 0)),
        slow(3, ("EDQUOT", 4, 1)),
    ],
)
def test_resumed_as_if_nothing_had_happened(ranks, fault, data, tmp_path, whole):
    out = tmp_path / "run"
    done = start(data, out, ranks, fault)
    if fault[0] == "kill":
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.returncode == 2, done.stderr
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        assert len(errors) == 1
        assert errors[0].startswith(f"error: cannot write {out}/")
        assert errors[0].endswith(": make room, then add --resume")
    same(undisturbed(data, out, ranks, "--resume"), whole(ranks))
    assert not [path for path in out.rglob("*") if path.suffix in (".tmp", ".lock")]
