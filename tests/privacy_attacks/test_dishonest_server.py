"""A server that does not follow the protocol learns nothing, and the silos end the run."""

from __future__ import annotations

import json

import numpy as np
from repository import ROOT
from uniformity import looks_random

from fedlada_mpi.privacy import key_files

DISHONEST = str(ROOT / "tests" / "helpers" / "dishonest.py")
SETTINGS = (
    "--secure --silo-keys keys --rounds 2 --participation 1 --clients 6 --local-steps 2 "
    "--device cpu --model linear --algorithm fedavg"
)
ERRORS = {
    "model": "the masks of the silos do not cancel",
    "participants": "the server asks for other participants than those of --seed",
    "settings": "--secure-neighbours: got 0 from the server, expected auto",
    "plan": "the server asks for what a silo does not do: --eval-clients 1",
    "orders": "the masks of the silos do not cancel",
    "alone": "the server has passed on the keys of 1 of 3 silos",
    "keys": "does not belong to",
    "names": "the server has passed on './silo_0002' as the name of a silo",
}


def test_the_run_ends_and_nothing_is_learned(mpirun, tmp_path):
    for silo in ("silo_0001", "silo_0002", "silo_0003"):
        key_files.new(tmp_path / "keys", silo)
    ways = ["honest", *ERRORS]
    mpirun(4, ",".join(ways), tmp_path, *SETTINGS.split(), command=(DISHONEST,), cwd=tmp_path, check=True)
    ended = {way: json.loads((tmp_path / f"{way}.json").read_text()) for way in ways}
    for way, error in ERRORS.items():
        seen = tmp_path / f"{way}.npy"
        assert ended[way]["statuses"] == [2] * 4, ended[way]
        assert error in ended[way]["err"]
        assert not seen.exists() or looks_random(np.load(seen).tobytes()), way
    # An honest one sees sums, so that what the others see is tested for something.
    assert ended["honest"]["statuses"] == [0] * 4
    assert not looks_random(np.load(tmp_path / "honest.npy").tobytes())
    assert (tmp_path / "model.npy").exists()
