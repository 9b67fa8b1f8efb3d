"""How far a grid is: state, rounds, accuracy, speed and expected end, of made-up run directories."""

import json
import os
import pty
import re
import subprocess
import time

import pytest
from hostile import VALUES
from ranks import python
from repository import ROOT

from fedlada_mpi import grid
from fedlada_mpi.experiments import live, load, progress
from fedlada_mpi.experiments.progress import FAILED, FINISHED, NOT_STARTED, RUNNING, STOPPED, RunProgress
from fedlada_mpi.rundir import lock

NOON = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def four(tmp_path):
    """A grid of four runs of 10 rounds, and their directories."""
    (tmp_path / "four.toml").write_text(
        'title = "Four"\n[base]\nalgorithm = "fedavg"\nrounds = 10\nseed = [0, 1, 2, 3]\n'
    )
    directories = [tmp_path / f"runs/digits_fedavg_seed={seed}" for seed in range(4)]
    for directory in directories:
        directory.mkdir(parents=True)
    return [str(tmp_path / "four.toml"), "--runs", str(tmp_path / "runs")], directories


def write_metrics(directory, seconds, accuracies):
    lines = [
        json.dumps({"round": t, "test_acc": accuracies.get(t), "seconds": {"total": s}})
        for t, s in enumerate(seconds, 1)
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_status_by_validation(four, capsys, monkeypatch):
    """The best round is that of the validation images: the first, although the second is better on the test images."""
    arguments, directories = four
    chosen = {"round": 5, "val_acc": 0.8, "val_loss": 0.1, "test_acc": 0.85}
    write_summary(directories[0], best_validation=chosen)
    values = [(0.7, 0.5), (0.6, 0.75), (None, None)]
    lines = [
        json.dumps({"round": t, "val_acc": val, "test_acc": test, "seconds": {"total": 1}})
        for t, (val, test) in enumerate(values, 1)
    ]
    (directories[1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(time, "time", lambda: NOON)
    assert grid.main([*arguments, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "   run                   state        rounds     val    test    best  s/round  end",
        "0  digits_fedavg_seed=0  finished      10/10  80.00%  90.00%  85.00%      2.5",
        "1  digits_fedavg_seed=1  stopped        3/10  70.00%  75.00%  50.00%        1",
    ]


def write_summary(directory, **changes):
    summary = {
        "status": "finished",
        "rounds": 10,
        "seconds": 25.0,
        "final": {"test_acc": 0.9},
        "best": {"test_acc": 0.95},
    }
    (directory / "summary.json").write_text(json.dumps({**summary, **changes}))


def test_status(four, capsys, monkeypatch):
    """2.5 s per round of the finished run; 30, 30 and 60 s of the running one: 7 rounds of 40 s end at 12:04:40.

    The stopped one has 8 rounds of 50 s to go. The last one's speed is the mean of 2.5, 40 and 50, so 308 s. One at a
    time: 280 + 400 + 308 s from noon on.
    """
    arguments, directories = four
    write_summary(directories[0])
    write_metrics(directories[1], [30, 30, 60], {1: 0.5, 2: 0.75, 3: 0.625})
    write_metrics(directories[2], [50, 50], {})
    monkeypatch.setattr(time, "time", lambda: NOON)
    with lock.hold(directories[1]):
        assert grid.main([*arguments, "--status"]) == 0
        holder = lock.owner(directories[1])
    assert capsys.readouterr().out.splitlines() == [
        "four: Four",
        "   run                   state        rounds    test    best  s/round  end",
        "0  digits_fedavg_seed=0  finished      10/10  90.00%  95.00%      2.5",
        f"1  digits_fedavg_seed=1  running        3/10  62.50%  75.00%       40  12:04  {holder}",
        "2  digits_fedavg_seed=2  stopped        2/10                       50",
        "3  digits_fedavg_seed=3  not started    0/10",
        "1 of 4 runs finished; 1 running; expected end 12:16, in 16 min",
    ]


def test_nothing_runs_and_nothing_is_left(four, capsys):
    arguments, directories = four
    assert grid.main([*arguments, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 4 runs finished"  # no speed is known
    for directory in directories[:3]:
        write_summary(directory)
    assert grid.main([*arguments, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 4 runs finished; about 25 s to go, one run at a time"
    write_summary(directories[3])
    assert grid.main([*arguments, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 runs finished"


def test_the_speed_is_that_of_the_last_rounds(four):
    arguments, directories = four
    write_metrics(directories[0], [100.0] * 10 + [2.0] * 50, {})
    run = grid.load(*[arguments[0], arguments[2]]).runs[0]
    assert progress.measure(run).pace == 2.0


def runs(*states, rounds=10, done=0, pace=None):
    return [RunProgress(f"run{i}", state, rounds, done, pace=pace) for i, state in enumerate(states)]


def test_the_last_round_of_records_with_many_participants(four):
    """Of 100,000 each: a record is longer than what is read from the end of the file at first."""
    arguments, directories = four
    records = [{"round": t, "participants": list(range(100_000))} for t in (1, 2)]
    (directories[1] / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = load(arguments[0], arguments[2]).runs
    assert [run.rounds_done() for run in runs] == [0, 2, 0, 0]


def test_expected_end_of_several_at_once():
    """Two at work with 40 and 10 s to go, then three of 100 s, which begin at 10, 40 and 110 s: all end at 210."""
    at_work = [RunProgress("a", RUNNING, 10, 6, pace=10.0), RunProgress("b", RUNNING, 10, 9, pace=10.0)]
    waiting = runs(NOT_STARTED, NOT_STARTED, STOPPED)
    assert progress.expected([*at_work, *waiting], 2) == 210
    assert progress.expected([*at_work, *waiting], 3) == 140  # at 0, 10 and 40
    assert progress.expected(at_work, 2) == 40
    assert progress.expected(runs(FINISHED, FAILED, pace=1.0), 1) == 0
    assert progress.expected(runs(RUNNING, NOT_STARTED), 2) is None


def test_words_for_times():
    durations = (4.4, 59, 60, 3540, 3600, 5400, 86_399, 86_400, 100_000)
    assert [progress.duration(s) for s in durations] == [
        *("4 s", "59 s", "1 min", "59 min", "1 h 0 min", "1 h 30 min"),
        *("1 d 0 h", "1 d 0 h", "1 d 4 h"),
    ]
    assert progress.clock(NOON + 3600, NOON) == "13:00"
    assert progress.clock(NOON + 13 * 3600, NOON) == "02 Mar 01:00"


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_that_are_no_numbers(value, four, capsys):
    arguments, directories = four
    for index, name in enumerate(("seconds", "final", "best")):
        write_summary(directories[index], **{name: value})
    (directories[3] / "metrics.jsonl").write_text(
        json.dumps({"round": 1})
        + "\n"
        + json.dumps({"round": 2, "seconds": {"total": value}, "test_acc": value})
        + "\n"
    )
    assert grid.main([*arguments, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 of 4 runs finished")


def test_a_table_higher_than_the_terminal():
    states = [FINISHED] * 5 + [FAILED] + [FINISHED] * 20 + [RUNNING] * 2 + [NOT_STARTED] * 20
    assert live.selected(runs(*states), 6) == [5, 25, 26, 27, 28, 29]
    assert live.selected(runs(*states[:3]), 6) == [0, 1, 2]


def test_a_run_that_has_just_finished(four, capsys):
    arguments, directories = four
    with lock.hold(directories[3]):
        table = live.LiveTable(grid.load(arguments[0], arguments[2]).runs, 1)
    write_summary(directories[3])
    table.show([], [])
    assert re.search(r"^3 .* finished +10/10", capsys.readouterr().out, re.MULTILINE)


# Plays a run; the second seed fails.
PRETEND = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print("output of the run", flush=True)
if "seed=1" in out.name:
    sys.exit(3)
(out / "metrics.jsonl").write_text(json.dumps({"round": 5, "test_acc": 0.5, "seconds": {"total": 1.0}}) + "\\n")
time.sleep(60 if "seed=3" in out.name else 1.5)
summary = {"status": "finished", "rounds": 10, "seconds": 25.0, "final": {"test_acc": 0.9}, "best": {"test_acc": 0.95}}
(out / "summary.json").write_text(json.dumps(summary))
"""


def on_a_terminal(arguments, until=None):
    """The exit status of a grid on a terminal, and all drawings of its table; SIGTERM when a drawing has ``until``."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [python(), "-m", "fedlada_mpi.grid", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = ""
    while chunk := read(ours):
        shown += chunk.decode().replace("\r\n", "\n")
        if until and re.search(until, shown):
            process.terminate()
            until = None
    os.close(ours)
    return process.wait(30), re.split(r"\x1b\[\d+F\x1b\[J", shown)


@pytest.mark.parametrize("parallel", [[], ["--parallel", "4"]])
def test_a_table_on_a_terminal(four, tmp_path, parallel):
    arguments, directories = four
    (tmp_path / "pretend.py").write_text(PRETEND)
    write_summary(directories[2])
    write_summary(directories[3])
    launcher = f"{python()} {tmp_path / 'pretend.py'}"
    status, drawings = on_a_terminal([*arguments, "--all", *parallel, "--launcher", launcher])
    assert status == 1
    assert any(re.search(r"^0 .* running +5/10 +50.00% +50.00% +1 +\d\d:\d\d$", d, re.MULTILINE) for d in drawings)
    last, text = drawings[-1], "".join(drawings)
    assert re.search(r"^0 .* finished +10/10 +90.00% +95.00% +2.5$", last, re.MULTILINE)
    assert re.search(r"^1 .* failed +0/10$", last, re.MULTILINE)
    assert "3 of 4 runs finished; 1 failed\n" in last
    assert last.endswith("error: 1 of 4 runs failed: 1\n")
    assert text.count("failed with status 3 after 0 of 10 rounds: see ") == 1
    assert "output of the run" not in text
    assert "output of the run" in (directories[0] / "log.txt").read_text()


def test_a_stopped_grid_expects_no_end(four, tmp_path):
    """The last run has 5 rounds of 1 s to go when it is stopped."""
    arguments, directories = four
    (tmp_path / "pretend.py").write_text(PRETEND)
    for directory in directories[:3]:
        write_summary(directory)
    launcher = f"{python()} {tmp_path / 'pretend.py'}"
    status, drawings = on_a_terminal([*arguments, "--all", "--launcher", launcher], until=r"3 .* running +5/10")
    assert status == 75
    assert any("1 running; expected end " in drawing for drawing in drawings)
    assert re.search(r"^3 .* stopped +5/10", drawings[-1], re.MULTILINE)
    assert drawings[-1].endswith(
        "3 of 4 runs finished; about 5 s to go, one run at a time\nstopped; the same command goes on\n"
    )


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # as Linux has it where all writers are gone
        return b""
