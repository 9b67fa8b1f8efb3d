"""The commands as a user types them: exit status, one line for a mistake, nothing left behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from limits import LIMIT
from PIL import Image
from ranks import python
from repository import ROOT

from data_prep import bench, inspect
from data_prep.__main__ import main


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "digits"
    assert main(["--dataset", "digits", "--out", str(out), "--clients", "8", "--silos", "2"]) == 0
    return out


def test_prepared_files(digits):
    names = {path.name for path in digits.iterdir()}
    assert names == {"silo_0001.h5", "silo_0002.h5", "test.h5", "manifest.json", "label_distribution.png"}
    with Image.open(digits / "label_distribution.png") as picture:
        assert picture.width > 1000
        # All ten class colours are in it, many pixels each.
        colours = sorted(picture.convert("RGB").getcolors(10**6), reverse=True)[:12]
    assert sum(len(set(colour)) > 1 for _, colour in colours) >= 10


def test_running_again_reports_it(digits, capsys):
    assert main(["--dataset", "digits", "--out", str(digits), "--clients", "8", "--silos", "2"]) == 0
    assert "already prepared" in capsys.readouterr().out


@pytest.fixture
def mine(tmp_path) -> Path:
    """An .npz of four images and two classes."""
    images = np.zeros((4, 2, 2, 3), np.uint8)
    np.savez(
        tmp_path / "mine.npz",
        train_images=images,
        train_labels=[0, 1, 0, 1],
        test_images=images,
        test_labels=[0, 1, 0, 1],
    )
    return tmp_path / "mine.npz"


MISTAKES = {
    "an unknown data set": ("--dataset digit", "did you mean 'digits'"),
    "an unknown partition": ("--dataset digits --partition dirichlt", "did you mean 'dirichlet'"),
    "an unknown mode": ("--dataset digits --exhausted refil", "did you mean 'refill'"),
    "no raw data": ("--dataset npz", "expected --raw PATH"),
    "a missing file": ("--dataset npz --raw nowhere.npz", "nowhere.npz does not exist"),
    "raw data for the digits": ("--dataset digits --raw MINE", "--raw has no effect"),
    "another kind of file": ("--dataset npz --raw FOLDER", "expected a .npz file"),
    "an archive that is none": ("--dataset cifar10 --raw JUNK", "truncated or not a tar archive"),
    "a zip that is none": ("--dataset tinyimagenet --raw JUNK", "truncated or not a zip"),
    "a folder with no images": ("--dataset imagefolder --raw FOLDER", "no images, expected folder/CLASS/IMAGE"),
    "images of another shape": ("--dataset cifar100 --raw MINE", "2x2x3, expected 32x32x3"),
    "more clients than images": ("--dataset npz --raw MINE --clients 5 --silos 1", "5 clients for 4 training examples"),
    "more silos than clients": ("--dataset digits --clients 3 --silos 4", "4 silos for 3 clients"),
    "no clients": ("--dataset digits --clients 0", "got 0, expected at least 1"),
    "too many classes": ("--dataset digits --partition pathological --classes-per-client 11",
                         "got 11 of 10 classes"),
    "a prior that cannot be met": ("--dataset digits --exhausted exact --dirichlet 0.0007 --silos 2 --clients 8",
                                   "cannot be met exactly"),
    "classes that cannot be met": ("--dataset digits --exhausted exact --partition pathological --clients 7 --silos 1",
                                   "cannot be met exactly"),
    "no owners": ("--dataset digits --partition natural", "no owners"),
    "a flag without effect": ("--dataset digits --partition iid --dirichlet 0.1", "--dirichlet has no effect"),
    "sizes of natural owners": ("--dataset digits --partition natural --size-sigma 1", "--size-sigma has no effect"),
    "a negative concentration": ("--dataset digits --dirichlet -1", "expected more than 0"),
    "a seed out of range": ("--dataset digits --seed -1", "got -1, expected at least 0"),
    "a target below a file": ("--dataset digits --out MINE/out", "cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, mine, tmp_path, capsys, monkeypatch):
    line, message = MISTAKES[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    for word, path in (("MINE", mine), ("FOLDER", tmp_path / "folder"), ("JUNK", tmp_path / "junk")):
        line = line.replace(word, str(path))
    arguments = line.split() if "--out" in line else [*line.split(), "--out", str(tmp_path / "new" / "out")]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert message in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [python(), "-m", "data_prep", "--dataset", "digits", "--out", str(tmp_path / "out"), "--silos", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLCONFIGDIR": str(tmp_path / "m"),
    }
    done = subprocess.run(command, preexec_fn=limit, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr
    assert not (tmp_path / "out").exists()


def test_interrupting_leaves_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlada_mpi.data.write.write_file", interrupted)
    assert main(["--dataset", "digits", "--out", str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inspect(digits, tmp_path, capsys):
    assert inspect.main([str(digits), "--picture", str(tmp_path / "mix.png")]) == 0
    printed = capsys.readouterr().out
    assert "digits, 10 classes, 8x8x1" in printed
    assert "all 3 checksums are right" in printed
    assert (tmp_path / "mix.png").stat().st_size > 10_000
    assert inspect.main([str(tmp_path)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_bench(digits, capsys):
    assert bench.main([str(digits), "--repeats", "2"]) == 0
    assert "from the page cache" in capsys.readouterr().out


def test_importing_needs_no_torch():
    code = "import sys, data_prep; sys.exit(any(name in sys.modules for name in ('torch', 'torchvision', 'mpi4py')))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT)


@pytest.fixture
def table(tmp_path) -> Path:
    """Of a client with two rows and one with three."""
    (tmp_path / "visits.csv").write_text("cost,age,site\n1,20,a\n2,30,a\n3,40,b\n4,50,b\n5,60,b\n")
    return tmp_path / "visits.csv"


def test_a_table_from_the_command_to_its_picture(table, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--dataset", "csv", "--raw", str(table), "--target", "cost", "--client", "site", "--out", str(out)]
    assert main(words) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"silo_0001.h5", "silo_0002.h5", "manifest.json", "label_distribution.png", "raw_path"}
    with Image.open(out / "label_distribution.png") as picture:
        assert picture.width > 1000
    assert inspect.main([str(out)]) == 0
    printed = capsys.readouterr().out
    assert "csv, regression, inputs float32 [1], targets float32 []" in printed
    assert "2 test rows of their own with 2 of 2 clients" in printed
    assert bench.main([str(out), "--repeats", "1"]) == 0


def test_options_without_effect(table, tmp_path, capsys):
    for words, option in (
        (["--dataset", "digits", "--target", "x"], "target"),
        (["--dataset", "digits", "--normalise", "pooled"], "normalise"),
        (["--dataset", "text", "--raw", str(tmp_path), "--task", "regression"], "task"),
        (["--dataset", "csv", "--raw", str(table), "--target", "cost", "--length", "8"], "length"),
    ):
        assert main([*words, "--out", str(tmp_path / "x")]) == 2
        assert f"--{option} has no effect on --dataset" in capsys.readouterr().err
    assert main(["--dataset", "csv", "--raw", str(table), "--target", "cost", "--task", "survial"]) == 2
    assert "did you mean 'survival'" in capsys.readouterr().err
    assert main(["--dataset", "csv", "--raw", str(table), "--target", "cost", "--normalise", "all"]) == 2
    assert "expected one of none, pooled, client" in capsys.readouterr().err
