"""Runs whose silos have a directory each: the same as on data prepared together, resumed, and refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest
import torch
from ranks import SIZE
from repository import ROOT
from silo_dirs import CLASS_NAMES, NAMES, make_silos

from data_prep import PrepareSettings
from fedlada_mpi.data.silos.prepare import prepare_silo
from fedlada_mpi.run import main

pytestmark = pytest.mark.skipif(SIZE > 1, reason="starts ranks of its own")

SCRIPT = str(ROOT / "tests" / "helpers" / "several_runs.py")
COMMON = ["--rounds", "2", "--batch-size", "3", "--local-epochs", "1", "--sums", "exact", "--lr", "0.05"]
CLIENTS = [[7, 4], [5], [6, 3, 4]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_silos(tmp_path_factory.mktemp("silo-runs"), CLIENTS)


@pytest.fixture
def launch(mpirun, tmp_path):
    """``launch(RANKS, *lines)``: several runs; their statuses, the same on all ranks, and what is printed."""

    def several(ranks, *lines, **env):
        command = (SCRIPT, str(tmp_path), json.dumps([[str(word) for word in line] for line in lines]))
        mpirun(ranks, command=command, env={"CUDA_VISIBLE_DEVICES": "", **env}, timeout=300, check=True)
        root, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks))
        statuses = [run["status"] for run in root]
        assert all([run["status"] for run in other] == statuses for other in others)
        assert not any(run["err"] for other in others for run in other)
        return statuses, SimpleNamespace(
            stdout="".join(run["out"] for run in root), stderr="".join(run["err"] for run in root)
        )

    return several


def silos(made: Path, *names: str) -> list[str]:
    return ["--silo-dir", str(made / "secure" / "{silo}"), "--silos", ",".join(names or NAMES)]


def model(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "model.pt", weights_only=True)


def same(one: Path, other: Path) -> bool:
    a, b = model(one), model(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_folder(made: Path, silo: str, run: str) -> Path:
    (found,) = (made / "secure" / silo / "runs").glob(f"{run}-*")
    return found


def test_runs_of_silos(made, tmp_path, launch):
    """As on data prepared together, resumed with the silos on other ranks, and with noise."""
    joint = ["--dataset", made / "joint", "--silo-per-rank", "--participation", "1"]
    masked = [*COMMON, "--secure", "--weighting", "size"]
    kept = ["--algorithm", "scaffold", *COMMON, "--checkpoint-every", "1"]
    dp = ["--dp", "client", "--noise-multiplier", "1", "--delta", "0.01", "--clip-norm", "1", "--secure"]
    noisy = ["--algorithm", "fedavg", "--local-steps", "2", "--batch-size", "3", "--rounds", "1", *dp]
    statuses, done = launch(
        4,
        [*silos(made), *COMMON, "--out", tmp_path / "own"],
        [*joint, *COMMON, "--out", tmp_path / "together"],
        [*silos(made), *masked, "--out", tmp_path / "masked"],
        [*joint, *masked, "--out", tmp_path / "masked-together"],
        [*silos(made), *kept, "--out", tmp_path / "whole"],
        [*silos(made), *kept, "--out", tmp_path / "cut", "--rounds", "1"],
        ["--resume", tmp_path / "cut", "--silos", "cairo,ankara,berlin", "--rounds", "2"],
        [*silos(made), *noisy, "--out", tmp_path / "noisy"],
        NUMBERED="2,1,3",
    )
    assert statuses == [0] * 8, done.stderr
    assert "run as the same account" in done.stdout
    check_as_together(made, tmp_path)
    check_resumed(made, tmp_path)
    check_noisy(made, tmp_path)


def check_as_together(made: Path, folder: Path) -> None:
    """The same clients with the same draws: the same bits, with masks and without; and the same results."""
    assert same(folder / "own", folder / "together")
    assert same(folder / "masked", folder / "masked-together")
    assert not same(folder / "own", folder / "masked")
    ours, theirs = (records(folder / name / "metrics.jsonl")[-1] for name in ("own", "together"))
    for name in ("test_acc", "train_acc", "test_loss", "train_loss", "local_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    # Each silo has results of its own, whose mean is that of all.
    parts = [records(own_folder(made, name, "own") / "metrics.jsonl")[-1] for name in NAMES]
    assert [part["train_examples"] for part in parts] == [11, 5, 13]
    correct = sum(part["test_acc"] * part["test_examples"] for part in parts)
    assert ours["test_acc"] == pytest.approx(correct / sum(part["test_examples"] for part in parts))
    masked = records(folder / "masked" / "metrics.jsonl")[-1]
    own = [records(own_folder(made, name, "masked") / "metrics.jsonl")[-1] for name in NAMES]
    assert masked["test_loss"] == pytest.approx(sum(part["test_loss"] * 6 for part in own) / 18, rel=1e-6)
    about, theirs = (json.loads((folder / name / "summary.json").read_text())["data"] for name in ("own", "together"))
    assert (about["mean"], about["std"], about["class_names"]) == (theirs["mean"], theirs["std"], CLASS_NAMES)


def check_resumed(made: Path, folder: Path) -> None:
    """What clients keep stays in their silos, and is found there again."""
    assert same(folder / "whole", folder / "cut")
    assert not [*(folder / "cut").rglob("clients_*")]
    with h5py.File(own_folder(made, "berlin", "cut") / "checkpoint" / "round_000002.h5") as file:
        assert [*file] == ["2"]
    lines = records(own_folder(made, "berlin", "cut") / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2]


def check_noisy(made: Path, folder: Path) -> None:
    """No mean of its pixels leaves a silo, and no result on its test rows."""
    (record,) = records(folder / "noisy" / "metrics.jsonl")
    assert (record["test_acc"], record["test_loss"], record["participants"]) == (None, None, None)
    about = json.loads((folder / "noisy" / "summary.json").read_text())["data"]
    assert (about["mean"], about["std"]) == ([0.5] * 3, [0.5] * 3)
    own = own_folder(made, "cairo", "noisy")
    assert records(own / "metrics.jsonl")[0]["test_examples"] == 6
    assert (own / "privacy.jsonl").is_file()


@pytest.fixture
def other(made, tmp_path):
    """Silos that may be changed."""
    return shutil.copytree(made, tmp_path / "other")


def prepare_again(root: Path, silo: str, name: str = "", classes=CLASS_NAMES, raw: str = "") -> None:
    out = root / "secure" / silo
    settings = PrepareSettings("npz", out=out, raw=root / f"{raw or silo}.npz", force=True)
    prepare_silo(settings, name or silo, classes)


def refused(launch, ranks: int, *lines) -> list[str]:
    """The errors of runs that are refused on every rank, a line each."""
    statuses, done = launch(ranks, *lines)
    assert {*statuses} == {2}, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(lines), done.stderr
    assert "Traceback" not in done.stderr
    return errors


def test_silos_that_do_not_fit_together(other, tmp_path, launch):
    """Refused in one line, on every rank, before anything is written."""
    here, three = tmp_path / "runs" / "x", [*COMMON, "--out", tmp_path / "runs" / "x"]
    for name, silo, called in (("list", "list", ""), ("called", "twin", "berlin"), ("torn", "torn", ""),
                               ("short", "short", ""), ("none", "none", "")):  # fmt: skip
        shutil.copy(other / "berlin.npz", other / f"{silo}.npz")
        classes = [*reversed(CLASS_NAMES)] if name == "list" else CLASS_NAMES
        prepare_again(other, silo, called, classes)
    secure = other / "secure"
    torn = bytearray((secure / "torn" / "silo.h5").read_bytes())
    torn[-1] ^= 1
    (secure / "torn" / "silo.h5").write_bytes(torn)
    (secure / "short" / "private.json").write_text("{}")
    (secure / "none" / "test.h5").unlink()
    pattern = str(secure / "{silo}")
    errors = refused(
        launch, 3,
        ["--silo-dir", pattern, "--silos", "ankara,list", *three],
        ["--silo-dir", pattern, "--silos", "ankara,oslo", *three],
        ["--silo-dir", pattern, "--silos", "ankara,twin", *three],
        ["--silo-dir", pattern, "--silos", "ankara,ankara", *three],
        ["--silo-dir", pattern, "--silos", "ankara,torn", *three],
        ["--silo-dir", pattern, "--silos", "ankara,short", *three],
        ["--silo-dir", pattern, "--silos", "ankara,none", *three],
        ["--silo-dir", secure / "berlin", *three],
        ["--silo-dir", pattern, "--silos", "ankara", *three],
        ["--silo-dir", pattern, "--silos", "ankara,../berlin", *three],
        ["--silo-dir", pattern, "--silos", "ankara,berlin", "--dataset", other / "joint", *three],
        ["--silo-dir", pattern, "--silos", "ankara,berlin", "--eval-clients", "1", *three],
        ["--silo-dir", pattern, "--silos", "ankara,berlin", "--server-trains", *three],
        ["--silo-dir", pattern, "--silos", "ankara,berlin", "--metrics", "auc", "--objective", "auc", *three],
    )  # fmt: skip
    for error, message in zip(errors, (
        "silo ankara has the class list ['left', 'middle', 'right'], and silo list",
        f"rank 2 has no directory {secure / 'oslo'}",
        f"{secure / 'twin'} has the silo berlin, expected twin",
        "two silos are called ankara",
        f"the data in {secure / 'torn'} is damaged or cannot be used: {secure / 'torn' / 'log.txt'} says why",
        f"the data in {secure / 'short'} is damaged",
        f"the data in {secure / 'none'} is damaged",
        "two silos are called berlin",
        "--silos: got 1 names, expected 2",
        "--silos: got '../berlin'",
        "--dataset has no effect on data that silos have prepared",
        "--eval-clients 1 records single clients",
        "--server-trains gives the server data",
        "outputs at once, which stay in the silos",
    ), strict=True):  # fmt: skip
        assert message in error
    assert "its sha256 is not that of" in (secure / "torn" / "log.txt").read_text()
    assert "not what data_prep has written" in (secure / "short" / "log.txt").read_text()
    assert not here.exists()


def test_a_run_goes_on_with_what_it_began(other, tmp_path, launch):
    """Not with other silos, other data, or without what clients kept."""
    run = ["--algorithm", "scaffold", *COMMON, "--rounds", "1", "--out", tmp_path / "x"]
    statuses, done = launch(3, [*silos(other, "ankara", "berlin"), *run])
    assert statuses == [0], done.stderr
    changed = {name: shutil.copytree(other, tmp_path / name) for name in ("no state", "nothing", "other data")}
    shutil.rmtree(own_folder(changed["no state"], "berlin", "x") / "checkpoint")
    shutil.rmtree(own_folder(changed["nothing"], "berlin", "x"))
    settings = {"out": changed["other data"] / "secure" / "berlin", "raw": other / "cairo.npz", "clients": 1}
    prepare_silo(PrepareSettings("npz", **settings, force=True), "berlin", CLASS_NAMES)
    again = ["--resume", tmp_path / "x", "--rounds", "2"]
    errors = refused(
        launch,
        3,
        [*again, "--silos", "ankara,cairo"],
        *([*again, "--silo-dir", root / "secure" / "{silo}"] for root in changed.values()),
    )
    for error, message in zip(
        errors,
        (
            "the silos have 5 clients, and the run began with 3",
            "has not kept what its clients need",
            "has nothing of this run",
            "has changed since the run began",
        ),
        strict=True,
    ):
        assert message in error


def test_one_rank_is_no_silo(made, tmp_path, capsys):
    assert main([*silos(made), "--out", str(tmp_path / "x")]) == 2
    assert "got one rank, which is the server" in capsys.readouterr().err
    assert main([*silos(made), "--print-config"]) == 0
