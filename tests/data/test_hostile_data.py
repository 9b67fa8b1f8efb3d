"""Raw data that would fill the memory, block or go in circles is refused in one line, soon and in little memory."""

from __future__ import annotations

import json
import os
import tracemalloc

import numpy as np
import pytest
from hostile_data import HOSTILE, image_folder, npz
from PIL import Image

from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.data.prepare import divide, prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.sources import ImageSet, bounds, load
from fedlada_mpi.rundir.client_values import CLIENTS, Clients, ClientValues, latest
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


def test_owners_whose_names_are_not_text(tmp_path):
    """Folders in latin-1, and what version 1.0.0 wrote of them: the names are text for all that is written later."""
    for place in (b"train/M\xfcller/a", b"train/M\xfcller/b", b"train/\xfe/a", b"test/a"):
        folder = tmp_path / "raw" / os.fsdecode(place)
        folder.mkdir(parents=True)
        Image.new("L", (5, 4), 7).save(folder / "0.png")
    manifest = prepare(PrepareSettings("imagefolder", tmp_path / "out", tmp_path / "raw"))
    assert manifest.client_names == ("M\\xfcller", "\\xfe")
    path = tmp_path / "out" / "manifest.json"
    written = json.loads(path.read_text())
    assert written["client_names"] == [*manifest.client_names]
    path.write_text(json.dumps({**written, "client_names": ["\udcfe", "\ud800\0"]}))
    names = read_manifest(tmp_path / "out").client_names
    assert names == ("\\xfe", "\\ud800\\x00")
    values = ClientValues(tmp_path, 0, Clients(np.ones(2, int), np.ones(2, int), names=names))
    values.append(1, {name: [0.5, 0.5] for name in values.values})
    values.write()
    assert latest(tmp_path / CLIENTS, 1)["names"].tolist() == [*names]
