"""What a silo writes of its own data, what others see of it, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat

import numpy as np
import pytest
from PIL import Image
from silo_dirs import CLASS_NAMES, NAMES, make_silos

from data_prep.__main__ import main
from fedlada_mpi.data.shards import check_files, read_clients, read_test
from fedlada_mpi.data.silos.files import Public, read_private, read_public
from fedlada_mpi.support.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_silos(tmp_path_factory.mktemp("silos"), [[7, 4], [5], [6, 3, 4]])


def prepared(tmp_path, *words: object) -> int:
    return main([*map(str, words), "--out", str(tmp_path / "out")])


def photos(folder, **images: int) -> None:
    random = np.random.default_rng(0)
    for name, count in images.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")


def test_the_files_are_the_owners_alone(made):
    silo = made / "secure" / "ankara"
    assert {path.name for path in silo.iterdir()} == {"silo.h5", "test.h5", "private.json", "public.json"}
    assert stat.S_IMODE(silo.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in silo.iterdir()} == {0o600}
    assert stat.S_IMODE(silo.parent.stat().st_mode) & 0o055 == 0o055  # others pass by


def test_nothing_in_public_is_counted(made):
    """Silos with other numbers of clients, rows and labels say the same, but for their names."""
    found = [json.loads((made / "secure" / name / "public.json").read_text()) for name in NAMES]
    assert [record.pop("name") for record in found] == [*NAMES]
    assert found[0] == found[1] == found[2]
    assert found[0]["class_names"] == CLASS_NAMES


def test_the_rows_are_those_that_were_given(made):
    manifest = read_private(made / "secure" / "cairo")
    with np.load(made / "cairo.npz") as given:
        shard = read_clients(manifest, np.arange(3))
        assert np.array_equal(shard.inputs, given["train_images"])
        assert np.array_equal(shard.targets, given["train_labels"])
        assert np.array_equal(read_test(manifest)[0], given["test_images"])
    assert manifest.sizes.tolist() == [6, 3, 4]
    assert manifest.client_names == ("cairo-0", "cairo-1", "cairo-2")


def test_photos_of_some_classes(tmp_path):
    """Classes are those of the list; a single photo of one is for training."""
    photos(tmp_path / "scans", cat=10, fish=1)
    (tmp_path / "classes").write_text("ape\ncat\n\nfish \n")
    assert prepared(tmp_path, "--silo", "a", "--dataset", "imagefolder", "--raw", tmp_path / "scans",
                    "--classes", tmp_path / "classes") == 0  # fmt: skip
    manifest = read_private(tmp_path / "out")
    assert manifest.counts.tolist() == [[0, 8, 1]]
    assert read_test(manifest)[1].tolist() == [1, 1]  # --test-share 0.2
    assert manifest.clients == 1


def test_a_table_with_one_class(tmp_path):
    rows = "".join(f"{i},{i % 3},sick\n" for i in range(10))
    (tmp_path / "visits.csv").write_text("age,ward,state\n" + rows)
    (tmp_path / "classes").write_text("well\nsick\n")
    line = ["--silo", "a", "--dataset", "csv", "--raw", tmp_path / "visits.csv", "--target", "state"]
    assert prepared(tmp_path, *line, "--classes", tmp_path / "classes", "--client", "ward") == 0
    manifest = read_private(tmp_path / "out")
    assert manifest.counts[:, 0].tolist() == [0, 0, 0]
    assert manifest.clients == 3
    assert manifest.normalise == "pooled"
    assert manifest.inputs.mean == ()
    assert manifest.sums[""].count == int(manifest.sizes.sum())
    assert not manifest.own_tests


def test_numbers_of_a_list(tmp_path):
    """An .npz without names has numbers of the list."""
    inputs = np.arange(12.0).reshape(6, 2).astype(np.float32)
    np.savez(tmp_path / "a.npz", train_inputs=inputs, train_targets=[2, 2, 0, 2, 0, 2], test_inputs=inputs[:2],
             test_targets=[0, 2])  # fmt: skip
    (tmp_path / "classes").write_text("x\ny\nz\n")
    line = ["--silo", "a", "--dataset", "npz", "--raw", tmp_path / "a.npz", "--classes", tmp_path / "classes"]
    assert prepared(tmp_path, *line, "--clients", "2") == 0
    manifest = read_private(tmp_path / "out")
    assert manifest.counts.sum(axis=0).tolist() == [2, 0, 4]
    assert manifest.clients == 2


def test_preparing_again(made, tmp_path, capsys):
    (tmp_path / "classes").write_text("\n".join(CLASS_NAMES))
    line = ["--silo", "berlin", "--dataset", "npz", "--raw", made / "berlin.npz", "--classes", tmp_path / "classes"]
    assert prepared(tmp_path, *line) == 0
    assert prepared(tmp_path, *line) == 0
    assert "nothing to do" in capsys.readouterr().out
    line[1] = "oslo"
    assert prepared(tmp_path, *line) == 2
    assert "holds the silo berlin" in capsys.readouterr().err
    assert prepared(tmp_path, *line, "--force") == 0
    assert read_public(tmp_path / "out").name == "oslo"


MISTAKES = {
    "no list of classes": ("--silo a --dataset npz --raw MINE", "got no --classes"),
    "a list without names": ("--silo a --dataset npz --raw MINE --classes EMPTY", "has 0 names, expected 2"),
    "a name twice": ("--silo a --dataset npz --raw MINE --classes TWICE", "has 'left' twice"),
    "no such list": ("--silo a --dataset npz --raw MINE --classes nowhere", "nowhere cannot be read"),
    "too few names": ("--silo a --dataset npz --raw MINE --classes SHORT", "got class 2 of 2 classes"),
    "photos of another class": ("--silo a --dataset imagefolder --raw SCANS --classes LIST", "got class 'cat'"),
    "a name that is a path": ("--silo ../b --dataset npz --raw MINE --classes LIST", "--silo: got '../b'"),
    "an empty name": ("--silo= --dataset npz --raw MINE --classes LIST", "--silo: got ''"),
    "shared data": ("--silo a --dataset digits", "expected one of imagefolder"),
    "several silos": ("--silo a --silos 2 --dataset npz --raw MINE --classes LIST", "--silos has no effect"),
    "a validation set": ("--silo a --validation 0.1 --dataset npz --raw MINE --classes LIST", "--validation has no"),
    "a list without a silo": ("--dataset npz --raw MINE --classes LIST", "got no --silo"),
    "classes of a regression": ("--silo a --dataset csv --raw TABLE --target y --classes LIST", "has no effect on the"),
    "survival without bins": ("--silo a --dataset csv --raw TABLE --target died y --task survival", "got no --edges"),
    "bins that do not ascend": ("--silo a --dataset csv --raw TABLE --target died y --task survival --edges 2 1",
                                "--edges: got [2.0, 1.0]"),
    "huge numbers": ("--silo a --dataset csv --raw HUGE --target y", "numbers beyond 2^64"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, made, tmp_path, capsys, monkeypatch):
    line, message = MISTAKES[name]
    photos(tmp_path / "SCANS", cat=3)
    for file, content in {
        "LIST": "\n".join(CLASS_NAMES), "EMPTY": "\n", "TWICE": "left\nleft\nx", "SHORT": "a\nb",
        "TABLE": "x,died,y\n1,1,2\n2,0,3\n3,1,1\n4,1,2\n5,0,1\n6,1,1\n", "HUGE": "x,y\n1e30,1\n2,1\n3,1\n4,1\n5,1\n",
    }.items():  # fmt: skip
        (tmp_path / file).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert prepared(tmp_path, *line.replace("MINE", str(made / "cairo.npz")).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_directory_no_silo(made, capsys):
    assert main(["--silo", "a", "--dataset", "npz", "--raw", str(made / "cairo.npz")]) == 2
    assert "got no --out" in capsys.readouterr().err


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made / "secure" / "berlin", tmp_path / "copy")


@pytest.mark.parametrize("change", [
    {"format": 3}, {"silo": "../x"}, {"silo": 4}, {"sums": []}, {"sums": {"": {"n": -1, "x": [], "squares": []}}},
    {"sums": {"": {"n": 1, "x": [1, 2], "squares": [1, 2]}}}, {"sums": {}}, {"silos": 2}, {"sizes": [10**9]},
    {"sums": {"": {"n": 1, "x": [2**400] * 3, "squares": [0] * 3}}}, {"counts": None}, {"classes": 4}, {"files": {}},
])  # fmt: skip
def test_a_private_file_that_is_none(copy, change):
    record = json.loads((copy / "private.json").read_text())
    (copy / "private.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(UserError, match="data_prep --silo"):
        read_private(copy)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 1}', b"\xff", b"[" * 100_000, b"9" * 5000])
@pytest.mark.parametrize("file", ["private.json", "public.json"])
def test_other_content(copy, file, content):
    (copy / file).write_bytes(content)
    with pytest.raises(UserError, match="data_prep --silo"):
        read_private(copy)


@pytest.mark.parametrize("file", ["private.json", "public.json"])
def test_a_pipe_is_not_waited_for(copy, file):
    (copy / file).unlink()
    os.mkfifo(copy / file)
    with pytest.raises(UserError, match="not a regular file"):
        read_private(copy)


def test_neither_can_be_changed_alone(copy):
    record = json.loads((copy / "public.json").read_text())
    (copy / "public.json").write_text(json.dumps({**record, "task": "regression"}))
    with pytest.raises(UserError, match="says something else"):
        read_private(copy)


def test_a_file_that_was_changed(copy):
    content = bytearray((copy / "silo.h5").read_bytes())
    content[-1] ^= 1
    (copy / "silo.h5").write_bytes(content)
    manifest = read_private(copy)
    with pytest.raises(UserError, match=r"data_prep .*--silo berlin .*--force"):
        check_files(manifest, ["silo.h5"])


@pytest.mark.parametrize("change", [
    {"name": "a/b"}, {"name": ".."}, {"name": "x" * 65}, {"classes": -1}, {"classes": 10**12}, {"class_names": ["a"]},
    {"inputs": {}}, {"inputs": {"dtype": "object", "shape": [1]}}, {"inputs": {"dtype": "uint8", "shape": [2**50]}},
    {"inputs": {"dtype": "float32", "shape": [1], "mean": [0], "std": [1]}}, {"image": 1}, {"edges": ["x"]},
    {"normalise": "own"}, {"task": "a b"}, {"format": True}, {"counts": [[1]]}, {"targets": None},
])  # fmt: skip
def test_a_public_file_that_is_none(copy, change):
    record = json.loads((copy / "public.json").read_text())
    with pytest.raises(ValueError, match=r"\w"):
        Public.parsed({**record, **change})
