"""Targets that a task cannot learn are refused in one line that says what was given and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks import About, Array, create

NUMBER = Array("float32")
ABOUT = {
    "classification": About(NUMBER, Array("int64"), classes=3),
    "multilabel": About(NUMBER, Array("uint8", (2,))),
    "regression": About(NUMBER, Array("float32")),
    "segmentation": About(NUMBER, Array("uint8", (2, 2)), classes=3),
    "next-token": About(Array("int64", (3,)), Array("int64", (3,)), classes=5),
    "survival": About(NUMBER, Array("float32", (2,)), edges=(1.0,)),
}
NAN, INF = float("nan"), float("inf")

REFUSED = [
    ("classification", "", [0.0, 1.0], "float64 of shape [2], expected one integer per example"),
    ("classification", "", [[0, 1]], "int64 of shape [1, 2], expected one integer"),
    ("classification", "", [True, False], "bool of shape [2]"),
    ("classification", "", [0, 3], "row 1 is 3, expected a class, 0 to 2"),
    ("classification", "", [0, 1, -1], "row 2 is -1, expected a class"),
    ("classification", "", ["a", "b"], "expected one integer"),
    ("classification", "", np.array([0, None]), "object of shape [2]"),
    ("multilabel", "", [0, 1], "expected 0 or 1 for every label, [n, labels]"),
    ("multilabel", "", [[0, 1, 1]], "shape [1, 3], expected [n, 2]"),
    ("multilabel", "", [[0, 2]], "row 0 is 2, expected 0"),
    ("multilabel", "", [[0.0, 1.0], [NAN, 1.0]], "row 1 is nan, expected a finite number"),
    ("multilabel", "", [[0.5, 1.0]], "row 0 is 0.5"),
    ("regression", "", [1.0, NAN], "row 1 is nan, expected a finite number"),
    ("regression", "", [1.0, -INF], "row 1 is -inf"),
    ("regression", "", [1.0, 1e39], "row 1 is 1e+39"),
    ("regression", "", [[1.0, 2.0]], "shape [1, 2], expected [n]"),
    ("regression", "", np.zeros((2, 2, 2)), "expected one number per example, or [n, k]"),
    ("regression", "", [True, False], "--task multilabel or classification"),
    ("regression", "", np.zeros(2, complex), "complex128"),
    ("regression", "poisson", [1, 0, -2], "row 2 is -2, expected 0 or more with --loss poisson"),
    ("segmentation", "", [[0, 1]], "expected a class for every pixel"),
    ("segmentation", "", np.zeros((2, 2, 2)), "float64 of shape [2, 2, 2], expected a class"),
    ("segmentation", "", np.zeros((2, 3, 2), int), "shape [2, 3, 2], expected [n, 2, 2]"),
    ("segmentation", "", np.full((2, 2, 2), 3, np.uint8), "row 0 is 3, expected a class, 0 to 2, or 255"),
    ("segmentation", "", np.full((2, 2, 2), -1), "row 0 is -1"),
    ("next-token", "", [0, 1], "integers [n, length]"),
    ("next-token", "", [[0, 1, 5]], "row 0 is 5, expected a token, 0 to 4, or -1"),
    ("next-token", "", [[0, 1, -2]], "row 0 is -2"),
    ("next-token", "", [[0, 1]], "shape [1, 2], expected [n, 3]"),
    ("survival", "", [1.0, 2.0], "expected event (1, or 0: censored) and time"),
    ("survival", "", [[1.0, 2.0, 3.0]], "expected two columns"),
    ("survival", "", [[1.0, NAN]], "row 0 is nan"),
    ("survival", "", [[0.0, 1.0], [12.0, 1.0]], "row 1 is 12.0, expected 0 (censored) or 1 (event) first"),
    ("survival", "cox", [[0.0, -1.0]], "row 0 is -1.0, expected a time of 0 or more"),
]


@pytest.mark.parametrize(("task", "loss", "targets", "message"), REFUSED)
def test_hostile_targets_are_refused(task, loss, targets, message):
    with pytest.raises(UserError) as error:
        create(task, ABOUT[task], loss).check_targets(np.asarray(targets), "mine.npz: train")
    text = str(error.value)
    assert text.startswith("mine.npz: train: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("task", "loss", "targets"),
    [
        ("classification", "", np.array([0, 2, 1], np.uint8)),
        ("multilabel", "", np.array([[True, False]])),
        ("multilabel", "", np.array([[1.0, 0.0]], np.float16)),
        ("regression", "", np.array([3, -4], np.int16)),
        ("regression", "poisson", np.array([0.0, 2.5])),
        ("segmentation", "", np.array([[[0, 1], [2, 255]]], np.uint8)),
        ("next-token", "", np.array([[0, 4, -1]], np.int16)),
        ("next-token", "", np.array([[0, 4, 1]], np.uint8)),
        ("survival", "", np.array([[0, 3], [1, 0]])),
        ("survival", "cox", np.array([[0.0, 3.5]], np.float32)),
    ],
)
def test_targets_of_other_types_are_taken(task, loss, targets):
    made = create(task, ABOUT[task], loss)
    made.check_targets(targets, "mine")
    made.check_targets(targets[:0], "mine")


def test_outputs_are_unknown_where_the_data_is():
    for name in ("classification", "multilabel", "regression", "segmentation", "next-token"):
        assert create(name, About({"a": NUMBER})).outputs() is None
    assert create("regression", ABOUT["regression"]).outputs() == (1,)
    assert create("regression", About(NUMBER, Array("float32", (4,)))).outputs() == (4,)
    assert create("next-token", About(Array("int64", (8,)), classes=9)).outputs() == (8, 9)
    assert create("segmentation", ABOUT["segmentation"]).outputs() == (3, 2, 2)
    assert create("survival", ABOUT["survival"]).outputs() == (1,)
