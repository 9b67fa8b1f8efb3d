"""What is written as JSON, which has neither NaN nor infinity."""

from __future__ import annotations

from fedlada_mpi.rundir.files import to_json


def test_numbers_that_are_not_finite_are_null_and_others_stay():
    value = {"a": float("nan"), "b": [1.5, float("inf"), 2], "c": {"d": -float("inf"), "e": "x", "f": None, "g": True}}
    assert to_json(value) == '{"a": null, "b": [1.5, null, 2], "c": {"d": null, "e": "x", "f": null, "g": true}}'
    assert to_json({"b": 1.5}) == '{"b": 1.5}'
