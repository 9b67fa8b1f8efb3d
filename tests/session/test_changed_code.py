"""Code of users that was edited between the start of a run and its end, or that only somebody's record names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import h5py
import pytest
from PIL import Image
from tiers import slow

from fedlada_mpi import UserError, load, predict, train
from fedlada_mpi.run import main
from fedlada_mpi.rundir import checkpoint

QUICK = ["--rounds", "1", "--participation", "0.04", "--local-steps", "1", "--device", "cpu"]
METHOD = """from fedlada_mpi.algorithms import Algorithm, hyper


class Mine(Algorithm):
    pull: float = hyper(0.5, "how strongly")
"""
MODEL = """from torch import nn


def net(classes, image_shape):
    rows, columns, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns * channels, classes))
"""
RAN = "open('ran', 'w').close()\n"


def own_code(folder: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run with a method and a model of one's own; the state of this user is empty."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    Path("mine.py").write_text(METHOD)
    Path("net.py").write_text(MODEL)
    own = ["--algorithm", "mine.py:Mine", "--model", "net.py:net"]
    return [*QUICK, "--dataset", str(digits_dir), *own, "--out", "run"]


@pytest.fixture
def quick(digits_dir, tmp_path, monkeypatch):
    return own_code(tmp_path, digits_dir, monkeypatch)


@pytest.fixture(scope="module")
def of_a_stranger(digits_dir, tmp_path_factory):
    """The folder of a finished run of somebody else, whose code leaves a file where it runs."""
    folder = tmp_path_factory.mktemp("stranger")
    with pytest.MonkeyPatch.context() as monkeypatch:
        quick = own_code(folder, digits_dir, monkeypatch)
        assert main(quick) == 0
        for name in ("mine.py", "net.py"):
            Path(name).write_text(Path(name).read_text() + RAN)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "of the stranger"))
        assert main([*quick, "--overwrite"]) == 0
        os.remove("ran")
    return folder


@pytest.fixture
def stranger(quick, of_a_stranger, tmp_path):
    """A copy of that folder to work in, in which this user has run the code as it was before."""
    shutil.copytree(of_a_stranger, tmp_path, dirs_exist_ok=True)
    for name in [name for name in sys.modules if name.startswith("fedlada_own_")]:  # as in another process
        del sys.modules[name]


def refused(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("name", ["mine.py", "net.py"])
def test_edited_code_is_refused_unless_it_is_accepted(quick, capsys, name):
    assert main(quick) == 0
    code = json.loads(Path("run/config.json").read_text())["code"]
    assert {setting: [*files] for setting, files in code.items()} == {"algorithm": ["mine.py"], "model": ["net.py"]}
    assert main(["--resume", "run", "--rounds", "2"]) == 0
    Path(name).write_text(Path(name).read_text() + "# edited\n")
    error = refused(capsys, "--resume", "run", "--rounds", 3)
    assert f"({name} changed since the run began): read it, then add --trust --accept-changed-code" in error
    for rounds in (2, 3):  # also where there is nothing left to do
        error = refused(capsys, *quick, "--resume", "--rounds", rounds)
        assert f"--resume: {name} has changed since the run in run began" in error
        assert "--accept-changed-code" in error
    assert main([*quick, "--resume", "--rounds", "3", "--accept-changed-code"]) == 0
    assert main(["--resume", "run", "--rounds", "4"]) == 0
    segments = json.loads(Path("run/summary.json").read_text())["segments"]
    assert len({json.dumps(segment["code"]) for segment in segments}) == 2


def test_a_checkpoint_of_an_earlier_version_goes_on(quick):
    assert main(quick) == 0
    path = checkpoint.folder(Path("run"), 1) / "server.h5"
    with h5py.File(path, "r+") as file:
        del file.attrs["code"]
    (path.parent / "files.json").write_text('["server.h5"]')
    record = json.loads(Path("run/config.json").read_text())
    del record["code"]
    Path("run/config.json").write_text(json.dumps(record))
    Path("mine.py").write_text(METHOD + "# edited\n")
    assert main([*quick, "--resume", "--rounds", "2"]) == 0


def test_in_python(quick, digits_dir):
    about = dict(dataset=str(digits_dir), participation=0.04, local_steps=1, device="cpu", out="run", quiet=True)
    train(model="net.py:net", rounds=1, **about)
    Path("net.py").write_text(MODEL.replace("classes))", "classes), nn.Tanh())"))
    for arguments, expected in {
        (): r"^run/config\.json names code, model net\.py:net, .* load\(DIR, trust=True\)$",
        ("trust",): r"^run: net\.py changed since this model was trained: .*accept_changed_code=True\)$",
    }.items():
        with pytest.raises(UserError, match=expected):
            _ = load("run", **dict.fromkeys(arguments, True)).model
    with pytest.raises(UserError, match=r"^resume=True: net\.py has changed .* by accept_changed_code=True$"):
        train(model="net.py:net", rounds=2, resume=True, **about)
    assert load("run", accept_changed_code=True).evaluate()
    assert load("run", model="net.py:net").evaluate()
    assert train(model="net.py:net", rounds=2, resume=True, accept_changed_code=True, **about).summary["rounds"] == 2
    assert load("run").evaluate()


def test_a_class_that_has_no_file(quick, digits_dir):
    """As one of a notebook's cells: what counts is what it does."""
    from fedlada_mpi import Algorithm

    def method(factor):
        class Cell(Algorithm):
            def direction(self, c, s, g):
                return g.mul_(factor)

        return Cell

    about = dict(dataset=str(digits_dir), participation=0.04, local_steps=1, device="cpu", out="run", quiet=True)
    train(algorithm=method(0.5), rounds=1, **about)
    train(algorithm=method(0.5), rounds=2, resume=True, **about)
    with pytest.raises(UserError, match=r"method\.<locals>\.Cell \(Python 3\.\d+\) has changed since the run in run"):
        train(algorithm=method(0.25), rounds=3, resume=True, **about)


DOORS = {
    "resume": ["--resume", "run", "--rounds", "2"],
    "resume on two": ["--resume", "run", "--rounds", "2", "-n", "2"],
    "print the settings": ["--resume", "run", "--print-config"],
    "help": ["--resume", "run", "--help"],
    "config": ["--config", "run/config.json", "--out", "new"],
    "a named method": ["--config", "run/config.json", "--out", "new", "--algorithm", "fedavg"],
}


@pytest.mark.parametrize("door", [door if door in ("resume", "config") else slow(door) for door in DOORS])
def test_a_record_runs_no_code_of_strangers(stranger, capsys, door):
    arguments = DOORS[door]
    error = refused(capsys, *arguments)
    setting = "model net.py:net" if "--algorithm" in arguments else "algorithm mine.py:Mine"
    assert error == (
        f"error: run/config.json names code, {setting}, that you have not run by name on this machine as it is: read "
        "it, then add --trust\n"
    )
    assert not Path("ran").exists()
    assert not Path("new").exists()


def test_python_runs_no_code_of_strangers(stranger, capsys):
    with pytest.raises(UserError, match=r"run/config\.json names code, .* then add trust=True"):
        train(config="run/config.json", out="new")
    run = load("run")
    for attempt in (lambda: run.model, run.evaluate):
        with pytest.raises(UserError, match=r"names code, model net\.py:net, .* load\(DIR, trust=True\)"):
            attempt()
    Image.new("L", (8, 8)).save("photo.png")
    assert predict.main(["run", "photo.png"]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert not Path("ran").exists()


BY_RANK = """
import os, sys
os.environ["XDG_STATE_HOME"] = os.path.abspath(f"state of rank {os.environ['OMPI_COMM_WORLD_RANK']}")
from fedlada_mpi.run import main
sys.exit(main(["--resume", "run", "--rounds", "2"]))
"""


def test_on_several_ranks_the_root_decides(stranger, mpirun):
    def go_on():
        return mpirun(2, command=("-c", BY_RANK), cwd=Path.cwd())

    done = go_on()
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "names code, algorithm mine.py:Mine," in done.stderr
    assert not Path("ran").exists()
    Path("of the stranger").rename("state of rank 0")  # the other knows nothing of the code
    done = go_on()
    assert done.returncode == 0, done.stderr
    assert Path("ran").exists()


def test_trust_is_given_once(stranger):
    assert main(["--resume", "run", "--rounds", "2", "--trust"]) == 0
    assert Path("ran").exists()
    assert main(["--resume", "run", "--rounds", "3"]) == 0
    assert load("run").evaluate()


def test_naming_code_is_consent(stranger, quick):
    assert main([*quick, "--resume", "--rounds", "2"]) == 0
    assert load("run").evaluate()


def test_settings_of_ones_own_are_consent(stranger, digits_dir):
    Path("mine.toml").write_text('algorithm = "mine.py:Mine"\nmodel = "net.py:net"\n')
    assert main([*QUICK, "--config", "mine.toml", "--dataset", str(digits_dir), "--out", "new"]) == 0
    assert load("run").evaluate()


@pytest.mark.parametrize("state", ["/proc/none", "relative", "/dev/null/x"])
def test_without_a_home_runs_go_on_and_only_trust_is_lost(quick, monkeypatch, capsys, state, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setenv("HOME", "/proc/none")
    assert main(quick) == 0
    assert "add --trust" in refused(capsys, "--resume", "run", "--rounds", "2")
    assert main(["--resume", "run", "--rounds", "2", "--trust"]) == 0
    assert not Path("relative").exists()


def test_a_cached_copy_of_a_file_is_not_run(quick):
    """Python would take compiled code that claims to belong to the file; its digest does not cover it."""
    import py_compile

    Path("other.py").write_text(RAN)
    copy = Path("__pycache__") / Path(py_compile.compile("net.py")).name
    py_compile.compile("other.py", str(copy), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert main(quick) == 0
    assert not Path("ran").exists()


def test_evaluation_takes_the_data_of_the_training(digits_dir, tmp_path, monkeypatch):
    from fedlada_mpi.data.manifest import TEST_FILE, read_manifest
    from fedlada_mpi.data.shards import read_test

    monkeypatch.chdir(tmp_path)
    shards = shutil.copytree(digits_dir, "shards")
    train(dataset=shards, rounds=1, participation=0.04, local_steps=1, device="cpu", out="run", quiet=True)
    expected = load("run").evaluate()
    test = read_test(read_manifest(Path(shards)))
    replace_labels(Path(shards), TEST_FILE)
    for recorded in (True, False):  # a run of an earlier version has the digest in its checkpoints alone
        summary = json.loads(Path("run/summary.json").read_text())
        if not recorded:
            del summary["data"]["digest"]
            Path("run/summary.json").write_text(json.dumps(summary))
        with pytest.raises(UserError, match=r"^run was trained on other data: got \w{12} in shards, expected \w{12}"):
            load("run").evaluate()
        assert load("run").evaluate(*test) == expected


def replace_labels(shards: Path, name: str) -> None:
    """Other labels under the same name, as by preparing other data there."""
    with h5py.File(shards / name, "r+") as file:
        file["labels"][:] = (file["labels"][:] + 1) % 10
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["files"][name]["sha256"] = hashlib.sha256((shards / name).read_bytes()).hexdigest()
    (shards / "manifest.json").write_text(json.dumps(manifest))
