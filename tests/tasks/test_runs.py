"""Whole runs of tasks that do not classify images, on any number of ranks, against numbers of their own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from ranks import barrier, from_root, is_root
from torch import nn

import fedlada_mpi
from fedlada_mpi import Data, Task, UserError, train, whole

pytestmark = pytest.mark.ranks

SIZES, TESTS, FEATURES = (5, 3, 8, 2), (2, 3, 0, 4), 3
NAMES = ("Bergen", "Graz", "Lund", "Pisa")
PLAIN = dict(algorithm="fedavg", precision="fp64", batch_size=0, local_steps=3, lr=0.05, lr_schedule="constant",
             weight_decay=0.0, clip=0.0, participation=1.0, rounds=2, eval_every=1, quiet=True)  # fmt: skip


def arrays():
    draw = np.random.default_rng(5)
    owners, tested = (np.repeat(np.arange(4), sizes) for sizes in (SIZES, TESTS))
    x, x1 = (draw.normal(size=(len(each), FEATURES)) for each in (owners, tested))
    y, y1 = (each @ [1.0, -2.0, 0.5] + 0.3 + 0.1 * draw.normal(size=len(each)) for each in (x, x1))
    return x, y, owners, x1, y1, tested


@pytest.fixture
def data():
    x, y, owners, x1, y1, tested = arrays()
    names = np.array(NAMES)
    return Data(inputs=x, targets=y, clients=names[owners], test=(x1, y1, names[tested]), task="regression")


@pytest.fixture
def there(tmp_path_factory):
    """A new directory, the same on every rank."""
    return from_root(lambda: str(tmp_path_factory.mktemp("runs")))


def linear() -> nn.Module:
    module = nn.Linear(FEATURES, 1).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.1, 0.2, -0.1]], dtype=torch.float64))
        module.bias.fill_(0.5)
    return module


def by_hand(rounds: int) -> np.ndarray:
    """Weights and bias after rounds of FedAvg with three full-batch steps of a squared loss."""
    x, y, owners, *_ = arrays()
    model = np.array([0.1, 0.2, -0.1, 0.5])
    for _ in range(rounds):
        ends = []
        for client in range(4):
            rows = np.column_stack([x[owners == client], np.ones(SIZES[client])])
            local = model.copy()
            for _ in range(3):
                local -= 0.05 * 2 * rows.T @ (rows @ local - y[owners == client]) / len(rows)
            ends.append(local)
        model = np.mean(ends, axis=0)
    return model


def errors(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.column_stack([x, np.ones(len(x))]) @ model - y


def rmse(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors(model, x, y) ** 2)))


@pytest.mark.parametrize("sums", ["fast", "exact"])
def test_federated_regression_is_that_of_a_loop(data, there, sums):
    run = train(data=data, model=linear(), data_dir=f"{there}/data", out=f"{there}/run", sums=sums, **PLAIN)
    model = by_hand(2)
    x, y, _, x1, y1, _ = arrays()
    found = np.append(run.model.module.weight.detach().numpy(), run.model.module.bias.detach().numpy())
    np.testing.assert_allclose(found, model, rtol=1e-13, atol=1e-13)
    last = {name: values[-1] for name, values in run.metrics.items()}
    assert last["train_rmse"] == pytest.approx(rmse(model, x, y), rel=1e-12)
    assert last["test_rmse"] == pytest.approx(rmse(model, x1, y1), rel=1e-12)
    assert last["test_mae"] == pytest.approx(np.abs(errors(model, x1, y1)).mean(), rel=1e-12)
    assert last["test_loss"] == pytest.approx(rmse(model, x1, y1) ** 2, rel=1e-12)
    spread = ((y1 - y1.mean()) ** 2).sum()
    assert last["test_r2"] == pytest.approx(1 - (errors(model, x1, y1) ** 2).sum() / spread, rel=1e-9)
    assert run.summary["best"]["round"] == 2
    evaluated = run.evaluate()
    assert evaluated["rmse"] == pytest.approx(last["test_rmse"], rel=1e-12)
    np.testing.assert_allclose(run.predict(x1)[:, 0], errors(model, x1, 0 * y1), rtol=1e-12)
    again = fedlada_mpi.load(run.dir, model=linear())
    np.testing.assert_array_equal(again.predict(x1), run.predict(x1))


def test_clients_have_their_own_metrics(data, there):
    train(data=data, model=linear(), data_dir=f"{there}/data", out=f"{there}/run", eval_clients=1, **PLAIN)
    barrier()
    if not is_root():
        return
    model, (x, y, owners, x1, y1, tested) = by_hand(2), arrays()
    with h5py.File(f"{there}/run/clients.h5") as file:
        assert file["names"].asstr()[:].tolist() == list(NAMES)
        assert file["test_examples"][:].tolist() == list(TESTS)
        train_rmse, test_rmse = file["train_rmse"][-1], file["test_rmse"][-1]
    for client in range(4):
        mine, my_tests = owners == client, tested == client
        assert train_rmse[client] == pytest.approx(rmse(model, x[mine], y[mine]), rel=1e-6)
        if TESTS[client]:
            assert test_rmse[client] == pytest.approx(rmse(model, x1[my_tests], y1[my_tests]), rel=1e-6)
        else:
            assert np.isnan(test_rmse[client])
    record = json.loads(Path(f"{there}/run/metrics.jsonl").read_text().splitlines()[-1])
    known = test_rmse[~np.isnan(test_rmse)]
    assert record["client_test_rmse_mean"] == pytest.approx(known.mean(), rel=1e-6)
    assert record["client_test_rmse_worst_decile"] == pytest.approx(known.max(), rel=1e-6)


def pairs_in_order(outputs: np.ndarray, targets: np.ndarray) -> float:
    """Of all pairs, the share that outputs order as targets do; NaN where there is none."""
    above = targets[:, None] > targets[None]
    return float((outputs[:, 0][:, None] > outputs[:, 0][None])[above].mean()) if above.any() else float("nan")


def test_a_metric_of_all_predictions_decides(data, there):
    metrics = {"order": whole(pairs_in_order)}
    run = train(data=data, model=linear(), metrics=metrics, objective="order", task="regression", eval_clients=1,
                data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)  # fmt: skip
    model, (_, _, _, x1, y1, tested) = by_hand(2), arrays()
    predicted = errors(model, x1, 0 * y1)[:, None]
    assert run.metrics["test_order"][-1] == pytest.approx(pairs_in_order(predicted, y1), abs=1e-15)
    assert "test_rmse" not in run.metrics
    assert run.summary["best"]["test_order"] == max(run.metrics["test_order"])
    assert run.evaluate()["order"] == pytest.approx(pairs_in_order(predicted, y1), abs=1e-15)
    if is_root():
        with h5py.File(f"{there}/run/clients.h5") as file:
            found = file["test_order"][-1]
        expected = [pairs_in_order(predicted[tested == c], y1[tested == c]) for c in range(4)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_loss_of_ones_own(data, there):
    def squared(outputs, targets):
        return (outputs[:, 0] - targets) ** 2

    run = train(data=data, model=linear(), loss=squared, data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    found = np.append(run.model.module.weight.detach().numpy(), run.model.module.bias.detach().numpy())
    np.testing.assert_allclose(found, by_hand(2), rtol=1e-13, atol=1e-13)
    assert run.summary["best"]["test_loss"] == pytest.approx(rmse(by_hand(2), *arrays()[3:5]) ** 2, rel=1e-12)


def test_resumed_as_if_it_had_not_stopped(data, there):
    settings = {**PLAIN, "algorithm": "fedlada", "lr": 0.01, "batch_size": 2, "validation": 0.2, "eval_clients": 1}
    named = dict(data=data, model=linear(), data_dir=f"{there}/data", **settings)
    whole_run = train(**{**named, "rounds": 4, "out": f"{there}/whole"})
    train(**{**named, "rounds": 2, "out": f"{there}/parts"})
    resumed = train(**{**named, "rounds": 4, "out": f"{there}/parts", "resume": True})
    for name, values in whole_run.metrics.items():
        if not name.startswith("seconds"):
            np.testing.assert_array_equal(resumed.metrics[name], values, err_msg=name)
    assert resumed.summary["best_validation"] == whole_run.summary["best_validation"]
    assert whole_run.summary["best_validation"]["round"] == 1 + int(np.argmin(whole_run.metrics["val_rmse"]))


def test_a_metric_that_fails_on_one_rank_ends_all_of_them(data, there):
    marked = arrays()[1][-1]  # the last client's, who is on the last rank

    def fragile(outputs, targets):
        if (targets == marked).any():
            raise ValueError("no such code")
        return targets

    with pytest.raises(UserError, match="metric fragile: ValueError: no such code"):
        train(data=data, model=linear(), task="regression", metrics={"fragile": fragile}, objective="-loss",
              data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)  # fmt: skip


def constant(outputs, targets):
    return torch.zeros(len(outputs))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: ((o[:, 0] - t) ** 2).mean(), r"got a tensor \[\] from its loss .*: leave out .mean\(\)"),
        (lambda o, t: ((o[:, 0] - t) ** 2).mean().item(), "from its loss"),
        (lambda o, t: (o[:, 0] - t - (o[:, 0] - t).mean()) ** 2, "depends on the others of its batch"),
        (lambda o, t: (o[:, 0] - t).detach() ** 2, "has no gradient"),
        (lambda o, t: (o[:, 0] - t) * float("nan"), "expected finite numbers"),
        (constant, "has no gradient"),
        (lambda o, t: (o[:, 0] - t.clamp_(max=0.0)) ** 2, "changes its outputs or targets in place"),
        (lambda o, t: (o[:, 0] - t.missing) ** 2, "AttributeError"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_before_anything_is_written(data, there, loss, words):
    with pytest.raises(UserError, match=words):
        train(data=data, model=linear(), loss=loss, data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    barrier()
    assert not Path(f"{there}/run/metrics.jsonl").exists()


class Counts(Task):
    """As a user would write it in a file."""

    objective = "-deviance"

    def loss(self, outputs, targets):
        return outputs[:, 0].exp() - targets * outputs[:, 0]

    def outputs(self):
        return (1,)


def test_a_task_whose_objective_it_does_not_have_is_refused(data, there):
    with pytest.raises(UserError, match=r"objective: got '-deviance', expected one of -loss"):
        train(data=data, task=Counts, model="linear", data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)


def test_outputs_that_a_task_does_not_take_are_refused(there):
    x, y = np.zeros((8, FEATURES)), np.tile([0, 1], (8, 1))
    data = Data(inputs=x, targets=y, clients=np.arange(8) % 4, test=(x, y))
    with pytest.raises(UserError, match=r"task next-token: IndexError: .*; expected a task for outputs \[1\]"):
        train(data=data, task="next-token", model=linear(), data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)


def test_further_metrics_of_classification(there):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 2))
    y = (x[:, 0] + 0.3 * draw.normal(size=40) > 0).astype(int)
    data = Data(inputs=x[:30], targets=y[:30], clients=np.arange(30) % 3, test=(x[30:], y[30:]))
    run = train(data=data, model="linear", metrics="auc,balanced_acc", objective="auc", seed=1,
                data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)  # fmt: skip
    logits = run.model(torch.from_numpy(x[30:]).double()).detach().numpy()
    score, positive = logits[:, 1] - logits[:, 0], y[30:] == 1
    auc = (score[positive][:, None] > score[~positive][None]).mean()
    assert run.metrics["test_auc"][-1] == pytest.approx(auc, abs=1e-15)
    recalls = [((score > 0) == positive)[positive == which].mean() for which in (True, False)]
    assert run.metrics["test_balanced_acc"][-1] == pytest.approx(np.mean(recalls), abs=1e-15)
    assert run.evaluate()["accuracy"] == run.metrics["test_acc"][-1]


class Both(nn.Module):
    """Of several arrays by name, one of them tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(4, 1)

    def forward(self, tokens, age):
        return self.head(torch.cat([self.embedding(tokens).mean(1), age[:, None]], 1))


def test_several_arrays_and_rows_of_any_length(there):
    draw = np.random.default_rng(2)
    tokens = [draw.integers(0, 5, length) for length in (3, 1, 4, 2, 2, 5, 1, 3)]
    ages, y = draw.normal(size=8).astype(np.float32), draw.normal(size=8)
    inputs, test = {"tokens": tokens[:6], "age": ages[:6]}, {"tokens": tokens[6:], "age": ages[6:]}
    data = Data(inputs=inputs, targets=y[:6], clients=[0, 0, 1, 1, 2, 2], test=(test, y[6:]), task="regression")
    run = train(data=data, model=Both(), data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    padded = np.zeros((2, 5), np.int64)
    for row, each in zip(padded, tokens[6:], strict=True):
        row[: len(each)] = each
    expected = run.model.module(torch.from_numpy(padded), torch.from_numpy(ages[6:]).double())
    np.testing.assert_allclose(run.predict(test), expected.detach(), rtol=1e-12)
    with pytest.raises(UserError, match="inputs: got tokens, expected also age"):
        run.predict({"tokens": tokens[6:]})


@pytest.mark.parametrize("change", [{"diagnose": 1}, {"algorithm": "mimelite"}])
def test_losses_that_do_not_add_up_have_no_full_gradient(there, change):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 2)), np.column_stack([np.ones(8), np.arange(1.0, 9)])
    data = Data(inputs=x, targets=y, clients=np.arange(8) % 2, test=(x, y), task="survival")
    given = {**PLAIN, "model": "linear", "loss": "cox", "data_dir": f"{there}/data", "out": f"{there}/run", **change}
    with pytest.raises(UserError, match="takes gradients over all examples of a client, and the loss of survival"):
        train(data=data, **given)


def counter():
    calls = []

    def metric(outputs, targets):
        calls.append(1)
        return (outputs[:, 0] - targets) * len(calls)

    return metric


def test_a_metric_with_a_state_is_refused(data, there):
    with pytest.raises(UserError, match="two calls on the same examples differ in growing: keep no state"):
        train(data=data, model=linear(), metrics={"growing": counter()}, objective="-growing",
              data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)  # fmt: skip


class Flat(nn.Module):
    """A number of each example, [N]."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x)[:, 0]


def test_outputs_of_one_number_per_example(data, there):
    run = train(data=data, model=Flat(), loss=lambda o, t: (o - t) ** 2, data_dir=f"{there}/data", out=f"{there}/run",
                **PLAIN)  # fmt: skip
    weights = run.model.module.linear.weight.detach().numpy()[0]
    np.testing.assert_allclose(weights, by_hand(2)[:3], rtol=1e-13, atol=1e-13)


def test_the_full_gradient_of_tokens_is_that_of_all_of_them(there):
    """MimeLite's m after a round is that gradient; batches have different numbers of tokens."""
    rows = [[0, 1, 2, 3, 1], [2, 1], [1, 3, 1], [3, 2, 0, 1], [1, 0]]
    table = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    module = nn.Embedding(4, 4).double()
    module.weight.data.copy_(table)
    data = Data(inputs=rows, clients=np.zeros(5, int), test=([[0, 1, 2, 3, 1], [2, 1]],))
    how = PLAIN | dict(algorithm="mimelite", batch_size=2, local_steps=1, rounds=2, lr=1e-9)
    run = train(data=data, model=module, data_dir=f"{there}/data", out=f"{there}/run", checkpoint_every=1, **how)
    assert np.isfinite(run.metrics["test_loss"]).all()
    barrier()
    if is_root():
        table.requires_grad_()
        pairs = torch.tensor([pair for row in rows for pair in pairwise(row)])
        nn.functional.cross_entropy(table[pairs[:, 0]], pairs[:, 1]).backward()
        with h5py.File(sorted(Path(f"{there}/run").glob("checkpoint/*/server.h5"))[0]) as file:
            np.testing.assert_allclose(file["m"][:16], 0.1 * table.grad.flatten().numpy(), rtol=1e-13, atol=1e-16)


def cox_loss(outputs, events, times):
    """Of one batch, by its definition."""
    found = [np.log(np.exp(outputs[times >= times[i]]).sum()) - outputs[i] for i in np.flatnonzero(events)]
    return sum(found) / max(1, len(found))


@pytest.mark.parametrize("sums", ["fast", "exact"])
def test_the_loss_of_a_batch_is_that_of_each_client(there, sums):
    x, _, owners, x1, _, tested = arrays()
    draw = np.random.default_rng(3)
    y, y1 = (np.column_stack([draw.random(len(e)) > 0.3, draw.random(len(e))]) for e in (owners, tested))
    data = Data(inputs=x, targets=y, clients=owners, test=(x1, y1, tested), task="survival")
    run = train(data=data, model=linear(), loss="cox", data_dir=f"{there}/data", out=f"{there}/run", sums=sums, **PLAIN)
    for part, rows, of, by in (("train", x, y, owners), ("test", x1, y1, tested)):
        outputs = run.predict(rows)[:, 0]
        losses = [cox_loss(outputs[by == c], of[by == c, 0], of[by == c, 1]) * (by == c).sum() for c in range(4)]
        assert run.metrics[f"{part}_loss"][-1] == pytest.approx(sum(losses) / len(by), rel=1e-12)
    assert run.evaluate()["loss"] == pytest.approx(run.metrics["test_loss"][-1], rel=1e-12)


def test_predictions_of_integers_and_of_rows_that_are_too_long(data, there):
    where = dict(data_dir=f"{there}/data", **PLAIN)
    run = train(data=data, model=linear(), out=f"{there}/run", **where)
    np.testing.assert_array_equal(run.predict([[1, 2, 3]]), run.predict([[1.0, 2.0, 3.0]]))
    with pytest.raises(UserError, match="got no rows"):
        run.predict(np.zeros((0, 3)))
    with pytest.raises(UserError, match="inputs: got masked values, expected none"):
        run.predict(np.ma.masked_equal([[1.0, 2.0, 3.0]], 2))
    tokens = Data(inputs=[[0, 1, 2], [1, 2]], clients=[0, 0], test=([[0, 1], [1, 0, 2]],))
    run = train(data=tokens, model=nn.Embedding(3, 3).double(), out=f"{there}/tokens", **where)
    with pytest.raises(UserError, match="got a row of 4, expected at most 3, as in training"):
        run.predict([[0, 1, 2, 1]])


def test_arrays_that_only_clients_can_normalise_are_refused(there):
    x, y, owners, x1, y1, tested = arrays()
    data = Data(inputs=x, targets=y, clients=owners, test=(x1, y1, tested), task="regression", normalise="client")
    run = train(data=data, model=linear(), data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    assert run.evaluate()["rmse"] == pytest.approx(run.metrics["test_rmse"][-1], rel=1e-12)
    for asked in (lambda: run.predict(x1), lambda: run.evaluate(x1, y1)):
        with pytest.raises(UserError, match="normalised by its own mean and standard deviation"):
            asked()


def test_truth_values_and_integers_are_taken_as_in_training(there):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(FEATURES, 2)

        def forward(self, x, out):
            return self.own(x * ~out)

    x, *_ = arrays()
    inputs, classes = {"x": x, "out": x > 0.5}, x[:, 0] > 0
    data = Data(inputs=inputs, targets=classes, clients=np.arange(len(x)) % 3, test=(inputs, classes))
    run = train(data=data, model=Masked().double(), data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    assert run.evaluate(inputs, classes) == run.evaluate(inputs, classes.astype(int)) == run.evaluate()
    whole_numbers = {**inputs, "out": inputs["out"].astype(int)}
    np.testing.assert_array_equal(run.predict(whole_numbers, True), run.predict(inputs, True))
    with pytest.raises(UserError, match="inputs out: got int64 other than 0 and 1, expected bool"):
        run.predict({**inputs, "out": 2 * whole_numbers["out"]})


def test_flips_and_crops_of_images_with_masks_are_refused(there):
    draw = np.random.default_rng(0)
    pictures = draw.integers(0, 256, (12, 4, 4, 1), np.uint8)
    masks = (pictures[..., 0] > 127).astype(np.uint8)
    data = Data(inputs=pictures, targets=masks, clients=np.arange(12) % 3, test=(pictures, masks), task="segmentation")
    given = {**PLAIN, "model": "fcn", "data_dir": f"{there}/data", "out": f"{there}/run", "augment": "paper"}
    with pytest.raises(UserError, match=r"flip and crop images, and leave their targets \[4, 4\] as they are"):
        train(data=data, **given)


class Uncopied:
    """An augmentation that cannot be copied."""

    def __call__(self, batch):
        return 2 * batch

    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


def test_objects_need_not_be_copied(data, there):
    given = {**PLAIN, "model": linear(), "data_dir": f"{there}/data"}
    runs = [
        train(data=data, augment=augment, out=f"{there}/{place}", **given)
        for place, augment in {"object": Uncopied(), "function": lambda batch: 2 * batch}.items()
    ]
    assert runs[0].evaluate() == runs[1].evaluate()


def test_tokens_that_training_did_not_have_are_refused(there):
    data = Data(inputs=[[0, 1, 2]] * 4, clients=[0, 0, 1, 1], test=([[0, 1, 2]],))
    run = train(data=data, model=nn.Embedding(3, 3).double(), data_dir=f"{there}/data", out=f"{there}/run", **PLAIN)
    assert run.predict([[2, 1, 0]]).shape == (1, 3, 3)
    for odd in (3, -1):
        with pytest.raises(UserError, match=f"inputs: got {odd}, expected 0 to 2"):
            run.predict([[0, odd, 1]])


def test_outputs_that_are_too_many_to_have_all_at_once(data, there, monkeypatch, capsys):
    given = dict(data=data, model=linear(), data_dir=f"{there}/data", **{**PLAIN, "quiet": False})
    metrics = {"order": whole(pairs_in_order)}
    monkeypatch.setattr("fedlada_mpi.rounds.evaluate.GATHERED", 4 * sum(TESTS))  # bytes: the test examples, just
    run = train(**given, metrics=metrics, objective="order", out=f"{there}/first")
    assert np.isnan(run.metrics["train_order"]).all()
    assert not np.isnan(run.metrics["test_order"]).any()
    if is_root():
        assert "no order on train examples, whose outputs are too many" in capsys.readouterr().out
    monkeypatch.setattr("fedlada_mpi.rounds.evaluate.GATHERED", 4 * sum(TESTS) - 1)
    with pytest.raises(UserError, match="objective order is a metric of all outputs at once"):
        train(**given, metrics=metrics, objective="order", out=f"{there}/second")
    run = train(**given, metrics=metrics, objective="-loss", out=f"{there}/third")
    assert np.isnan(run.metrics["test_order"]).all()


def test_images_with_several_labels_are_loaded_as_images(there):
    draw = np.random.default_rng(0)
    pictures, labels = draw.integers(0, 256, (12, 4, 4, 1), np.uint8), draw.random((12, 2)) < 0.5
    data = Data(inputs=pictures, targets=labels, clients=np.arange(12) % 3, test=(pictures, labels), task="multilabel")
    given = {**PLAIN, "model": "mlp", "data_dir": f"{there}/data", "out": f"{there}/run"}
    run = train(data=data, **given)
    barrier()
    again = fedlada_mpi.load(run.dir)
    np.testing.assert_array_equal(again.predict(pictures), run.predict(pictures))
    assert again.evaluate()["f1"] == pytest.approx(run.metrics["test_f1"][-1], rel=1e-12)


def test_integers_are_numbers_where_the_run_says_so(there):
    """They are no classes, and the data was given without a task."""
    x, _, owners, x1, *_ = arrays()
    y, y1 = (np.rint(1000 * each[:, 0]).astype(int) for each in (x, x1))
    data = Data(inputs=x, targets=y, clients=owners, test=(x1, y1))
    given = {**PLAIN, "model": linear(), "data_dir": f"{there}/data", "out": f"{there}/run", "rounds": 1}
    with pytest.raises(UserError, match="expected 0 to K-1; numbers: task regression"):
        train(data=data, **given)
    run = train(data=data, task="regression", **given)
    weights = np.append(run.model.module.weight.detach().numpy(), run.model.module.bias.detach().numpy())
    assert run.metrics["test_rmse"][-1] == pytest.approx(rmse(weights, x1, y1), rel=1e-12)
