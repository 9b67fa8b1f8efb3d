"""Whose directory it is: one run at a time, and nothing is removed that a run did not write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile import damage_file
from limits import LIMIT
from repository import ROOT
from training_runs import arguments, make_data, run_here

from fedlada_mpi.run import main
from fedlada_mpi.rundir import claim, lock

SHORT = dict(algorithm="fedavg", rounds=2, local_steps=1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("claim"), [4, 6], silos=1)


@pytest.fixture
def refused(data, tmp_path, capsys):
    """A start in ``tmp_path`` that must end with 2 and leave every file as it is; its message."""

    def start(*flags: str, **settings) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main([*arguments(data, tmp_path, {**SHORT, **settings}), *flags]) == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err

    return start


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--overwrite",)])
@pytest.mark.parametrize(
    "name", ["model.pt", "best.pt", "clients.h5", "config.json", "summary.json", "checkpoint/mine", "tensorboard/mine"]
)
def test_files_of_others_are_never_removed(name, flags, tmp_path, refused):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert f"holds {name.split('/')[0]}, but no run" in refused(*flags)


def test_a_finished_run_without_its_checkpoints_is_not_started_again(data, tmp_path, refused):
    run_here(data, tmp_path, **SHORT)
    for path in sorted((tmp_path / "checkpoint").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    for settings in ({}, {"rounds": 4}, {"lr": 0.5}):
        assert "holds results but no checkpoint" in refused("--resume", **settings)
    assert "already holds a run" in refused()
    assert main([*arguments(data, tmp_path, SHORT), "--overwrite"]) == 0


def test_a_run_killed_before_its_first_checkpoint_starts_again(data, tmp_path, refused):
    run_here(data, tmp_path, **SHORT)
    settings = (tmp_path / "config.json").read_text()
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "config.json").write_text(settings)
    assert "already holds a run" in refused()
    assert "was started with other settings (lr: " in refused("--resume", lr=0.5)
    assert main([*arguments(data, tmp_path, SHORT), "--resume"]) == 0


def test_a_directory_that_another_process_holds(data, tmp_path, refused):
    with lock.hold(tmp_path):
        for flags in ((), ("--resume",), ("--overwrite",)):
            assert f"{tmp_path} is in use by process " in refused(*flags)
    assert main(arguments(data, tmp_path, SHORT)) == 0
    assert not (tmp_path / lock.NAME).exists()


@pytest.mark.slow
def test_two_runs_at_once(data, tmp_path):
    """The second ends with 2 while the first goes on, to the result that it has alone."""
    settings = dict(SHORT, rounds=200, checkpoint_every=20)
    alone = run_here(data, tmp_path / "alone", **settings)
    command = [sys.executable, "-m", "fedlada_mpi.run", *arguments(data, tmp_path / "shared", settings), "--resume"]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not (tmp_path / "shared" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # so that it is still there, however slow the second one is
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    first.send_signal(signal.SIGCONT)
    assert (second.returncode, f"is in use by process {first.pid} on " in second.stderr) == (2, True), second.stderr
    assert first.wait(timeout=LIMIT) == 0
    lines = (tmp_path / "shared" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["local_loss"] for line in lines] == [record["local_loss"] for record in alone.metrics]


@pytest.mark.parametrize("flags", [("--resume",), ("--overwrite",)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", "a FIFO"), ("model.pt", "a directory"), ("config.json", "a FIFO"), ("summary.json", "a device")],
)
def test_something_else_in_the_place_of_a_file(name, kind, flags, data, tmp_path, refused):
    run_here(data, tmp_path, **SHORT)
    damage_file(tmp_path / name, kind)
    assert f"error: --out: {tmp_path / name} is not a regular file, as a run needs it" in refused(*flags)


def test_garbage_in_the_metrics_of_a_run_that_goes_on(data, tmp_path, capsys):
    run_here(data, tmp_path, **SHORT)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\x00garbage\n{"round": 3, "lr')
    assert main([*arguments(data, tmp_path, {**SHORT, "rounds": 3}), "--resume"]) == 0
    damaged = tmp_path / "metrics.damaged.jsonl"
    assert f"written again from the checkpoint, and kept as {damaged}\n" in capsys.readouterr().out
    assert [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert main([*arguments(data, tmp_path, SHORT), "--overwrite"]) == 0
    assert not damaged.exists()


def test_a_batch_plan_larger_than_the_memory_is_refused(data, tmp_path, refused):
    words = refused("--overwrite", local_steps=2**31 - 1)
    assert "local steps of 6 examples take" in words
    assert "lower --local-steps" in words


def link_elsewhere(path, tmp_path_factory):
    """``path`` as a link to a folder with something of the user's."""
    target = tmp_path_factory.mktemp("scratch")
    (target / "mine").write_text("mine")
    path.symlink_to(target)
    return target


def test_checkpoints_behind_a_link(data, tmp_path, tmp_path_factory):
    """Written, resumed and discarded there; the link, its target and other files in it stay."""
    target = tmp_path_factory.mktemp("scratch")
    (tmp_path / "checkpoint").symlink_to(target)
    run_here(data, tmp_path, **SHORT)
    assert [path.name for path in target.iterdir()] == ["round_000002"]
    run_here(data, tmp_path, resume=True, **dict(SHORT, rounds=4))
    assert sorted(path.name for path in target.iterdir()) == ["round_000002", "round_000004"]
    (target / "mine").write_text("mine")
    assert main([*arguments(data, tmp_path, dict(SHORT, rounds=3)), "--overwrite"]) == 0
    assert (tmp_path / "checkpoint").readlink() == target
    assert sorted(path.name for path in target.iterdir()) == ["mine", "round_000003"]


def test_a_checkpoint_that_is_a_link(data, tmp_path, tmp_path_factory):
    """One that was moved to another disk is resumed from, and only its link is removed when it is the oldest."""
    run_here(data, tmp_path, **SHORT)
    moved = tmp_path_factory.mktemp("scratch") / "moved"
    link = tmp_path / "checkpoint" / "round_000002"
    link.rename(moved)
    link.symlink_to(moved)
    run_here(data, tmp_path, resume=True, **dict(SHORT, rounds=4, checkpoint_every=1))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["round_000003", "round_000004"]
    assert (moved / "server.h5").is_file()


@pytest.mark.parametrize("name", ["checkpoint", "tensorboard"])
def test_a_link_to_nowhere_is_refused(name, tmp_path, refused):
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    for flags in ((), ("--resume",), ("--overwrite",)):
        message = refused(*flags)
        assert message.startswith(
            f"error: --out: {tmp_path / name} is a link to {tmp_path / 'nowhere'}, expected a folder"
        )


@pytest.mark.parametrize("name", ["model.pt", "metrics.jsonl", "config.json", "summary.json"])
def test_temporary_names_are_not_written_through(name, data, tmp_path, tmp_path_factory, capsys):
    target = link_elsewhere(tmp_path / "elsewhere", tmp_path_factory) / "mine"
    (tmp_path / f"{name}.tmp").symlink_to(target)
    assert main(arguments(data, tmp_path, SHORT)) == 2
    expected = f"error: cannot write {tmp_path / name}: File exists: remove {tmp_path / name}.tmp, then add --resume\n"
    assert capsys.readouterr().err == expected
    assert target.read_text() == "mine"
    (tmp_path / f"{name}.tmp").unlink()
    assert main([*arguments(data, tmp_path, SHORT), "--resume"]) == 0


def test_overwriting_leaves_what_runs_do_not_write(data, tmp_path):
    """Killed in between, the directory is still known as that of a run."""
    run_here(data, tmp_path, **SHORT)
    (tmp_path / "checkpoint" / "notes").write_text("mine")
    (tmp_path / "checkpoint" / "round_000001.tmp").mkdir()
    removed = []
    with pytest.MonkeyPatch.context() as patch:
        unlink = Path.unlink
        patch.setattr(Path, "unlink", lambda self, **options: (removed.append(self.name), unlink(self, **options)))
        claim.clear(tmp_path)
    assert removed[-2:] == ["metrics.jsonl", "config.json"]
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint", "notes"]
