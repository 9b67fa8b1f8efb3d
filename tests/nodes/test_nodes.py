"""Runs over several nodes: where ranks are, what reaches them, and that the results are those of one node."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from limits import LIMIT
from pretend import FORKED, wait_until
from ranks import find_mpirun, tolerant_mpirun
from repository import ROOT
from training_runs import Run, arguments, disagreement, make_data, run_here

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1500)]

MPIRUN = find_mpirun() or "mpirun"
DEPARTING = str(ROOT / "tests" / "helpers" / "departing.py")
SIZES = [7, 12, 5, 9, 4, 15, 8]
SETTINGS = dict(
    algorithm="scaffold", rounds=3, participation=0.6, local_epochs=1, batch_size=4, eval_every=1, eval_clients=1,
    checkpoint_every=1, seed=3,
)  # fmt: skip
# One launch for several runs: starting Python and MPI costs more than they do.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)

# A run on two GPUs per node, as far as the choice of one goes.
GPUS = """
import platform, sys, torch
from fedlada_mpi.rounds import device
from fedlada_mpi.settings import Config
from fedlada_mpi.mpi import World
from fedlada_mpi.run import main
from unittest.mock import patch
two = {"is_available": lambda: True, "device_count": lambda: 2, "set_device": lambda device: None}
with patch.multiple(torch.cuda, **two), World() as world:
    print("GPU", platform.node(), device.choose_device(world, Config()).index, flush=True)
sys.exit(main(sys.argv[1:]) if sys.argv[1:] else 0)
"""
# Prints what x is on a rank after every round.
SAME_X = """
import hashlib, sys
from fedlada_mpi.rounds import silo
from fedlada_mpi.run import main
exchange = silo.Silo.exchange

def shown(self, r):
    exchange(self, r)
    print("x", r.t, hashlib.sha256(self.s.x.numpy().tobytes()).hexdigest(), flush=True)

silo.Silo.exchange = shown
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "nodes", SIZES, silos=2)


@pytest.fixture(scope="session")
def alone(data, shared_tmp):
    return run_here(data, shared_tmp / "nodes-alone", **SETTINGS)


@pytest.fixture
def start(nodes, mpi_env, passed_on):
    """``start(SLOTS, *words)`` starts python on the nodes' slots."""

    def begin(slots, *words, **env):
        ranks = ("-x", "PYTHONPATH", *(word for name in env for word in ("-x", name)), "-n", sum(slots))
        command = [MPIRUN, *ranks, nodes.python(len(slots)), *words]
        return nodes.start(command, slots, {**mpi_env, **passed_on, **env})

    return begin


@pytest.fixture
def launch(start):
    """``launch(SLOTS, *words)`` waits for its end."""
    return lambda slots, *words: start(slots, *words).finish(250)


@pytest.mark.slow
def test_ranks_are_on_all_nodes(launch):
    """Without a policy of its own, mpi.env would put them all on the first."""
    done = launch((2, 3, 1), "-c", "from mpi4py import MPI; print(MPI.Get_processor_name())")
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2", "n2", "n3"], done.stderr


@pytest.mark.slow
def test_a_grid_passes_on_what_runs_need(nodes, mpi_env, passed_on, tmp_path):
    (tmp_path / "grid.toml").write_text('title = "t"\n[base]\nrounds = 1\n[[runs]]\nalgorithm = "fedavg"\n')
    (tmp_path / "show.py").write_text(
        "import os; from mpi4py import MPI\n"
        "print(MPI.Get_processor_name(), os.environ['FEDLADA_DATA'], os.environ['OMP_NUM_THREADS'])\n"
    )
    show = tmp_path / "mpirun"
    show.write_text(f"#!/bin/sh\nexec {MPIRUN} -n 2 {sys.executable} {tmp_path}/show.py\n")
    show.chmod(0o755)
    grid = [sys.executable, "-m", "fedlada_mpi.grid", tmp_path / "grid.toml", "--runs", tmp_path, "--index", "0"]
    env = {**mpi_env, **passed_on, "FEDLADA_DATA": str(tmp_path), "OMP_NUM_THREADS": "3"}
    done = nodes.run([*grid, "--launcher", show], [1, 1], env)
    assert sorted(done.stdout.splitlines()[1:]) == [f"n1 {tmp_path} 3", f"n2 {tmp_path} 3"], done.stderr
    assert done.returncode == 1, "nothing was trained, whatever the launcher says"


@pytest.mark.parametrize(
    "slots",
    [(2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow), pytest.param((3, 1), marks=pytest.mark.slow)],
    ids=str,
)
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


@pytest.mark.slow
def test_gpus_by_local_rank(launch):
    """Of two on every node; a third rank shares the first."""
    done = launch((3, 1), "-c", GPUS)
    chosen = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("GPU"))
    assert chosen == [["n1", "0"], ["n1", "0"], ["n1", "1"], ["n2", "0"]], done.stdout + done.stderr


@pytest.mark.slow
def test_rounded_over_a_slow_cable(nodes, data, launch, tmp_path):
    """--wire bf16: after every round all ranks hold the same bits, and the model is near that of one process."""
    settings = {**SETTINGS, "precision": "fp32", "algorithm": "fedlada", "wire": "bf16"}
    near = run_here(data, tmp_path / "near", **settings)
    nodes.slow("n2", "20mbit")
    try:
        done = launch((2, 2), "-c", SAME_X, *arguments(data, tmp_path / "far", settings))
    finally:
        nodes.slow("n2", "")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("x ")]
    assert len(found) == 12
    assert len(set(map(tuple, found))) == 3
    far = Run(tmp_path / "far", data)
    assert far.participants == near.participants
    assert 1e-5 < disagreement(far.x, near.x, data.start) < 0.02
    # x and, up, two sums are rounded; v, down, is not: of four ranks on two nodes, one vector of three.
    vector = 4 * data.network.layout.size
    assert far.metrics[0]["bytes_mpi"] == 4 * 3 * vector - 3 * vector // 2


@pytest.mark.slow
def test_the_others_go_on_without_the_node_of_the_server(nodes, data, mpi_env, passed_on, tmp_path):
    """They wait until its lock is known to be left behind, for longer than the other nodes may be silent."""
    lost = json.dumps(dict.fromkeys((0, 1), ("order", 6, 0.0)))
    out = tmp_path / "run"
    mpirun = [tolerant_mpirun(), "--with-ft", "ulfm", "-x", "PYTHONPATH", "-n", "4"]
    command = [*mpirun, nodes.python(2), DEPARTING, lost, *arguments(data, out, SETTINGS)]
    done = nodes.run(command, [2, 2], {**mpi_env, **passed_on})
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(out, data)
    assert [(left["rank"], left["host"]) for left in run.summary["left"]] == [(0, "n1"), (1, "n1")]
    assert len(run.metrics) == SETTINGS["rounds"]


@pytest.mark.slow
def test_threads_of_the_root_are_those_of_all(nodes, mpi_env, passed_on):
    """mpirun passes its environment on to ranks next to it, but not to other nodes."""
    ask = (
        "import torch; from fedlada_mpi.mpi import World; from fedlada_mpi.settings import Config\n"
        "from fedlada_mpi.rounds.device import asked_threads, choose_device\n"
        "world = World(); choose_device(world, Config(device='cpu'), asked_threads(world))\n"
        "print(torch.get_num_threads()); world.close()"
    )
    on_n1 = '[ "$(hostname)" != n1 ] || export OMP_NUM_THREADS=1; exec "$0" "$@"'
    command = [MPIRUN, "-x", "PYTHONPATH", "-n", "2", "sh", "-c", on_n1, nodes.python(2), "-c", ask]
    done = nodes.run(command, [1, 1], {**mpi_env, **passed_on})
    assert done.stdout.split() == ["1", "1"], done.stderr


@pytest.mark.slow
def test_a_node_that_does_not_see_the_files_is_named(nodes, start, launch, data, tmp_path):
    """By the doctor, and by a run."""
    runs, shards = tmp_path / "runs", tmp_path / "data" / "mine"
    shutil.copytree(data.shards, shards)
    runs.mkdir()
    for folder in (runs, shards):
        nodes.hide("n2", folder)
    # At once: the doctor waits for seconds, as a node may learn of files late.
    doctor = ("-m", "fedlada_mpi.doctor", "--out", runs / "one")
    examined = start((1, 1), *doctor, FEDLADA_DATA=str(tmp_path / "data"))
    run = arguments(data, runs / "one", {**SETTINGS, "dataset": shards})
    done = launch((1, 1), "-m", "fedlada_mpi.run", *run)
    assert done.returncode == 2
    assert done.stderr.count(f"error: no manifest.json in {shards}") == 1
    assert "(rank 1 on n2)" in done.stderr
    done = examined.finish(250)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"rank 1 on n2: {runs} is not the folder that rank 0 sees" in done.stdout
    assert f"rank 1 on n2: no manifest.json in {shards}" in done.stdout
    assert not [*runs.iterdir()]
    nodes.on("n2", "umount", shards)
    done = launch((1, 1), "-m", "fedlada_mpi.run", *run)
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(runs / "one") in done.stderr
    assert done.stderr.count("(rank 1 on n2)") == 1


def ranks_left(nodes):
    """By the commands that asked for them, and by that of the servers that forked them."""
    lines = [line for name in nodes.names for line in nodes.processes(name)]
    return [line for line in lines if "departing" in line or FORKED in line]


@pytest.mark.slow
def test_a_cut_link_ends_the_run(nodes, start, data, alone, tmp_path):
    """The ranks end; mpirun once the kernel gives up on the node, by default after 15 minutes."""
    said = {
        8: "has waited 8 s for other ranks: one of them",
        600: "waits for other ranks, and n2 has given no sign of life",
    }
    nodes.on("head", "sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2")
    settings = {patience: {**SETTINGS, "rounds": 100_000, "patience": patience} for patience in said}
    outs = {patience: tmp_path / str(patience) for patience in said}

    def begun(patience, *more):
        """A run that has come to its third round; a busy machine may use up a short patience before."""
        run = start((2, 2), DEPARTING, "{}", *arguments(data, outs[patience], settings[patience]), *more)
        third = outs[patience] / "checkpoint" / "round_000003"
        wait_until(lambda: third.exists() or run.process.poll() is not None, LIMIT, run.err.read_text)
        if third.exists():
            return run
        assert run.process.returncode == 4, run.err.read_text()
        return begun(patience, "--overwrite")

    started = {patience: begun(patience) for patience in said}
    assert len(ranks_left(nodes)) >= 8, "a rank would not be seen"
    nodes.cut("n2")
    try:
        for patience, words in said.items():
            done = started[patience].finish(LIMIT)
            assert done.returncode == 4, done.stdout + done.stderr
            assert f" on n1 {words}" in done.stderr
        wait_until(lambda: not ranks_left(nodes), LIMIT, lambda: ranks_left(nodes))
    finally:
        nodes.join("n2")
    for patience, out in outs.items():
        last = max(int(path.name[6:]) for path in (out / "checkpoint").glob("round_*") if path.name[6:].isdecimal())
        resumed = run_here(data, out, **{**settings[patience], "rounds": last + 1, "resume": True})
        assert resumed.participants[:3] == alone.participants
        assert len(resumed.metrics) == last + 1
