"""Silos with tables of their own, on the ranks of this test run: the means are those of all rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ranks import SIZE, barrier, communicator, is_root

from data_prep import PrepareSettings
from fedlada_mpi.data.normalise import statistics
from fedlada_mpi.data.silos.prepare import prepare_silo
from fedlada_mpi.data.silos.sums import Sums, agree_statistics
from fedlada_mpi.mpi import World
from fedlada_mpi.run import main

SEED = 4


def table(rank: int) -> np.ndarray:
    """Age, dose and cost of a rank's patients, another number of them on each."""
    random = np.random.default_rng(SEED + rank)
    return random.normal((50, 1e-3, 2), (20, 1e-4, 1), (12 + 3 * rank, 3)).astype(np.float32)


@pytest.mark.ranks
def test_ranks_agree_on_the_mean_of_all():
    with World() as world:
        mine = {"": Sums.of(table(world.rank), "")} if world.rank or world.size == 1 else {"": Sums.nothing(3)}
        mean, std = agree_statistics(world, mine)[""]
    ranks = range(1, SIZE) if SIZE > 1 else range(1)
    assert ([*mean], [*std]) == statistics(np.concatenate([table(rank) for rank in ranks]))


@pytest.mark.ranks
@pytest.mark.skipif(SIZE == 1, reason="one rank is the server, which has no data")
def test_tables_are_normalised_by_all_silos(shared_tmp, out):
    root = shared_tmp / "tables"
    if not is_root():
        rank = communicator().rank
        root.mkdir(exist_ok=True)
        rows = "".join(f"{age!r},{dose!r},{cost!r}\n" for age, dose, cost in table(rank).tolist())
        (root / f"{rank}.csv").write_text("age,dose,cost\n" + rows)
        settings = PrepareSettings("csv", out=root / f"silo_{rank:04d}", raw=root / f"{rank}.csv", target=["cost"])
        prepare_silo(settings, f"silo_{rank:04d}")
    barrier()
    words = ["--silo-dir", str(root / "{silo}"), "--rounds", "2", "--batch-size", "4", "--out", str(out)]
    assert main([*words, "--weighting", "size"]) == 0
    barrier()
    if is_root():
        about = json.loads((out / "summary.json").read_text())["data"]["inputs"][""]
        found = Sums.of(np.concatenate([_trained(root, rank) for rank in range(1, SIZE)]), "").statistics(False)
        assert (tuple(about["mean"]), tuple(about["std"])) == found
        record = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        own = [*root.glob("*/runs/*/metrics.jsonl")]
        assert len(own) == SIZE - 1
        parts = [json.loads(path.read_text().splitlines()[-1]) for path in own]
        count = sum(part["test_examples"] for part in parts)
        assert record["test_loss"] == pytest.approx(sum(p["test_loss"] * p["test_examples"] for p in parts) / count)


def _trained(root, rank: int) -> np.ndarray:
    from fedlada_mpi.data.shards import read_clients
    from fedlada_mpi.data.silos.files import read_private

    return read_clients(read_private(root / f"silo_{rank:04d}"), [0]).inputs
