"""Damaged shards and edited manifests: refused in one line, or the data is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from damage import DAMAGES, MANIFEST, contents, flipped, outcome
from fuzz_shards import FUZZ, Changed, check_damaged, check_edited, json_values, refusal_of_edit, with_content
from hypothesis import example, given
from hypothesis import strategies as st
from training_runs import make_data

from fedlada_mpi.data.shards import read_manifest
from fedlada_mpi.support.errors import UserError

FILES = ("silo_0001.h5", "silo_0002.h5", "test.h5")


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("damage"), [3, 2, 4], silos=2).shards


@pytest.fixture(scope="session")
def original(shards):
    return contents(shards)


@FUZZ
@given(st.sampled_from((*FILES, MANIFEST)), st.sampled_from(DAMAGES), st.integers(0, 2**32))
def test_damaged_files(shards, original, name, damage, seed):
    check_damaged(shards / name, original, damage, seed)


@pytest.mark.parametrize("name", FILES)
def test_no_flip_in_a_shard_is_accepted(shards, original, name):
    """Every 1501st bit: headers, images and labels."""
    path = shards / name
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 1501):
        with Changed(path, flipped(content, bit)):
            assert outcome(shards, original) == "refused"


@FUZZ
@given(st.integers(0, 10**6), json_values, st.booleans())
@example(0, [[]], False)
@example(0, None, True)
def test_edited_manifests(shards, original, number, value, delete):
    check_edited(shards, original, number, value, delete)


# One for each that the reader once took, or failed on with a traceback.
EDITS = {
    "classes as text": (("classes",), "3", "'classes' is '3', expected an integer"),
    "a negative number of silos": (("silos",), -1, "'silos' is -1, expected an integer from 1 to 3"),
    "more silos than clients": (("silos",), 10**9, "expected an integer from 1 to 3"),
    "fewer silos than files": (("silos",), 1, "'files' are not silo_0001.h5 to silo_0001.h5 and test.h5"),
    "another number of clients": (("clients",), 2, "'counts' is .*, expected a list of 2"),
    "images without a size": (("image_shape",), [8, 8], "'image_shape' is .*, expected a list of 3"),
    "a huge image": (("image_shape", 0), 2**40, "'bytes' of silo_0001.h5"),
    "a size of infinity": (("image_shape", 0), float("inf"), "expected an integer"),
    "a mean of NaN": (("mean", 0), float("nan"), "is nan, expected a number"),
    "another mean": (("mean", 0), 0.25, "mean .*, but .* in manifest.json"),
    "a deviation of zero": (("std", 1), 0, "expected more than 0"),
    "another deviation": (("std", 1), 0.125, "std .*, but .* in manifest.json"),
    "a count of a half": (("counts", 0, 0), 0.5, "'counts' are not 3 rows of 3 numbers"),
    "a negative count": (("counts", 0, 0), -1, "'counts' are not"),
    "a count of 2**63": (("counts", 0, 0), 2**63, "'counts' are not"),
    "nested counts": (("counts", 0, 0), [[1]], "inhomogeneous"),
    "another count": (("counts", 0, 0), 1000, "but 'counts' add up to"),
    "a file elsewhere": (("files", "../test.h5"), {}, "'files' are not"),
    "no files": (("files",), {}, "'files' are not"),
    "files as a list": (("files",), [], r"'files' is \[\], expected an object"),
    "a file that is no object": (("files", "test.h5"), 5, "test.h5 is 5, expected an object"),
    "a file of no bytes": (("files", "test.h5", "bytes"), 0, "the 'bytes' of test.h5 is 0, expected an integer from"),
    "an empty test set": (("files", "test.h5", "images"), 0, "the 'images' of test.h5 is 0"),
    "a huge test set": (("files", "test.h5", "images"), 10**11, "the 'bytes' of test.h5"),
    "another checksum": (("files", "test.h5", "sha256"), "0" * 64, "its sha256 is not that of manifest.json"),
    "no checksum": (("files", "test.h5", "sha256"), None, "the 'sha256' of test.h5 is None, expected text"),
    "a client twice": (("files", "silo_0001.h5", "client_ids"), [0, 0], "not each of 0 to 2 once"),
    "an unknown client": (("files", "silo_0001.h5", "client_ids"), [0, 9], "not each of 0 to 2 once"),
    "clients in another order": (("files", "silo_0001.h5", "client_ids"), [1, 0], "'client_ids' are not those of"),
    "an unknown partition": (("partition", "kind"), "magic", "expected one of dirichlet"),
    "another partition": (("partition", "kind"), "iid", "partition .*, but .* in manifest.json"),
    "another seed": (("seed",), 21, "seed 20, but 21 in manifest.json"),
    "a long name": (("dataset",), "a" * 5000, "expected a name"),
    "a command for a name": (("dataset",), "x; rm -r /", "expected a name"),
    "another format": (("format",), 3, "shards of format 3, expected format 1 or 2"),
    "the other format": (("format",), 2, "not a manifest of shards"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits(shards, name):
    assert "python -m data_prep" in refusal_of_edit(shards, *EDITS[name])


def test_nesting_without_end(shards):
    with Changed(shards / MANIFEST, "[" * 100_000), pytest.raises(UserError, match="not a manifest of shards"):
        read_manifest(shards)


def reversed_offsets(file: h5py.File) -> None:
    file["offsets"][:] = file["offsets"][:][::-1]


def shifted_offsets(file: h5py.File) -> None:
    file["offsets"][:] += 1


def large_label(file: h5py.File) -> None:
    file["labels"][0] = 3


def negative_label(file: h5py.File) -> None:
    file["labels"][0] = -1


def exchanged_labels(file: h5py.File) -> None:
    """Other labels of the right range: only the counts give them away."""
    file["labels"][:] = (file["labels"][:] + 1) % 3


def other_clients(file: h5py.File) -> None:
    file["client_ids"][:] += 1


def other_type(file: h5py.File) -> None:
    labels = file["labels"][:]
    del file["labels"]
    file["labels"] = labels.astype(np.uint8)


def a_group(file: h5py.File) -> None:
    del file["images"]
    file.create_group("images")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reversed_offsets, "'offsets' are not those of"),
        (shifted_offsets, "'offsets' are not those of"),
        (large_label, "labels 0 to 3, expected 0 to 2"),
        (negative_label, "labels -1 to 2, expected 0 to 2"),
        (exchanged_labels, "not as often there as 'counts'"),
        (other_clients, "'client_ids' are not those of"),
        (other_type, "'labels' is uint8"),
        (a_group, "not a shard of"),
    ],
)
def test_content_is_checked_whatever_the_checksum(shards, tmp_path, change, message):
    copy = with_content(shards, tmp_path / "copy", "silo_0001.h5", change)
    with pytest.raises(UserError, match=message):
        contents(copy)
