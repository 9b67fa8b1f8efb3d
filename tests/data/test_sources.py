"""Every raw format, read from small files made here, and every way in which such files can be wrong."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiers import slow

from fedlada_mpi.data.sources import cifar, decode, load, raw_available, statistics
from fedlada_mpi.data.sources.raw import find_raw
from fedlada_mpi.support.errors import UserError


def save_npz(path: Path, **changes) -> Path:
    arrays = dict(
        train_images=np.zeros((6, 4, 4, 3), np.uint8),
        train_labels=np.array([0, 1, 2, 0, 1, 2]),
        test_images=np.zeros((3, 4, 4, 3), np.uint8),
        test_labels=np.array([0, 1, 2]),
    )
    arrays.update(changes)
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_npz(tmp_path):
    path = save_npz(
        tmp_path / "a.npz", train_clients=np.array(list("xyxyxy")), class_names=np.array(["cat", "dog", "eel"])
    )
    images = load("npz", path, 1)
    assert images.class_names == ["cat", "dog", "eel"]
    assert images.owners.tolist() == list("xyxyxy")
    grey = save_npz(
        tmp_path / "b.npz", train_images=np.zeros((6, 4, 4), np.uint8), test_images=np.zeros((3, 4, 4), np.uint8)
    )
    assert load("npz", grey, 1).train_images.shape == (6, 4, 4, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(test_labels=None), "expected also test_labels"),
        (dict(train_images=np.zeros((6, 4, 4, 3), np.float32)), "float32, expected uint8"),
        (dict(train_images=np.zeros((6, 3, 4, 4), np.uint8)), "channels last"),
        (dict(train_images=np.zeros((5, 4, 4, 3), np.uint8)), "5 images and 6 labels"),
        (dict(train_images=np.zeros((6, 5, 4, 3), np.uint8)), "5x4x3 and test images of 4x4x3"),
        (dict(train_labels=np.zeros(6, int)), "got 1 class, expected at least 2"),
        (dict(train_labels=np.array([0, 1, 3, 0, 1, 3])), "class 2 has no training images"),
        (dict(train_labels=np.array([0, 1, -2, 0, 1, 2])), "negative"),
        (dict(train_labels=np.linspace(0, 1, 6)), "expected one integer per image"),
        (dict(test_labels=np.array([0, 1, 7])), "test label 7"),
        (dict(train_clients=np.arange(4)), "expected one owner per training image"),
        (dict(train_labels=np.array([0, 1, 2, 0, 1, None])), "has Python objects"),
        (dict(class_names=np.array(["cat"])), "but 1 class names"),
        (dict(test_images=np.zeros((0, 4, 4, 3), np.uint8), test_labels=np.zeros(0, int)), "at least one image"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load("npz", save_npz(tmp_path / "a.npz", **changes), 1)


def test_npz_cut_short(tmp_path):
    path = save_npz(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"not a complete \.npz"):
        load("npz", path, 1)


def test_npz_of_another_data_set(tmp_path):
    with pytest.raises(UserError, match="4x4x3, expected 32x32x3 for cifar10"):
        load("cifar10", save_npz(tmp_path / "a.npz"), 1)


def test_digits():
    images = load("digits", raw_available("digits", "nowhere"), 1)
    assert images.train_images.shape == (1500, 8, 8, 1)
    assert np.bincount(images.train_labels).tolist() == [150] * 10
    # The UCI test set has 178 182 177 183 181 182 181 179 174 180 digits 0 to 9.
    assert np.bincount(images.test_labels).tolist() == [28, 32, 27, 33, 31, 32, 31, 29, 24, 30]
    assert set(np.unique(images.train_images)) == {int(level * 255 / 16 + 0.5) for level in range(17)}


def test_statistics_by_hand():
    images = np.zeros((2, 1, 2, 3), np.uint8)
    images[..., 1] = 255
    images[0, 0, 0, 2] = 255
    mean, std = statistics("npz", images)
    assert mean == (0.0, 1.0, 0.25)
    assert std == pytest.approx((1.0, 1.0, 0.4330127018922193))
    assert statistics("cifar10", images) == ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 did, as in the official files."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_text(self, value):
        data = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    dispatch[str] = dispatch[bytes] = save_text

    def save_global(self, value, name=None):
        if getattr(value, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
        else:
            super().save_global(value, name)

    dispatch[type] = save_global
    dispatch[type(np.ndarray.__reduce__(np.empty(0))[0])] = save_global


def python2_pickle(value) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue()


IMAGES = np.random.RandomState(0).randint(0, 256, (25, 32, 32, 3)).astype(np.uint8)
LABELS = np.arange(25) % 10


@pytest.fixture
def official(monkeypatch) -> dict[str, bytes]:
    """Files like CIFAR-10's, of four training images each, that the loader takes for the official ones."""
    files = {}
    for number, name in enumerate((*cifar.CIFAR10.train, *cifar.CIFAR10.test)):
        part = slice(4 * number, 4 * number + 4)
        rows = IMAGES[part].transpose(0, 3, 1, 2).reshape(4, 3072)
        files[name] = python2_pickle(
            {"batch_label": name, "labels": LABELS[part].tolist(), "data": rows, "filenames": ["a"] * 4}
        )
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    train, test = ({name: sums[name] for name in names} for names in (cifar.CIFAR10.train, cifar.CIFAR10.test))
    monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, train=train, test=test, images_per_file=(4, 4)))
    return files


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_cifar_archive_and_folder(tmp_path, official):
    archive = packed(tmp_path / "cifar-10-python.tar.gz", official)
    folder = unpacked(tmp_path / "there" / "cifar-10-batches-py", official)
    for raw in (archive, tmp_path, folder, folder.parent):
        images = load("cifar10", raw, 1)
        assert np.array_equal(images.train_images, IMAGES[:20])
        assert np.array_equal(images.test_images, IMAGES[20:24])
        assert images.train_labels.tolist() == LABELS[:20].tolist()
        assert images.class_names[:2] == ["airplane", "automobile"]


def test_cifar_wrong_md5(tmp_path, official):
    official["data_batch_3"] = official["data_batch_3"][:-1] + b"x"
    for raw in (packed(tmp_path / "a.tar.gz", official), unpacked(tmp_path / "cifar-10-batches-py", official)):
        with pytest.raises(UserError, match=r"data_batch_3: md5 is .*, expected"):
            load("cifar10", raw, 1)


def test_cifar_cut_short_or_missing(tmp_path, official):
    archive = packed(tmp_path / "a.tar.gz", official)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(UserError, match="truncated or not a tar archive"):
        load("cifar10", archive, 1)
    archive.write_bytes(b"no archive at all")
    with pytest.raises(UserError, match="truncated or not a tar archive"):
        load("cifar10", archive, 1)
    del official["data_batch_2"]
    with pytest.raises(UserError, match="data_batch_2 is missing"):
        load("cifar10", packed(tmp_path / "b.tar.gz", official), 1)
    with pytest.raises(UserError, match="data_batch_2 is missing"):
        load("cifar10", unpacked(tmp_path / "cifar-10-batches-py", official), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no cifar-10-python\.tar\.gz"):
        load("cifar10", tmp_path / "empty", 1)


def test_cifar_pickles_cannot_run_code(tmp_path, official, monkeypatch):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    official["test_batch"] = pickle.dumps({"data": Attack(), "labels": []}, protocol=2)
    sums = {"test_batch": hashlib.md5(official["test_batch"]).hexdigest()}
    monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, test=sums))
    with pytest.raises(UserError, match=r"it asks for posix\.mkdir"):
        load("cifar10", unpacked(tmp_path / "cifar-10-batches-py", official), 1)
    assert not (tmp_path / "harm").exists()


def test_md5_sums_are_torchvisions():
    datasets = pytest.importorskip("torchvision.datasets")
    for ours, theirs in ((cifar.CIFAR10, datasets.CIFAR10), (cifar.CIFAR100, datasets.CIFAR100)):
        assert list(ours.train.items()) == [tuple(pair) for pair in theirs.train_list]
        assert list(ours.test.items()) == [tuple(pair) for pair in theirs.test_list]
        assert (ours.archive, ours.folder) == (theirs.filename, theirs.base_folder)


WNIDS = [f"n{number:08d}" for number in range(200)]


def jpeg(value: int, size: int = 64, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value, value // 2, 0)).save(out, "JPEG", quality=95)
    return out.getvalue()


@pytest.fixture
def tiny(tmp_path) -> Path:
    """200 classes of one training image, two validation images; class c is of grey level c."""
    root = tmp_path / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(reversed(WNIDS)))
    (root / "words.txt").write_text("".join(f"{wnid}\tthing {n}, other name\n" for n, wnid in enumerate(WNIDS)))
    for label, wnid in enumerate(WNIDS):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        (folder / f"{wnid}_0.JPEG").write_bytes(jpeg(label, mode="L"))
    (root / "val" / "images" / "val_0.JPEG").write_bytes(jpeg(100))
    (root / "val" / "images" / "val_1.JPEG").write_bytes(jpeg(40, mode="L"))
    (root / "val" / "val_annotations.txt").write_text(
        f"val_1.JPEG\t{WNIDS[40]}\t0\t0\t9\t9\nval_0.JPEG\t{WNIDS[7]}\t0\t0\t9\t9\n"
    )
    return root


def zipped(root: Path) -> Path:
    path = root.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as file:
        for item in sorted(root.rglob("*"), reverse=True):
            file.write(item, item.relative_to(root.parent))
    return path


def test_tinyimagenet(tiny):
    for raw in (tiny, tiny.parent, zipped(tiny)):
        images = load("tinyimagenet", raw, 1)
        assert images.train_images.shape == (200, 64, 64, 3)
        assert np.abs(images.train_images.mean(axis=(1, 2, 3)) - np.arange(200)).max() < 1
        assert images.train_labels.tolist() == list(range(200))
        assert images.test_labels.tolist() == [40, 7]
        assert images.test_images.mean(axis=(1, 2)).round() == pytest.approx(
            np.array([[40, 40, 40], [100, 50, 0]]), abs=2
        )
        assert images.class_names[3] == "thing 3"


def test_training_images_in_numeric_order(tiny):
    folder = tiny / "train" / WNIDS[0] / "images"
    for number in (10, 9, 2):
        (folder / f"{WNIDS[0]}_{number}.JPEG").write_bytes(jpeg(number * 20, mode="L"))
    means = load("tinyimagenet", tiny, 1).train_images[:4].mean(axis=(1, 2, 3))
    assert means == pytest.approx([0, 40, 180, 200], abs=2)


@pytest.mark.parametrize("pack", [lambda root: root, slow(zipped)])
def test_decoding_in_processes(tiny, monkeypatch, pack):
    raw = pack(tiny)
    alone = load("tinyimagenet", raw, 1)
    monkeypatch.setattr(decode, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(decode, "BATCH", 7)
    together = load("tinyimagenet", raw, 3)
    assert np.array_equal(alone.train_images, together.train_images)
    (tiny / "train" / WNIDS[5] / "images" / f"{WNIDS[5]}_0.JPEG").write_bytes(jpeg(5)[:300])
    with pytest.raises(UserError, match=f"{WNIDS[5]}_0.JPEG: cannot be decoded"):
        load("tinyimagenet", pack(tiny), 3)


def test_tinyimagenet_that_does_not_fit(tiny):
    (tiny / "val" / "images" / "val_1.JPEG").write_bytes(jpeg(1, size=32))
    with pytest.raises(UserError, match=r"val_1\.JPEG: image of 32x32 among images of 64x64"):
        load("tinyimagenet", tiny, 1)
    (tiny / "val" / "images" / "val_1.JPEG").unlink()
    with pytest.raises(UserError, match=r"val_1\.JPEG: cannot be read"):
        load("tinyimagenet", tiny, 1)
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99999999\t0\t0\t9\t9\n")
    with pytest.raises(UserError, match="line 1: got class 'n99999999'"):
        load("tinyimagenet", tiny, 1)
    (tiny / "val" / "val_annotations.txt").unlink()
    with pytest.raises(UserError, match=r"val_annotations\.txt is missing"):
        load("tinyimagenet", tiny, 1)
    archive = zipped(tiny)
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or not a zip"):
        load("tinyimagenet", archive, 1)


def save_image(path: Path, value, size=(6, 5), mode="RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_imagefolder(tmp_path):
    for number, (name, colour) in enumerate((("dog", (9, 8, 7)), ("cat", (1, 2, 3)), ("dog", (4, 4, 4)))):
        save_image(tmp_path / "train" / name / f"{number}.png", colour)
    save_image(tmp_path / "val" / "dog" / "0.png", 200, mode="L")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("not an image")
    images = load("imagefolder", tmp_path, 1)
    assert images.class_names == ["cat", "dog"]
    assert images.train_labels.tolist() == [0, 1, 1]
    assert images.train_images[:, 0, 0].tolist() == [[1, 2, 3], [9, 8, 7], [4, 4, 4]]
    assert images.test_images.shape == (1, 5, 6, 3)
    assert images.owners is None


def test_imagefolder_of_owners_and_grey(tmp_path):
    for number, (owner, name) in enumerate((("mia", "b"), ("ben", "a"), ("ben", "b"))):
        save_image(tmp_path / "train" / owner / name / "0.png", number, mode="L")
    save_image(tmp_path / "test" / "a" / "0.png", 7, mode="L")
    images = load("imagefolder", tmp_path, 1)
    assert images.owners.tolist() == ["ben", "ben", "mia"]
    assert images.train_labels.tolist() == [0, 1, 1]
    assert images.train_images[:, 0, 0, 0].tolist() == [1, 2, 0]
    assert images.train_images.shape == (3, 5, 6, 1)


def test_imagefolder_that_does_not_fit(tmp_path):
    def fails(message: str) -> None:
        with pytest.raises(UserError, match=message):
            load("imagefolder", tmp_path, 1)

    fails("no images, expected")
    (tmp_path / "test").mkdir()
    fails("no folder train/")
    save_image(tmp_path / "train" / "a" / "0.png", 1, mode="L")
    fails("test: no images")
    save_image(tmp_path / "test" / "a" / "0.png", 1, mode="L")
    fails("got 1 class")
    save_image(tmp_path / "train" / "b" / "0.png", 1, mode="L", size=(7, 5))
    fails(r"b/0\.png: image of 5x7 among images of 5x6")
    save_image(tmp_path / "train" / "b" / "0.png", 1, mode="I;16")
    fails("mode 'I;16', expected 8 bits")
    (tmp_path / "train" / "b" / "0.png").write_bytes(b"not an image")
    fails(r"b/0\.png: cannot be decoded")
    save_image(tmp_path / "train" / "b" / "0.png", 1, mode="L")
    save_image(tmp_path / "test" / "c" / "0.png", 1, mode="L")
    fails("test class 'c' has no training images")
    save_image(tmp_path / "train" / "b" / "deeper" / "0.png", 1, mode="L")
    fails("different depths")


def test_raw_available(tmp_path):
    assert raw_available("cifar10", tmp_path) is None
    places = [
        tmp_path / "cifar10.npz",
        tmp_path / "cifar10/raw/cifar-10-batches-py",
        tmp_path / "raw/cifar-10-python.tar.gz",
    ]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        assert raw_available("cifar10", tmp_path) == place
    assert raw_available("digits", tmp_path).is_file()


def test_no_raw_data(tmp_path):
    with pytest.raises(UserError, match=r"expected .*raw/tiny-imagenet-200\.zip \(from http"):
        find_raw("tinyimagenet", None, tmp_path, download=True)
    with pytest.raises(UserError, match=r"expected .*raw/cifar-10-python\.tar\.gz"):
        find_raw("cifar10", None, tmp_path, download=False)
    with pytest.raises(UserError, match="expected --raw PATH"):
        find_raw("npz", None, tmp_path, download=True)
    with pytest.raises(UserError, match="does not exist"):
        find_raw("npz", tmp_path / "a.npz", tmp_path, download=True)


def test_download_without_network(tmp_path, monkeypatch):
    utils = pytest.importorskip("torchvision.datasets.utils")

    def no_network(*arguments):
        raise OSError("no route to host")

    monkeypatch.setattr(utils, "download_url", no_network)
    with pytest.raises(UserError, match=r"cannot download .*no route to host.* --raw cifar-10-python\.tar\.gz"):
        find_raw("cifar10", None, tmp_path, download=True)
