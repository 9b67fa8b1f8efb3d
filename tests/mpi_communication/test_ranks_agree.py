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


def agrees(one: Run, other: Run, tolerance: float) -> bool:
    """Draws, parameters and metrics."""
    keys = ("lr", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency")
    values = [[[record.get(key) for key in keys] for record in run.metrics] for run in (one, other)]
    return (
        one.participants == other.participants
        and len(one.metrics) == len(other.metrics) == ROUNDS
        and disagreement(one.x, other.x, other.data.start) < tolerance
        and np.allclose(*np.array(values, float), rtol=tolerance, atol=1e-12, equal_nan=True)
    )


# One test for each launch: processes that share out the tests would each launch it.
@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ranks_agree(ranks, runs):
    alone, together = runs(1), runs(ranks)
    tolerances = {name: 1e-4 if name == "single" else 1e-10 for name in CASES}
    assert [name for name in CASES if not agrees(together[name], alone[name], tolerances[name])] == []
    # Neither who reads which file nor who trains matters.
    for number in (1, ranks):
        plain, others = runs(number)["scaffold"], ("one file", "file per rank", "server")
        assert [name for name in others if not agrees(runs(number)[name], plain, 1e-10)] == []
    for participants in alone["fedlada"].participants:
        assert len(participants) == len(set(participants)) == 3
        assert set(participants) <= set(range(len(SIZES)))
    assert len({len(p) for p in alone["bernoulli"].participants}) > 1
    if ranks == 4:
        was_spread(together["one file"])
        was_spread(together["fedlada"])
        # With the state of its clients: two rounds on 1 rank, two on 2 and two on 4.
        changing = together["goes on"]
        assert changing.participants == alone["one file"].participants
        assert disagreement(changing.x, alone["one file"].x, changing.data.start) < 1e-10


def was_spread(run: Run) -> None:
    owned = owned_clients(read_manifest(run.data.shards), 3)
    spread = [sum(bool({*map(int, ids)} & {*p}) for ids in owned) for p in run.participants]
    assert max(spread) == 3
