"""Every built-in loss against a loop over single numbers in double precision, and its gradients."""

from __future__ import annotations

import math

import metric_cases
import numpy as np
import pytest
import torch
from torch.func import grad_and_value, vmap

from fedlada_mpi import settings
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks import TASKS, About, Array, Task, create

NUMBER = Array("float32")
EDGES = (1.0, 2.0, 4.0, 9.0)


def log_softmax(logits: np.ndarray, index: int) -> float:
    largest = max(logits)
    return float(logits[index]) - largest - math.log(sum(math.exp(x - largest) for x in logits))


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def classification(outputs, targets):
    return [-log_softmax(o, t) for o, t in zip(outputs, targets, strict=True)], None


def multilabel(outputs, targets):
    return [
        sum(softplus(x) - x * y for x, y in zip(o, map(float, t), strict=True)) / len(o)
        for o, t in zip(outputs, targets, strict=True)
    ], None


def regression(each):
    def loop(outputs, targets):
        rows = zip(outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1), strict=True)
        return [sum(each(x, float(y)) for x, y in zip(o, t, strict=True)) / len(o) for o, t in rows], None

    return loop


def huber(x: float, y: float) -> float:
    return 0.5 * (x - y) ** 2 if abs(x - y) < 1 else abs(x - y) - 0.5


def segmentation(outputs, targets):
    sums, counts = [], []
    for o, t in zip(outputs, targets, strict=True):
        places = [place for place in np.ndindex(t.shape) if t[place] != 255]
        sums.append(sum(-log_softmax(o[(slice(None), *place)], t[place]) for place in places))
        counts.append(len(places))
    return sums, counts


def next_token(outputs, targets):
    sums, counts = [], []
    for o, t in zip(outputs, targets, strict=True):
        sums.append(sum(-log_softmax(o[i], t[i]) for i in range(len(t)) if t[i] >= 0))
        counts.append(int((t >= 0).sum()))
    return sums, counts


def discrete(outputs, targets):
    """An event in a bin that ends at or after its time; who is censored survives the bins that end by then."""
    losses = []
    for logits, (event, time) in zip(outputs, targets, strict=True):
        loss = 0.0
        for x, end in zip(logits, EDGES, strict=True):
            if event and time <= end:
                loss += softplus(-x)
                break
            if time < end:
                break
            loss += softplus(x)
        losses.append(loss)
    return losses, None


def volumes():
    outputs, targets = metric_cases.masks()
    return outputs.reshape(6, 2, 4, 6, 5).swapaxes(1, 2), targets.reshape(6, 2, 6, 5)


def hazards():
    targets = metric_cases.lifetimes()[1][:40]
    targets[:6] = [(0, 2), (1, 2), (1, 0), (0, 0), (0, 9), (1, 9.5)]  # at the ends of bins, at once, after the last
    assert targets[:, 1].max() > EDGES[-1]
    return np.random.RandomState(0).randn(40, 4), targets


CASES = {
    "classification": ("classification", "", metric_cases.classes, classification),
    "multilabel": ("multilabel", "", metric_cases.labels, multilabel),
    "squared": ("regression", "", metric_cases.numbers, regression(lambda x, y: (x - y) ** 2)),
    "absolute": ("regression", "absolute", metric_cases.numbers, regression(lambda x, y: abs(x - y))),
    "huber": ("regression", "huber", metric_cases.numbers, regression(huber)),
    "poisson": ("regression", "poisson", metric_cases.counts, regression(lambda x, y: math.exp(x) - y * x)),
    "segmentation": ("segmentation", "", metric_cases.masks, segmentation),
    "volumes": ("segmentation", "", volumes, segmentation),
    "next-token": ("next-token", "", metric_cases.tokens, next_token),
    "discrete": ("survival", "", hazards, discrete),
}


def task_for(name: str, loss: str, outputs: np.ndarray, targets: np.ndarray) -> Task:
    classes = {"classification": 1, "segmentation": 1, "next-token": 2}.get(name)
    about = About(
        NUMBER,
        Array(str(targets.dtype), targets.shape[1:]),
        classes=outputs.shape[classes] if classes else 0,
        edges=EDGES,
    )
    return create(name, about, loss)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_loop(case):
    name, loss, make, loop = CASES[case]
    outputs, targets = make()
    task = task_for(name, loss, outputs, targets)
    task.check_targets(targets, "targets")
    assert task.outputs() == outputs.shape[1:]
    found = task.loss(torch.from_numpy(outputs), torch.from_numpy(targets))
    sums, counts = loop(outputs, targets)
    if counts is not None:
        assert found[1].tolist() == counts
        found = found[0]
    assert found.shape == (len(outputs),)
    np.testing.assert_allclose(found.numpy(), sums, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_differences(case):
    name, loss, make, _ = CASES[case]
    outputs, targets = (array[:4] for array in make())
    task = task_for(name, loss, outputs, targets)

    def total(values):
        losses = task.loss(values, torch.from_numpy(targets))
        return (losses[0] if isinstance(losses, tuple) else losses).sum()

    assert torch.autograd.gradcheck(total, torch.from_numpy(outputs).requires_grad_())


@pytest.mark.parametrize("case", CASES)
def test_an_example_does_not_depend_on_the_others(case):
    name, loss, make, _ = CASES[case]
    outputs, targets = map(torch.from_numpy, make())
    task = task_for(name, loss, outputs.numpy(), targets.numpy())
    everyone, one = task.loss(outputs, targets), task.loss(outputs[3:4], targets[3:4])
    everyone, one = (x[0] if isinstance(x, tuple) else x for x in (everyone, one))
    assert one[0].item() == pytest.approx(everyone[3].item(), rel=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_single_precision_stays_single(case):
    name, loss, make, loop = CASES[case]
    outputs, targets = make()
    task = task_for(name, loss, outputs, targets)
    found = task.loss(torch.from_numpy(outputs).float(), torch.from_numpy(targets))
    found = found if isinstance(found, tuple) else (found,)
    assert all(part.dtype == torch.float32 for part in found)
    np.testing.assert_allclose(found[0].numpy(), loop(outputs, targets)[0], rtol=1e-4, atol=1e-4)


def test_targets_of_one_number_do_not_broadcast():
    outputs, targets = torch.tensor([[1.0], [5.0]]), torch.tensor([1.0, 5.0])
    assert create("regression", About(NUMBER, Array("float32"))).loss(outputs, targets).tolist() == [0, 0]


def partial_likelihood(risks, targets, present) -> float:
    """Breslow: everyone whose time is not earlier is at risk."""
    total, events = 0.0, 0
    for i in range(len(risks)):
        if present[i] and targets[i][0]:
            at_risk = [risks[j] for j in range(len(risks)) if present[j] and targets[j][1] >= targets[i][1]]
            largest = max(at_risk)
            total += largest + math.log(sum(math.exp(x - largest) for x in at_risk)) - risks[i]
            events += 1
    return total / events if events else 0.0


def test_cox_of_padded_batches_of_several_clients():
    """Ties, padding anywhere, a client without events, one with a single example, and one without any."""
    clients, size = 6, 16
    outputs, targets = metric_cases.lifetimes(rows=clients * size)
    outputs, targets = outputs.reshape(clients, size, 1), targets.reshape(clients, size, 2)
    present = np.random.RandomState(0).rand(clients, size) < 0.7
    targets[2, :, 0] = 0
    present[3], present[4] = np.arange(size) == 5, False
    targets[3, 5, 0] = 1
    outputs[0, ~present[0]] = 50  # padding must not count, whatever it is
    task = create("survival", About(NUMBER, Array("float64", (2,))), "cox")
    assert task.outputs() == (1,)
    assert any(len(np.unique(targets[c, present[c], 1])) < present[c].sum() for c in range(clients))
    arrays = [torch.from_numpy(array) for array in (outputs, targets, present)]
    gradients, losses = vmap(grad_and_value(task.batch_loss))(*arrays)
    expected = [partial_likelihood(outputs[c, :, 0], targets[c], present[c]) for c in range(clients)]
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert expected[2:5] == [0, 0, 0]
    step = 1e-6
    for c, i in np.ndindex(clients, size):
        moved = [outputs[c, :, 0] + sign * step * (np.arange(size) == i) for sign in (1, -1)]
        up, down = (partial_likelihood(risks, targets[c], present[c]) for risks in moved)
        assert gradients[c, i, 0].item() == pytest.approx((up - down) / (2 * step), abs=1e-8)
    assert not gradients.numpy()[~present].any()


def test_cox_of_extreme_risks_is_finite():
    outputs = torch.tensor([[800.0], [-900.0], [3.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1.0, 3.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    loss = create("survival", About(NUMBER), "cox").batch_loss(outputs, targets, torch.ones(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == pytest.approx((1700 + 797) / 3)
    assert outputs.grad.isfinite().all()


def test_cox_has_no_loss_of_single_examples():
    task = create("survival", About(NUMBER), "cox")
    with pytest.raises(NotImplementedError):
        task.loss(torch.zeros(2, 1), torch.zeros(2, 2))
    assert create("survival", About(NUMBER, edges=EDGES)).batch_loss is None


@pytest.mark.parametrize("edges", [(), (2.0, 1.0), (1.0, 1.0)])
def test_discrete_survival_needs_bins(edges):
    with pytest.raises(UserError, match="ascending ends"):
        create("survival", About(NUMBER, edges=edges))


def test_unknown_names_are_refused_with_a_suggestion():
    about = About(NUMBER, Array("float32"))
    with pytest.raises(
        UserError, match=r"got 'regresion', expected one of classification, .*did you mean 'regression'"
    ):
        create("regresion", about)
    with pytest.raises(UserError, match=r"got 'Poisson' for task regression, .*did you mean 'poisson'"):
        create("regression", about, "Poisson")
    assert {task.name: tuple(task.losses) for task in TASKS.values()} == settings.TASKS
    assert create("regression", about).loss_name == "squared"
