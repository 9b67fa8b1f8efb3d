"""The embedded data sets: shapes, clients, splits, licences, and the same bits everywhere."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest

from fedlada_mpi.data.normalise import time_edges
from fedlada_mpi.data.sources.base import ArraySet
from fedlada_mpi.data.sources.embedded import EMBEDDED, FOLDER
from fedlada_mpi.data.sources.npz import load_digits
from fedlada_mpi.tasks import About, Array, create

# Rows for training and for testing, shape of an input and of a target, clients, classes, task, loss.
SETS = {
    "randhie": (16164, 4022, (22,), (), 6, 0, "regression", "poisson"),
    "dd": (1446, 362, (12,), (2,), 22, 0, "survival", ""),
    "shakespeare": (16003, 1782, (80,), (80,), 10, 80, "next-token", ""),
    "digit-masks": (1500, 297, (1, 16, 16), (16, 16), 10, 2, "segmentation", ""),
    "digit-mosaics": (1500, 297, (1, 16, 16), (10,), 10, 0, "multilabel", ""),
}


@cache
def loaded(name: str) -> ArraySet:
    return EMBEDDED[name]()


def digest(data: ArraySet) -> str:
    """Of all arrays; names as UTF-8."""
    found = hashlib.sha256()
    for array in (data.inputs, data.targets, data.test_inputs, data.test_targets, data.owners, data.test_owners):
        if array is not None:
            found.update(
                "\n".join(array).encode() if array.dtype.kind == "U" else np.ascontiguousarray(array).tobytes()
            )
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", EMBEDDED)
def test_what_the_sets_hold(name):
    data = loaded(name)
    train, test, example, target, clients, classes, task, loss = SETS[name]
    assert data.inputs.shape == (train, *example)
    assert data.test_inputs.shape == (test, *example)
    assert data.targets.shape == (train, *target)
    assert data.test_targets.shape == (test, *target)
    assert data.test_inputs.dtype == data.inputs.dtype
    assert data.test_targets.dtype == data.targets.dtype
    assert len(data.owners) == train
    assert len(np.unique(data.owners)) == clients
    assert (len(data.class_names), data.task, data.loss, data.image) == (classes, task, loss, False)
    assert np.isfinite(data.inputs).all()
    assert np.isfinite(data.test_inputs).all()


@pytest.mark.parametrize("name", EMBEDDED)
def test_targets_are_those_of_the_task(name):
    data = loaded(name)
    edges = tuple(time_edges(data.targets)) if data.task == "survival" else ()
    example = Array(str(data.targets.dtype), data.targets.shape[1:])
    about = About(Array(str(data.inputs.dtype), data.inputs.shape[1:]), example, len(data.class_names), edges=edges)
    task = create(data.task, about, data.loss)
    task.check_targets(data.targets, name)
    task.check_targets(data.test_targets, name)


@pytest.mark.parametrize("name", ["randhie", "dd", "shakespeare"])
def test_every_client_has_its_own_test_rows(name):
    data = loaded(name)
    (owners, counts), (test_owners, test_counts) = (
        np.unique(array, return_counts=True) for array in (data.owners, data.test_owners)
    )
    assert owners.tolist() == test_owners.tolist()
    assert len(data.test_owners) == len(data.test_targets)
    share = test_counts / (counts + test_counts)
    assert share.min() > 0.09
    assert share.max() < 0.23


@pytest.mark.parametrize("name", ["randhie", "dd", "shakespeare"])
def test_terms_lie_beside_the_files(name):
    text = (FOLDER / f"{name}.LICENSE.txt").read_text()
    terms = {"randhie": "This is in the public domain.", "dd": "MIT License", "shakespeare": "creativecommons.org"}
    assert terms[name] in text
    assert (FOLDER / f"{name}.npz").stat().st_size < 600_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("randhie", "1c68aa41974a4190"),
        ("dd", "17f924b0a55c0dbb"),
        ("shakespeare", "237dd25a73000109"),
        ("digit-masks", "6b79f4f483c2bb2d"),
        ("digit-mosaics", "87dc10fd222f7eed"),
    ],
)
def test_the_bits_are_the_same_everywhere(name, expected):
    assert digest(EMBEDDED[name]()) == expected


def test_no_person_of_randhie_is_in_both_splits():
    with np.load(FOLDER / "randhie.npz") as arrays:
        person, site, test = arrays["person"], arrays["site"], arrays["test"]
        assert not set(person[test]) & set(person[~test])
        assert len(set(zip(person, site, strict=True))) == len(set(person)) == 5908
    data = loaded("randhie")
    assert data.feature_names[:4] == ["logc", "idp", "lpi", "fmde"]
    assert (data.targets.min(), data.targets.max(), data.targets.dtype) == (0, 77, np.float32)
    assert sorted(set(data.owners)) == [f"site {number}" for number in range(1, 7)]


def test_a_regime_of_dd_is_of_one_kind_on_one_continent():
    inputs = loaded("dd").inputs
    assert (inputs[:, :6].sum(1) == 1).all()
    assert (inputs[:, 6:11].sum(1) == 1).all()


def test_rows_of_shakespeare_are_the_text_again():
    data = loaded("shakespeare")
    with np.load(FOLDER / "shakespeare.npz") as arrays:
        text, starts, plays = arrays["text"].tobytes(), arrays["starts"], arrays["plays"].tolist()
    symbols = "".join(data.class_names).replace("\\n", "\n")
    assert len(symbols) == 80
    for play, start, end in zip(plays, starts, starts[1:], strict=False):
        read = ""
        for inputs, targets, owners in (
            (data.inputs, data.targets, data.owners),
            (data.test_inputs, data.test_targets, data.test_owners),
        ):
            inputs, targets = inputs[owners == play].ravel(), targets[owners == play].ravel()
            known = int((targets >= 0).sum())
            assert (targets[known:] == -1).all()
            assert (targets[:known] == inputs[1 : known + 1]).all()
            read += "".join(symbols[token] for token in inputs[: known + 1])
        assert read.encode() == text[start:end]


def test_masks_mark_the_digit_and_no_client_has_all_digits_alike():
    data, digits = loaded("digit-masks"), load_digits()
    assert set(np.unique(data.targets)) == {0, 1}
    assert (data.targets.sum((1, 2)) == (digits.train_images >= 96).sum((1, 2, 3))).all()
    # No brightness tells the two apart.
    pixels = data.inputs[:, 0]
    assert pixels[data.targets == 1].min() < np.percentile(pixels[data.targets == 0], 75)
    counts = np.stack([np.bincount(digits.train_labels[data.owners == k], minlength=10) for k in range(10)])
    assert counts.sum(1).min() > 100
    assert (counts.max(1) > 2.5 * counts.mean(1)).all()


def test_mosaics_name_the_digits_that_they_show():
    data = loaded("digit-mosaics")
    occur = data.targets.sum(1)
    assert (occur.min(), occur.max()) == (1, 4)
    shares = np.stack([data.targets[data.owners == k].mean(0) for k in range(10)])
    for client in range(10):
        assert set(np.argsort(shares[client])[-3:]) == {client, (client + 1) % 10, (client + 2) % 10}
    assert data.test_owners is None
