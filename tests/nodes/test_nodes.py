"""Runs over several nodes: where ranks are, what reaches them, and that the results are those of one node."""

from __future__ import annotations

import json
import sys

import pytest
from ranks import find_mpirun
from training_runs import Run, arguments, disagreement, make_data, run_here

pytestmark = [pytest.mark.serial, pytest.mark.nodes]

MPIRUN = find_mpirun() or "mpirun"
SIZES = [7, 12, 5, 9, 4, 15, 8]
SETTINGS = dict(
    algorithm="scaffold", rounds=3, participation=0.6, local_epochs=1, batch_size=4, eval_every=1, eval_clients=1,
    checkpoint_every=1, seed=3,
)  # fmt: skip
# One launch for several runs: starting Python and MPI costs more than they do.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)


@pytest.fixture(scope="module")
def data(shared_tmp):
    return make_data(shared_tmp / "nodes", SIZES, silos=2)


@pytest.fixture(scope="module")
def alone(data, shared_tmp):
    return run_here(data, shared_tmp / "nodes-alone", **SETTINGS)


@pytest.fixture
def launch(nodes, mpi_env, passed_on):
    """``launch(SLOTS, *words)`` runs python on the nodes' slots."""

    def run(slots, *words, timeout=90, **env):
        ranks = ("-x", "PYTHONPATH", *(word for name in env for word in ("-x", name)), "-n", sum(slots))
        command = [MPIRUN, *ranks, sys.executable, *words]
        return nodes.run(command, slots, {**mpi_env, **passed_on, **env}, timeout)

    return run


def test_ranks_are_on_all_nodes(nodes, mpi_env):
    """Without a policy of its own, mpi.env would put them all on the first."""
    done = nodes.run([MPIRUN, "-n", "6", "hostname"], [2, 3, 1], mpi_env)
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2", "n2", "n3"], done.stderr


def test_a_grid_passes_on_what_runs_need(nodes, mpi_env, passed_on, tmp_path):
    (tmp_path / "grid.toml").write_text('title = "t"\n[base]\nrounds = 1\n[[runs]]\nalgorithm = "fedavg"\n')
    show = tmp_path / "mpirun"
    show.write_text(f"#!/bin/sh\nexec {MPIRUN} -n 2 sh -c 'echo \"$(hostname) $FEDLADA_DATA $OMP_NUM_THREADS\"'\n")
    show.chmod(0o755)
    grid = [sys.executable, "-m", "fedlada_mpi.grid", tmp_path / "grid.toml", "--runs", tmp_path, "--index", "0"]
    env = {**mpi_env, **passed_on, "FEDLADA_DATA": str(tmp_path), "OMP_NUM_THREADS": "3"}
    done = nodes.run([*grid, "--launcher", show], [1, 1], env)
    assert sorted(done.stdout.splitlines()[1:]) == [f"n1 {tmp_path} 3", f"n2 {tmp_path} 3"], done.stderr
    assert done.returncode == 1, "nothing was trained, whatever the launcher says"


@pytest.mark.parametrize("slots", [(2, 2), (2, 2, 2), (3, 1)], ids=str)
def test_results_are_those_of_one_node(slots, data, alone, launch, tmp_path):
    out = {kind: tmp_path / kind for kind in ("auto", "host", "shared")}
    lines = [arguments(data, path, {**SETTINGS, "transport": kind}) for kind, path in out.items()]
    done = launch(slots, "-c", SCRIPT, json.dumps(lines))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in out.values():
        run = Run(path, data)
        assert run.participants == alone.participants
        assert disagreement(run.x, alone.x, data.start) < 1e-10
        assert [len(record["seconds_by_rank"]["train"]) for record in run.metrics] == [sum(slots)] * 3
    assert [*Run(out["auto"], data).summary["segments"][0]["nodes"]] == [f"n{i + 1}" for i in range(len(slots))]


def test_threads_of_the_root_are_those_of_all(nodes, mpi_env, passed_on):
    """mpirun passes its environment on to ranks next to it, but not to other nodes."""
    ask = (
        "import torch; from fedlada_mpi.mpi import World; from fedlada_mpi.config import Config\n"
        "from fedlada_mpi.device import asked_threads, choose_device\n"
        "world = World(); choose_device(world, Config(device='cpu'), asked_threads(world))\n"
        "print(torch.get_num_threads()); world.close()"
    )
    on_n1 = '[ "$(hostname)" != n1 ] || export OMP_NUM_THREADS=1; exec "$0" "$@"'
    command = [MPIRUN, "-x", "PYTHONPATH", "-n", "2", "sh", "-c", on_n1, sys.executable, "-c", ask]
    done = nodes.run(command, [1, 1], {**mpi_env, **passed_on})
    assert done.stdout.split() == ["1", "1"], done.stderr
