"""The validation split: which images are held out, what is written, and what is refused."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import PrepareSettings, prepare
from data_prep.__main__ import main
from fedlada_mpi.data.manifest import VALIDATION_FILE, read_manifest
from fedlada_mpi.data.partition import hold_out
from fedlada_mpi.data.shards import read_silos, read_test
from fedlada_mpi.support.errors import UserError


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_as_many_of_each_class_as_its_share(labels, share, seed):
    labels = np.array(labels)
    number = round(share * len(labels))
    if not number:
        with pytest.raises(UserError, match="which is none"):
            hold_out(share, labels, seed)
        return
    try:
        kept, held = hold_out(share, labels, seed)
    except UserError:
        # Systematic sampling takes at most one more of a class than its share.
        assert (np.bincount(labels)[np.unique(labels)] * (1 - number / len(labels)) < 1).any()
        return
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(labels)))
    assert len(held) == round(share * len(labels))
    assert set(labels[kept]) == set(labels)
    exact = np.bincount(labels) * len(held) / len(labels)
    assert np.abs(np.bincount(labels[held], minlength=len(exact)) - exact).max() < 1
    assert np.array_equal(hold_out(share, labels, seed)[1], held)


def test_the_seed_chooses():
    labels = np.arange(100) % 2
    assert not np.array_equal(hold_out(0.2, labels, 0)[1], hold_out(0.2, labels, 1)[1])
    kept, held = hold_out(0.0, labels, 0)
    assert (kept.tolist(), len(held)) == (list(range(100)), 0)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("validation")
    for share in (0.0, 0.1):
        prepare(PrepareSettings("digits", out=root / str(share), silos=2, partition="iid", validation=share))
    return root


def contents(images, labels) -> list[bytes]:
    return sorted(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def test_held_out_images_are_in_no_shard(made):
    plain, split = (read_manifest(made / share) for share in ("0.0", "0.1"))
    everything = read_silos(plain, [0, 1])
    shard, (images, labels) = read_silos(split, [0, 1]), read_test(split, name=VALIDATION_FILE)
    assert len(labels) == 150
    together = contents(np.concatenate([shard.inputs, images]), np.concatenate([shard.targets, labels]))
    assert together == contents(everything.inputs, everything.targets)
    assert contents(*read_test(split)) == contents(*read_test(plain))
    assert (plain.validation, split.validation) == (0.0, 0.1)
    assert plain.digest != split.digest
    assert np.bincount(labels).tolist() == pytest.approx(np.bincount(everything.targets) / 10, abs=1)


def test_without_one_nothing_of_it_is_written(made):
    assert "validation" not in json.loads((made / "0.0" / "manifest.json").read_text())
    assert not (made / "0.0" / VALIDATION_FILE).exists()
    with h5py.File(made / "0.0" / "test.h5") as file:
        assert "validation" not in file.attrs


def test_another_share_is_refused_and_replaced_by_force(made, capsys):
    out = made / "changed"
    words = ["--dataset", "digits", "--out", str(out), "--silos", "2"]
    assert main([*words, "--validation", "0.2"]) == 0
    assert main(words) == 2
    assert "prepared with other settings (validation 0.2 not 0.0)" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert not (out / VALIDATION_FILE).exists()
    assert read_manifest(out).validation == 0.0


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.0, "--validation: got 1.0, expected less than 1"),
        (-0.1, "--validation: got -0.1, expected at least 0"),
        (float("nan"), "--validation: got nan, expected at least 0"),
        (0.0001, "--validation: got 0.0001 of 1500 training examples, which is none: give more"),
        (0.9999, "--validation: got 0.9999, which leaves no training example of class or stratum 0: give less"),
    ],
)
def test_refused(share, words, tmp_path):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        prepare(PrepareSettings("digits", out=tmp_path / "out", validation=share))
    assert not (tmp_path / "out").exists()


def test_an_owner_keeps_an_image(tmp_path):
    random = np.random.default_rng(0)
    labels = np.arange(40) % 2
    arrays = dict(train_images=random.integers(0, 255, (40, 4, 4, 1), np.uint8), train_labels=labels)
    arrays |= dict(test_images=arrays["train_images"][:4], test_labels=labels[:4], train_clients=np.arange(40) // 2)
    np.savez(tmp_path / "raw.npz", **arrays)
    settings = dict(raw=tmp_path / "raw.npz", out=tmp_path / "out", partition="natural", silos=1)
    with pytest.raises(UserError, match=r"--validation: got 0\.8, which leaves owner \d+ no row: give less"):
        prepare(PrepareSettings("npz", validation=0.8, **settings))
    manifest = prepare(PrepareSettings("npz", validation=0.05, **settings))
    assert (manifest.clients, int(manifest.sizes.sum())) == (20, 38)
    kept = read_silos(manifest, [0]).inputs / 255
    assert manifest.mean == pytest.approx((kept.mean(),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation": 2}, "'validation' is 2, expected a share of the training examples"),
        ({"validation": "a"}, "'validation' is 'a', expected a number"),
        ({"validation": 0.0}, "'files' are not silo_0001.h5 to silo_0002.h5 and test.h5: 'validation.h5'"),
        ({"validation": 0.3}, "validation 0.1, but 0.3 in manifest.json"),
    ],
)
def test_an_edited_manifest(change, words, made, tmp_path):
    for path in (made / "0.1").iterdir():
        (tmp_path / path.name).symlink_to(path)
    text = json.loads((made / "0.1" / "manifest.json").read_text())
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        read_test(read_manifest(tmp_path), name=VALIDATION_FILE)
