"""Preparing and reading shards: what is in them, and that a directory holds all of them or none."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.inspect import table, verify
from fedlada_mpi.data import prepare as preparation
from fedlada_mpi.data import write
from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.shards import read_manifest, read_silos, read_test
from fedlada_mpi.data.sources import load, raw_available
from fedlada_mpi.support import disk
from fedlada_mpi.support.errors import UserError

DIGITS = load("digits", raw_available("digits", "."), 1)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here."""
    monkeypatch.setattr(preparation, "draw", lambda manifest, path: path.write_bytes(b""))


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "draw", lambda manifest, path: path.write_bytes(b""))
        prepare(PrepareSettings("digits", out, clients=7, silos=3, exhausted="exact"))
    return out


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_format(made):
    with h5py.File(made / "silo_0002.h5") as file:
        assert sorted(file) == ["client_ids", "images", "labels", "offsets"]
        assert file["images"].dtype == np.uint8
        assert file["images"].shape == (2 * 214, 8, 8, 1)
        assert file["images"].chunks is None
        assert file["labels"].dtype == file["client_ids"].dtype == file["offsets"].dtype == np.int64
        assert file["client_ids"][:].tolist() == [3, 4]
        assert file["offsets"][:].tolist() == [0, 214, 428]
        assert sorted(file.attrs) == ["classes", "dataset", "format", "mean", "partition", "seed", "std"]
        assert (file.attrs["dataset"], file.attrs["classes"], file.attrs["seed"], file.attrs["format"]) == (
            "digits",
            10,
            20,
            1,
        )
        assert json.loads(file.attrs["partition"]) == {
            "kind": "dirichlet", "dirichlet": 0.3, "exhausted": "exact", "classes_per_client": None, "size_sigma": 0.0,
        }  # fmt: skip
        assert file.attrs["mean"] == pytest.approx([DIGITS.train_images.mean() / 255])
        assert file.attrs["std"] == pytest.approx([DIGITS.train_images.std() / 255])
    assert not list(made.glob(".*"))


def test_reading(made):
    manifest = read_manifest(made)
    assert (manifest.clients, manifest.silos, manifest.image_shape) == (7, 3, (8, 8, 1))
    assert [ids.tolist() for ids in manifest.client_ids] == [[0, 1, 2], [3, 4], [5, 6]]
    assert manifest.sizes.tolist() == [214] * 7
    shard = read_silos(manifest, [2, 0], verify=True)
    assert shard.client_ids.tolist() == [5, 6, 0, 1, 2]
    assert shard.offsets.tolist() == [0, 214, 428, 642, 856, 1070]
    assert shard.inputs.flags.c_contiguous
    first = read_silos(manifest, [0])
    assert np.array_equal(shard.inputs[428:], first.inputs)
    assert np.array_equal(shard.targets[428:], first.targets)
    empty = read_silos(manifest, [])
    assert empty.inputs.shape == (0, 8, 8, 1)
    assert empty.offsets.tolist() == [0]


def test_every_image_keeps_its_label(made):
    shard = read_silos(read_manifest(made), [0, 1, 2])
    known = {image.tobytes(): label for image, label in zip(DIGITS.train_images, DIGITS.train_labels, strict=True)}
    assert [known[image.tobytes()] for image in shard.inputs] == shard.targets.tolist()
    images, labels = read_test(read_manifest(made))
    assert np.array_equal(images, DIGITS.test_images)
    assert np.array_equal(labels, DIGITS.test_labels)


def test_reading_does_not_double_the_memory(tmp_path):
    rng = np.random.RandomState(0)
    big = dict(train_images=rng.randint(0, 256, (4000, 32, 32, 3)).astype(np.uint8), train_labels=np.arange(4000) % 4)
    np.savez(tmp_path / "a.npz", **big, test_images=big["train_images"][:10], test_labels=big["train_labels"][:10])
    manifest = prepare(
        PrepareSettings("npz", tmp_path / "out", tmp_path / "a.npz", clients=4, silos=2, partition="iid")
    )
    tracemalloc.start()
    shard = read_silos(manifest, [0, 1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * (shard.inputs.nbytes + shard.targets.nbytes)


def test_bytes_of_format_1(tmp_path):
    """Those of the first version: shards of images stay the same data."""
    manifest = prepare(PrepareSettings("digits", tmp_path, clients=7, silos=3, partition="iid", validation=0.1))
    assert {name: entry["sha256"][:16] for name, entry in manifest.files.items()} == {
        "silo_0001.h5": "1d7dabca9f6df99b",
        "silo_0002.h5": "781cedc2efb0bc68",
        "silo_0003.h5": "3e98f07b96455873",
        "test.h5": "e9b33794487749d9",
        "validation.h5": "8c92fe33fbf15e4b",
    }
    text = (tmp_path / "manifest.json").read_bytes()
    assert hashlib.sha256(text).hexdigest()[:16] == "543c3fc9630b221a"


def test_two_preparations_are_byte_identical(made, tmp_path):
    prepare(PrepareSettings("digits", tmp_path / "again", clients=7, silos=3, exhausted="exact"))
    assert contents(tmp_path / "again") == contents(made)


def test_finished_shards_are_left_alone(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    messages = []
    prepare(PrepareSettings("digits", copy, clients=7, silos=3, exhausted="exact"), report=messages.append)
    assert "already prepared" in messages[0]
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seed=21), "seed 20 not 21"),
        (dict(silos=2), "silos 3 not 2"),
        (dict(clients=8), "clients 7 not 8"),
        (dict(dirichlet=0.5), "dirichlet 0.3 not 0.5"),
        (dict(partition="iid"), "kind dirichlet not iid"),
    ],
)
def test_shards_of_other_settings_are_refused(made, copy, change, message):
    settings = dict(clients=7, silos=3, exhausted="exact") | change
    with pytest.raises(UserError, match=f"{message}.*--force"):
        prepare(PrepareSettings("digits", copy, **settings))
    assert contents(copy) == contents(made)
    assert prepare(PrepareSettings("digits", copy, force=True, **settings)).silos == settings["silos"]
    assert len(list(copy.glob("silo_*.h5"))) == settings["silos"]
    verify(read_manifest(copy))


def test_changed_raw_data_is_refused(tmp_path):
    arrays = {name: getattr(DIGITS, name) for name in ("train_images", "train_labels", "test_images", "test_labels")}
    settings = PrepareSettings("npz", tmp_path / "out", tmp_path / "a.npz", clients=4, silos=2)
    np.savez(tmp_path / "a.npz", **arrays)
    prepare(settings)
    np.savez(tmp_path / "a.npz", **arrays | {"test_labels": 9 - DIGITS.test_labels})
    with pytest.raises(UserError, match="other raw data"):
        prepare(settings)
    (tmp_path / "a.npz").unlink()
    assert prepare(settings).clients == 4


def test_a_failed_preparation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "entry", fail)
    with pytest.raises(UserError, match="No space left"):
        prepare(PrepareSettings("digits", tmp_path / "new" / "digits"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_leaves_the_old_shards(made, copy, monkeypatch):
    monkeypatch.setattr(write, "entry", fail)
    with pytest.raises(UserError, match="No space left"):
        prepare(PrepareSettings("digits", copy, clients=5, silos=3, force=True))
    assert contents(copy) == contents(made)


def test_a_disk_that_fills_up_while_a_file_is_written(made, copy, monkeypatch):
    """HDF5 would crash the process, were it told."""
    left = 3

    def write_some(file, data):
        nonlocal left
        left -= 1
        if left < 0:
            file.error = OSError(28, "No space left on device")
        return io.FileIO.write(file, data)

    monkeypatch.setattr(disk._Disk, "write", write_some)
    with pytest.raises(UserError, match="No space left"):
        prepare(PrepareSettings("digits", copy, clients=5, silos=3, force=True))
    assert contents(copy) == contents(made)


def fail(*arguments):
    raise OSError(28, "No space left on device")


def test_an_interrupted_preparation_is_completed(made, copy):
    # Killed while files were put in place: no manifest yet, and the folder of a process that is no more.
    (copy / "manifest.json").unlink()
    (copy / "silo_0003.h5").unlink()
    unfinished = copy / f"{write.STAGING}{write.socket.gethostname()}-{2**22 + 1}"
    unfinished.mkdir()
    (unfinished / "silo_0003.h5").write_bytes(b"half")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        read_manifest(copy)
    prepare(PrepareSettings("digits", copy, clients=7, silos=3, exhausted="exact"))
    assert contents(copy) == contents(made)


def test_missing_files_are_made_again(made, copy):
    (copy / "silo_0001.h5").unlink()
    (copy / "test.h5").write_bytes(b"short")
    prepare(PrepareSettings("digits", copy, clients=7, silos=3, exhausted="exact"))
    assert contents(copy) == contents(made)


def test_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(UserError, match="0 MB free, expected"):
        prepare(PrepareSettings("digits", tmp_path / "digits"))
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(PrepareSettings("digits", tmp_path / "file" / "digits"))


def test_changed_bytes_are_found(copy):
    manifest = read_manifest(copy)
    with h5py.File(copy / "silo_0001.h5", "r+") as file:
        file["images"][0, 0, 0, 0] ^= 1
    with pytest.raises(UserError, match=r"silo_0001\.h5: its sha256 is not that of manifest\.json.*--force"):
        verify(manifest)


def test_missing_and_short_files(copy):
    manifest = read_manifest(copy)
    data = (copy / "silo_0001.h5").read_bytes()
    (copy / "silo_0001.h5").write_bytes(data[:-10])
    with pytest.raises(UserError, match=f"silo_0001.h5: got {len(data) - 10} bytes, expected {len(data)}: prepare it"):
        read_silos(manifest, [0])
    (copy / "silo_0001.h5").write_bytes(b"x" * len(data))
    with pytest.raises(UserError, match=r"not a shard of manifest\.json .*file signature not found"):
        read_silos(manifest, [0], verify=False)
    (copy / "silo_0001.h5").unlink()
    with pytest.raises(UserError, match=r"silo_0001\.h5: missing"):
        read_silos(manifest, [0])
    os.mkfifo(copy / "silo_0001.h5")
    with pytest.raises(UserError, match=r"silo_0001\.h5: missing, or not a regular file"):
        read_silos(manifest, [0])
    with pytest.raises(UserError, match="no silo 3, expected 0 to 2"):
        read_silos(manifest, [3])


def test_another_format_version(copy):
    with h5py.File(copy / "silo_0001.h5", "r+") as file:
        size = (copy / "silo_0001.h5").stat().st_size
        file.attrs["format"] = 2
    text = (copy / "manifest.json").read_text()
    other = text.replace(f'"bytes": {size}', f'"bytes": {(copy / "silo_0001.h5").stat().st_size}')
    (copy / "manifest.json").write_text(other)
    manifest = read_manifest(copy)
    with pytest.raises(UserError, match=r"silo_0001\.h5: .*format 2, expected format 1"):
        read_silos(manifest, [0], verify=False)
    (copy / "manifest.json").write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError, match=r"manifest\.json: shards of format 9, expected format 1"):
        read_manifest(copy)
    (copy / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=r"manifest\.json: not a manifest"):
        read_manifest(copy)


def test_datasets_that_do_not_fit(copy):
    manifest = read_manifest(copy)
    with h5py.File(copy / "silo_0001.h5", "r+") as file:
        del file["labels"]
        file["labels"] = np.zeros(3, np.int64)
    manifest.files["silo_0001.h5"]["bytes"] = (copy / "silo_0001.h5").stat().st_size
    with pytest.raises(UserError, match=r"'labels' is int64 \[3\], expected int64 \[642\]"):
        read_silos(manifest, [0], verify=False)


def test_natural_owners(tmp_path):
    train = dict(train_images=np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1), train_labels=[0, 1, 0, 1, 0, 1])
    test = dict(test_images=np.zeros((1, 1, 1, 1), np.uint8), test_labels=[0])
    np.savez(tmp_path / "a.npz", **train, **test, train_clients=["zoe", "ben", "ben", "zoe", "mia", "ben"])
    settings = dict(dataset="npz", out=tmp_path / "out", raw=tmp_path / "a.npz", partition="natural")
    manifest = prepare(PrepareSettings(**settings, silos=2))
    shard = read_silos(manifest, [0, 1])
    assert manifest.client_names == ("ben", "mia", "zoe")
    assert shard.inputs.ravel().tolist() == [1, 2, 5, 4, 0, 3]
    assert manifest.counts.tolist() == [[1, 2], [1, 0], [1, 1]]
    with pytest.raises(UserError, match="4 silos for 3 clients"):
        prepare(PrepareSettings(**settings | {"out": tmp_path / "more"}, silos=4))
    with pytest.raises(UserError, match="the data has 3 owners"):
        prepare(PrepareSettings(**settings | {"out": tmp_path / "more"}, silos=2, clients=4))


def test_table(made):
    rows = table(read_manifest(made)).splitlines()
    assert rows[3].split()[:4] == ["silo_0002.h5", "3-4", "428", "214"]
    assert rows[-1].split()[:4] == ["all", "silos", "7", "1,498"]


def test_a_clients_checksum_is_of_its_labels_and_images(made):
    manifest = read_manifest(made)
    shard = read_silos(manifest, range(manifest.silos))
    for client, expected in enumerate(manifest.client_sha256):
        here = int(np.flatnonzero(shard.client_ids == client)[0])
        rows = slice(shard.offsets[here], shard.offsets[here + 1])
        assert hashlib.sha256(shard.targets[rows].tobytes() + shard.inputs[rows].tobytes()).hexdigest() == expected


def test_owners_are_clients_unless_something_else_is_asked_for(tmp_path):
    owners = ["zoe", "ben", "ben", "zoe", "mia", "ben"]
    images = np.zeros((6, 2, 2, 1), np.uint8)
    arrays = dict(train_images=images, train_labels=[0, 1, 0, 1, 0, 1], test_images=images[:2], test_labels=[0, 1])
    np.savez(tmp_path / "owned.npz", **arrays, train_clients=owners)
    np.savez(tmp_path / "plain.npz", **arrays)
    lines: list[str] = []
    owned = dict(dataset="npz", raw=tmp_path / "owned.npz")
    manifest = prepare(PrepareSettings(**owned, out=tmp_path / "a"), lines.append)
    assert (manifest.partition["kind"], manifest.client_names) == ("natural", ("ben", "mia", "zoe"))
    assert manifest.sizes.tolist() == [3, 1, 2]
    assert lines[1].startswith("the data has owners: each is a client")
    # The same again, by default and by name.
    for partition in ("", "natural"):
        prepare(PrepareSettings(**owned, out=tmp_path / "a", partition=partition), lines.append)
        assert "already prepared" in lines[-1]
    for asked in (dict(partition="dirichlet"), dict(dirichlet=0.5), dict(size_sigma=0.1), dict(exhausted="exact")):
        other = prepare(PrepareSettings(**owned, out=tmp_path / "b", clients=2, force=True, **asked))
        assert (other.partition["kind"], other.clients) == ("dirichlet", 2)
    with pytest.raises(UserError, match="--clients: got 2, but the data has 3 owners: leave it out, or divide all"):
        prepare(PrepareSettings(**owned, out=tmp_path / "c", clients=2))
    assert not (tmp_path / "c").exists()
    plain = prepare(PrepareSettings("npz", raw=tmp_path / "plain.npz", out=tmp_path / "d", clients=2))
    assert plain.partition["kind"] == "dirichlet"
