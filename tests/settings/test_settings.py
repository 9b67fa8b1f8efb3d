"""Settings: the paper's values, where each came from, and what is refused."""

from __future__ import annotations

import argparse
import json

import pytest

from fedlada_mpi import algorithms, settings
from fedlada_mpi.algorithms import resolve, settings_of
from fedlada_mpi.algorithms.fedavg import FedAvg
from fedlada_mpi.data.manifest import data_root
from fedlada_mpi.settings import Config, differences, dumps, is_record, load
from fedlada_mpi.support.errors import UserError

# The paper's table, written out: what the data set decides, and what the method decides on top of it.
PAPER_DATA = {
    "cifar10": dict(clients=100, participation=0.1, local_epochs=5, batch_size=50, crop_padding=4),
    "cifar100": dict(clients=100, participation=0.1, local_epochs=2, batch_size=50, crop_padding=4),
    "tinyimagenet": dict(clients=100, participation=0.1, local_epochs=2, batch_size=50, crop_padding=8),
}
EVERYWHERE = dict(
    model="resnet18", rounds=1500, dirichlet=0.6, partition="dirichlet", exhausted="refill", sampling="fixed",
    weighting="uniform", local_steps=0, lr_decay=0.998, clip=10.0, augment="paper",
)  # fmt: skip
SGD = dict(lr=0.1, weight_decay=0.001, decay_mode="l2", server_lr=1.0)
ADAPTIVE = dict(
    lr=0.001, weight_decay=0.01, decay_mode="decoupled", server_lr=1.0, beta1=0.9, beta2=0.99, eps_v=1e-8, v_init="zero"
)
PAPER_METHOD = {
    "fedavg": SGD,
    "fedprox": dict(SGD, mu=0.1),
    "scaffold": dict(SGD, alpha=1.0),
    "fedcm": dict(SGD, alpha=0.1),
    "fedadam": dict(SGD, server_lr=0.1, beta1=0.9, beta2=0.99, eps=0.01),
    "fedadam_amended": dict(SGD, server_lr=0.1, beta1=0.9, beta2=0.99, eps=0.01, alpha=0.1),
    "localadam": ADAPTIVE,
    "fedlada": ADAPTIVE,
}
PAPER_ALPHA = {"cifar10": 0.1, "cifar100": 0.05, "tinyimagenet": 0.05}
# Ours, for a laptop.
DIGITS = dict(model="cnn", rounds=60, clients=50, participation=0.2, local_epochs=5, batch_size=10, dirichlet=0.3)


@pytest.mark.parametrize("method", PAPER_METHOD)
@pytest.mark.parametrize("dataset", [*PAPER_DATA, "digits"])
def test_presets(dataset, method):
    found = resolve({"dataset": dataset, "algorithm": method}).config.record()
    expected = dict(EVERYWHERE, **PAPER_DATA[dataset]) if dataset in PAPER_DATA else dict(DIGITS, augment="none")
    expected |= PAPER_METHOD[method]
    if method == "fedlada":
        expected["alpha"] = PAPER_ALPHA.get(dataset, 0.3)
    if dataset == "digits" and method in ("fedlada", "localadam"):
        expected["lr"] = 0.004
    assert {name: found[name] for name in expected} == expected


def test_data_of_ones_own_is_as_it_is():
    """No flip and crop, which mirror letters and X-rays; everybody takes part where there are few clients."""
    own = dict(dataset="mine", algorithm="fedavg")
    found = resolve(own, dataset_kind="npz", shards={"clients": 10})
    assert (found.config.augment, found.config.participation) == ("none", 1.0)
    assert found.sources["participation"] == "few clients"
    assert resolve(own, dataset_kind="npz", shards={"clients": 11}).config.participation == 0.2
    assert resolve({**own, "clients": "3", "participation": 0.5}, dataset_kind="npz").config.participation == 0.5
    # A preset is not changed, nor what a record says.
    assert resolve({"dataset": "digits", "clients": 5}).config.participation == 0.2
    record = {**resolve(own, dataset_kind="npz", shards={"clients": 3}).config.record(), "participation": 0.2}
    record |= {"augment": "paper", "crop": "always"}
    again = resolve({}, record, dataset_kind="npz", shards={"clients": 3}, recorded=True).config
    assert (again.participation, again.augment, again.crop) == (0.2, "paper", "always")


@pytest.mark.parametrize("given", [{"crop": "always"}, {"flip": False}, {"crop_padding": 2}])
def test_what_only_augmented_images_have(given):
    name = next(iter(given)).replace("_", "-")
    with pytest.raises(UserError, match=f"--{name} has no effect on images that are not augmented: add"):
        resolve({"dataset": "digits", **given})
    resolve({"dataset": "digits", "augment": "paper", **given})
    resolve({"dataset": "cifar10", **given})
    record = {**resolve({"dataset": "digits"}).config.record(), **given}
    resolve({}, record, recorded=True)  # of a version that took it


def test_first_of_flag_file_preset_default():
    file = {"dataset": "cifar100", "rounds": 7, "lr": 0.5}
    found = resolve({"lr": "0.25", "algorithm": "fedlada"}, file)
    wanted = {
        "lr": (0.25, "flag"),
        "rounds": (7, "file"),
        "dataset": ("cifar100", "file"),
        "alpha": (0.05, "preset cifar100, fedlada"),
        "weight_decay": (0.01, "preset fedlada"),
        "local_epochs": (2, "preset cifar100"),
        "seed": (0, "default"),
    }
    record = found.config.record()
    assert {name: (record[name], found.sources[name]) for name in wanted} == wanted
    rows = dict(line.split(maxsplit=1) for line in found.table().splitlines())
    assert list(rows) == list(settings_of("fedlada"))
    assert rows["lr"].split() == ["0.25", "flag"]
    assert rows["out"].split() == ["runs/cifar100-fedlada-seed0", "default"]


def test_the_tuned_preset():
    """It has values of its own for some methods; for the others it is the paper's, and the record says so."""
    found = resolve({"dataset": "cifar10", "preset": "tuned", "alpha": 0.2})
    assert (found.config.preset, found.sources["preset"]) == ("tuned", "flag")
    assert (found.config.weight_decay, found.sources["weight_decay"]) == (0.05, "preset tuned, fedlada")
    assert (found.config.hyper["alpha"], found.sources["alpha"]) == (0.2, "flag")
    assert (found.config.lr, found.sources["lr"]) == (0.001, "preset fedlada")
    by_hand = resolve({"preset": "tuned", "weight_decay": 0.3}).config
    assert by_hand.weight_decay == 0.3
    assert resolve({}, {"preset": "tuned"}).config == resolve({"preset": "tuned"}).config
    other = resolve({"algorithm": "fedcm", "preset": "tuned"})
    assert other.config == resolve({"algorithm": "fedcm"}).config
    assert (other.config.preset, other.sources["preset"]) == ("paper", "no tuned values for fedcm")


def test_the_closest_preset():
    """Of FedLADA alone; LocalAdam and the others keep the paper's values."""
    found = resolve({"dataset": "cifar10", "preset": "closest"})
    wanted = resolve({"dataset": "cifar10", "weight_decay": 0.05, "lr_decay": 0.996, "crop": "always"}).config
    assert found.config.record() == {**wanted.record(), "preset": "closest"}
    assert {found.sources[n] for n in ("weight_decay", "lr_decay", "crop")} == {"preset closest, fedlada"}
    other = resolve({"algorithm": "localadam", "preset": "closest"})
    assert other.config == resolve({"algorithm": "localadam"}).config
    assert other.sources["preset"] == "no closest values for localadam"


def test_tuned_values_are_not_inherited():
    """What was chosen for a method says nothing about those that are made of it."""
    assert FedAvg.tuned
    assert type("Own", (FedAvg,), {}).tuned == {}
    assert type("Own", (algorithms.find("fedlada"),), {}).closest == {}


@pytest.mark.parametrize("preset", ["paper", "tuned", "closest"])
def test_a_record_keeps_its_preset(preset, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(dumps(resolve({"preset": preset, "lr": 0.5}).config))
    read = resolve({}, load(path), recorded=True)
    assert (read.config.preset, read.config.weight_decay) == (preset, {"paper": 0.01}.get(preset, 0.05))
    assert read.sources["weight_decay"] != "file"


def test_values_that_the_paper_does_not_state_are_marked():
    def source(name, **flags):
        return resolve(flags).sources[name]

    assert source("clip", algorithm="scaffold") == "default, ours"
    assert source("clip", algorithm="scaffold", clip=5) == "flag"
    assert source("mu", algorithm="fedprox", dataset="cifar10") == "default, ours"
    assert source("alpha", algorithm="fedcm", dataset="cifar100") == "default, ours"
    assert source("alpha", algorithm="fedcm", dataset="cifar10") == "default"
    assert source("alpha", algorithm="fedlada", dataset="cifar100") == "preset cifar100, fedlada"
    assert source("lr", algorithm="fedavg") == "preset fedavg"


def test_shards_stand_between_preset_and_file():
    shards = {"clients": 30, "dirichlet": 0.2}
    found = resolve({"dataset": "some/where", "clients": 10}, {}, dataset_kind="cifar10", shards=shards)
    assert (found.config.clients, found.sources["clients"]) == (10, "flag")
    assert (found.config.dirichlet, found.sources["dirichlet"]) == (0.2, "shards")
    assert (found.config.model, found.sources["model"]) == ("resnet18", "preset cifar10")
    assert found.config.out == "runs/where-fedlada-seed0"


@pytest.mark.parametrize("method", PAPER_METHOD)
def test_a_runs_own_settings_read_back(method, tmp_path):
    chosen = {
        "dataset": "cifar100",
        "algorithm": method,
        "local_steps": 3,
        "targets": [0.4, 0.45],
        "server_trains": True,
    }
    config = resolve(chosen).config
    path = tmp_path / "config.json"
    path.write_text(dumps(config))
    assert load(path) == config.record()
    assert resolve({}, load(path), recorded=is_record(path)).config == config


def test_a_record_of_an_older_version_reads_back(tmp_path):
    """It lacks settings that were added since, which take the values that they have without it, and it has those of
    all methods."""
    config = resolve({"algorithm": "fedavg", "rounds": 7, "lr": 0.3}).config
    record = {**config.record(), "alpha": 0.1, "mu": 0.1, "v_init": "zero"}
    for name in ("size_sigma", "transport", "max_clients_at_once"):
        del record[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    assert resolve({}, load(path), recorded=is_record(path)).config == config


def test_a_toml_file_is_not_a_record(tmp_path):
    """However complete it is, what a person wrote there was chosen by hand."""
    values = {**resolve({"algorithm": "fedavg"}).config.record(), "alpha": 0.1}
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    assert load(path) == values
    assert not is_record(path)
    with pytest.raises(UserError, match="--alpha is not a setting of fedavg"):
        resolve({}, load(path), recorded=is_record(path))


def test_every_setting_of_a_file_written_by_hand_must_have_an_effect():
    with pytest.raises(UserError, match="--mu is not a setting of fedavg"):
        resolve({}, {"algorithm": "fedavg", "mu": 0.1})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rounds", "1e3", 1000),
        ("seed", "9007199254740993", 9007199254740993),  # 2^53 + 1 has no float
        ("lr", "1e-3", 0.001),
        ("server_trains", "yes", True),
        ("targets", "0.4,0.5 0.6", [0.4, 0.5, 0.6]),
        ("targets", ["0.4", "0.5"], [0.4, 0.5]),
        ("out", "some/where", "some/where"),
    ],
)
def test_text_becomes_the_fields_type(name, text, value):
    found = getattr(resolve({name: text}).config, name)
    assert found == value
    assert type(found) is type(value)


REFUSED = [
    ({"rouns": 3}, "unknown setting 'rouns' (did you mean 'rounds'?)"),
    ({"qqqq": 3}, "unknown setting 'qqqq'"),
    ({"rounds": "many"}, "--rounds: got 'many', expected int"),
    ({"rounds": "1.5"}, "--rounds: got '1.5', expected int"),
    ({"rounds": True}, "--rounds: got True, expected int"),
    ({"lr": "nan"}, "--lr: got 'nan', expected float"),
    ({"lr": "inf"}, "--lr: got 'inf', expected float"),
    ({"server_trains": "maybe"}, "--server-trains: got 'maybe', expected bool"),
    ({"model": 5}, "--model: got 5, expected str"),
    ({"rounds": -1}, "--rounds: got -1, expected at least 0"),
    ({"participation": 1.5}, "--participation: got 1.5, expected at most 1"),
    ({"participation": 0}, "--participation: got 0.0, expected more than 0"),
    ({"lr_decay": 1.01}, "--lr-decay: got 1.01, expected at most 1"),
    ({"seed": 2**64}, f"--seed: got {2**64}, expected at most {2**63 - 1}"),
    ({"clients": 0}, "--clients: got 0, expected at least 1"),
    (
        {"sampling": "bernouli"},
        "--sampling: got 'bernouli', expected one of fixed, bernoulli (did you mean 'bernoulli'?)",
    ),
    (
        {"algorithm": "fedlad"},
        f"--algorithm: got 'fedlad', expected one of {', '.join(algorithms.names())}, package.module:Class or "
        "path/file.py:Class (did you mean 'fedlada'?)",
    ),
    (
        {"v_init": "fresh"},
        "--v-init fresh: got --eps 0, expected one above 0, such as 1e-8, as v_hat may be zero",
    ),
    (
        {"v_max": False, "v_init": "server"},
        "--no-v-max: got --eps 0, expected one above 0, such as 1e-8, as v_hat may be zero",
    ),
    ({"correct_after_max": True}, "--correct-after-max has no effect without --bias-correction: leave it out"),
    (
        {"correct_after_max": True, "bias_correction": True, "v_max": False, "eps": 1e-8},
        "--correct-after-max has no effect with --no-v-max: leave it out",
    ),
    (
        {"algorithm": "fedavg", "decay_mode": "inside"},
        "--decay-mode inside: fedavg has no g_a, expected l2 or decoupled",
    ),
    ({"smu_mu": 1.0}, "--smu-mu has no effect on --activation relu, only on smu: leave it out"),
    ({"algorithm": "fedavg", "mu": 0.1}, "--mu is not a setting of fedavg: leave it out (its own are: none)"),
    (
        {"algorithm": "fedadam", "mu": 1},
        "--mu is not a setting of fedadam: leave it out (its own are: --beta1, --beta2, --eps, --v0)",
    ),
    ({"algorithm": "localadam", "alpha": 0.5}, "--alpha: got 0.5, expected at least 1"),
    (
        {"local_steps": 3, "local_epochs": 2},
        "--local-steps and --local-epochs contradict each other: give one of them",
    ),
    ({"algorithm": "fedcm", "alpha": 1.5}, "--alpha: got 1.5, expected at most 1"),
    ({"alpha": 0}, "--alpha: got 0.0, expected more than 0"),
    ({"beta2": 1}, "--beta2: got 1.0, expected less than 1"),
    (
        {"clients": 20, "participation": 0.01},
        "--participation 0.01 of 20 clients selects none: expected at least 0.05, or --sampling bernoulli",
    ),
    (
        {"wire": "bf16", "sums": "exact"},
        "--wire bf16 would round what --sums exact computes: got both, expected --wire fp32",
    ),
    (
        {"wire": "bf16", "robust": "median"},
        "--wire bf16 would round what --robust median computes: got both, expected --wire fp32",
    ),
    (
        {"wire": "bf16", "precision": "fp64"},
        "--wire bf16 would round what --precision fp64 computes: got both, expected --wire fp32",
    ),
    ({"targets": [70]}, "--targets: got [70.0], expected fractions between 0 and 1, such as 0.7"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_refused_in_one_line(given, words):
    with pytest.raises(UserError) as found:
        resolve(given)
    assert str(found.value) == words


def test_accepted_at_the_edge():
    resolve({"algorithm": "scaffold", "alpha": 1.5})
    resolve({"algorithm": "localadam", "alpha": 1.0})
    resolve({"local_steps": 0, "local_epochs": 2})
    resolve({"clients": 20, "participation": 0.01, "sampling": "bernoulli"})
    resolve({"rounds": 0, "clip": 0, "weight_decay": 0, "batch_size": 0, "eval_every": 0})


def test_files_that_are_not_settings(tmp_path):
    for name, text, words in (
        ("a.json", "{", "a.json is not valid JSON: "),
        ("b.toml", "lr 3", "b.toml is not valid TOML: "),
        ("c.json", "[1]", "c.json holds list, expected one table of settings"),
        ("d.json", '{"lr": 0.1, "rounds": 3, "lr": 0.2}', "d.json is not valid JSON: 'lr' is there twice"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError) as found:
            load(tmp_path / name)
        assert str(found.value).startswith("--config: ")
        assert words in str(found.value)
    with pytest.raises(UserError, match=r"--config: cannot read .*absent.toml: No such file or directory"):
        load(tmp_path / "absent.toml")


def test_a_record_of_a_later_version():
    record = {**Config().record(), "warmth": 3}
    with pytest.raises(
        UserError, match=r"^unknown setting 'warmth' in the record of the run .*: use the version of fed"
    ):
        resolve({}, record, recorded=True)
    with pytest.raises(UserError, match=r"^unknown setting 'warmth'$"):
        resolve({}, {"warmth": 3})


def test_only_what_changes_the_result_is_a_difference():
    old = Config().record()
    new = Config(lr=0.2, sampling="bernoulli", rounds=7, out="elsewhere", device="cuda", eval_every=3)
    assert differences(old, new) == [
        "sampling: fixed in the checkpoint, bernoulli now",
        "lr: 0.1 in the checkpoint, 0.2 now",
    ]
    del old["lr"]  # a setting that the checkpoint's version did not have
    assert differences(old, Config(lr=0.2)) == []


def test_every_setting_has_a_flag():
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, settings.SETTINGS)
    assert vars(parser.parse_args([])) == {}
    line = ["--batch-size", "7", "--server-trains", "--targets", "0.4", "0.5", "--lr-decay", "1"]
    given = vars(parser.parse_args(line))
    assert given == {"batch_size": "7", "server_trains": True, "targets": ["0.4", "0.5"], "lr_decay": "1"}
    assert vars(parser.parse_args(["--no-server-trains"])) == {"server_trains": False}
    flags = {word for action in parser._actions for word in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in settings.SETTINGS} <= flags


def test_where_shards_are(monkeypatch):
    monkeypatch.delenv("FEDLADA_DATA", raising=False)
    assert str(data_root()) == "data"
    monkeypatch.setenv("FEDLADA_DATA", "/scratch/shards")
    assert str(data_root()) == "/scratch/shards"
    assert str(data_root("here")) == "here"


def test_every_setting_is_in_one_group_of_the_help():
    listed = [name for names in settings.grouped().values() for name in names]
    assert sorted(listed) == sorted(settings.SETTINGS)
    assert "" not in settings.grouped()
    assert "sums" in settings.grouped()["machine"]


@pytest.mark.parametrize("name", ["mine.yaml", "mine.YML", "mine.ini"])
def test_a_file_of_another_type_is_named_as_such(tmp_path, name):
    (tmp_path / name).write_text("rounds: 3\n")
    kind = name.rpartition(".")[2].upper()
    with pytest.raises(UserError, match=f"{name}, a {kind} file; settings are TOML"):
        settings.load(tmp_path / name)
