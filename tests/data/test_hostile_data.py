"""Raw data that would fill the memory, block or go in circles is refused in one line, soon and in little memory."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hostile_data import HOSTILE, image_folder, npz
from PIL import Image

from fedlada_mpi.data.prepare import divide, prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.sources import ImageSet, bounds, load
from fedlada_mpi.support.errors import UserError

# Some of the archives take longer to make than everything else here: the campaign has them.
SLOW = ("tar_of_many_members", "tar_with_a_long_header")


@pytest.mark.parametrize(("make", "message"), [case for case in HOSTILE if case[0].__name__ not in SLOW])
def test_refused(tmp_path, make, message):
    folder = tmp_path / "raw"
    folder.mkdir()
    kind, raw = make(folder)
    tracemalloc.start()
    with pytest.raises(UserError, match=message) as refused:
        prepare(PrepareSettings(kind, tmp_path / "out", raw, clients=2, silos=1, workers=1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(refused.value).splitlines()) == 1
    assert peak < 20e6
    assert not (tmp_path / "out").exists()


def test_more_than_the_memory(tmp_path, monkeypatch):
    _, raw = npz(tmp_path)
    image_folder(tmp_path / "images")
    monkeypatch.setattr(bounds, "available_memory", lambda: 10)
    for kind, path in (("npz", raw), ("imagefolder", tmp_path / "images")):
        with pytest.raises(UserError, match=r"GB of data, but only 0\.0 GB of memory are free"):
            load(kind, path, 1)


def test_a_table_of_too_many_clients_and_classes(tmp_path):
    labels = np.arange(2**20)
    images = np.broadcast_to(np.zeros((), np.uint8), (2**20, 1, 1, 1))
    everything = ImageSet(images, labels, images[:1], labels[:1], [""] * 2**20, owners=labels)
    for settings in (dict(partition="natural"), dict(clients=2**20)):
        with pytest.raises(UserError, match=r"1048576 clients with 1048576 classes: .* GB of data"):
            divide(PrepareSettings("npz", tmp_path, **settings), everything)


def test_links_to_images_and_folders_are_followed(tmp_path):
    kind, folder = image_folder(tmp_path / "images")
    Image.new("L", (5, 4), 99).save(tmp_path / "elsewhere.png")
    (tmp_path / "more").mkdir()
    Image.new("L", (5, 4), 55).save(tmp_path / "more" / "0.png")
    (folder / "train" / "b" / "1.png").symlink_to(tmp_path / "elsewhere.png")
    (folder / "train" / "c").symlink_to(tmp_path / "more")
    images = load(kind, folder, 1)
    assert images.train_labels.tolist() == [0, 1, 1, 2]
    assert images.train_images[:, 0, 0, 0].tolist() == [7, 7, 99, 55]


def test_names_that_are_not_text(tmp_path):
    kind, folder = image_folder(tmp_path / "images")
    os.rename(os.fsencode(folder / "train" / "b" / "0.png"), os.fsencode(folder / "train" / "b") + b"/\xff.png")
    os.rename(os.fsencode(folder / "train" / "b"), os.fsencode(folder / "train") + b"/\xfe\n$\\no$")
    manifest = prepare(PrepareSettings(kind, tmp_path / "out", folder, clients=2, silos=1, partition="iid"))
    assert manifest.clients == 2
