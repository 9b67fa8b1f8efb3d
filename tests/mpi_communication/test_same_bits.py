"""``--sums exact``: the same bits on 1, 2 and 4 ranks, with any transport, in any groups of clients."""

from __future__ import annotations

import json

import pytest
import torch
from repository import ROOT
from training_runs import Run, arguments, disagreement, make_data, without_times

pytestmark = pytest.mark.slow
SIZES = [7, 12, 5, 9, 4, 15, 8, 6, 11, 3]
COMMON = dict(
    sums="exact", precision="fp32", rounds=2, participation=0.6, local_epochs=1, batch_size=10, augment="paper",
    crop_padding=1, eval_every=1, eval_clients=2, lr=0.05, seed=11,
)  # fmt: skip
CASES = {
    "fedlada": dict(COMMON, algorithm="fedlada", lr=0.01),
    "scaffold": dict(COMMON, algorithm="scaffold", weighting="size"),
    "fednova": dict(COMMON, algorithm="fednova", weighting="size", server_trains=True),
    "mimelite": dict(COMMON, algorithm="mimelite", sampling="bernoulli"),
    "clip": dict(COMMON, algorithm="localadam", robust="clip", lr=0.01),
    "median": dict(COMMON, algorithm="localadam", robust="median", lr=0.01),
    "trimmed": dict(COMMON, algorithm="fedavg", robust="trimmed", trim=0.2),
    "double": dict(COMMON, algorithm="fedavg", precision="fp64"),
    "draws": dict(COMMON, algorithm=f"{ROOT / 'tests' / 'helpers' / 'noisy_method.py'}:Noisy"),
}
# What may differ: how clients are grouped, and how vectors move.
OTHERWISE = {1: {}, 2: dict(max_clients_at_once=2), 4: dict(transport="shared", max_clients_at_once=3)}
# One launch for all cases: starting Python and MPI costs more than the runs.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)


def launched(shared_tmp, mpirun) -> dict[int, dict[str, Run]]:
    """Every case, by the number of ranks."""
    data = make_data(shared_tmp / "bits", SIZES, silos=4)
    found = {}
    for ranks, other in OTHERWISE.items():
        cases = CASES | ({"plain": CASES["scaffold"] | dict(sums="fast")} if ranks == 1 else {})
        out = {name: shared_tmp / f"bits-{ranks}" / name for name in cases}
        lines = [arguments(data, out[name], settings | other) for name, settings in cases.items()]
        mpirun(ranks, json.dumps(lines), command=("-c", SCRIPT), check=True)
        found[ranks] = {name: Run(out[name], data) for name in cases}
    return found


def results(run: Run) -> list[dict[str, object]]:
    """The metrics without times, and without the bytes between ranks."""
    return [{k: v for k, v in without_times(record).items() if k != "bytes_mpi"} for record in run.metrics]


def same(one: Run, other: Run) -> bool:
    return (
        results(one) == results(other)
        and all(torch.equal(one.model[key], value) for key, value in other.model.items())
        and {k: v.tobytes() for k, v in one.server.items()} == {k: v.tobytes() for k, v in other.server.items()}
    )


def test_bits_are_the_same(shared_tmp, mpirun):
    """And not those of plain sums, which might happen to agree."""
    runs = launched(shared_tmp, mpirun)
    alone = runs[1]
    assert [(name, ranks) for name in CASES for ranks in (2, 4) if not same(runs[ranks][name], alone[name])] == []
    exact, plain = alone["scaffold"], alone["plain"]
    assert 0 < disagreement(exact.x, plain.x, plain.data.start) < 1e-5
