"""Runs that are forked from a warm process: as in a new interpreter, whatever becomes of the warm one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import python

from fedlada_mpi.experiments.starting import StopSignals
from fedlada_mpi.experiments.warm import ForkedRun, WarmProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="runs are forked on Linux only")
RUN = [sys.executable, "-m", "fedlada_mpi.run"]


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "none"}


@pytest.fixture(scope="module")
def warm(environment):
    process = WarmProcess()
    yield process
    process.close()


def start(warm, environment, out, *arguments):
    out.mkdir(exist_ok=True)
    with open(out / "log.txt", "a") as log:
        return warm.start([*RUN, "--dataset", "digits", "--out", str(out), *arguments], environment, log)


def until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def records(out):
    """The metrics of a run, but for its times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("seconds")} for line in lines]


def test_a_forked_run_is_one_of_a_new_interpreter(warm, environment, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    asked = ("--rounds", "2", "--algorithm", "fedlada")
    process = start(warm, {**environment, "CUDA_VISIBLE_DEVICES": ""}, one, *asked)
    assert process.wait() == 0, (one / "log.txt").read_text()
    new = [python(), *RUN[1:], "--dataset", "digits", "--out", str(other), *asked]
    subprocess.run(new, env=environment, check=True, capture_output=True)
    assert records(one) == records(other)
    assert (one / "model.pt").read_bytes() == (other / "model.pt").read_bytes()
    settings = [json.loads((out / "config.json").read_text()) for out in (one, other)]
    assert {**settings[0], "out": ""} == {**settings[1], "out": ""}
    ran = [json.loads((out / "summary.json").read_text())["environment"] for out in (one, other)]
    assert ran[0]["command"] == [word.replace(str(other), str(one)) for word in ran[1]["command"]]
    assert [each["threads"] for each in ran] == [1, 1]


def test_a_run_goes_on_and_is_stopped_without_the_warm_process(environment, tmp_path):
    """The warm process is killed while a run is at work: others take a new interpreter, at once."""
    warm = WarmProcess()
    bad = start(warm, environment, tmp_path / "bad", "--lr", "x")
    assert bad.wait() == 2
    assert "error: " in (tmp_path / "bad" / "log.txt").read_text()
    process = start(warm, environment, tmp_path / "long", "--rounds", "100000")
    until(lambda: (tmp_path / "long" / "metrics.jsonl").exists())
    warm.process.kill()
    warm.process.wait()
    assert start(warm, environment, tmp_path / "next", "--rounds", "1") is None
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    process.send_signal(signal.SIGTERM)  # its number may be another's by now: nobody gets it
    warm.close()


def test_what_takes_a_new_interpreter(environment, monkeypatch):
    """Ranks, other programs, and variables that libraries read when they are loaded; nothing is started for that."""
    warm = WarmProcess()
    monkeypatch.setattr(warm, "_launch", lambda *_: setattr(warm, "environment", environment))
    monkeypatch.setattr(warm, "_ask", lambda *_: 1)
    assert warm.start([*RUN, "-n", "4"], environment) is None
    assert warm.start(["mpirun", *RUN], environment) is None
    assert isinstance(warm.start(RUN, {**environment, "CUDA_VISIBLE_DEVICES": "1"}), ForkedRun)
    assert warm.start(RUN, {**environment, "OMP_NUM_THREADS": "2"}) is None
    assert warm.start(RUN, {n: v for n, v in environment.items() if n != "OMP_NUM_THREADS"}) is None


def test_a_warm_process_that_cannot_import_is_given_up(environment, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    warm = WarmProcess()
    assert warm.start(RUN, {**environment, "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', '')}"}) is None
    assert not warm.usable


class Pretended:
    """A process that keeps the signals that it gets."""

    def __init__(self):
        self.got = []
        self.send_signal = self.got.append


def test_ctrl_c_while_a_run_is_being_forked():
    """It came to the process group, to which the run may not have belonged yet; an earlier one is not passed on."""
    signals, process = StopSignals(False, warm=True), Pretended()
    signals._handle(signal.SIGINT, None)

    def slow_start(*_):
        signals._handle(signal.SIGTERM, None)
        signals._handle(signal.SIGINT, None)
        return process

    signals.warm.start = slow_start
    assert signals.start(RUN) is process
    assert process.got == [signal.SIGTERM, signal.SIGINT]
