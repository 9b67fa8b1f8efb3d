"""How clients fare one by one: numbers computed by hand and by torch, the file, kills and resumes."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from ranks import barrier, is_root
from training_runs import arguments, make_data, run_here

from fedlada_mpi.run import main
from fedlada_mpi.rundir.client_values import CLIENTS, Clients, ClientValues, latest, read
from fedlada_mpi.rundir.columns import CLASSIFICATION, of_task
from fedlada_mpi.support.errors import UserError

SIZES = [4, 6, 5, 3, 9]
SPREAD = CLASSIFICATION.spread["train"]  # the clients of these data have no test images of their own
SHORT = dict(algorithm="fedavg", local_steps=1, lr=0.05, eval_every=0, eval_clients=2)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "client-values", SIZES, silos=3)


def test_spread_by_hand():
    many = np.array([*range(20), 0.5, np.nan]) / 20  # 21 known: the worst three are 0, 0.5 and 1
    few = np.array([0.25, 0.75, *[np.nan] * 20])
    clients = Clients(np.ones(22, int), np.ones(22, int), np.ones(22, int))
    found = clients.spread({"train_acc": many, "test_acc": few})
    assert found["client_train_acc_worst_decile"] == pytest.approx(0.5 / 20)
    assert found["client_train_acc_mean"] == pytest.approx(190.5 / 21 / 20)
    assert [found[f"client_test_acc_{name}"] for name in ("mean", "std", "worst_decile")] == [0.5, 0.25, 0.25]
    assert list(found) == [*CLASSIFICATION.spread["test"], *CLASSIFICATION.spread["train"]]
    nothing = dict.fromkeys(("train_acc", "test_acc"), np.full(22, np.nan))
    assert clients.spread(nothing) == dict.fromkeys(found)


def test_the_worst_tenth_of_errors_are_the_largest():
    columns = of_task({"mae": ("mean absolute error", False, False)}, "mae", larger_is_better=False)
    clients = Clients(np.ones(12, int), np.ones(12, int), columns=columns)
    found = clients.spread({"train_mae": np.array([*range(11), np.nan], float)})  # 11 known: the worst two are 9 and 10
    assert found == pytest.approx(
        {"client_train_mae_mean": 5, "client_train_mae_std": 10**0.5, "client_train_mae_worst_decile": 9.5}
    )


def test_the_file_of_clients_with_names_and_test_examples(tmp_path):
    clients = Clients(np.array([3, 4]), np.array([1, 2]), np.array([2, 0]), ("Süd", "Nord"))
    values = ClientValues(tmp_path, 0, clients)
    row = {"train_loss": [1, 2], "train_acc": [0.5, 0.25], "test_loss": [3, np.nan], "test_acc": [0.75, np.nan]}
    for number in (2, 4):
        spread = values.add(number, {name: np.array(each, float) for name, each in row.items()})
    values.write()
    assert spread["client_test_acc_mean"] == 0.75
    found = latest(tmp_path / CLIENTS, 3)
    assert (found["names"].tolist(), found["test_examples"].tolist()) == (["Süd", "Nord"], [2, 0])
    np.testing.assert_array_equal(found["test_acc"], [0.75, np.nan])
    assert latest(tmp_path / CLIENTS, 1) == {}
    kept = ClientValues(tmp_path, 2, clients)
    assert (kept.rounds, read(tmp_path / CLIENTS)["rounds"].tolist()) == ([2], [2])
    again = ClientValues.restored(tmp_path, clients, kept.known())
    again.write()
    np.testing.assert_array_equal(read(tmp_path / CLIENTS)["test_loss"], [[3, np.nan]])


def test_values_of_an_old_run_can_be_continued(tmp_path):
    """Its test values, which were not on the clients' own examples, are dropped."""
    clients = Clients(np.array([3, 4]), np.array([1, 2]))
    with h5py.File(tmp_path / CLIENTS, "w") as file:
        file.update({"rounds": np.array([1]), "clients": np.arange(2), "images": np.array([3, 4])})
        file.update({f"{part}_{n}": np.full((1, 2), 0.5, "f4") for part in ("train", "test") for n in ("acc", "loss")})
    values = ClientValues(tmp_path, 1, clients)
    values.add(2, {"train_loss": np.ones(2), "train_acc": np.ones(2)})
    values.write()
    assert {*read(tmp_path / CLIENTS)} == {"rounds", "clients", "images", "train_acc", "train_loss"}
    assert read(tmp_path / CLIENTS)["train_acc"].tolist() == [[0.5, 0.5], [1, 1]]


def expected(data, model) -> dict[str, list[float]]:
    """By a plain module, image by image."""
    module = data.module
    module.load_state_dict(model)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (data.mean, data.std))
    found = {"train_acc": [], "train_loss": []}
    for images, labels in zip(data.images, data.labels, strict=True):
        pixels = (torch.from_numpy(images).double() / 255 - mean) / std
        with torch.no_grad():
            logits = module(pixels.permute(0, 3, 1, 2))
        found["train_acc"].append(float((logits.argmax(1) == torch.from_numpy(labels)).double().mean()))
        found["train_loss"].append(float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))))
    return found


@pytest.mark.ranks
def test_values_of_a_run(data, out):
    """On any number of ranks the same, which are those of the plain module."""
    run = run_here(data, out, **SHORT, rounds=5)
    stored = read(out / CLIENTS)
    assert stored["rounds"].tolist() == [2, 4, 5]
    assert (stored["clients"].tolist(), stored["images"].tolist()) == (list(range(5)), SIZES)
    assert "test_acc" not in stored
    for name, values in expected(data, run.model).items():
        np.testing.assert_allclose(stored[name][-1], values, rtol=1e-6)
    assert [r["round"] for r in run.metrics if r["client_train_acc_mean"] is not None] == [2, 4, 5]
    assert [r["round"] for r in run.metrics if r["train_acc"] is not None] == [2, 4, 5]
    for i, record in enumerate(r for r in run.metrics if r["train_acc"] is not None):
        np.testing.assert_allclose(np.average(stored["train_acc"][i], weights=SIZES), record["train_acc"], rtol=1e-6)
        np.testing.assert_allclose(stored["train_acc"][i].std(), record["client_train_acc_std"], rtol=1e-5, atol=1e-7)
        assert record["client_train_acc_worst_decile"] == pytest.approx(stored["train_acc"][i].min())


@pytest.mark.ranks
def test_other_metrics_are_those_of_a_run_without(data, out):
    settings = {**SHORT, "rounds": 4, "eval_every": 2, "precision": "fp32", "batch_size": 2}
    ours = run_here(data, out / "with", **settings)
    plain = run_here(data, out / "without", **{**settings, "eval_clients": 0})
    assert not (out / "without" / CLIENTS).exists()
    for record, other in zip(ours.metrics, plain.metrics, strict=True):
        assert set(record) == {*other, *SPREAD}
        assert all(record[name] == other[name] for name in other if not name.startswith("seconds"))
    assert all(torch.equal(ours.model[name], plain.model[name]) for name in data.names)


@pytest.mark.ranks
def test_a_resumed_run_has_the_values_of_the_whole(data, out):
    """Also where the file is ahead of the checkpoint, as after a kill between the two."""
    whole = run_here(data, out / "whole", **SHORT, rounds=6)
    run_here(data, out / "parts", **SHORT, rounds=3)
    if is_root():
        ahead = ClientValues(out / "parts", 3, Clients(np.array(SIZES), np.ones(5, int)))
        ahead.add(4, {"train_acc": np.ones(5), "train_loss": np.ones(5)})
        ahead.write()
        assert read(out / "parts" / CLIENTS)["rounds"].tolist() == [2, 3, 4]
    barrier()
    resumed = run_here(data, out / "parts", **SHORT, rounds=6, resume=True)
    ours, theirs = read(out / "parts" / CLIENTS), read(out / "whole" / CLIENTS)
    assert (ours["rounds"].tolist(), theirs["rounds"].tolist()) == ([2, 3, 4, 6], [2, 4, 6])
    for name in ("train_acc", "train_loss"):
        assert np.array_equal(ours[name][[0, 2, 3]], theirs[name])
    assert [resumed.metrics[-1][name] for name in SPREAD] == [whole.metrics[-1][name] for name in SPREAD]


def test_a_run_that_goes_on_without_drops_what_it_repeats(data, out):
    run_here(data, out, **SHORT, rounds=3)
    ahead = ClientValues(out, 3, Clients(np.array(SIZES), np.ones(5, int)))
    ahead.add(4, {"train_acc": np.ones(5), "train_loss": np.ones(5)})
    ahead.write()
    run = run_here(data, out, **{**SHORT, "eval_clients": 0}, rounds=4, resume=True)
    assert read(out / CLIENTS)["rounds"].tolist() == [2, 3]
    assert "client_train_acc_mean" not in run.metrics[-1]
    assert main([*arguments(data, out, {**SHORT, "eval_clients": 0, "rounds": 1}), "--overwrite"]) == 0
    assert not (out / CLIENTS).exists()


@pytest.mark.parametrize("damage", ["garbage", "cut", "no rounds", "shape", "clients"])
def test_a_damaged_file_is_refused_in_one_line(data, out, damage, capsys):
    run_here(data, out, **SHORT, rounds=2)
    path = out / CLIENTS
    if damage in ("garbage", "cut"):
        path.write_bytes(b"garbage" if damage == "garbage" else path.read_bytes()[:900])
    else:
        with h5py.File(path, "r+") as file:
            name = {"no rounds": "rounds", "shape": "train_acc", "clients": "clients"}[damage]
            del file[name]
            if damage != "no rounds":
                file[name] = np.arange(5) + 1 if damage == "clients" else np.zeros(3)
    capsys.readouterr()
    words = [*arguments(data, out, {**SHORT, "rounds": 3}), "--resume"]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {path} is damaged (")
    assert message.endswith(f": rm {path}, then --resume goes on without the values in it\n")
    path.unlink()
    assert main(words) == 0
    assert read(path)["rounds"].tolist() == [3]


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / CLIENTS).mkdir()
    with pytest.raises(UserError, match="is damaged"):
        ClientValues(tmp_path, 1, Clients(np.ones(2, int), np.ones(2, int)))
