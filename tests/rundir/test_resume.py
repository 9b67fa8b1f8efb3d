"""A run that was killed, stopped or extended ends as if nothing had happened.

``FEDLADA_KILLS=20 python -m pytest tests/rundir/test_resume.py -k killed`` repeats the random kill 20 times per case.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from limits import LIMIT
from method_cases import CASES, PAPER
from ranks import barrier, find_mpirun, is_root, python
from repository import ROOT
from tiers import on_ranks_with_all, slow
from training_runs import Run, arguments, disagreement, make_data, run_here, same

from fedlada_mpi.data.shards import read_manifest
from fedlada_mpi.run import main

KILLS = int(os.environ.get("FEDLADA_KILLS", "1"))
SIZES = [7, 12, 5, 9, 4, 8]
ROUNDS = 120
COMMON = dict(
    rounds=ROUNDS, participation=0.5, local_epochs=1, batch_size=4, augment="paper", crop_padding=1, precision="fp32",
    eval_every=10, seed=2,
)  # fmt: skip


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "resume", SIZES, silos=3)


@pytest.fixture
def run_dir(shared_tmp, request):
    return shared_tmp / "resumed" / request.node.name


def start(data, out, *, ranks=1, resume=False, **settings) -> subprocess.Popen:
    line = [python(), "-m", "fedlada_mpi.run", *arguments(data, out, settings), *(["--resume"] if resume else [])]
    if ranks > 1:
        line = [find_mpirun() or pytest.skip("no mpirun"), "-n", str(ranks), *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )


def finish(process: subprocess.Popen, expected: int = 0) -> str:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
        pytest.fail(f"the run did not end in 250 s\n{out[-2000:]}\n{err[-6000:]}")
    assert process.returncode == expected, f"status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return err


def wait_for_round(process: subprocess.Popen, out: Path, number: int) -> None:
    """Until the run has logged ``number`` rounds, or has ended."""
    deadline = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.0005)


def victims(process: subprocess.Popen, ranks: int) -> list[int]:
    """The process itself, or one rank of the launcher: the launcher then ends the others."""
    if ranks == 1:
        return [process.pid]
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture(scope="session")
def whole(data, shared_tmp):
    """The uninterrupted run of a case, made once."""
    known = {}

    def find(algorithm: str, ranks: int = 1) -> Run:
        if (algorithm, ranks) not in known:
            out = shared_tmp / "whole" / f"{algorithm}-{ranks}"
            if ranks == 1:
                run_here(data, out, algorithm=algorithm, **COMMON)
            else:
                finish(start(data, out, ranks=ranks, algorithm=algorithm, **COMMON))
            known[algorithm, ranks] = Run(out, data)
        return known[algorithm, ranks]

    return find


@pytest.mark.timeout(300 * KILLS + 900)
@pytest.mark.parametrize(("algorithm", "ranks"), [slow("fedavg", 1), ("scaffold", 1), slow("scaffold", 2)])
def test_killed_at_a_random_moment(algorithm, ranks, data, run_dir, whole):
    expected = whole(algorithm, ranks)
    kills = 0
    for repetition in range(KILLS if ranks == 1 else max(1, KILLS // 4)):
        seed = random.randrange(10**9)
        moment = random.Random(seed)
        out = run_dir / str(seed)
        # Every round: the kill often hits a checkpoint that is being written.
        settings = dict(COMMON, algorithm=algorithm, checkpoint_every=(1, 7)[repetition % 2])
        process = start(data, out, ranks=ranks, **settings)
        target = moment.randrange(0, ROUNDS - 10)
        wait_for_round(process, out, target)
        time.sleep(moment.uniform(0, 0.05))
        if process.poll() is None:
            for pid in victims(process, ranks):
                os.kill(pid, signal.SIGKILL)
            kills += 1
        process.communicate(timeout=LIMIT)
        logged = (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0
        finish(start(data, out, ranks=ranks, resume=True, **settings))
        try:
            same(Run(out, data), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: killed after {logged} rounds (aimed at {target}): {error}") from error
        print(f"kill {kills}: seed {seed}, {algorithm}, {ranks} ranks, after {logged} rounds: identical", flush=True)
    assert kills > 0
    print(f"{algorithm} on {ranks} ranks: {kills} kills, every resumed run identical")


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGUSR1)])
def test_stopped_by_a_signal(number, data, run_dir, whole):
    settings = dict(COMMON, algorithm="fedavg")
    process = start(data, run_dir, **settings)
    wait_for_round(process, run_dir, 5)
    process.send_signal(number)
    finish(process, expected=75)
    assert 5 <= len(Run(run_dir, data).metrics) < ROUNDS
    run_here(data, run_dir, resume=True, **settings)
    same(Run(run_dir, data), whole("fedavg"))


def test_other_settings_are_refused_by_name(data, run_dir, capsys):
    short = dict(COMMON, algorithm="fedcm", rounds=3)
    run_here(data, run_dir, **short)
    capsys.readouterr()
    assert main(arguments(data, run_dir, dict(short, rounds=6, lr=0.07, alpha=0.4, resume=True))) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    for word in ("lr: 0.1 in the checkpoint, 0.07 now", "alpha: 0.1 in the checkpoint, 0.4 now"):
        assert word in message
    assert "weight_decay" not in message
    assert len(Run(run_dir, data).metrics) == 3


@pytest.mark.parametrize(
    ("algorithm", "before", "after"), [("scaffold", 1, 3), slow("scaffold", 3, 1), ("feddr", 3, 1), slow("fedpd", 1, 3)]
)
def test_resumed_on_another_number_of_ranks(algorithm, before, after, data, run_dir):
    case = CASES[algorithm]
    settings = {**COMMON, **case.settings, **case.requires, "algorithm": algorithm, "precision": "fp64", "rounds": 8}
    whole = run_here(data, run_dir / "whole", **settings)
    for ranks, part in ((before, dict(settings, rounds=4)), (after, dict(settings, resume=True))):
        if ranks == 1:
            run_here(data, run_dir / "parts", **part)
        else:
            finish(start(data, run_dir / "parts", ranks=ranks, **part))
    resumed = Run(run_dir / "parts", data)
    assert [record["round"] for record in resumed.metrics] == list(range(1, 9))
    assert resumed.participants == whole.participants
    assert disagreement(resumed.x, whole.x, data.start) < 1e-10


@pytest.mark.parametrize(
    ("algorithm", "change"),
    [on_ranks_with_all(algorithm, {}) if algorithm in PAPER else slow(algorithm, {}) for algorithm in CASES]
    + [slow("fedlamb", dict(m_start="client", v_start="client")), on_ranks_with_all("mimelite", dict(base="adam"))],
    ids=str,
)
def test_extended_run_is_the_longer_run_to_the_bit(algorithm, change, data, run_dir):
    """Stopped after round 3, which is one in which nobody communicates in FedPD."""
    case = CASES[algorithm]
    settings = {**COMMON, **case.settings, **case.requires, **change, "algorithm": algorithm}
    whole = run_here(data, run_dir / "whole", **{**settings, "rounds": 6})
    run_here(data, run_dir / "parts", **{**settings, "rounds": 3})
    run_here(data, run_dir / "parts", **{**settings, "rounds": 6, "resume": True})
    resumed = Run(run_dir / "parts", data)
    assert resumed.participants == whole.participants
    assert [record["round"] for record in resumed.metrics] == list(range(1, 7))
    assert all(torch.equal(resumed.model[name], whole.model[name]) for name in data.names)
    assert set(resumed.server) == set(whole.server)
    assert all(np.array_equal(resumed.server[name], whole.server[name]) for name in whole.server)
    assert resumed.clients.keys() == whole.clients.keys()
    for client, vectors in whole.clients.items():
        assert all(np.array_equal(resumed.clients[client][name], vectors[name]) for name in vectors)


@pytest.mark.ranks
def test_resuming_a_finished_run_changes_nothing(data, run_dir):
    settings = dict(COMMON, algorithm="fedavg", rounds=2)
    first = run_here(data, run_dir, **settings)
    before = first.model, first.metrics
    again = run_here(data, run_dir, resume=True, **settings)
    assert again.metrics == before[1]
    assert all(torch.equal(again.model[name], before[0][name]) for name in data.names)


@pytest.mark.ranks
def test_killed_between_the_last_checkpoint_and_the_results(data, run_dir):
    """The directory then has the checkpoint of an extended run with the model and summary of the shorter one."""
    settings = dict(COMMON, algorithm="fedavg")
    longer = dict(settings, rounds=4, resume=True)
    run_here(data, run_dir / "killed", **{**settings, "rounds": 2})
    earlier = {name: (run_dir / "killed" / name).read_bytes() for name in ("model.pt", "summary.json")}
    whole = run_here(data, run_dir / "killed", **longer).model
    for missing in ({}, {"summary.json"}, {"model.pt", "summary.json"}):
        barrier()  # all ranks have read the files
        if is_root():
            for name, content in earlier.items():
                path = run_dir / "killed" / name
                path.unlink(missing_ok=True) if name in missing else path.write_bytes(content)
        barrier()
        resumed = run_here(data, run_dir / "killed", **longer)
        assert all(torch.equal(resumed.model[name], whole[name]) for name in data.names)
        assert json.loads((run_dir / "killed" / "summary.json").read_text())["rounds"] == 4
        assert [record["round"] for record in resumed.metrics] == [1, 2, 3, 4]


class TestData:
    """The data that a run started with, and nothing else, is what it goes on with."""

    SHORT = dict(COMMON, algorithm="fedavg", rounds=2)
    LONGER = dict(SHORT, rounds=4, resume=True)

    @pytest.fixture
    def whole(self, data, run_dir):
        run_here(data, run_dir / "parts", **self.SHORT)
        return run_here(data, run_dir / "whole", **{**self.SHORT, "rounds": 4}).model

    def ends_as(self, whole, data, out, **changes):
        model = run_here(data, out, **{**self.LONGER, **changes}).model
        return all(torch.equal(model[name], whole[name]) for name in data.names)

    def test_other_data_is_refused(self, data, whole, run_dir, capsys):
        other = make_data(run_dir / "other", SIZES, silos=3, seed=6)
        capsys.readouterr()
        settings = dict(self.LONGER, init=data.init)
        assert main(arguments(other, run_dir / "parts", settings)) == 2
        message = capsys.readouterr().err
        expected, actual = (read_manifest(where.shards).digest[:12] for where in (data, other))
        assert message == (
            f"error: --resume: {run_dir / 'parts'} was trained on other data: got {actual} in {other.shards}, "
            f"expected {expected}: give --dataset the directory of those shards, or use another --out\n"
        )
        assert self.ends_as(whole, data, run_dir / "parts")

    def test_moved_data_is_the_same(self, data, whole, run_dir):
        moved = shutil.copytree(data.shards, run_dir / "elsewhere")
        assert self.ends_as(whole, data, run_dir / "parts", dataset=moved)

    def test_in_other_silos_it_is_the_same(self, data, whole, run_dir):
        again = make_data(run_dir / "again", SIZES, silos=2)
        assert read_manifest(again.shards).files != read_manifest(data.shards).files
        assert self.ends_as(whole, data, run_dir / "parts", dataset=again.shards)

    def test_a_checkpoint_without_a_digest_resumes(self, data, whole, run_dir):
        (path,) = (run_dir / "parts" / "checkpoint").glob("*/server.h5")
        with h5py.File(path, "r+") as file:
            del file.attrs["data"]
        path.with_name("files.json").write_text('["server.h5"]')  # nor had these checkpoints checksums
        assert self.ends_as(whole, data, run_dir / "parts")
