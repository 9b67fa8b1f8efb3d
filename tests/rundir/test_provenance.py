"""Where the rounds of a run were computed, also after kills and on other numbers of ranks."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime

import h5py
import pytest
from limits import LIMIT
from ranks import SIZE, barrier, find_mpirun, is_root, python
from repository import ROOT
from training_runs import arguments, make_data, run_here

from fedlada_mpi import __version__
from fedlada_mpi.rundir import provenance

SHORT = dict(algorithm="fedavg", local_steps=1, checkpoint_every=2)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "provenance", [4, 6, 5], silos=2)


def seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").timestamp()


@pytest.mark.ranks
def test_segments_of_a_run_that_goes_on(data, out):
    run_here(data, out, **SHORT, rounds=3)
    run = run_here(data, out, **SHORT, rounds=5, resume=True)
    first, second = run.summary["segments"]
    assert [(s["from"], s["to"]) for s in (first, second)] == [(1, 3), (4, 5)]
    times = [seconds(s[name]) for s in (first, second) for name in ("start", "end")]
    assert times == sorted(times)
    assert (run.summary["start"], seconds(run.summary["end"]) >= times[-1]) == (first["start"], True)
    for segment in (first, second, run.summary["environment"]):
        assert (segment["fedlada_mpi"], segment["ranks"]) == (__version__, SIZE)
        ((host, node),) = segment["nodes"].items()
        assert (host, node["ranks"], sum(node["devices"].values())) == (platform.node(), SIZE, SIZE)
        assert node["cpu"] == provenance.cpu_model()
    # Nothing left to do but the results, which a kill prevented: no segment of its own.
    barrier()
    if is_root():
        (out / "summary.json").unlink()
    barrier()
    again = run_here(data, out, **SHORT, rounds=5, resume=True)
    assert [(s["from"], s["to"]) for s in again.summary["segments"]] == [(1, 3), (4, 5)]


@pytest.mark.slow
def test_rounds_that_were_lost_are_in_no_segment(data, out):
    """Killed in round 4, with a checkpoint of round 2; then on two ranks."""
    kill = (
        "import os, signal, sys, fedlada_mpi.rounds.server as s\n"
        "inner = s.Server.round\n"
        "def round(self, t):\n"
        "    if t == 3:\n"
        "        self.silo.checkpoints.settle()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return inner(self, t)\n"
        "s.Server.round = round\n"
        "from fedlada_mpi.run import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = arguments(data, out, {**SHORT, "rounds": 6})
    done = subprocess.run([python(), "-c", kill, *words], cwd=ROOT, capture_output=True, timeout=LIMIT)
    assert done.returncode == -9
    command = [find_mpirun() or pytest.skip("no mpirun"), "-n", "2", python(), "-m", "fedlada_mpi.run", *words]
    subprocess.run([*command, "--resume"], cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
    segments = json.loads((out / "summary.json").read_text())["segments"]
    assert [(s["from"], s["to"], s["ranks"]) for s in segments] == [(1, 2, 1), (3, 6, 2)]
    assert [sum(node["ranks"] for node in s["nodes"].values()) for s in segments] == [1, 2]


def test_a_checkpoint_without_segments_resumes(data, out):
    run_here(data, out, **SHORT, rounds=2)
    (path,) = (out / "checkpoint").glob("*/server.h5")
    with h5py.File(path, "r+") as file:
        del file["run"]
    path.with_name("files.json").write_text('["server.h5"]')
    run = run_here(data, out, **SHORT, rounds=4, resume=True)
    assert [(s["from"], s["to"]) for s in run.summary["segments"]] == [(3, 4)]


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    unknown = {"commit": None, "modified": None}
    assert provenance.commit() == unknown
    git("init", "-q")
    assert provenance.commit() == unknown, "before the first commit"
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    git("tag", "v1")
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    (tmp_path / "notes").write_text("untracked")
    head = {"commit": (tmp_path / ".git" / "refs" / "heads").joinpath(*_branch(tmp_path)).read_text().strip()}
    assert provenance.commit() == {**head, "modified": False}
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit() == {**head, "modified": True}
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == unknown


def _branch(root) -> list[str]:
    return (root / ".git" / "HEAD").read_text().strip().removeprefix("ref: refs/heads/").split("/")


def test_ranks_that_share_a_gpu():
    ranks = [{"host": "a", "cpu": "x", "device": "H200", "gpu": gpu} for gpu in ("GPU-2", "GPU-1", "GPU-2")]
    ranks.append({"host": "b", "cpu": "x", "device": "x CPU", "gpu": ""})
    assert provenance.nodes(ranks) == {
        "a": {"ranks": 3, "cpu": "x", "devices": {"H200": 3}, "gpus": ["GPU-1", "GPU-2"]},
        "b": {"ranks": 1, "cpu": "x", "devices": {"x CPU": 1}},
    }
