"""The landscape of a search: a line, a heat map, points, or parallel coordinates."""

import math

import pytest
from matplotlib.collections import PathCollection, QuadMesh

from fedlada_mpi.analysis.drawing import STYLES
from fedlada_mpi.rundir.columns import ACCURACY
from fedlada_mpi.tuning.figures import Landscape, Trial, plan
from fedlada_mpi.tuning.outcomes import Outcome
from fedlada_mpi.tuning.space import Choices, Range
from fedlada_mpi.tuning.strategies import Rung

LR, DECAY, ALPHA = Range(0.001, 1.0, log=True), Choices((0.01, 0.1)), Choices(("a", "b"))
DIVERGED = [Outcome(math.nan, "diverged")]


def drawn(space, points, courses, rungs, winner=0):
    trials = [Trial(i, point, course, None) for i, (point, course) in enumerate(zip(points, courses, strict=True))]
    ((name, draw),) = plan([Landscape("fedavg", "FedAvg", space, trials, rungs, winner, ACCURACY)])
    assert name == "landscape_fedavg"
    drawing = draw(STYLES["screen"])
    return drawing.axes[0]


def scored(*scores):
    return [Outcome(score) for score in scores]


def test_one_setting_has_a_line_for_each_rung():
    points = [{"lr": 0.1}, {"lr": 0.001}, {"lr": 1.0}, {"lr": 0.01}]
    courses = [scored(0.5, 0.9), scored(0.1), DIVERGED, scored(0.4, 0.8)]
    axes = drawn({"lr": LR}, points, courses, [Rung(1, 4), Rung(3, 2)])
    first, second, winner, failed = axes.lines
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([0.001, 0.01, 0.1], [10, 40, 50])
    assert (list(second.get_xdata()), list(second.get_ydata())) == ([0.01, 0.1], [80, 90])
    assert (winner.get_xdata(), winner.get_ydata()) == ([0.1], [90])
    assert failed.get_xdata() == [1.0]
    assert axes.get_xscale() == "log"


def test_a_grid_of_two_is_a_heat_map():
    points = [{"lr": lr, "weight_decay": decay} for lr in (1.0, 0.1) for decay in (0.01, 0.1)]
    courses = [DIVERGED, scored(0.2), scored(0.5), scored(0.25)]
    axes = drawn({"lr": Choices((1.0, 0.1)), "weight_decay": DECAY}, points, courses, [Rung(3, 4)], winner=2)
    (mesh,) = [each for each in axes.collections if isinstance(each, QuadMesh)]
    assert mesh.get_array().tolist() == [[50, None], [25, 20]]  # rates from left to right, by size
    texts = {each.get_text(): each.get_weight() for each in axes.texts}
    assert texts == {"diverged": "normal", "20.0": "normal", "50.0": "bold", "25.0": "normal"}


def test_the_title_of_a_small_heat_map_is_whole():
    points = [{"lr": lr, "weight_decay": decay} for lr in (1.0, 0.1) for decay in (0.01, 0.1)]
    space = {"lr": Choices((1.0, 0.1)), "weight_decay": DECAY}
    drawing = drawn(space, points, [scored(0.2)] * 4, [Rung(3, 4)]).figure
    drawing.canvas.draw()
    title = drawing._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= drawing.bbox.width


def test_two_settings_that_are_drawn_are_points():
    points = [{"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.5, "weight_decay": 0.1}, {"lr": 0.9, "weight_decay": 0.1}]
    axes = drawn(
        {"lr": LR, "weight_decay": DECAY}, points, [scored(0.5, 0.9), scored(0.3), DIVERGED], [Rung(1, 3), Rung(3, 1)]
    )
    found = [each for each in axes.collections if isinstance(each, PathCollection)]
    places = sorted((*each.get_offsets()[0].tolist(), each.get_array()[0]) for each in found)
    assert places == [(0.1, 0, 90), (0.5, 1, 30)]
    sizes = {each.get_array()[0]: each.get_sizes()[0] for each in found}
    assert sizes[90] > sizes[30]


@pytest.mark.parametrize("settings", [3, 4])
def test_more_settings_are_parallel_coordinates(settings):
    space = dict([("lr", LR), ("weight_decay", DECAY), ("model", ALPHA), ("clip", Range(0, 10))][:settings])
    whole = [
        {"lr": 0.1, "weight_decay": 0.01, "model": "a", "clip": 5.0},
        {"lr": 0.001, "weight_decay": 0.1, "model": "b", "clip": 0.0},
        {"lr": 1.0, "weight_decay": 0.1, "model": "b", "clip": 10.0},
    ]
    points = [{name: point[name] for name in space} for point in whole]
    axes = drawn(space, points, [scored(0.5, 0.9), scored(0.1), DIVERGED], [Rung(1, 3), Rung(3, 1)])
    lines = {len(line.get_ydata()): list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 2}
    # From the settings, each on a scale from 0 to 1, to the scores from 10 to 90 %.
    assert lines[settings + 2] == pytest.approx([*[2 / 3, 0, 0, 0.5][:settings], 0.5, 1])
    assert lines[settings + 1] == pytest.approx([*[0, 1, 1, 0][:settings], 0])
    assert lines[settings] == pytest.approx([1, 1, 1, 1][:settings])


def test_nothing_is_drawn_without_a_score():
    failed = Trial(0, {"lr": 0.1}, DIVERGED, None)
    assert plan([Landscape("fedavg", "FedAvg", {"lr": LR}, [failed], [Rung(1, 1)], None, ACCURACY)]) == []
