"""The same settings on 1, 2 and 4 ranks: the same draws, and parameters equal up to the order of the sums."""

from __future__ import annotations

import json

import numpy as np
import pytest
from training_runs import Run, arguments, disagreement, make_data

from fedlada_mpi.data.shards import read_manifest

pytestmark = pytest.mark.serial

SIZES = [7, 12, 5, 9, 4, 15, 8, 6, 11, 3]
ROUNDS = 6
COMMON = dict(
    rounds=ROUNDS,
    participation=0.3,
    local_epochs=2,
    batch_size=4,
    augment="paper",
    crop_padding=1,
    eval_every=2,
    seed=11,
)
CASES = {
    "fedlada": dict(COMMON, algorithm="fedlada", lr=0.01),
    "scaffold": dict(COMMON, algorithm="scaffold", weighting="size"),
    "single": dict(COMMON, algorithm="fedavg", precision="fp32"),
    "bernoulli": dict(COMMON, algorithm="fedcm", sampling="bernoulli"),
    "server": dict(COMMON, algorithm="scaffold", weighting="size", server_trains=True),
}
# One launch for all cases: starting Python and MPI costs more than the runs.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)


@pytest.fixture(scope="module")
def runs(shared_tmp, mpirun):
    data = make_data(shared_tmp / "ranks", SIZES, silos=4)
    found = {}
    for ranks in (1, 2, 4):
        out = {name: shared_tmp / f"ranks-{ranks}" / name for name in CASES}
        lines = [arguments(data, out[name], settings) for name, settings in CASES.items()]
        mpirun(ranks, json.dumps(lines), command=("-c", SCRIPT), check=True)
        found[ranks] = {name: Run(out[name], data) for name in CASES}
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree(name, ranks, runs):
    alone, together = runs[1][name], runs[ranks][name]
    assert len(alone.metrics) == ROUNDS
    assert together.participants == alone.participants
    tolerance = 1e-4 if name == "single" else 1e-10
    assert disagreement(together.x, alone.x, alone.data.start) < tolerance
    for key in ("lr", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency"):
        values = [[record.get(key) for record in run.metrics] for run in (together, alone)]
        np.testing.assert_allclose(*np.array(values, float), rtol=tolerance, atol=1e-12, err_msg=key)


def test_the_server_that_trains_agrees_with_the_one_that_does_not(runs):
    for ranks in (2, 4):
        plain, working = runs[ranks]["scaffold"], runs[ranks]["server"]
        assert working.participants == plain.participants
        assert disagreement(working.x, plain.x, plain.data.start) < 1e-10


def test_the_work_was_really_spread(runs):
    """4 files on 3 silos: at most 2 files per rank, so participants from 3 files are on at least 2 ranks."""
    files = read_manifest(runs[4]["fedlada"].data.shards).client_ids
    spread = [sum(bool({*map(int, ids)} & {*p}) for ids in files) for p in runs[4]["fedlada"].participants]
    assert max(spread) >= 3


def test_draws_of_participants(runs):
    for participants in runs[1]["fedlada"].participants:
        assert len(participants) == len(set(participants)) == 3
        assert set(participants) <= set(range(len(SIZES)))
    assert len({len(p) for p in runs[1]["bernoulli"].participants}) > 1
