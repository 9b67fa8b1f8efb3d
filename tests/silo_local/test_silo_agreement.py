"""What silos agree on, from what each makes public: the same on every rank, or one line that names two of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlada_mpi.data.manifest import Stored
from fedlada_mpi.data.silos.agreement import joined, numbers_of, shared_manifest, with_statistics
from fedlada_mpi.data.silos.files import Public
from fedlada_mpi.session.run_data import Member, SiloData, _check_passed_on
from fedlada_mpi.support.errors import PublicError, UserError

IMAGES = Public(
    "a", "npz", "classification", "", 2, ("x", "y"), True, Stored("uint8", (4, 4, 1)), Stored("int64"), "none"
)
TABLE = replace(
    IMAGES, image=False, inputs=Stored("float32", (2,)), normalise="pooled", feature_names=("age", "sex=f"),
)  # fmt: skip
WORDS = replace(
    IMAGES, task="next-token", classes=5, class_names=(), image=False, inputs=Stored("int64", (7,), True, values=5),
)  # fmt: skip

REFUSED = {
    "classes": (IMAGES, {"class_names": ("y", "x")}, "silo a has the class list ['x', 'y'], and silo b ['y', 'x']"),
    "more classes": (IMAGES, {"classes": 3, "class_names": ("x", "y", "z")}, "class list"),
    "shape": (IMAGES, {"inputs": Stored("uint8", (4, 5, 1))}, "inputs 'uint8 [4, 4, 1]', and silo b 'uint8 [4, 5, 1]'"),
    "channels": (IMAGES, {"inputs": Stored("uint8", (4, 4, 3))}, "uint8 [4, 4, 3]"),
    "type": (TABLE, {"inputs": Stored("float64", (2,))}, "float64 [2]"),
    "targets": (IMAGES, {"targets": Stored("int32")}, "silo a has the targets 'int64 []'"),
    "task": (IMAGES, {"task": "multilabel"}, "give all silos the same --task"),
    "columns": (TABLE, {"feature_names": ("age", "sex=m")}, "['age', 'sex=f']"),
    "normalisation": (TABLE, {"normalise": "none"}, "give all silos the same --normalise"),
    "images": (IMAGES, {"image": False}, "kind of data"),
    "source": (IMAGES, {"dataset": "imagefolder"}, "kind of source"),
    "one name": (IMAGES, {"name": "a"}, "two silos are called a"),
    "names of inputs": (TABLE, {"inputs": {"age": Stored("float32", (2,))}}, "prepare the same arrays"),
    "width of words": (WORDS, {"inputs": Stored("int64", (7, 2), True, values=5)}, "of any length"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_silos_that_differ(name):
    first, change, message = REFUSED[name]
    for position in (1, 2):
        silos = [first, replace(first, name="c"), replace(first, name="d")]
        silos[position] = replace(first, **{"name": "b", **change})
        with pytest.raises(UserError) as raised:
            joined(silos)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_difference_far_down_a_list_is_named_without_it():
    many = tuple(f"class number {i}" for i in range(50))
    silos = [replace(IMAGES, classes=50, class_names=many), replace(IMAGES, name="b", classes=50)]
    silos[1] = replace(silos[1], class_names=(*many[:-1], "other"))
    with pytest.raises(UserError, match="silos a and b have another class list"):
        joined(silos)


def test_the_longest_rows_and_largest_tokens_of_all():
    first = replace(WORDS, targets=Stored("int8", (7,)))
    tokens = Stored("int64", (3,), True, values=900)
    other = replace(WORDS, name="b", classes=900, inputs=tokens, targets=Stored("int16", (7,)))
    for common in (joined([first, other]), joined([other, first])):
        assert common.inputs == Stored("int64", (7,), True, values=900)
        assert common.targets == Stored("int16", (7,))
        assert common.classes == 900


def test_what_all_know_has_no_sizes():
    manifest = shared_manifest(joined([TABLE, replace(TABLE, name="b")]), [2, 3])
    assert [ids.tolist() for ids in manifest.client_ids] == [[0, 1], [2, 3, 4]]
    assert (manifest.files, manifest.sizes.any(), manifest.counts.size, manifest.own_tests) == ({}, False, 0, False)
    known = with_statistics(manifest, {"": ((1.0, 2.0), (3.0, 4.0))})
    assert known.inputs.mean == (1.0, 2.0)
    assert known.about().inputs.shape == (2,)
    assert manifest.digest != shared_manifest(TABLE, [3, 2]).digest


def test_a_silo_knows_what_the_others_are_told_of_it():
    """Told that it has more clients, others would take its for those of a third silo."""
    mine = {"public": {"name": "berlin"}, "clients": 2}
    _check_passed_on([{}, mine], mine)
    with pytest.raises(PublicError, match="has not passed on what this silo says"):
        _check_passed_on([{}, {**mine, "clients": 20}], mine)


def test_draws_of_a_silo_do_not_depend_on_the_size_of_others():
    assert numbers_of(0, 3).tolist() == [0, 1, 2]
    assert numbers_of(2, 2).tolist() == [2 << 20, (2 << 20) + 1]
    assert numbers_of(2**20, 1).dtype == np.int64


@pytest.mark.parametrize("item", [
    5, [], {"public": {}}, {"public": IMAGES.record(), "clients": 0, "host": "h", "account": 1},
    {"public": IMAGES.record(), "clients": 2**21, "host": "h", "account": 1},
    {"public": IMAGES.record(), "clients": "many", "host": "h", "account": 1},
    {"public": {**IMAGES.record(), "sizes": [3]}, "clients": 1, "host": "h", "account": 1},
    {"public": IMAGES.record(), "clients": 1, "host": "h"}, {"public": None, "clients": 1, "host": "", "account": 0},
    {"public": IMAGES.record(), "clients": float("inf"), "host": "h", "account": 1},
])  # fmt: skip
def test_a_rank_may_say_anything(item):
    with pytest.raises(UserError, match="rank 3 describes no silo"):
        Member.parsed(3, item)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((("n1", 1), ("n2", 2), ("n3", 3)), []),
        ((("n1", 1), ("n2", 1), ("n3", 1)), ["silos a, b, c run as account 1 on several machines"]),
        ((("n1", 1), ("n1", 1), ("n3", 3)), ["silos a, b run as the same account (1) on n1"]),
        ((("n1", 1), ("n1", 2), ("n3", 3)), ["silos a, b share n1: whoever administers it"]),
        ((("n1", 1), ("n1", 1), ("n1", 2)), ["silos a, b run as the same account", "silos a, b, c share n1"]),
    ],
)
def test_who_could_read_whose_data(places, said):
    data = SiloData.__new__(SiloData)
    data.members = [Member(replace(IMAGES, name=n), 1, *place) for n, place in zip("abc", places, strict=True)]
    notes = data._notes()
    assert len(notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(notes, said, strict=True))
