"""Arrays as they come from elsewhere: what a run cannot take is refused, or made to fit."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedlada_mpi.data.arrays import Data, shards
from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.shards import read_manifest, read_silos
from fedlada_mpi.data.sources.text import text_files
from fedlada_mpi.support.errors import UserError

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
ARRAYS = dict(train_inputs=X, train_targets=Y, test_inputs=X[:2], test_targets=Y[:2], train_clients=np.arange(6) % 2)


def prepared(tmp_path, changes, **settings):
    np.savez(tmp_path / "a.npz", **{**ARRAYS, **changes})
    return prepare(PrepareSettings("npz", tmp_path / "out", raw=tmp_path / "a.npz", **settings))


def test_another_byte_order(tmp_path):
    swapped = {name: ARRAYS[name].astype(">f8") for name in ("train_inputs", "test_inputs", "train_targets")}
    silo = read_silos(prepared(tmp_path, swapped), [0])
    np.testing.assert_array_equal(silo.inputs, X[::2])
    np.testing.assert_array_equal(silo.targets, Y[::2])


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        (dict(train_inputs=X * 1e37), {}, r"training inputs: got 1.1e\+38 in row 5, expected numbers up to 1e\+38"),
        (dict(test_inputs=-X[:2] * 1e200), dict(normalise="pooled"), r"test inputs: got -1e\+200 in row 0"),
        (dict(train_targets=Y * 1e99), {}, r"training targets: got 1e\+99 in row 1"),
        (dict(train_targets=np.full(6, 2**63, np.uint64), test_targets=np.zeros(2, np.uint64)),
         dict(task="regression"), r"training targets: got 9223372036854775808 in row 0, expected numbers up to 2\^63"),
        (dict(train_inputs=X.astype(object)), {}, "train_inputs has Python objects, expected numbers or text"),
        (dict(train_inputs=np.array(3.0)), {}, "train_inputs is a single value"),
        (dict(train_clients=np.array([0, 1, np.nan, 1, 0, 1])), {}, "row 2 has the owner nan"),
        (dict(train_targets=np.full((6, 2, 2), 300), test_targets=np.zeros((2, 2, 2), int)), dict(task="segmentation"),
         "masks are 300 to 300, expected the class of each pixel, 0 to 254"),
        (dict(train_targets=np.full((6, 2, 2), 255), test_targets=np.zeros((2, 2, 2), int)), dict(task="segmentation"),
         "all pixels of the masks are 255"),
    ],
)  # fmt: skip
def test_refused(tmp_path, changes, settings, words):
    with pytest.raises(UserError, match=words):
        prepared(tmp_path, changes, **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tokens", "words"), [(2**40, "got token 1099511627776, expected up to 2147483647"), (1, "")])
def test_tokens(tmp_path, tokens, words):
    rows = np.full((6, 2 if words else 1), tokens)
    np.savez(tmp_path / "a.npz", train_inputs=rows, test_inputs=rows, train_clients=np.arange(6) % 2)
    with pytest.raises(UserError, match=words or "all targets are -1, which is none, expected rows of at least 2"):
        prepare(PrepareSettings("npz", tmp_path / "out", raw=tmp_path / "a.npz"))


def test_several_inputs_are_for_python(tmp_path):
    np.savez(tmp_path / "a.npz", train_inputs_a=X, train_targets=Y, test_inputs_a=X, test_targets=Y)
    with pytest.raises(UserError, match="expected also train_inputs, test_inputs; several inputs by name: from Python"):
        prepare(PrepareSettings("npz", tmp_path / "out", raw=tmp_path / "a.npz"))


def test_texts_whose_names_are_not_utf8_are_two_clients(tmp_path):
    for name in (b"\xfe.txt", b"\xff.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"to be or not")
    assert [*text_files(tmp_path)] == ["\\xfe", "\\xff"]


def test_the_largest_numbers_are_normalised(tmp_path):
    manifest = prepared(tmp_path, dict(train_inputs=np.where(X > 5, 1e38, -1e38)), normalise="pooled")
    assert manifest.inputs.std == (1e38, 1e38)
    assert read_manifest(tmp_path / "out").inputs == manifest.inputs


def test_integers_that_fit_become_masks_and_times(tmp_path):
    masks = dict(train_targets=np.ones((6, 2, 2), int), test_targets=np.zeros((2, 2, 2), int))
    assert prepared(tmp_path, masks, task="segmentation").targets.dtype == "uint8"
    times = np.stack([np.ones(6, int), np.arange(6)], axis=1)
    changes = dict(train_targets=times, test_targets=times[:2])
    assert prepared(tmp_path, changes, task="survival", force=True).targets.dtype == "float64"


def test_integers_that_are_no_classes_need_a_task(tmp_path):
    counts = np.array([-3, 70, 5, 900, 2, 8])
    data = Data(inputs=X, targets=counts, clients=[0, 0, 0, 1, 1, 1], test=(X, counts))
    with pytest.raises(UserError, match="got class -3 in targets, expected 0 to K-1; numbers: task regression"):
        shards(data, {"data_dir": str(tmp_path)})
    manifest = read_manifest(shards(data, {"data_dir": str(tmp_path), "task": "regression"}))
    assert (manifest.task, manifest.classes, manifest.targets.dtype) == ("", 0, "int64")
    with pytest.raises(UserError, match="got class -3"):
        Data(inputs=X, targets=counts, clients=[0, 0, 0, 1, 1, 1], test=(X, counts), task="classification")


class Failing:
    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise OSError("disk")


class Endless:
    def __getitem__(self, row):
        return X[0], Y[0]


PAIRS = [*zip(X, Y, strict=True)]
NAMED = [({"a": x, "b": x}, y) for x, y in PAIRS]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"a": PAIRS, "b": Failing()}, "training data set 'b': OSError: disk"),
        (Endless(), "expected a data set for each client, by name or in a list"),
        ({"1": PAIRS, 1: PAIRS}, "got names that read the same"),
        ({("a", 1): PAIRS}, "got the name .*, expected text or an integer"),
        ({"a": [*NAMED, ({"a": X[0]}, 1.0)]}, "training inputs: got a, b in one row and a in another"),
        ({"a": [*NAMED, ({"a": X[0], "b": X[0], "c": X[0]}, 1.0)]}, "got a, b in one row and a, b, c in another"),
        ({"a": NAMED, "b": PAIRS}, "got a, b in one row and one array in another"),
    ],
)
def test_data_sets_that_do_not_fit(train, words):
    with pytest.raises(UserError, match=words):
        Data.from_datasets(train, PAIRS)


def test_the_order_of_names_is_free():
    turned = [({"b": x["b"], "a": x["a"]}, y) for x, y in NAMED]
    assert {*Data.from_datasets({"p": NAMED, "q": turned}, turned).examples.inputs} == {"a", "b"}
