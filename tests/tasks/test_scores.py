"""Losses and metrics as sums over examples: their values by hand, and what a metric may not give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlada_mpi.rounds.evaluate import batch_size
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks import (
    About,
    Array,
    Metric,
    Regression,
    Task,
    create,
    next_token,
    own,
    segmentation,
    summed,
    whole,
)
from fedlada_mpi.tasks.classification import NO_CLASS, Classification, predicted
from fedlada_mpi.tasks.scores import ClassScores, Scores

ABOUT = About(Array("float32", (2,)), Array("float32"))
CLASSES = About(Array("float32", (2,)), Array("int64"), classes=3)
OUTPUTS, TARGETS = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 4.0, 1.0])


def error(outputs, targets):
    return (outputs[:, 0] - targets).abs()


class Absolute(Task):
    objective = "-loss"

    def loss(self, outputs, targets):
        return error(outputs, targets)


def scores(**metrics) -> Scores:
    task = Absolute(ABOUT)
    task.metrics = metrics
    return Scores(task, (1,))


def values(of: Scores) -> dict:
    sums = [*of.totals(OUTPUTS, TARGETS).tolist(), len(TARGETS)]
    return of.values(sums) | of.of_all(OUTPUTS.numpy(), TARGETS.numpy())


def test_a_subclass_of_a_built_in_task_is_users_code():
    """Its metrics get copies, which they may sort."""

    class Sorting(Regression):
        metrics = {"least": whole(lambda outputs, targets: targets.sort() or targets[0])}

    scores, targets = Scores(Sorting(ABOUT), (1,)), np.array([3.0, 1.0])
    assert scores.own_code
    assert scores.of_all(np.zeros((2, 1)), targets) == {"least": 1.0}
    np.testing.assert_array_equal(targets, [3.0, 1.0])


def test_a_mean_and_a_quotient_of_totals():
    above = lambda outputs, targets: (outputs[:, 0], targets)  # noqa: E731
    found = values(scores(error=error, ratio=above))
    assert found == {"loss": 2.0, "error": 2.0, "ratio": pytest.approx(8 / 6)}


def test_a_function_of_several_sums():
    pairs = lambda outputs, targets: torch.stack([outputs[:, 0] > 1.5, targets > 1.5], 1)  # noqa: E731
    of = scores(both=summed(pairs, lambda sums: sums[0] / sums[1]))
    assert of.columns == ("loss", "both.0", "both.1")
    assert values(of)["both"] == 2.0


def test_outputs_that_are_nan_are_no_class():
    """torch takes NaN for the largest: the first class was right."""
    nan, zeros = torch.tensor([[torch.nan] * 3, [1.0, torch.nan, 0.0], [3.0, 1.0, 2.0]]), torch.zeros(3, dtype=int)
    for of in (ClassScores(3), Scores(Classification(CLASSES), (3,))):
        assert of.each(nan, zeros)[1].tolist() == [0, 0, 1]
        assert of.totals(nan, zeros)[1] == 1
    assert predicted(nan).tolist() == [NO_CLASS, NO_CLASS, 0]
    hits, tokens = next_token.correct(nan[None], zeros[None])
    assert (hits.tolist(), tokens.tolist()) == ([1], [3])
    pixels = nan.T[None, :, None]
    assert [each.tolist() for each in segmentation.sizes(pixels, torch.tensor([[[0, 1, 1]]]))] == [
        [[0, 0]],
        [[0, 0]],
        [[2, 0]],
    ]


def test_a_metric_of_all_predictions_gets_numpy_arrays():
    def largest(outputs, targets):
        assert isinstance(outputs, np.ndarray) and outputs.shape == (3, 1)  # noqa: PT018
        return (outputs[:, 0] - targets).max()

    assert values(scores(largest=whole(largest)))["largest"] == 4.0


def test_no_examples_have_no_value_and_undefined_ones_are_nan():
    of = scores(ratio=lambda outputs, targets: (outputs[:, 0], targets), none=summed(
        lambda outputs, targets: outputs, lambda sums: float("nan")))  # fmt: skip
    assert of.values([0.0, 0.0, 0.0, 0.0, 0]) == {"loss": None, "ratio": None, "none": None}
    found = of.values([3.0, 1.0, 0.0, 2.0, 3])
    assert found["loss"] == 1.0
    assert math.isnan(found["ratio"])
    assert math.isnan(found["none"])


def test_values_of_many_groups_are_those_of_each():
    of = scores(error=error, ratio=lambda o, t: (o[:, 0], t), squares=summed(lambda o, t: o * o, lambda s: s[0] ** 0.5))
    groups = np.array([[6.0, 1.0, 0.0], [6.0, 1.0, 0.0], [8.0, 2.0, 0.0], [6.0, 0.0, 0.0], [9.0, 4.0, 0.0], [3, 2, 0]])
    together = of.values_by_column(groups)
    for column in range(3):
        alone = of.values(groups[:, column])
        for name, value in alone.items():
            expected = math.nan if value is None else value
            assert together[name][column] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda o, t: error(o, t).mean(), "metric bad: got [] for 2 examples, expected a number of each"),
        (lambda o, t: o, "metric bad: got [2, 1] for 2 examples, expected a number of each"),
        (lambda o, t: 3.0, "metric bad: got 3.0 for 2 examples"),
        (lambda o, t: o[:1, 0], "metric bad: got [1] for 2 examples, expected one number of each"),
        (lambda o, t: o.nothing, "metric bad: AttributeError"),
    ],
)
def test_what_is_no_metric_is_refused(metric, words):
    with pytest.raises(UserError) as found:
        scores(bad=metric)
    assert words in str(found.value)


def clamped(outputs, targets):
    targets.clamp_(max=0.0)
    return outputs[:, 0]


def scaled(outputs, targets):
    return outputs.mul_(2)[:, 0]


@pytest.mark.parametrize("metric", [clamped, scaled])
def test_a_metric_that_changes_its_arguments_is_refused(metric):
    with pytest.raises(UserError, match=r"^metric bad changes its outputs or targets in place"):
        scores(bad=metric)


def test_a_loss_that_changes_its_targets_is_refused():
    made = own.of_functions(Task, lambda o, t: (o[:, 0] - t.clamp_(max=0.0)).abs(), None, None)
    with pytest.raises(UserError, match=r"^the loss changes its outputs or targets in place"):
        Scores(made(ABOUT), (1,))


def test_a_whole_metric_may_sort_in_place():
    def sorts(outputs, targets):
        outputs.sort(0)
        targets[:] = 0
        return outputs[-1, 0]

    outputs, targets = np.array([[3.0], [1.0]]), np.array([3.0, 1.0])
    of = scores(largest=whole(sorts), error=whole(lambda o, t: np.abs(o[:, 0] - t).max()))
    assert of.of_all(outputs, targets) == {"largest": 3.0, "error": 0.0}
    assert targets.tolist() == [3.0, 1.0]


def test_a_whole_metric_that_gives_no_number_is_refused():
    of = scores(bad=whole(lambda outputs, targets: outputs))
    with pytest.raises(UserError, match=r"metric bad: got .*, expected a number"):
        of.of_all(OUTPUTS.numpy(), TARGETS.numpy())


def test_a_loss_of_batches_is_evaluated_in_the_same_ones_on_every_device():
    about = About(Array("float32", (2,)), Array("float32", (2,)), edges=(1.0, 2.0))
    discrete, cox = (Scores(create("survival", about, loss), shape) for loss, shape in (("", (2,)), ("cox", (1,))))
    devices = torch.device("cpu"), torch.device("cuda")
    assert [batch_size(discrete, device) for device in devices] == [250, 5000]
    assert [batch_size(cox, device) for device in devices] == [250, 250]


def test_objectives():
    task = Absolute(ABOUT)
    task.metrics = {"mae": error, "auc": whole(max)}
    assert own.objective_of(task) == ("loss", False)
    assert own.objective_of(task, "auc") == ("auc", True)
    assert own.objective_of(task, "-mae") == ("mae", False)
    for wrong in ("f1", "-f1"):
        with pytest.raises(UserError, match=r"--objective: got '-?f1', expected one of mae, auc, -mae, -auc, -loss"):
            own.objective_of(task, wrong)
    with pytest.raises(UserError, match="of which less is better: expected -loss"):
        own.objective_of(task, "loss")


def test_functions_from_python_become_a_task():
    made = own.of_functions(Task, error, {"mae": error, "worst": whole(max)}, "worst")
    assert issubclass(made, Task)
    assert (made.__module__, made.__qualname__) == (error.__module__, error.__qualname__)
    task = made(ABOUT)
    assert task.loss(OUTPUTS, TARGETS).tolist() == [0.0, 2.0, 4.0]
    assert own.objective_of(task) == ("worst", True)
    with pytest.raises(UserError, match="objective: got none, expected one of mae"):
        own.of_functions(type("Own", (Task,), {"objective": "acc"}), None, {"mae": error}, None)


@pytest.mark.parametrize("name", ["loss", "count", "a b", "1st", ""])
def test_names_of_metrics_are_columns(name):
    task = Absolute(ABOUT)
    task.metrics = {name: Metric(error)}
    with pytest.raises(UserError, match="metrics: got the name"):
        own.check_metrics(task)


def test_the_direction_of_a_metric_that_has_one_is_not_turned_round():
    task = Absolute(ABOUT)
    task.metrics = {"mae": Metric(error, larger_is_better=False), "f1": Metric(error, larger_is_better=True)}
    assert own.objective_of(task, "-mae") == ("mae", False)
    with pytest.raises(UserError, match="--objective: got -f1, of which more is better: expected f1"):
        own.objective_of(task, "-f1")
    with pytest.raises(UserError, match="--objective: got mae, of which less is better: expected -mae"):
        own.objective_of(task, "mae")
