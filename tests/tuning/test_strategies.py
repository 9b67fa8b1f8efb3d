"""Rungs, draws and promotions, by hand."""

import math

import pytest

from fedlada_mpi.settings import SETTINGS
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tuning.space import Choices, Range, parse
from fedlada_mpi.tuning.strategies import points, promoted, ranked, rungs, total_rounds

NAN = math.nan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((9, 90, 3), [(10, 9), (30, 3), (90, 1)]),
        ((12, 200, 3, 25), [(25, 12), (75, 4), (200, 1)]),
        ((18, 200, 3, 25), [(25, 18), (75, 6), (200, 2)]),
        ((8, 8, 2), [(1, 8), (2, 4), (4, 2), (8, 1)]),
        ((10, 100, 4), [(25, 10), (100, 2)]),  # 4 fits once into 10
        ((7, 10, 3), [(4, 7), (10, 2)]),  # the first rung rounded up
        ((2, 90, 3), [(90, 2)]),  # too few to leave any out
        ((4, 1000, 2, 10), [(10, 4), (20, 2), (1000, 1)]),  # one that is left goes on to the end
        ((9, 90, 3, 90), [(90, 9)]),
        ((5, 40), [(40, 5)]),
    ],
)
def test_rungs(arguments, expected):
    assert rungs(*arguments) == expected


def test_a_trial_that_goes_on_keeps_its_rounds():
    """9 x 10, 3 x 20 and 1 x 60."""
    assert total_rounds(rungs(9, 90, 3)) == 90 + 60 + 60


def test_the_best_first_of_equals_the_first_and_nan_last():
    scores = {0: 0.5, 1: NAN, 2: 0.7, 3: 0.5, 4: 0.7}
    assert ranked(scores, True) == [2, 4, 0, 3, 1]
    assert ranked(scores, False) == [0, 3, 2, 4, 1]
    assert promoted(scores, True, 3) == [0, 2, 4]
    assert promoted(scores, False, 1) == [0]


def test_trials_without_a_score_do_not_go_on():
    assert promoted({0: NAN, 1: 0.1, 2: NAN}, True, 2) == [1]
    assert promoted({0: NAN}, True, 1) == []


def test_a_grid_crosses_all_values_the_last_varies_fastest():
    space = {"lr": Choices((0.1, 0.2)), "clip": Choices((1, 2, 3))}
    found = [(point["lr"], point["clip"]) for point in points("grid", space, 0, 0)]
    assert found == [(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.2, 2), (0.2, 3)]


def test_a_grid_has_no_ranges():
    with pytest.raises(UserError, match=r"search\.lr: got a range, expected a list of values for strategy grid"):
        points("grid", {"lr": Range(0.1, 1.0)}, 0, 0)


def test_places_in_a_range():
    assert [Range(0.001, 10.0, log=True).draw(share) for share in (0, 0.25, 0.5, 1)] == [0.001, 0.01, 0.1, 10.0]
    assert [Range(2, 4).draw(share) for share in (0, 0.5, 1)] == [2, 3, 4]
    # Each of 1, 2, 3 has a third; both ends are taken.
    assert [Range(1, 3, whole=True).draw(share / 10) for share in range(11)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert Range(0.0, 1.0).draw(1 / 3) == 0.3333
    assert [Choices(("a", "b", "c")).draw(share) for share in (0, 0.34, 0.67, 0.999)] == ["a", "b", "c", "c"]


def test_draws_are_even_on_their_scale_and_the_same_again():
    space = {"lr": Range(0.001, 1.0, log=True), "batch_size": Range(1, 4, whole=True)}
    drawn = points("random", space, 300, 5)
    below = sum(point["lr"] < 10**-1.5 for point in drawn)
    assert 110 < below < 190  # half of 300, within four deviations
    counts = [sum(point["batch_size"] == size for point in drawn) for size in (1, 2, 3, 4)]
    assert all(45 < count < 105 for count in counts)
    assert all(type(point["batch_size"]) is int for point in drawn)
    assert points("random", space, 300, 5) == drawn != points("random", space, 300, 6)
    assert points("random", space, 10, 5) == drawn[:10]


def test_methods_draw_the_same_values_of_what_they_share():
    lr = Range(0.001, 1.0, log=True)
    one, other = points("random", {"lr": lr}, 5, 0), points("random", {"alpha": Range(0, 1), "lr": lr}, 5, 0)
    assert [point["lr"] for point in one] == [point["lr"] for point in other]


def test_no_trial_is_drawn_twice():
    space = {"a": Choices((1, 2, 3)), "b": Choices((1, 2))}
    drawn = points("halving", space, 6, 0)
    assert sorted((point["a"], point["b"]) for point in drawn) == [(a, b) for a in (1, 2, 3) for b in (1, 2)]
    with pytest.raises(UserError, match="trials: got 7, but the settings to vary have 6 combinations"):
        points("random", space, 7, 0)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lr", {"low": 0.2, "high": 0.1}, "got low 0.2 and high 0.1, expected low to be less than high"),
        ("lr", {"low": 0.1, "high": 0.1}, "expected low to be less than high"),
        ("lr", {"low": 0.1}, "high is missing"),
        ("lr", {"low": 0.1, "hihg": 0.2}, "unknown key 'hihg' (did you mean 'high'?)"),
        ("lr", {"low": 0, "high": 1}, "--lr: got 0.0, expected more than 0"),
        ("lr", {"low": "a", "high": 1}, "--lr: got 'a', expected float"),
        ("lr", {"low": 0.1, "high": float("nan")}, "--lr: got nan, expected float"),
        ("lr", {"low": 0.1, "high": 1, "log": "yes"}, "log: got 'yes', expected true or false"),
        ("weight_decay", {"low": 0, "high": 1, "log": True}, "got low 0.0 with log = true, expected more than 0"),
        ("batch_size", {"low": 1.5, "high": 4}, "--batch-size: got 1.5, expected int"),
        ("lr", {"low": 0.5, "high": 4, "int": True}, "low: got 0.5, expected an integer"),
        ("model", {"low": 0, "high": 1}, "got a range, expected a list of values, as it is no number"),
        ("lr", 0.1, "got 0.1, expected a list of values or {low = ..., high = ...}"),
        ("lr", [], "got an empty list"),
        ("lr", [0.1, 1e-1], "got 0.1 twice"),
        ("lr", [0.1, -1], "--lr: got -1.0, expected more than 0"),
        ("decay_mode", ["l2", "decopled"], "expected one of l2, decoupled, inside (did you mean 'decoupled'?)"),
    ],
)
def test_what_no_setting_can_be(name, given, message):
    with pytest.raises(UserError) as error:
        parse(name, SETTINGS[name], given)
    assert message in str(error.value)
