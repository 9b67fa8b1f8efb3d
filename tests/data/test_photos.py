"""Folders of photos: different sizes, modes and orientations, no test folder, and what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.__main__ import main
from fedlada_mpi.data.datasets import ensure, resolve_dataset
from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.shards import read_test
from fedlada_mpi.data.sources import load
from fedlada_mpi.data.sources.imagefolder import ORIENTATION, read_photos
from fedlada_mpi.support.errors import UserError


def save(path: Path, pixels: np.ndarray | Image.Image, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)


def grey(level: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.full((height, width), level, np.uint8)


def folder(root: Path, images: int = 10, classes: tuple[str, ...] = ("a", "b")) -> Path:
    """So many grey images of each class; the level of each one is its own."""
    for label, name in enumerate(classes):
        for number in range(images):
            save(root / name / f"{number:02}.png", grey(100 * label + number))
    return root


def test_the_split_takes_a_share_of_every_class(tmp_path):
    images = load("imagefolder", folder(tmp_path, images=20), 1, test_share=0.25)
    assert np.bincount(images.train_labels).tolist() == [15, 15]
    assert np.bincount(images.test_labels).tolist() == [5, 5]
    levels = [split[:, 0, 0, 0].tolist() for split in (images.train_images, images.test_images)]
    assert sorted(levels[0] + levels[1]) == [*range(20), *range(100, 120)]
    assert (images.test_images[:, 0, 0, 0] // 100).tolist() == images.test_labels.tolist()
    assert images.class_names == ["a", "b"]
    assert images.test_share == 0.25
    again = load("imagefolder", tmp_path, 1, test_share=0.25)
    assert np.array_equal(again.test_images, images.test_images)
    few = load("imagefolder", tmp_path, 1, test_share=0.001)
    assert few.test_labels.tolist() == [0, 1]
    most = load("imagefolder", tmp_path, 1, test_share=0.999)
    assert most.train_labels.tolist() == [0, 1]


def test_resize_takes_the_middle(tmp_path):
    """The outer thirds of a wide image, and of a high one, are of another level and are cut off."""
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 8:16] = 200
    for name, pixels in (("a/0", wide), ("a/1", wide.T), ("b/0", grey(50, 4, 4)), ("b/1", grey(50, 90, 70))):
        save(tmp_path / f"{name}.png", pixels)
    images = load("imagefolder", tmp_path, 1, resize=4)
    every = np.concatenate([images.train_images, images.test_images])
    assert every.shape == (4, 4, 4, 1)
    found = np.array(sorted(every.reshape(4, -1).tolist()))
    assert found[:2].tolist() == [[50] * 16] * 2
    # The filter sees a little of what is next to the middle; squeezed, the edges would be 0.
    assert np.abs(found[2:] - 200).max() < 20


def test_photos_are_turned_upright(tmp_path):
    """With orientation 6, the rows of the file are columns from the right."""
    turned = np.zeros((6, 8, 3), np.uint8)
    turned[0] = (250, 0, 0)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    save(tmp_path / "train/a/0.png", turned, exif=exif.tobytes())
    for name in ("train/b/0.png", "test/a/0.png"):
        save(tmp_path / name, np.zeros((8, 6, 3), np.uint8))
    images = load("imagefolder", tmp_path, 1)
    assert images.train_images.shape == (2, 8, 6, 3)
    assert images.train_images[0, :, :, 0].tolist() == [[0] * 5 + [250]] * 8


def test_modes(tmp_path):
    """Palettes, transparency (white behind it), grey and CMYK in one data set."""
    red = Image.new("RGB", (4, 4), (200, 0, 0))
    half = red.convert("RGBA")
    half.putalpha(Image.fromarray(np.repeat([[0, 0, 255, 255]], 4, axis=0).astype(np.uint8)))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    files = {
        "red.png": red,
        "half.png": half,
        "p.gif": palette,
        "l.png": red.convert("L"),
        "k.jpg": red.convert("CMYK"),
    }
    for name, image in files.items():
        save(tmp_path / "train/a" / name, image)
    for name in ("train/b/0.png", "test/a/0.png"):
        save(tmp_path / name, red)
    images = load("imagefolder", tmp_path, 1)
    found = dict(zip(sorted(files), images.train_images[:5], strict=True))
    assert found["red.png"][0].tolist() == found["p.gif"][0].tolist() == [[200, 0, 0]] * 4
    assert found["half.png"][0].tolist() == [[255, 255, 255]] * 2 + [[200, 0, 0]] * 2
    assert found["l.png"][0].tolist() == [[60, 60, 60]] * 4
    assert np.abs(found["k.jpg"][0].astype(int) - [200, 0, 0]).max() < 8


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_photos_of_more_bits_are_refused(tmp_path, mode):
    """Pillow would make all that is over 255 white."""
    Image.new("L", (4, 4), 9).save(tmp_path / "grey.png")
    assert read_photos([str(tmp_path / "grey.png")], (4, 4, 1)).tolist() == [[[[9]] * 4] * 4]
    Image.new(mode, (4, 4), 300).save(tmp_path / "wide.tif")
    with pytest.raises(UserError, match=rf"wide\.tif: pixels of mode '{mode}', expected 8 bits per channel: convert"):
        read_photos([str(tmp_path / "wide.tif")], (4, 4, 1))


def test_a_file_that_is_no_image_is_named_once(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    with pytest.raises(UserError, match=r"a\.png: cannot be decoded \(cannot identify image file\), expected"):
        read_photos([str(tmp_path / "a.png")], (4, 4, 1))


def test_damaged_images_are_counted_and_named(tmp_path):
    folder(tmp_path)
    for name in ("a/03", "b/01", "b/02"):
        (tmp_path / f"{name}.png").write_text("not an image")
    with pytest.raises(UserError, match=r"\.png: cannot be decoded .* \(and 2 more of 20 images: .*\.png, .*\.png\)$"):
        load("imagefolder", tmp_path, 1)
    folder(tmp_path)
    for number in range(8):  # their headers are right, and their pixels are missing
        path = tmp_path / f"a/{number:02}.png"
        path.write_bytes(path.read_bytes()[:45])
    with pytest.raises(UserError, match=r"cannot be decoded .* more of \d+ images: .*, \.\.\.\)$"):
        load("imagefolder", tmp_path, 1)


def test_folders_that_are_refused(tmp_path):
    def fails(message: str, **options) -> None:
        with pytest.raises(UserError, match=message):
            load("imagefolder", tmp_path, 1, **options)

    save(tmp_path / "0.png", grey(1))
    fails("images without a class, expected CLASS/IMAGE")
    (tmp_path / "0.png").unlink()
    folder(tmp_path, images=1)
    fails("class 'a' has one image, expected at least 2")
    folder(tmp_path)
    (tmp_path / "c").mkdir()
    fails("c: no images, expected .*remove the folder")
    (tmp_path / "c/0.HEIC").touch()
    fails(r"c: no images among 1 files \(\.heic\), expected")
    (tmp_path / "c").rename(tmp_path / ".c")
    assert load("imagefolder", tmp_path, 1).class_names == ["a", "b"]
    save(tmp_path / "a/99.png", grey(1, 30, 20))
    fails("image of 30x20 among images of 6x8, expected one size: add --resize 32")
    for owner in ("mia", "ben"):
        folder(tmp_path / "train" / owner, images=1, classes=("a",))
    folder(tmp_path / "train/zoe", images=5, classes=("b",))
    fails("--test-share: got 0.1, which leaves owner (mia|ben) no training image")
    folder(tmp_path / "test")
    fails("--test-share has no effect: the test images are in", test_share=0.1)


def test_other_pixels_in_files_of_the_same_size_are_noticed(tmp_path):
    raw, settings = tmp_path / "raw", dict(clients=2, silos=1, dirichlet=0.3)
    for name in ("a", "b"):
        for number in range(4):
            save(raw / name / f"{number}.bmp", grey(number))
    first = prepare(PrepareSettings("imagefolder", tmp_path / "data" / "raw", raw, **settings))
    assert prepare(PrepareSettings("imagefolder", tmp_path / "data" / "raw", raw, **settings)).source == first.source
    save(raw / "b" / "3.bmp", grey(99))
    with pytest.raises(UserError, match="other raw data"):
        prepare(PrepareSettings("imagefolder", tmp_path / "data" / "raw", raw, **settings))
    resolved, directory = resolve_dataset(dict(dataset="raw", data_dir=str(tmp_path / "data"), clients=3), {})
    with pytest.raises(UserError, match="raw has changed since: prepare both from it"):
        ensure(resolved.config, directory, 1)


def test_shards_of_version_1_0_are_compared_by_names_and_sizes(tmp_path):
    """They are still the same data, of which other partitions are made, until another size is found."""
    raw, settings = tmp_path / "raw", dict(clients=2, silos=1, dirichlet=0.3)
    lines = []
    for name in ("a", "b"):
        for number in range(4):
            save(raw / name / f"{number}.bmp", grey(number))
            lines.append(f"{name}/{number}.bmp\0{(raw / name / f'{number}.bmp').stat().st_size}\n")
    out = tmp_path / "data" / "raw"
    prepare(PrepareSettings("imagefolder", out, raw, **settings))
    source = hashlib.sha256("".join(lines).encode()).hexdigest()
    written = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**written, "source": source}))
    assert prepare(PrepareSettings("imagefolder", out, raw, **settings)).source == source
    for _ in range(2):  # prepared, then found
        resolved, directory = resolve_dataset(dict(dataset="raw", data_dir=str(out.parent), clients=3), {})
        assert ensure(resolved.config, directory, 1).source == source
    (raw / "b" / "3.bmp").write_bytes((raw / "b" / "3.bmp").read_bytes() + b"0")
    with pytest.raises(UserError, match="other raw data"):
        prepare(PrepareSettings("imagefolder", out, raw, **settings))


def test_the_command_with_names_of_any_language(tmp_path, monkeypatch, capsys, recwarn):
    """Without --out, --clients and --silos; the names of folders become those of the data set and its classes."""
    folder(tmp_path / "Fotos für später", images=30, classes=("Äpfel", "日本", "b c"))
    (tmp_path / "Fotos für später/Äpfel/notes.txt").write_text("not an image")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLADA_DATA", raising=False)
    words = ["--dataset", "imagefolder", "--raw", "Fotos für später/", "--resize", "8"]
    assert main(words) == 0
    manifest = read_manifest("data/Fotos für später")
    assert manifest.class_names == ("b c", "Äpfel", "日本")
    assert (manifest.clients, manifest.silos, manifest.resize, manifest.test_share) == (4, 4, 8, 0.1)
    assert (manifest.image_shape, len(read_test(manifest)[1])) == ((8, 8, 1), 9)
    assert manifest.raw == tmp_path / "Fotos für später"
    # Files that tests before this one have left open are closed at any time.
    assert [str(w.message) for w in recwarn if w.category is not ResourceWarning] == []
    capsys.readouterr()
    assert main(words) == 0
    assert "already prepared" in capsys.readouterr().out
    assert main([*words[:-1], "9"]) == 2
    assert "resize 8 not 9" in capsys.readouterr().err
    assert main([*words, "--test-share", "0.2"]) == 2
    assert "test_share 0.1 not 0.2" in capsys.readouterr().err


MISTAKES = {
    "--dataset digits --resize 8": "--resize has no effect on --dataset digits",
    "--dataset npz --raw mine.npz --test-share 0.1": "--test-share has no effect on --dataset npz",
    "--dataset imagefolder --raw mine.npz --resize 8": "--resize has no effect on mine.npz",
    "--dataset imagefolder --raw photos --resize -3": "--resize: got -3, expected 1 to 1024",
    "--dataset imagefolder --raw photos --test-share 1": "--test-share: got 1.0, expected a share",
    "--dataset imagefolder --raw data/photos": "--out: got data/photos, in the folder of the images",
    "--dataset imagefolder --raw photos --out photos/out": "--out: got photos/out, which is in the folder",
    "--dataset imagefolder": "expected --raw PATH",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLADA_DATA", raising=False)
    np.savez("mine.npz", train_images=np.zeros((2, 2, 2), np.uint8))
    folder(Path("photos"), images=2)
    folder(Path("data/photos"), images=2)
    assert main(line.split()) == 2
    assert MISTAKES[line] in capsys.readouterr().err
