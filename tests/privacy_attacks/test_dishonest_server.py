"""A server that does not follow the protocol learns nothing, and the silos end the run."""

from __future__ import annotations

import numpy as np
import pytest
from repository import ROOT
from tiers import slow
from uniformity import looks_random

from fedlada_mpi.privacy import key_files

DISHONEST = str(ROOT / "tests" / "helpers" / "dishonest.py")
SETTINGS = (
    "--secure --secure-neighbours all --rounds 2 --participation 1 --clients 6 --local-steps 2 --device cpu "
    "--model linear --algorithm fedavg"
)


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("model", "the masks of the silos do not cancel"),
        slow("participants", "the server asks for other participants than those of --seed"),
        slow("settings", "--secure-neighbours: got 0 from the server, expected all"),
        slow("keys --silo-keys keys", "does not belong to"),
    ],
)
def test_the_run_ends_and_nothing_is_learned(mpirun, tmp_path, way, error):
    for silo in ("silo_0001", "silo_0002", "silo_0003"):
        key_files.new(tmp_path / "keys", silo)
    seen, (way, *more) = tmp_path / "seen.npy", way.split()
    done = mpirun(4, way, seen, *SETTINGS.split(), *more, command=(DISHONEST,), cwd=tmp_path)
    assert done.returncode == 2, done.stderr[-3000:]
    assert error in done.stderr
    assert not seen.exists() or looks_random(np.load(seen).tobytes())


def test_an_honest_server_sees_sums(mpirun, tmp_path):
    """So that what the others see is tested for something."""
    seen = tmp_path / "seen.npy"
    mpirun(4, "honest", seen, *SETTINGS.split(), command=(DISHONEST,), cwd=tmp_path, check=True)
    assert not looks_random(np.load(seen).tobytes())
