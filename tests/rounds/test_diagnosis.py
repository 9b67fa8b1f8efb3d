"""--diagnose: its numbers compared with hand-worked ones and with the float64 reference, on any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ranks import barrier, is_root
from training_runs import Run, arguments, make_data, run_here, run_reference, same

from fedlada_mpi.data.owners import Ownership, shared_out
from fedlada_mpi.rounds.watchers.diagnosis import Objective
from fedlada_mpi.run import main
from fedlada_mpi.rundir.columns import DIAGNOSED
from fedlada_mpi.session import training
from fedlada_mpi.support import rng

SIZES = [4, 6, 5, 3, 9]
ROUNDS = 4
COMMON = dict(rounds=ROUNDS, diagnose=1, local_steps=3, lr=0.05, weight_decay=0.02, clip=0)
CASES = {
    "fedavg": dict(participation=0.6),
    "scaffold": dict(weighting="size", server_lr=0.7),
    "fedcm": dict(alpha=0.3, participation=0.6, lr_decay=0.9),
    "fedadam_amended": dict(alpha=0.3, server_lr=0.1, eps=0.01),
    "localadam": dict(lr=0.01, decay_mode="decoupled"),
    "fedlada": dict(lr=0.01, alpha=0.25, participation=0.6, server_lr=1.3, decay_mode="decoupled"),
}


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "diagnose", SIZES, silos=4)


def cosine(a, b) -> float | None:
    norms = math.sqrt(a @ a) * math.sqrt(b @ b)
    return a @ b / norms if norms else None


def pooled(data, x, weighting="uniform"):
    """The gradient of the global objective, by autograd on each client's images."""
    weights = np.array(data.sizes if weighting == "size" else [1] * len(data.sizes), float)
    return sum(w * gradient(x) for w, gradient in zip(weights / weights.sum(), data.gradients, strict=True))


def check(records, expected) -> None:
    for record, numbers in zip(records, expected, strict=True):
        assert set(numbers) == set(DIAGNOSED)
        for name, value in numbers.items():
            if value is None:
                assert record[name] is None, name
            else:
                assert record[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (record["round"], name)


@pytest.mark.ranks
def test_one_step_of_gradient_descent(data, out):
    """FedAvg with K = 1 and all clients: x_i = x - lr g_i and D = lr grad F."""
    lr = COMMON["lr"]
    run = run_here(data, out, **{**COMMON, "local_steps": 1, "weight_decay": 0}, algorithm="fedavg", lr_decay=1)
    x, last, expected = data.start, None, []
    for _ in range(ROUNDS):
        each = [gradient(x) for gradient in data.gradients]
        g = np.mean(each, axis=0)
        spread = np.mean([e @ e for e in each])
        expected.append(
            dict(
                drift=lr**2 * spread,
                drift_ratio=spread / (g @ g),
                direction_cosine=None if last is None else cosine(last, g),
                gradient_norm=math.sqrt(g @ g),
                gradient_norm_z=math.sqrt(g @ g),
                step_cosine=None if last is None else cosine(last, g),
                step_change=None if last is None else (g - last) @ (g - last) / (g @ g),
            )
        )
        x, last = x - lr * g, g
    check(run.metrics, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_without_lost_clients(data, out, weighting, monkeypatch):
    """F is the mean over the clients that are left, here without the third: a step is lr grad F."""
    lost = 2

    def without(*arguments):
        owners = shared_out(*arguments)
        return Ownership([clients[clients != lost] for clients in owners.clients_of], owners.only_serves)

    monkeypatch.setattr(training, "shared_out", without)
    settings = {**COMMON, "local_steps": 1, "weight_decay": 0, "weighting": weighting}
    run = run_here(data, out, **settings, algorithm="fedavg", lr_decay=1)
    weights = np.array(data.sizes if weighting == "size" else [1] * len(data.sizes), float)
    weights[lost] = 0
    x, last = data.start, None
    for record in run.metrics:
        g = sum(w * gradient(x) for w, gradient in zip(weights / weights.sum(), data.gradients, strict=True))
        assert record["gradient_norm"] == pytest.approx(math.sqrt(g @ g), rel=1e-6)
        assert record["direction_cosine"] == (None if last is None else pytest.approx(cosine(last, g), rel=1e-6))
        x, last = x - COMMON["lr"] * g, g


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", CASES)
def test_against_the_reference(data, out, algorithm):
    settings = {"lr_decay": 1.0, **COMMON, **CASES[algorithm]}
    run = run_here(data, out, algorithm=algorithm, **settings)
    rounds = run_reference(data, algorithm, run.participants, [3] * len(SIZES), settings)
    xs = [data.start, *(each.x for each in rounds)]
    amends, weighting = "alpha" in settings, settings.get("weighting", "uniform")
    alpha = settings.get("alpha", 1.0)
    expected = []
    for t, each in enumerate(rounds):
        g, step = pooled(data, xs[t], weighting), xs[t] - xs[t + 1]
        last = xs[t - 1] - xs[t] if t else np.zeros_like(step)
        g_a = (rounds[t - 1].vectors["g_a"] if t else np.zeros_like(step)) if amends else last
        z = xs[t] / alpha - (1 - alpha) / alpha * (xs[t - 1] if t else xs[t])
        at_z = pooled(data, z, weighting)
        # g_a^{t+1} is mean(offset) / (K eta_t), and consistency the mean squared distance from x^{t+1}.
        offset = each.vectors["g_a"] * 3 * settings["lr"] * settings["lr_decay"] ** t
        drift = each.consistency + 2 * offset @ step - step @ step
        expected.append(
            dict(
                drift=drift,
                drift_ratio=drift / (step @ step),
                direction_cosine=cosine(g_a, g),
                gradient_norm=math.sqrt(g @ g),
                gradient_norm_z=math.sqrt(at_z @ at_z),
                step_cosine=cosine(last, step),
                step_change=(step - last) @ (step - last) / (step @ step) if t else None,
            )
        )
    check(run.metrics, expected)


@pytest.mark.ranks
def test_nothing_else_changes(data, out):
    """Bits and bytes of a run are those of one without; numbers are there every N-th round."""
    settings = dict(rounds=5, algorithm="fedlada", precision="fp32", batch_size=2, eval_every=2, participation=0.6)
    ours = run_here(data, out / "with", **settings, diagnose=2)
    plain = run_here(data, out / "without", **settings)
    for record, other in zip(ours.metrics, plain.metrics, strict=True):
        assert set(record) == {*other, *DIAGNOSED}
        assert all(record[name] == other[name] for name in other if not name.startswith("seconds"))
        assert all((record[name] is None) == bool(record["round"] % 2) for name in DIAGNOSED)
    assert all(torch.equal(ours.model[name], plain.model[name]) for name in data.names)


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", ["fedavg", "fedlada"])
def test_a_resumed_run_has_the_numbers_of_the_whole(data, out, algorithm):
    settings = dict(algorithm=algorithm, precision="fp32", batch_size=2, participation=0.6, eval_every=1, diagnose=2)
    whole = run_here(data, out / "whole", **settings, rounds=6)
    run_here(data, out / "parts", **settings, rounds=3)
    same(run_here(data, out / "parts", **settings, rounds=6, resume=True), whole)


@pytest.mark.ranks
def test_a_run_that_is_diagnosed_from_a_checkpoint_on_does_not_know_the_step_before(data, out):
    settings = dict(algorithm="fedlada", local_steps=1)
    run_here(data, out, **settings, rounds=2)
    third, fourth = run_here(data, out, **settings, rounds=4, resume=True, diagnose=1).metrics[2:]
    unknown = {"gradient_norm_z", "step_cosine", "step_change"}
    assert {name for name in DIAGNOSED if third[name] is None} == unknown
    assert None not in [fourth[name] for name in DIAGNOSED]


OWN = """
import torch
from torch import nn

def features(classes, image_shape):
    torch.manual_seed(3)
    rows, columns, channels = image_shape
    first = nn.Linear(rows * columns * channels, 7).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, classes))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["stacked", "generic"])
@pytest.mark.parametrize("images", [0, 12])
def test_softmax_regression_on_frozen_features_with_dropout(data, out, engine, images):
    """By numpy: the gradient of the last layer is the mean of (p - y) h', with h' = (h, 1)."""
    own = out.parent / "own_features.py"
    if is_root():
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(OWN)
    barrier()
    out = out / f"{engine}-{images}"
    given = dict(model=f"{own}:features", engine=engine, rounds=1, local_steps=1, algorithm="fedavg", diagnose=1)
    line = arguments(data, out, {**given, "diagnose_images": images})
    at = line.index("--init")
    assert main([*line[:at], *line[at + 2 :], "--seed", "5", "--lr", "1e-9"]) == 0  # so that the model stays put
    barrier()
    model = {name: v.double().numpy() for name, v in torch.load(out / "model.pt", weights_only=True).items()}
    clients = []
    for client, (pixels, labels) in enumerate(zip(data.images, data.labels, strict=True)):
        if images:  # 12 of 27
            count = {4: 2, 6: 3, 5: 2, 3: 1, 9: 4}[len(labels)]
            chosen = np.sort(np.argsort(rng.bits(len(labels), 5, rng.DIAGNOSE, 0, client))[:count])
            pixels, labels = pixels[chosen], labels[chosen]
        inputs = ((pixels / 255 - np.array(data.mean)) / np.array(data.std)).transpose(0, 3, 1, 2)
        h = np.tanh(inputs.reshape(len(labels), -1) @ model["1.weight"].T + model["1.bias"])
        logits = h @ model["4.weight"].T + model["4.bias"]
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        error = p - np.eye(3)[labels]
        clients.append(error.T @ np.column_stack([h, np.ones(len(h))]) / len(h))
    record = Run(out, data).metrics[0]
    assert record["gradient_norm"] == pytest.approx(np.linalg.norm(np.mean(clients, axis=0)), rel=1e-6)


def test_images_are_chosen_client_by_client():
    assert rng.chosen(10, 1.0, 0, 3).tolist() == list(range(10))
    assert len(rng.chosen(10, 0.25, 0, 3)) == 3
    assert len(rng.chosen(10, 0.001, 0, 3)) == 1
    assert rng.chosen(10, 0.5, 0, 3).tolist() != rng.chosen(10, 0.5, 0, 4).tolist()


def test_a_gpu_without_room_takes_smaller_batches():
    objective = Objective.__new__(Objective)
    objective.batch, tried = 500, []

    def compute():
        tried.append(objective.batch)
        if objective.batch > 130:
            raise torch.cuda.OutOfMemoryError

    objective._compute = compute
    objective.compute()
    assert tried == [500, 250, 125]


@pytest.mark.ranks
def test_images_without_a_diagnosis_are_refused(capsys):
    assert main(["--diagnose-images", "5"]) == 2
    if is_root():
        assert "--diagnose-images: got no --diagnose" in capsys.readouterr().err


@pytest.mark.ranks
def test_exact_sums_take_another_way_to_the_same_gradient(data, out):
    """Their transport is planned for integers."""
    settings = dict(algorithm="fedavg", rounds=2, local_steps=1, eval_every=1, lr=0.1, diagnose=1)
    fast, exact = (run_here(data, out / sums, **settings, sums=sums) for sums in ("fast", "exact"))
    for ours, expected in zip(exact.metrics, fast.metrics, strict=True):
        assert ours["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
