"""The settings and the environment of groups: shared ones once, differences apart."""

from synthetic_runs import run

from fedlada_mpi.analysis import load, setups
from fedlada_mpi.analysis.groups import group


def test_what_differs_and_what_all_share():
    runs = [run([0.1], algorithm=m, seed=seed) for m in ("fedavg", "scaffold", "fedcm") for seed in (0, 1)]
    for one in runs:
        one.environment = {"device": "NVIDIA H200", "torch": "2.11", "commit": "01234567"}
    runs[-1].environment["torch"] = "2.12"
    runs += [run([0.1], algorithm="fedprox", lr=0.05)]
    differ, shared = setups.tables(group(runs))
    values = {row[0].text: row[1].text for row in shared.rows}
    assert values["model"] == "resnet18"
    assert values["batch"] == "50"
    names = [column.name for column in differ.columns]
    assert names == ["Data", "Method", "learning rate η_l", "device", "torch", "commit", "of the method"]
    rows = {row[1].text.split()[0]: dict(zip(names, row, strict=True)) for row in differ.rows}
    assert rows["FedCM"]["torch"].text == "2.11, 2.12"
    assert rows["FedProx"]["learning rate η_l"][::6] == ("0.05", "rare")
    assert rows["FedAvg"]["learning rate η_l"][::6] == ("0.1", "")
    assert rows["FedProx"]["device"].text == "not recorded"
    assert rows["FedProx"]["of the method"].text == "μ=0.1"
    assert not set(names) & set(values)


def test_numbers_that_stand_for_something_else_are_put_into_words():
    _, shared = setups.tables(group([run([0.1], eval_train_every=-1, eval_every=0, clip=0.0)]))
    values = {row[0].text: row[1].text for row in shared.rows}
    words = {"eval train every": "as eval every", "eval every": "only at the end", "flip": "yes", "norm": "–"}
    words |= {"local steps": "given by local epochs", "validation": "none", "clip": "off", "size sigma": "equal"}
    assert {name: values[name] for name in words} == words
    assert setups.in_words("batch_size", 50) == "50"
    assert setups.in_words("alpha", 0.0) == "0"  # of a method, whose 0 is a number


def test_the_environment_of_the_last_segment():
    first = {"torch": "2.10", "device": "x86_64 CPU", "ranks": 2}
    last = {"torch": "2.11", "commit": "0123456789", "modified": True, "ranks": 4}
    assert load._environment({"environment": first, "segments": [last]}, "NVIDIA H200") == {
        "ranks": "4",
        "torch": "2.11",
        "device": "NVIDIA H200",
        "commit": "01234567 modified",
    }
    for damaged in ({}, {"environment": 3, "segments": 1}, {"segments": [[]]}):
        assert load._environment(damaged, "") == {}


def test_the_loss_of_a_task_that_none_was_given_for():
    runs = [run([0.1], task="survival", loss=loss, seed=seed) for seed, loss in enumerate(("", "cox"))]
    differ, _ = setups.tables(group(runs))
    assert {row[2].text for row in differ.rows} == {"discrete", "cox"}
    _, shared = setups.tables(group([run([0.1], task="my_task.py:Quantile")]))
    assert {row[0].text: row[1].text for row in shared.rows}["loss"] == "–"
