"""Metrics against the values of scikit-learn 1.9.1 and lifelines 0.30.3 for the same inputs, and where undefined."""

from __future__ import annotations

import time

import metric_cases
import numpy as np
import pytest
import torch

from fedlada_mpi.tasks import About, Array, Metric, create
from fedlada_mpi.tasks.classification import OPTIONAL
from fedlada_mpi.tasks.curves import area_under_curve, concordance

NUMBER = Array("float32")
TASKS = {
    "classification": create("classification", About(NUMBER, Array("int64"), classes=4)),
    "multilabel": create("multilabel", About(NUMBER, Array("uint8", (5,)))),
    "regression": create("regression", About(NUMBER, Array("float64", (3,)))),
    "poisson": create("regression", About(NUMBER, Array("int64")), "poisson"),
    "segmentation": create("segmentation", About(NUMBER, Array("uint8", (6, 5)), classes=4)),
    "next-token": create("next-token", About(Array("int64", (7,)), Array("int64", (7,)), classes=5)),
    "cox": create("survival", About(NUMBER, Array("float64", (2,))), "cox"),
    "discrete": create("survival", About(NUMBER, Array("float64", (2,)), edges=(1, 2, 3, 5, 8, 30))),
}


def value(metric: Metric, outputs: np.ndarray, targets: np.ndarray, batches: int = 1) -> float:
    """A metric of the whole data, in ``batches`` batches where it is summed."""
    if metric.whole:
        return metric.function(outputs, targets)
    sums = None
    for o, t in zip(np.array_split(outputs, batches), np.array_split(targets, batches), strict=True):
        each = metric.function(torch.from_numpy(o), torch.from_numpy(t))
        if isinstance(each, torch.Tensor) and metric.value is None:
            each = (each, torch.ones_like(each))
        columns = torch.stack(each, 1) if isinstance(each, tuple) else each
        part = columns.double().sum(0).numpy()
        sums = part if sums is None else sums + part
    if metric.value is not None:
        return metric.value(sums)
    return sums[0] / sums[1] if sums[1] else float("nan")


@pytest.mark.parametrize(
    ("task", "case", "name", "expected"),
    [
        ("classification", metric_cases.classes(), "acc", 0.53),
        ("multilabel", metric_cases.labels(), "f1", 0.593103448275862),
        ("multilabel", metric_cases.labels(), "auc", 0.7570110208673615),
        ("regression", metric_cases.numbers(), "rmse", 0.9980500608410223),
        ("regression", metric_cases.numbers(), "mae", 0.7965236837557746),
        ("regression", metric_cases.numbers(), "r2", 0.647407400313238),
        ("poisson", metric_cases.counts(), "deviance", 1.0785837115572103),
        ("poisson", metric_cases.counts(), "rmse", 1.1627870792569106),
        ("poisson", metric_cases.counts(), "mae", 0.8836454143729149),
        ("segmentation", metric_cases.masks(), "dice", 0.5471173271173271),
        ("segmentation", metric_cases.masks(), "iou", 0.4563888888888889),
        ("next-token", metric_cases.tokens(), "perplexity", 3.187968592545083),
        ("next-token", metric_cases.tokens(), "acc", 0.5625),
        ("cox", metric_cases.lifetimes(), "cindex", 0.7359645669291338),
        ("cox", metric_cases.lifetimes(7, 2000), "cindex", 0.7236988271760215),
    ],
)
def test_metrics_are_those_of_the_reference(task, case, name, expected):
    metric = TASKS[task].metrics[name]
    for batches in (1, 3):
        assert value(metric, *case, batches) == pytest.approx(expected, abs=1e-12)


def test_optional_metrics_of_classification():
    outputs, targets = metric_cases.classes()
    assert value(OPTIONAL["balanced_acc"], outputs, targets, 3) == pytest.approx(0.5190773932812561, abs=1e-12)
    # Not rounded: whether equal probabilities come out equal depends on the last bits of exp.
    outputs, targets = metric_cases.classes(digits=9)
    assert value(OPTIONAL["auc"], outputs, targets) == pytest.approx(0.8229527793430965, abs=1e-12)
    assert list(TASKS["classification"].metrics) == ["acc"]


def test_two_classes_have_the_binary_area():
    outputs, targets = metric_cases.classes(5, 80, 2)
    difference = np.round(outputs[:, 1] - outputs[:, 0], 1)
    assert value(OPTIONAL["auc"], np.stack([0 * difference, difference], 1), targets) == pytest.approx(
        0.8479817708333333, abs=1e-12
    )


def test_one_number_per_example():
    outputs, targets = metric_cases.numbers()
    metrics = create("regression", About(NUMBER, Array("float64"))).metrics
    found = [value(metrics[name], outputs[:, :1], targets[:, 0]) for name in ("rmse", "mae", "r2")]
    assert found == pytest.approx([0.9564048130413527, 0.7707917735964209, 0.23249855063348257], abs=1e-10)


def test_discrete_risks_are_ranked_by_expected_lifetimes():
    targets = metric_cases.lifetimes()[1]
    outputs = np.random.RandomState(8).randn(300, 6) - 1 + metric_cases.lifetimes()[0] * 0.5
    assert value(TASKS["discrete"].metrics["cindex"], outputs, targets) == pytest.approx(0.6625196850393701, abs=1e-12)


def plain_concordance(times: np.ndarray, events: np.ndarray, risks: np.ndarray) -> float:
    """Every pair by itself, as the definition says."""
    good = pairs = 0.0
    for i in range(len(times)):
        for j in range(len(times)):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                pairs += 1
                good += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return good / pairs if pairs else float("nan")


@pytest.mark.parametrize("seed", range(25))
def test_concordance_of_all_pairs(seed):
    rng = np.random.RandomState(seed)
    rows = rng.randint(1, 40)
    times, risks = rng.randint(0, rng.randint(1, 12), rows), rng.randint(0, rng.randint(1, 12), rows)
    events = rng.rand(rows) < rng.rand()
    expected = plain_concordance(times, events, risks)
    assert concordance(times.astype(float), events, risks.astype(float)) == pytest.approx(expected, nan_ok=True)


def test_rankings_of_a_hundred_thousand_take_no_squares():
    rng = np.random.RandomState(0)
    risks, times, events = rng.randn(100_000), rng.exponential(size=100_000), rng.rand(100_000) < 0.5
    begin = time.process_time()
    index, area = concordance(times, events, risks), area_under_curve(risks, events)
    assert time.process_time() - begin < 5
    assert index == pytest.approx(0.5, abs=0.01)
    assert area == pytest.approx(0.5, abs=0.01)


def test_undefined_values_are_nan():
    nothing = np.zeros(3)
    assert np.isnan(area_under_curve(np.arange(3.0), np.ones(3, bool)))
    assert np.isnan(area_under_curve(np.array([0, np.nan, 1]), np.array([True, False, True])))
    assert np.isnan(concordance(np.arange(3.0), nothing, nothing))
    assert np.isnan(concordance(np.ones(3), np.ones(3), np.arange(3.0)))
    assert np.isnan(concordance(np.zeros(0), np.zeros(0), np.zeros(0)))
    assert np.isnan(value(OPTIONAL["auc"], np.random.RandomState(0).randn(5, 3), np.full(5, 2)))
    assert np.isnan(value(TASKS["multilabel"].metrics["f1"], np.full((2, 5), -1.0), np.zeros((2, 5))))
    assert np.isnan(value(TASKS["multilabel"].metrics["auc"], np.zeros((2, 5)), np.zeros((2, 5))))
    empty = np.eye(4)[[0, 0]].reshape(2, 4, 1, 1) * np.ones((1, 1, 6, 5))
    for target in (0, 255):
        assert np.isnan(value(TASKS["segmentation"].metrics["dice"], empty, np.full((2, 6, 5), target, np.uint8)))
    for name in ("perplexity", "acc"):
        assert np.isnan(value(TASKS["next-token"].metrics[name], np.zeros((2, 7, 5)), np.full((2, 7), -1)))
    assert np.isnan(OPTIONAL["balanced_acc"].value(np.zeros(8)))


def test_a_perplexity_beyond_all_numbers_is_infinite():
    outputs = np.zeros((1, 7, 5))
    outputs[..., 1] = 1e4
    assert value(TASKS["next-token"].metrics["perplexity"], outputs, np.zeros((1, 7), int)) == np.inf


def test_the_area_leaves_out_labels_that_all_or_none_have():
    outputs, targets = metric_cases.labels()
    constant = np.concatenate([targets, np.ones_like(targets[:, :1]), np.zeros_like(targets[:, :1])], 1)
    wider = np.concatenate([outputs, outputs[:, :2]], 1)
    assert value(TASKS["multilabel"].metrics["auc"], wider, constant) == pytest.approx(0.7570110208673615, abs=1e-12)


def test_r2_with_an_offset_and_of_constants():
    outputs, targets = metric_cases.numbers()
    r2 = TASKS["regression"].metrics["r2"]
    assert value(r2, outputs + 1e4, targets + 1e4) == pytest.approx(0.647407400313238, abs=1e-7)
    assert np.isnan(value(r2, outputs, np.full_like(targets, 0.1)))
    assert np.isnan(value(r2, outputs[:1], targets[:1]))
    targets[:, 1] = 0.1
    defined = value(r2, outputs, targets)
    assert defined == pytest.approx(np.mean([value(r2, outputs[:, [k]], targets[:, k]) for k in (0, 2)]), abs=1e-12)


def test_objectives_are_metrics_of_their_task():
    for task in TASKS.values():
        assert task.objective.removeprefix("-") in task.metrics
        assert all(isinstance(metric, Metric) and metric.title for metric in task.metrics.values())
