"""Damaged shards of format 2 and edited manifests of them: refused in one line, or the data is the same."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from damage import DAMAGES, MANIFEST, contents, edited
from fuzz_shards import FUZZ, Changed, check_damaged, check_edited, json_values, refusal_of_edit, with_content
from hypothesis import given
from hypothesis import strategies as st

from fedlada_mpi.data import prepare as preparation
from fedlada_mpi.data.arrays import Data
from fedlada_mpi.data.arrays import shards as written
from fedlada_mpi.data.shards import padded_inputs, read_manifest, read_silos
from fedlada_mpi.support.errors import UserError

SILO = "silo_0001.h5"


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Two clients in two files: ragged tokens and numbers with a mean, classes, and tests of the clients' own."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    inputs = {"tokens": [[1, 2], [3], [4, 5, 6], [7], [8], [9]], "values": values}
    tests = {"tokens": [[1], [2, 3], [4]], "values": values[:3]}
    data = Data(
        inputs=inputs, targets=[0, 1, 2, 0, 1, 2], clients=[[0, 1, 2], [3, 4, 5]], test=(tests, [0, 1, 2], [0, 1, 1]),
        normalise="pooled",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "draw", lambda manifest, path: path.write_bytes(b""))
        return Path(written(data, {"data_dir": str(tmp_path_factory.mktemp("arrays"))}))


@pytest.fixture(scope="session")
def original(shards):
    return contents(shards)


def test_everything_is_compared(original):
    assert {"inputs tokens values", "inputs tokens starts", "inputs values", "own inputs tokens values"} < {*original}


@FUZZ
@given(st.sampled_from((SILO, "silo_0002.h5", MANIFEST)), st.sampled_from(DAMAGES), st.integers(0, 2**32))
def test_damaged_files(shards, original, name, damage, seed):
    check_damaged(shards / name, original, damage, seed)


@FUZZ
@given(st.integers(0, 10**6), json_values, st.booleans())
def test_edited_manifests(shards, original, number, value, delete):
    check_edited(shards, original, number, value, delete)


TOKENS, VALUES = ("inputs", "tokens"), ("inputs", "values")
EDITS = {
    "objects": ((*VALUES, "dtype"), "object", "the 'dtype' of 'inputs' values is 'object', expected one of bool"),
    "another type": ((*VALUES, "dtype"), "int32", "contents .*, but .* in manifest.json"),
    "a dimension without a size": ((*VALUES, "shape"), [0], "expected an integer from 1"),
    "a huge row": (VALUES, {"dtype": "float32", "shape": [2**39]}, "'bytes' of silo_0001.h5"),
    "a shape that overflows": ((*VALUES, "shape"), [2**39, 2**39], "the 'shape' of 'inputs' values"),
    "too many dimensions": ((*VALUES, "shape"), [1] * 40, "the 'shape' of 'inputs' values"),
    "a longest row of 0": ((*TOKENS, "shape"), [0], "expected an integer from 1"),
    "another longest row": ((*TOKENS, "shape"), [2], "contents .*, but"),
    "ragged by word": ((*TOKENS, "ragged"), "yes", "is 'yes', expected true or false"),
    "means without deviations": ((*VALUES, "std"), [], "expected a list of 1 or 2"),
    "a deviation of 0": ((*VALUES, "std", 0), 0.0, "as many as 'mean', more than 0"),
    "a mean of infinity": ((*VALUES, "mean", 0), float("inf"), "is inf, expected a number"),
    "another mean": ((*VALUES, "mean", 0), 0.25, "contents .*, but"),
    "no inputs": (("inputs",), {}, "'inputs' are {}, expected arrays"),
    "a path for a name": (("inputs", "../x"), {"dtype": "int8", "shape": []}, "called '../x', expected the name"),
    "ragged targets": (("targets",), {"dtype": "int64", "shape": [3], "ragged": True}, "'targets' are ragged"),
    "images that are none": (("image",), True, "expected uint8 images"),
    "an empty client": (("sizes", 0), 0, "expected an integer from 1"),
    "a size for nobody": (("sizes",), [3, 3, 3], "expected a list of 2"),
    "other sizes": (("sizes", 0), 2, "'counts' do not add up to 'sizes'"),
    "negative tests": (("test_sizes", 0), -1, "expected an integer from 0"),
    "other tests": (("test_sizes", 0), 2, "'test_offsets' are not those of"),
    "huge tests": (("test_sizes", 0), 10**11, "'bytes' of silo_0001.h5"),
    "no tests at all": (("test_sizes",), [0, 0], "'files' are not .* and test.h5"),
    "a command for a task": (("task",), "x; rm", "expected names"),
    "another task": (("task",), "regression", "although rows have no classes"),
    "another loss": (("loss",), "poisson", "contents .*, but"),
    "an unknown normalisation": (("normalise",), "all", "expected names"),
    "more values": ((*TOKENS, "values"), 11, "contents .*, but"),
    "values without end": ((*TOKENS, "values"), 2**40, "expected an integer from 0 to"),
    "bins that do not ascend": (("edges",), [1, 3, 2], "expected each more than the one before"),
    "an option of nobody": (("reading", "exec"), "x", "expected options of data_prep"),
    "more classes": (("classes",), 4, "'class_names' is .*, expected a list|'counts' is .*|expected a list of 4"),
    "no format": (("format",), True, "shards of format True, expected format 1 or 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits(shards, name):
    refusal_of_edit(shards, *EDITS[name])


def test_no_counts(shards):
    path = shards / MANIFEST
    with (
        Changed(path, edited(path.read_text(), ("counts",), None, True)),
        pytest.raises(UserError, match="are missing"),
    ):
        read_manifest(shards)


def descending(file: h5py.File) -> None:
    file["inputs/tokens/starts"][:] = [0, 3, 2, 6]


def starting_late(file: h5py.File) -> None:
    file["inputs/tokens/starts"][0] = 1


def beyond_the_values(file: h5py.File) -> None:
    file["inputs/tokens/starts"][-1] = 2**40


def longer_than_said(file: h5py.File) -> None:
    file["inputs/tokens/starts"][:] = [0, 0, 0, 6]


def an_unstored_terabyte(file: h5py.File) -> None:
    """Values that the file declares but does not have."""
    del file["inputs/tokens/values"]
    file.create_dataset("inputs/tokens/values", (2**37,), np.int64)
    file["inputs/tokens/starts"][:] = [0, 1, 2, 2**37]


def unstored_rows(file: h5py.File) -> None:
    del file["inputs/values"]
    file.create_dataset("inputs/values", (2**31, 2), np.float32)


def nan(file: h5py.File) -> None:
    file["inputs/values"][1, 1] = np.nan


def token_beyond(file: h5py.File) -> None:
    file["inputs/tokens/values"][2] = 10


def other_class(file: h5py.File) -> None:
    file["targets"][0] = 1


def class_beyond(file: h5py.File) -> None:
    file["test/targets"][0] = 3


def no_tests(file: h5py.File) -> None:
    del file["test"]


def text(file: h5py.File) -> None:
    del file["inputs/values"]
    file["inputs/values"] = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (descending, "do not ascend"),
        (starting_late, "do not ascend"),
        (beyond_the_values, "do not ascend"),
        (longer_than_said, "has a row of 6, expected at most 3"),
        (an_unstored_terabyte, "expected at most 3|more than the file"),
        (unstored_rows, "expected float32"),
        (nan, "not finite"),
        (token_beyond, "has 1 to 10, expected 0 to 9"),
        (other_class, "not as often there as 'counts'"),
        (class_beyond, "labels 3 to 3, expected 0 to 2"),
        (no_tests, "not a shard of"),
        (text, "'inputs/values' is object"),
    ],
)
def test_content_is_checked_whatever_the_checksum(shards, tmp_path, change, message):
    copy = with_content(shards, tmp_path / "copy", SILO, change)
    tracemalloc.start()
    with pytest.raises(UserError, match=message) as refused:
        contents(copy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert len(str(refused.value).splitlines()) == 1


def test_rows_too_long_to_be_filled_up(shards, monkeypatch):
    manifest = read_manifest(shards)
    inputs = read_silos(manifest, [0]).inputs
    monkeypatch.setattr("fedlada_mpi.data.shards.available_memory", lambda: 10)
    with pytest.raises(UserError, match="3 rows, all as long as the longest of 3, are more than the memory"):
        padded_inputs(manifest.arrays, inputs)
