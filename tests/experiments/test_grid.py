"""The experiment grid: what the files expand to, and how a run is started, skipped, resumed and refused."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile import DAMAGES, OBSTACLES, damage_file
from ranks import python
from repository import ROOT

from data_prep import PrepareSettings, prepare
from fedlada_mpi import algorithms, grid, run, settings
from fedlada_mpi.data.datasets import resolve_dataset
from fedlada_mpi.experiments import experiments, load
from fedlada_mpi.experiments.starting import StopSignals, claimed
from fedlada_mpi.rundir import lock
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tuning.results import toml

# Stands in for a launcher: gets the whole command of the run and plays its part.
PRETEND = """
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
out = pathlib.Path(arguments[arguments.index("--out") + 1])
with open(out / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
behaviour = os.environ.get("PRETEND", "finish")
if behaviour == "fail":
    sys.exit(3)
if behaviour in ("wait", "too late"):
    signals = []
    status = int(os.environ.get("STATUS", 75))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(status) if behaviour == "wait" else signals.append(1))
    (out / "ready").touch()
    while not signals:
        time.sleep(0.02)
if behaviour == "together":
    (out / "ready").touch()
    deadline = time.monotonic() + 100
    while len([*out.parent.glob("*/ready")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    print("pipe", os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), "threads", os.environ.get("OMP_NUM_THREADS"))
if behaviour == "vanish":
    sys.exit(0)
(out / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 60}))
"""


@pytest.fixture
def small(tmp_path):
    """A grid of three runs and the arguments that start it with the pretended launcher."""
    (tmp_path / "small.toml").write_text('[base]\nalgorithm = "fedavg"\nseed = [0, 1, 2]\n')
    (tmp_path / "pretend.py").write_text(PRETEND)
    launcher = shlex.join([python(), str(tmp_path / "pretend.py")])
    return [str(tmp_path / "small.toml"), "--runs", str(tmp_path / "runs"), "--launcher", launcher]


def start(arguments, interpreter="", **environment):
    return subprocess.Popen(
        [interpreter or python(), "-m", "fedlada_mpi.grid", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write(path, text):
    path.write_text(text)
    return str(path)


def test_the_papers_experiments_have_the_papers_sizes():
    sizes = {name: len(load(name).runs) for name in experiments()}
    assert sizes == {
        "main": 3 * 7 * 5 + 2 * 5,  # and FedAdam(*) on CIFAR
        "optimizers": 6 * 5,
        "intervals": 4 * 3,
        "participation": 4 * 3,
        "alpha": 6 * 3,
        "fedadam_amended": (5 + 4 - 1 + 5) * 3,  # (a) and (b) meet at alpha 0.1, rate 0.1; and FedCM
        "smooth": 2 * 4 * 3,
        "scaffold_scale": 7 * 3,
        "consistency": (5 + 1) * 3,
        "communication": 7 * 5,
        "global_vs_local": 3 * 5,
        "batch": 2 * 2 * 3,
        "augmentation": 3 * 2 * 2 * 3,
        "readings": 3 * 2 + 7 * 2 + 5 + 5,
        "tuning": 7 * 3,
        "digits": 4 * 3,
        "family": len(algorithms.names()) * 3,
        "speedup": 4 * 4 * 3,
        "diagnostics": 6 * 3,
    }


def test_lists_are_crossed_and_blocks_are_added(tmp_path):
    path = write(
        tmp_path / "g.toml",
        '[base]\nseed = [0, 1]\n[[runs]]\nalgorithm = ["fedavg", "fedcm"]\n[[runs]]\nalgorithm = "fedprox"\nmu = 0.5\n',
    )
    names = [run.directory.name for run in load(path, "R").runs]
    assert names == [
        "digits_fedavg_seed=0",
        "digits_fedcm_seed=0",
        "digits_fedavg_seed=1",
        "digits_fedcm_seed=1",
        "digits_fedprox_mu=0.5_seed=0",
        "digits_fedprox_mu=0.5_seed=1",
    ]


def test_blocks_with_the_same_run_may_say_it_in_other_words(tmp_path):
    """10 is the preset's eval_every of the digits."""
    path = write(tmp_path / "g.toml", "[[runs]]\n[[runs]]\neval_every = 10\n")
    assert len(load(path, "R").runs) == 1


def test_a_list_setting_is_a_value_unless_it_holds_lists(tmp_path):
    one = write(tmp_path / "one.toml", "[base]\ntargets = [0.8, 0.9]\n")
    assert [run.given["targets"] for run in load(one).runs] == [[0.8, 0.9]]


def test_equal_runs_of_two_experiments_share_a_directory():
    main = {run.directory.name for run in load("main", "R").runs}
    assert {run.directory.name for run in load("communication", "R").runs} < main
    assert {run.directory.name for run in load("global_vs_local", "R").runs} < main


def test_a_value_equal_to_the_preset_does_not_change_the_name(tmp_path):
    spelled = write(
        tmp_path / "a.toml", '[base]\ndataset = "cifar10"\nalgorithm = "fedlada"\nalpha = 0.1\nlr = 0.001\n'
    )
    assert load(spelled, "R").runs[0].directory == Path("R/cifar10_fedlada_seed=0")


def test_an_axis_is_named_also_where_its_value_is_the_presets(tmp_path):
    """0.1 is the preset's rate of FedAvg on the digits."""
    path = write(tmp_path / "a.toml", '[base]\nalgorithm = "fedavg"\nlr = [0.05, 0.1]\nserver_lr = 0.5\nseed = [0]\n')
    assert [run.directory.name for run in load(path, "R").runs] == [
        "digits_fedavg_server_lr=0.5_lr=0.05_seed=0",
        "digits_fedavg_server_lr=0.5_lr=0.1_seed=0",
    ]


def test_a_run_of_several_blocks_names_the_axes_of_all(tmp_path):
    path = write(
        tmp_path / "a.toml", '[base]\nalgorithm = "fedprox"\n[[runs]]\nlr = [0.1, 0.2]\n[[runs]]\nmu = [0.1, 0.3]\n'
    )
    assert [run.directory.name for run in load(path, "R").runs] == [
        "digits_fedprox_lr=0.1_mu=0.1_seed=0",
        "digits_fedprox_lr=0.2_seed=0",
        "digits_fedprox_mu=0.3_seed=0",
    ]


@pytest.mark.parametrize("existing", ["digits_fedavg_seed=0", "digits_fedavg_server_lr=1.0_seed=0"])
def test_a_run_is_found_under_the_name_of_an_earlier_version_or_another_plan(tmp_path, capsys, existing):
    """And the other way round: a plan without the axis finds the run of one that has it."""
    path = write(tmp_path / "a.toml", '[base]\nalgorithm = "fedavg"\nlr = [0.05, 0.1]\n')
    others = ["digits_fedavg_lr=0.2_seed=0", "digits_fedavg_seed=00", "digits_fedavg_lr=0.1_odd_seed=0"]
    for name in (existing, *others):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / existing / "summary.json").write_text('{"status": "finished", "rounds": 60}')
    assert grid.main([path, "--runs", str(tmp_path / "runs"), "--todo"]) == 0
    assert capsys.readouterr().out == "0\n"
    names = [run.directory.name for run in load(path, str(tmp_path / "runs")).runs]
    assert names == ["digits_fedavg_lr=0.05_seed=0", existing]
    plain = write(tmp_path / "b.toml", '[base]\nalgorithm = "fedavg"\n')
    assert load(plain, str(tmp_path / "runs")).runs[0].directory.name == existing


def test_a_run_that_another_plan_has_begun_meanwhile(small, tmp_path, capsys):
    """Two grids at once in one directory: what one finishes under its own name, the other does not start."""
    path = write(tmp_path / "a.toml", '[base]\nalgorithm = "fedavg"\nlr = [0.1]\n')
    first, other = (load(each, small[2]).runs[0] for each in (path, small[0]))
    assert first.directory != other.directory
    other.directory.mkdir(parents=True)
    assert first.located().directory == other.directory
    first.directory.mkdir()
    assert first.located().directory == first.directory


def test_a_name_that_would_be_too_long_for_a_file_has_no_axes():
    (run,) = load("digits", "R", {"seed": 0, "algorithm": "fedavg"}).runs
    assert run.name.text(["lr", "clients"]) == "digits_fedavg_clients=50_lr=0.1_seed=0"
    assert run.name.text(run.name.values) == "digits_fedavg_seed=0"


def test_the_preset_is_an_axis(tmp_path):
    """A method without tuned values has one run for both; a given value that is the preset's is not named."""
    both = write(
        tmp_path / "a.toml",
        '[base]\ndataset = "cifar10"\nalgorithm = ["fedcm", "fedlada"]\npreset = ["paper", "tuned"]\n',
    )
    assert {run.directory.name: run.given["preset"] for run in load(both).runs} == {
        "cifar10_fedcm_preset=paper_seed=0": "paper",
        "cifar10_fedlada_preset=paper_seed=0": "paper",
        "cifar10_fedlada_preset=tuned_seed=0": "tuned",
    }
    spelled = write(tmp_path / "b.toml", '[base]\ndataset = "cifar10"\npreset = "tuned"\nweight_decay = 0.05\n')
    assert load(spelled, "R").runs[0].directory == Path("R/cifar10_fedlada_preset=tuned_seed=0")
    paper = write(tmp_path / "c.toml", '[base]\ndataset = "cifar10"\nweight_decay = 0.05\n')
    assert load(paper, "R").runs[0].directory == Path("R/cifar10_fedlada_weight_decay=0.05_seed=0")


def test_a_name_that_is_too_long_without_axes_is_cut_and_stays_apart(tmp_path):
    """Two plans, one of which has axes, give the same run the same name."""
    settings = {"dirichlet": 0.345678, "partition_seed": 123456789, "validation": 0.123456, "model": "mlp"}
    settings |= {"activation": "gelu", "server_lr": 0.912345, "participation": 0.345678, "local_epochs": 3}
    settings |= {"sampling": "bernoulli", "lr_decay": 0.9912345, "lr_warmup": 123456789, "weight_decay": 0.0123456}
    settings |= {"batch_size": 17, "clip": 3.14159265, "on_nonfinite": "skip", "precision": "fp64", "sums": "exact"}
    path = write(
        tmp_path / "a.toml", f"[base]\nalgorithm = 'fedavg'\n{toml(settings)}lr = [0.25, 0.5]\nseed = [0, 1]\n"
    )
    root = tmp_path / "runs"
    names = [run.directory.name for run in load(path, str(root)).runs]
    assert len({*names}) == 4
    assert all(len(name) == 255 and name.startswith("digits_fedavg_dirichlet=0.345678_") for name in names)
    assert [name[-7:] for name in names] == ["_seed=0", "_seed=1"] * 2
    for name in names:
        (root / name).mkdir(parents=True)
    plain = write(tmp_path / "b.toml", f"[base]\nalgorithm = 'fedavg'\nlr = 0.5\nseed = 1\n{toml(settings)}")
    assert load(plain, str(root)).runs[0].directory.name == names[3]


def test_names_of_odd_values_stay_apart(tmp_path):
    names = set()
    for value in ("a/b", "a:b", "a b", "a-b"):
        path = write(tmp_path / "g.toml", f'[base]\ninit = "{value}"\n')
        names.add(load(path, "R").runs[0].directory.name)
    assert len(names) == 4
    assert not any(set(name) & set("/: ") for name in names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[base]\nalgoritm = "fedavg"\n', "unknown setting 'algoritm' (did you mean 'algorithm'?)"),
        ('[base]\nalgorithm = "fedlda"\n', "did you mean 'fedlada'?"),
        ("[bse]\nseed = 1\n", "unknown key 'bse' (did you mean 'base'?)"),
        ('[base]\nalgorithm = "fedavg"\nalpha = 0.1\n', "is not a setting of fedavg"),
        ("[base]\nseed = []\n", "seed is an empty list"),
        ('[base]\nout = "x"\n', "--runs"),
        ("[base]\nrounds = [10, 20]\n", "digits_fedlada_seed=0 has rounds 10 and 20: keep one of them"),
        ("[base]\neval_every = [1, 2]\n", "has eval_every 1 and 2"),
        ("[[runs]]\n[[runs]]\neval_clients = 1\n", "has eval_clients 0 and 1"),
        ("[base\n", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_refused_with_its_name(tmp_path, capsys, text, message):
    path = write(tmp_path / "mine.toml", text)
    assert grid.main([path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert "mine.toml" in error


def test_an_unknown_experiment_and_an_index_beyond_the_end_are_refused(capsys):
    assert grid.main(["digit"]) == 2
    assert "did you mean 'digits'?" in capsys.readouterr().err
    assert grid.main(["digits", "--index", "12"]) == 2
    assert "there are 12 runs, 0 to 11" in capsys.readouterr().err
    assert grid.main(["digits", "--command", "-1"]) == 2


def test_the_command_of_a_run_is_complete(capsys):
    assert grid.main(["intervals", "--command", "3", "--runs", "R", "--launcher", "mpirun -n 4"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["mpirun", "-n", "4"]
    assert words[4:6] == ["-m", "fedlada_mpi.run"]
    assert words[6:] == [
        *("--dataset", "tinyimagenet", "--algorithm", "fedlada", "--local-epochs", "20", "--seed", "0"),
        *("--out", "R/tinyimagenet_fedlada_local_epochs=20_seed=0", "--resume"),
    ]


def test_the_command_of_a_run_takes_values_that_begin_with_a_minus(tmp_path):
    given = {"data_dir": "-x", "objective": "-loss", "eval_train_every": -1, "lr": 0.5, "targets": [-1e-05, 0.1, -2.0]}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
    path = write(tmp_path / "a.toml", '[base]\ndataset = "dd"\n' + "".join(lines))
    (planned,) = load(path, "R").runs
    read, known = run.parse(planned.command()[3:])[0].settings, settings.SETTINGS
    assert {name: settings.coerce(known[name], read[name]) for name in given} == given


def test_set_changes_every_run_and_makes_axes(capsys):
    assert grid.main(["main", "--set", "seed=7", "--count"]) == 0
    assert capsys.readouterr().out == "23\n"
    assert grid.main(["digits", "--set", "seed=7,8", "--set", "server-lr=0.5", "--count"]) == 0
    assert capsys.readouterr().out == "8\n"
    assert grid.main(["digits", "--set", "sede=7"]) == 2
    assert "did you mean 'seed'?" in capsys.readouterr().err


def test_todo_is_what_sbatch_takes(small, tmp_path, capsys):
    assert grid.compact([0, 1, 2, 3, 7, 9, 10]) == "0-3,7,9-10"
    for seed, summary in ((0, {"status": "finished", "rounds": 60}), (1, {"status": "stopped", "rounds": 60})):
        directory = tmp_path / f"runs/digits_fedavg_seed={seed}"
        directory.mkdir(parents=True)
        (directory / "summary.json").write_text(json.dumps(summary))
    assert grid.main([*small, "--todo"]) == 0
    assert capsys.readouterr().out == "1-2\n"


def test_a_run_that_finished_with_fewer_rounds_is_not_finished(small, tmp_path):
    directory = tmp_path / "runs/digits_fedavg_seed=0"
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text('{"status": "finished", "rounds": 60}')
    assert load(small[0], small[2]).runs[0].finished()
    assert not load(small[0], small[2], {"rounds": 61}).runs[0].finished()


def test_status_survives_a_line_that_is_being_written(small, tmp_path, capsys):
    directory = tmp_path / "runs/digits_fedavg_seed=1"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert grid.main([*small, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[2:] == ["not", "started", "0/60"]
    assert lines[3].split()[2:] == ["stopped", "2/60"]
    assert lines[-1] == "0 of 3 runs finished"


def test_the_title_is_shown_and_kept_for_the_report(small, tmp_path, capfd):
    Path(small[0]).write_text('title = "Three <seeds>"\n' + Path(small[0]).read_text())
    assert grid.main([*small, "--status"]) == 0
    assert not (tmp_path / "runs").exists()
    assert grid.main([*small, "--all"]) == 0
    assert capfd.readouterr().out.count("small: Three <seeds>\n") == 2
    assert json.loads((tmp_path / "runs/small.plan.json").read_text()) == {"title": "Three <seeds>"}


def test_a_run_is_started_once_and_then_skipped(small, tmp_path, capsys):
    assert grid.main([*small, "--index", "1"]) == 0
    assert grid.main([*small, "--index", "1"]) == 0
    assert "already finished" in capsys.readouterr().out
    calls = (tmp_path / "runs/digits_fedavg_seed=1/calls").read_text().splitlines()
    assert len(calls) == 1
    assert "-m fedlada_mpi.run --algorithm fedavg --seed 1" in calls[0]
    assert calls[0].endswith("--resume")
    assert not (tmp_path / "runs/digits_fedavg_seed=1" / lock.GRID).exists()


def test_a_run_that_outlived_its_grid_is_left_alone(small, tmp_path, capsys):
    """After a kill -9 of the grid its lock is void, but the run still holds its own."""
    directory = tmp_path / "runs/digits_fedavg_seed=1"
    with lock.hold(directory):
        assert grid.main([*small, "--index", "1"]) == 2
        assert f"{directory} is in use by process" in capsys.readouterr().err
        assert grid.main([*small, "--status"]) == 0
        assert re.search(r" running +0/60 .*process ", capsys.readouterr().out)
    assert not (directory / "calls").exists()
    assert grid.main([*small, "--index", "1"]) == 0


def test_the_exit_status_passes_through(small, monkeypatch, capfd):
    monkeypatch.setenv("PRETEND", "fail")
    assert grid.main([*small, "--index", "0"]) == 3
    assert grid.main([*small, "--all"]) == 1
    assert "3 of 3 runs failed: 0-2" in capfd.readouterr().err
    assert grid.main([*small[:-1], "no-such-launcher", "--index", "0"]) == 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_second_start_is_refused_and_a_signal_stops_the_run(small, tmp_path, number, capsys):
    first = start([*small, "--index", "0"], sys.executable, PRETEND="wait")  # whose process id is asked for
    ready = tmp_path / "runs/digits_fedavg_seed=0/ready"
    deadline = time.monotonic() + 100
    while not ready.exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    assert grid.main([*small, "--index", "0"]) == 2
    assert f"process {first.pid} on" in capsys.readouterr().err
    assert grid.main([*small, "--all"]) == 0  # leaves that one alone and does the others
    assert "is in use by" in capsys.readouterr().out
    first.send_signal(number)
    assert first.wait(30) == 75
    assert grid.main([*small, "--index", "0"]) == 0


def test_no_run_starts_after_a_signal(small, tmp_path):
    """Even where the signal came too late for the run that was under way."""
    first = start([*small, "--all"], PRETEND="too late")
    deadline = time.monotonic() + 100
    while not (tmp_path / "runs/digits_fedavg_seed=0/ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 75
    assert "1 of" not in first.communicate()[1]
    assert (tmp_path / "runs/digits_fedavg_seed=0/summary.json").exists()
    assert not (tmp_path / "runs/digits_fedavg_seed=1/calls").exists()


@pytest.mark.parametrize(("launched", "passed_on"), [(False, signal.SIGTERM), (True, signal.SIGUSR1)])
def test_a_run_gets_the_signal_that_came_just_before_it(launched, passed_on):
    signals = StopSignals(launched)
    signals._handle(signal.SIGTERM, None)
    assert signals.start([python(), "-c", "import time; time.sleep(100)"]).wait(50) == -passed_on
    assert signals.status == 75


def test_a_launcher_that_ends_with_0_has_not_finished_a_run(small, monkeypatch, capfd):
    """As mpirun does where a node was lost."""
    monkeypatch.setenv("PRETEND", "vanish")
    assert grid.main([*small, "--index", "0"]) == 1
    assert "ended with status 0 after 0 of 60 rounds" in capfd.readouterr().err
    assert grid.main([*small, "--all", "--parallel", "2"]) == 1
    assert "3 of 3 runs failed: 0-2" in capfd.readouterr().err


CONTROL = """#!/bin/sh
echo "$*" "$(cat)" >> {calls}
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_several_runs_at_once(small, tmp_path, monkeypatch, capfd, gpu):
    """Two of the three wait for each other; on a GPU they share it by NVIDIA's service."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL.format(calls=tmp_path / "control"))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if gpu else "")
    monkeypatch.setenv("PRETEND", "together")
    assert grid.main([*small, "--all", "--parallel", "2"]) == 0
    printed = capfd.readouterr().out
    assert printed.count(": started, prints to ") == printed.count(": finished, 60 rounds") == 3
    logs = [(tmp_path / f"runs/digits_fedavg_seed={seed}/log.txt").read_text() for seed in range(3)]
    assert all(("fedlada-mps-" in log) == gpu for log in logs), logs
    calls = (tmp_path / "control").read_text() if gpu else ""
    assert calls.split() == (["-d", "quit"] if gpu else [])
    assert grid.main([*small, "--all", "--parallel", "2"]) == 0
    assert capfd.readouterr().out.count("already finished") == 3


@pytest.mark.parametrize("status", ["75", "1"])
def test_a_signal_stops_all_runs(status, small, tmp_path):
    """With 1 where it came while Python was starting."""
    first = start([*small, "--all", "--parallel", "2"], PRETEND="wait", STATUS=status)
    ready = [tmp_path / f"runs/digits_fedavg_seed={seed}/ready" for seed in range(3)]
    deadline = time.monotonic() + 100
    while not (ready[0].exists() and ready[1].exists()):
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 75
    assert not ready[2].exists()
    assert "stopped after 0 of 60 rounds" in first.communicate()[0]


@pytest.mark.parametrize("arguments", [["--parallel", "2"], ["--all", "--parallel", "0"]])
def test_parallel_needs_a_number_and_all(small, arguments, capsys):
    assert grid.main([*small, *arguments]) == 2
    assert "--parallel: got" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*DAMAGES, *OBSTACLES])
def test_status_and_todo_of_a_damaged_run(kind, small, tmp_path, capsys):
    for seed, name in enumerate(("metrics.jsonl", "summary.json", lock.NAME)):
        directory = tmp_path / f"runs/digits_fedavg_seed={seed}"
        directory.mkdir(parents=True)
        (directory / name).write_text('{"round": 2, "status": "stopped", "rounds": 60}\n')
        damage_file(directory / name, kind)
    for arguments in ("--status", "--todo"):
        assert grid.main([*small, arguments]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0-2"


@pytest.mark.parametrize(
    "text", ['{"round": 1e400}', '{"round": "2"}', '{"round": true}', '{"round": null}', "[1]", "\0", "[" * 50_000]
)
def test_status_survives_lines_that_are_no_records(text, small, tmp_path, capsys):
    directory = tmp_path / "runs/digits_fedavg_seed=1"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"round": 1}\n' + text + "\n")
    (directory / "summary.json").write_text('{"status": "finished", "rounds": 1e400}')
    assert grid.main([*small, "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[2:] == ["stopped", "1/60"]


def test_paths_that_no_grid_can_have(small, capsys):
    for arguments in (["x" * 300 + ".toml"], ["\0.toml"], [small[0], "--runs", "x" * 5000], [small[0], "--runs", "\0"]):
        assert grid.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_ranks_of_this_machine(small, capsys, monkeypatch):
    monkeypatch.delenv("FEDLADA_LAUNCHER", raising=False)
    assert grid.main([*small[:3], "--command", "1", "-n", "4"]) == 0
    assert " -n 4 --out " in capsys.readouterr().out
    assert grid.main([*small, "--command", "1", "-n", "4"]) == 2
    assert "-n 4 starts the ranks without a launcher" in capsys.readouterr().err
    assert grid.main([*small[:3], "--all", "-n", "four"]) == 2
    assert capsys.readouterr().err == "error: -n: got 'four', expected a number of ranks from 1 to 4096\n"


def test_runs_that_cannot_be_written(small, tmp_path, capsys):
    (tmp_path / "runs").write_text("mine")
    assert grid.main([*small, "--index", "0"]) == 2
    assert capsys.readouterr().err.endswith("/grid.lock: Not a directory: make it writable, then run it again\n")


OWN = """from fedlada_mpi.algorithms import Algorithm, hyper


class Mine(Algorithm):
    pull: float = hyper(0.5, "how strongly")
"""


@pytest.fixture
def of_my_own(small, tmp_path):
    """A grid whose run, by a method of one's own, is finished; and what starts it."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "small.toml").write_text(f'[base]\nalgorithm = "{tmp_path}/mine.py:Mine"\nrounds = 60\n')
    (run,) = load(small[0], str(tmp_path / "runs")).runs
    run.directory.mkdir(parents=True)
    (run.directory / "config.json").write_text(json.dumps({"algorithm": "mine.py:Mine", "pull": 0.5, "code": run.code}))
    (run.directory / "summary.json").write_text('{"status": "finished", "rounds": 60}')
    return small, run.directory, tmp_path / "mine.py"


def test_a_run_that_was_finished_with_other_code(of_my_own, capsys):
    small, directory, code = of_my_own
    assert grid.main([*small, "--all"]) == 0
    assert "already finished" in capsys.readouterr().out
    code.write_text(OWN + "# edited\n")
    expected = f"error: {directory}: finished with other code or defaults, changed since: mine.py; --overwrite"
    for arguments, status in ((["--all"], 1), (["--index", "0"], 2)):
        assert grid.main([*small, *arguments]) == status
        assert capsys.readouterr().err.startswith(expected)
    assert grid.main([*small, "--all", "--parallel", "1"]) == 1
    assert "finished with other code" in capsys.readouterr().err
    assert grid.main([*small, "--status"]) == 0
    assert re.search(r"other code +60/60\b.*0 of 1 runs finished; 1 other code", capsys.readouterr().out, re.DOTALL)
    assert not (directory / "calls").exists()


def test_a_run_that_was_finished_with_other_defaults(tmp_path, capsys):
    """Of an earlier version, in which everybody's images were augmented, and a fifth of three clients took part."""
    raw = tmp_path / "raw.npz"
    images, labels = np.zeros((6, 2, 2), np.uint8), np.arange(6) % 2
    np.savez(raw, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    prepare(PrepareSettings("npz", raw=raw, out=tmp_path / "mine", clients=3))
    (tmp_path / "plan.toml").write_text(f'[base]\ndataset = "{tmp_path}/mine"\nalgorithm = "fedavg"\nrounds = 5\n')
    (run,) = load(str(tmp_path / "plan.toml"), str(tmp_path / "runs")).runs
    run.directory.mkdir(parents=True)
    now = resolve_dataset(run.given, {})[0].config.record()
    (run.directory / "summary.json").write_text('{"status": "finished", "rounds": 5}')
    for then, expected in (
        ({}, []),
        ({"augment": "paper", "participation": 0.2}, ["augment from paper to none", "participation from 0.2 to 1.0"]),
        ({"rounds": 7, "out": "elsewhere"}, []),
    ):
        (run.directory / "config.json").write_text(json.dumps({**now, **then}))
        assert run.changed() == expected
    shutil.rmtree(tmp_path / "mine")  # nothing is known of what a run would be
    assert run.changed() == []


def test_a_full_disk_ends_a_parallel_grid_in_one_line(small, tmp_path, capsys):
    log = tmp_path / "runs/digits_fedavg_seed=0/log.txt"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    assert grid.main([*small, "--all", "--parallel", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write {log}: No space left on device")
    assert error.endswith("then give the same command again\n")


def test_a_plan_is_checked_against_its_own_data(tmp_path):
    """120 clients, of whom one takes part; of the digits' 50 none would. Names are the same before it is prepared."""
    raw = tmp_path / "raw.npz"
    images, labels = np.zeros((240, 2, 2), np.uint8), np.arange(240) % 2
    np.savez(raw, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    text = f'[base]\ndataset = "{tmp_path}/mine"\nalgorithm = "fedavg"\nparticipation = [0.01, 0.02]\n'
    path = write(tmp_path / "plan.toml", text + "targets = [1.2]\n")
    before = [run.directory for run in load(path).runs]
    with pytest.raises(UserError, match=r"--participation: got -1.0, expected more than 0"):
        load(path, "", {"participation": -1})
    prepare(PrepareSettings("npz", raw=raw, out=tmp_path / "mine", clients=120))
    with pytest.raises(UserError, match="expected fractions between 0 and 1"):
        load(path)
    path = write(tmp_path / "plan.toml", text)
    assert [run.directory for run in load(path).runs] == before
    with pytest.raises(UserError, match=r"--participation 0.001 of 120 clients selects none"):
        load(path, "", {"participation": 0.001})


def test_other_code_is_accepted_or_overwritten(of_my_own, capsys):
    small, directory, code = of_my_own
    code.write_text(OWN + "# edited\n")
    assert grid.main([*small, "--all", "--accept-changed-code"]) == 0
    assert "already finished" in capsys.readouterr().out
    for arguments, expected in (([], "\n"), (["--overwrite"], "0\n")):
        assert grid.main([*small, "--todo", *arguments]) == 0
        assert capsys.readouterr().out == expected
    # The pretended run leaves the record as it was: it is said to have ended without a result.
    assert grid.main([*small, "--all", "--overwrite"]) == 1
    assert (directory / "calls").read_text().split()[-1] == "--overwrite"
    (directory / "summary.json").unlink()
    assert grid.main([*small, "--all", "--accept-changed-code"]) == 0
    assert (
        (directory / "calls").read_text().splitlines()[-1].endswith(f"--accept-changed-code --out {directory} --resume")
    )


def test_a_changed_default_is_other_code(of_my_own, capsys, monkeypatch):
    """Also where the text of the method is the same."""
    small, directory, code = of_my_own
    code.write_text("import os\n" + OWN.replace("0.5", "float(os.environ.get('PULL', '0.5'))"))
    (run,) = load(small[0], str(directory.parent)).runs
    (directory / "config.json").write_text(json.dumps({"algorithm": "mine.py:Mine", "pull": 0.5, "code": run.code}))
    assert grid.main([*small, "--all"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("PULL", "0.75")
    monkeypatch.setattr(sys, "modules", {n: m for n, m in sys.modules.items() if not n.startswith("fedlada_own_")})
    assert grid.main([*small, "--all"]) == 1
    assert "changed since: pull from 0.5 to 0.75;" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_needs_no_more_rounds_leaves_no_checkpoints(tmp_path, keep, ends):
    """Once it has finished; one that was stopped goes on from them."""
    planned = replace(load("digits", str(tmp_path)).runs[0], rounds=3, keep_checkpoints=keep)
    saved = planned.directory / "checkpoint" / "round_000003"
    with claimed(planned) as to_do:
        assert to_do
        saved.mkdir(parents=True)
        if ends:
            (planned.directory / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 3}))
    assert saved.is_dir() == (keep or not ends)
