"""The same settings on 1, 2 and 4 ranks: the same draws, and parameters equal up to the order of the sums.

The shards are in one file or in four, whatever the number of ranks, and one run goes on from rank to ranks.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from tiers import slow
from training_runs import Run, arguments, disagreement, make_data

from fedlada_mpi.data.owners import owned_clients
from fedlada_mpi.data.shards import read_manifest

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
    "one file": dict(COMMON, algorithm="scaffold", weighting="size"),
    "file per rank": dict(COMMON, algorithm="scaffold", weighting="size", silo_per_rank=True),
}
UNTIL = {1: 2, 2: 4, 4: ROUNDS}  # the round that the run which goes on has reached on so many ranks
GOES_ON = dict(COMMON, algorithm="scaffold", weighting="size", resume=True)
# One launch for all cases: starting Python and MPI costs more than the runs.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)


@pytest.fixture(scope="session")
def runs(shared_tmp, mpirun):
    four, one = (make_data(shared_tmp / f"ranks-{silos}-files", SIZES, silos=silos) for silos in (4, 1))
    data = {name: one if name == "one file" else four for name in CASES}

    @cache
    def launched(ranks):
        if ranks > 1:
            launched(ranks // 2)  # whose run goes on
        out = {name: shared_tmp / f"ranks-{ranks}" / name for name in CASES}
        lines = [arguments(data[name], out[name], settings) for name, settings in CASES.items()]
        goes_on = shared_tmp / "ranks-that-change"
        lines.append(arguments(one, goes_on, {**GOES_ON, "rounds": UNTIL[ranks]}))
        mpirun(ranks, json.dumps(lines), command=("-c", SCRIPT), check=True)
        return {name: Run(out[name], data[name]) for name in CASES} | {"goes on": Run(goes_on, one)}

    return launched


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree(name, ranks, runs):
    alone, together = runs(1)[name], runs(ranks)[name]
    assert len(alone.metrics) == ROUNDS
    assert together.participants == alone.participants
    tolerance = 1e-4 if name == "single" else 1e-10
    assert disagreement(together.x, alone.x, alone.data.start) < tolerance
    for key in ("lr", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency"):
        values = [[record.get(key) for record in run.metrics] for run in (together, alone)]
        np.testing.assert_allclose(*np.array(values, float), rtol=tolerance, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2, slow(4)])
@pytest.mark.parametrize("name", ["one file", "file per rank", "server"])
def test_who_reads_which_file_and_who_trains_do_not_matter(name, ranks, runs):
    plain, other = runs(ranks)["scaffold"], runs(ranks)[name]
    assert other.participants == plain.participants
    assert disagreement(other.x, plain.x, plain.data.start) < 1e-10


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks(runs):
    """With the state of its clients: two rounds on 1 rank, two on 2 and two on 4."""
    alone, changing = runs(1)["one file"], runs(4)["goes on"]
    assert changing.participants == alone.participants
    assert disagreement(changing.x, alone.x, alone.data.start) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one file", "fedlada"])
def test_the_work_was_really_spread(name, runs):
    run = runs(4)[name]
    owned = owned_clients(read_manifest(run.data.shards), 3)
    spread = [sum(bool({*map(int, ids)} & {*p}) for ids in owned) for p in run.participants]
    assert max(spread) == 3


def test_draws_of_participants(runs):
    for participants in runs(1)["fedlada"].participants:
        assert len(participants) == len(set(participants)) == 3
        assert set(participants) <= set(range(len(SIZES)))
    assert len({len(p) for p in runs(1)["bernoulli"].participants}) > 1
