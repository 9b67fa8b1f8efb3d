"""Settings of a run: one flat dataclass, the paper's presets, and where each value came from.

    python -m fedlada_mpi.run --dataset cifar10 --algorithm scaffold --print-config

A setting is taken from the first of: command line, ``--config FILE``, preset of the method, preset of the data set
(``PRESETS``), default. Settings of a single method, and its presets, are declared in its class (``hyper``): the paper's
as ``presets`` and, for ``--preset tuned``, what differs from them as ``tuned``.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean, printable, shortened
from .inputs import check_path, read_json, read_toml, reason
from .rng import fixed_number

DATASETS = ("digits", "cifar10", "cifar100", "tinyimagenet")
PATHS = ("dataset", "data_dir", "init", "out")
# Of settings without a limit of their own: counts fit into 32 bits, products of three rates into a float32.
MOST: dict[type, int] = {int: 2**31 - 1, float: 10**12}


@dataclass(frozen=True)
class Setting:
    """A setting's default, documentation and range; ``runtime`` ones may differ when a run is resumed."""

    default: Any
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    runtime: bool = False
    kind: str = ""  # bool, int, float, str or list[float]
    name: str = ""

    def named(self, name: str) -> Setting:
        kind = "list[float]" if isinstance(self.default, list) else type(self.default).__name__
        return replace(self, name=name, kind=kind)


def setting(default: Any, help: str, **range_: Any) -> Any:
    """A field of the settings."""
    meta = {"setting": Setting(default, help, **{**range_, "most": _most(default, range_.get("most"))})}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def hyper(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A setting of one method, declared in its class; ``self.NAME`` is its value in a run."""
    return Setting(default, help, choices, least, _most(default, most), above, below)


def _most(default: Any, most: float | None) -> float | None:
    return MOST.get(type(default)) if most is None else most


@dataclass
class Config:
    dataset: str = setting("digits", f"one of {', '.join(DATASETS)}, or a name or directory of shards")
    data_dir: str = setting("", "where the shards are (default: $FEDLADA_DATA, else data/)", runtime=True)
    algorithm: str = setting("fedlada", "the federated method, or your own as package.module:Class or file.py:Class")
    preset: str = setting(
        "paper", "what is not given is the paper's, or what was chosen on CIFAR-10", choices=("paper", "tuned")
    )
    model: str = setting(
        "cnn", "resnet18, lenet, lenet3, cnn, torchvision:NAME, or your own as package.module:function"
    )
    norm: str = setting(
        "", "exchange BatchNorm by group:N, layer, instance or none (torchvision:NAME: group:2 unless given)"
    )
    activation: str = setting("relu", "activation of lenet, lenet3 and cnn", choices=("relu", "gelu", "smu"))
    smu_mu: float = setting(2.5, "mu of --activation smu; the larger, the closer to ReLU", above=0)
    init: str = setting("", "start from this model.pt instead of a fresh initialisation")
    init_partial: bool = setting(False, "take from --init what fits by name and shape, and leave the rest")

    rounds: int = setting(100, "communication rounds T", least=0, runtime=True)
    clients: int = setting(50, "number of clients m", least=1)
    participation: float = setting(0.2, "share of the clients in a round", above=0, most=1)
    sampling: str = setting("fixed", "exactly S clients, or each with probability P", choices=("fixed", "bernoulli"))
    weighting: str = setting("uniform", "weights of the mean over participants", choices=("uniform", "size"))
    robust: str = setting(
        "none",
        "for the mean over participants: coordinate-wise median or trimmed mean, or clip to the median norm",
        choices=("none", "median", "trimmed", "clip"),
    )
    trim: float = setting(0.1, "share left out at each end by --robust trimmed", above=0, below=0.5)
    sums: str = setting("fast", "exact: the same bits on any number of ranks", choices=("fast", "exact"))
    local_epochs: int = setting(5, "passes over a client's data in a round", least=1)
    local_steps: int = setting(0, "local steps K; 0 = given by local_epochs", least=0)
    batch_size: int = setting(50, "mini-batch of a client; 0 = all of its data", least=0)

    lr: float = setting(0.1, "local rate eta_l", above=0)
    server_lr: float = setting(1.0, "server rate eta_g", above=0)
    lr_schedule: str = setting(
        "exponential",
        "the local rate over the rounds (rates.py)",
        choices=("exponential", "constant", "cosine", "step"),
    )
    lr_decay: float = setting(0.998, "factor per round (exponential) or per lr_step rounds (step)", above=0, most=1)
    lr_step: int = setting(100, "rounds between the decays of --lr-schedule step", least=1)
    lr_horizon: int = setting(0, "rounds until the end of --lr-schedule cosine; 0 = --rounds", least=0)
    lr_warmup: int = setting(0, "rounds in which the rate rises linearly to its schedule", least=0)
    weight_decay: float = setting(1e-3, "lambda", least=0)
    decay_mode: str = setting(
        "l2",
        "decay in the gradient, in the step, or in the step inside alpha, where g_a does not amplify it",
        choices=("l2", "decoupled", "inside"),
    )
    decay_on: str = setting(
        "all", "decay of all parameters, or not of biases and norms (those of one axis)", choices=("all", "weights")
    )
    clip: float = setting(10.0, "largest L2 norm of a gradient; 0 = off", least=0)
    on_nonfinite: str = setting(
        "stop", "when a client's result is not finite: end the run, or leave the client out", choices=("stop", "skip")
    )

    partition: str = setting(
        "dirichlet", "how clients get their images", choices=("dirichlet", "iid", "pathological", "natural")
    )
    dirichlet: float = setting(0.6, "concentration of the label priors", above=0)
    exhausted: str = setting("refill", "when a class runs out", choices=("refill", "exact"))
    classes_per_client: int = setting(2, "classes of a client under --partition pathological", least=1)
    size_sigma: float = setting(0.0, "spread of the clients' sizes (lognormal); 0 = equal", least=0, most=10)
    partition_seed: int = setting(20, "seed of the partition", least=0, most=2**32 - 1)
    validation: float = setting(
        0.0, "share of the training images that chooses the best round (best.pt); 0 = none", least=0, below=1
    )

    augment: str = setting("paper", "flip and padded crop, or nothing", choices=("paper", "none"))
    flip: bool = setting(True, "flip half of the images, where they are augmented")
    crop: str = setting(
        "half", "which images are cropped, where they are augmented", choices=("half", "always", "never")
    )
    # The place of a crop is drawn from 20 bits.
    crop_padding: int = setting(4, "zero pixels around an image before the crop", least=0, most=2**19 - 1)
    seed: int = setting(0, "seed of sampling, batches, augmentation and initialisation", least=0, most=2**63 - 1)
    precision: str = setting(
        "fp32",
        "arithmetic of gradients; states are float32 (fp64: all double)",
        choices=("fp64", "fp32", "tf32", "bf16"),
    )

    device: str = setting("auto", "where to train", choices=("auto", "cpu", "cuda"), runtime=True)
    engine: str = setting(
        "auto",
        "stacked kernels, or functional torch for any module (auto: stacked where the model has it)",
        choices=("auto", "stacked", "generic"),
        runtime=True,
    )
    compile: str = setting("auto", "use compiled kernels on the GPU", choices=("auto", "on", "off"), runtime=True)
    transport: str = setting(
        "auto",
        "how vectors move between ranks (auto: the fastest that works)",
        choices=("auto", "direct", "shared", "staged", "host"),
        runtime=True,
    )
    wire: str = setting(
        "fp32",
        "bf16: sums, and the change of the model, are rounded where they cross between nodes (fp32: as computed)",
        choices=("fp32", "bf16"),
    )
    server_trains: bool = setting(False, "rank 0 owns clients too", runtime=True)
    silo_per_rank: bool = setting(False, "a silo file is read by one rank alone, which owns its clients", runtime=True)
    patience: int = setting(
        7200, "seconds that a rank waits for others before the run ends with status 4; 0 = any", least=0, runtime=True
    )
    adopt: bool = setting(
        False, "where a rank is lost (mpirun --with-ft ulfm), the others train its clients", runtime=True
    )
    min_silos: int = setting(
        1, "stop with a checkpoint where fewer ranks with clients than this are left", least=1, runtime=True
    )
    max_clients_at_once: int = setting(
        0, "clients trained together on a rank; 0 = as memory allows (--sums exact on a CPU: 1)", least=0, runtime=True
    )
    eval_every: int = setting(1, "evaluate every this many rounds; 0 = only at the end", least=0, runtime=True)
    eval_train_every: int = setting(
        -1,
        "evaluate on the training images every this many rounds; 0 = only at the end, -1 = as eval_every",
        least=-1,
        runtime=True,
    )
    eval_clients: int = setting(
        0, "evaluate client by client every this many rounds and at the end; 0 = never", least=0, runtime=True
    )
    diagnose: int = setting(
        0, "record drift, true gradient and step directions every this many rounds; 0 = never", least=0, runtime=True
    )
    diagnose_images: int = setting(
        0, "about so many of all training images for the true gradient of --diagnose; 0 = all", least=0, runtime=True
    )
    targets: list[float] = setting([], "test accuracies whose first round is reported", runtime=True)
    checkpoint_every: int = setting(50, "checkpoint every this many rounds; 0 = only at the end", least=0, runtime=True)
    wandb: bool = setting(False, "record with Weights & Biases, too; its WANDB_* variables apply", runtime=True)
    mlflow: bool = setting(False, "record with MLflow, too; its MLFLOW_* variables apply", runtime=True)
    out: str = setting("", "output directory (default: runs/DATASET-ALGORITHM-seedN)", runtime=True)

    hyper: dict[str, Any] = field(default_factory=dict)  # the method's own settings

    def record(self) -> dict[str, Any]:
        """All settings by name, the method's own among them."""
        return {**{name: getattr(self, name) for name in SETTINGS}, **self.hyper}


SETTINGS: dict[str, Setting] = {
    f.name: f.metadata["setting"].named(f.name) for f in fields(Config) if "setting" in f.metadata
}


OTHER_FILES = (".yaml", ".yml", ".ini", ".cfg", ".conf", ".py", ".xml", ".csv")  # that people give for settings

# As --help lists them, each in one group.
GROUPS: dict[str, tuple[str, ...]] = {
    "data": (
        *("dataset", "data_dir", "clients", "partition", "dirichlet", "exhausted", "classes_per_client", "size_sigma"),
        *("partition_seed", "validation", "augment", "flip", "crop", "crop_padding"),
    ),
    "method and model": (
        *("algorithm", "preset", "model", "norm", "activation", "smu_mu", "init", "init_partial"),
        *("server_lr", "participation", "sampling", "weighting", "robust", "trim"),
    ),
    "training": (
        *("rounds", "local_epochs", "local_steps", "batch_size", "lr", "lr_schedule", "lr_decay", "lr_step"),
        *("lr_horizon", "lr_warmup", "weight_decay", "decay_mode", "decay_on", "clip", "on_nonfinite", "seed"),
    ),
    "evaluation": ("eval_every", "eval_train_every", "eval_clients", "targets", "diagnose", "diagnose_images"),
    "machine": (
        *("device", "precision", "sums", "engine", "compile", "transport", "wire", "server_trains", "silo_per_rank"),
        *("max_clients_at_once", "patience", "adopt", "min_silos"),
    ),
    "output": ("out", "checkpoint_every", "wandb", "mlflow"),
}


def grouped() -> dict[str, dict[str, Setting]]:
    """The settings that all methods have, by group."""
    return {title: {name: SETTINGS[name] for name in names} for title, names in GROUPS.items()}


def settings_of(algorithm: str) -> dict[str, Setting]:
    """All settings of a run with this method."""
    from .algorithms import find  # which imports this module

    return {**SETTINGS, **find(algorithm).hypers}


# Settings that only some schedules of the local rate have.
SCHEDULES = {"lr_decay": ("exponential", "step"), "lr_step": ("step",), "lr_horizon": ("cosine",)}

# What --wire bf16 contradicts; a median or trimmed mean is gathered, not summed.
NOT_ROUNDED = {"sums": ("exact",), "robust": ("median", "trimmed"), "precision": ("fp64",)}

# The paper's experimental set-up; "digits" is ours, sized for a laptop.
_PAPER = dict(
    model="resnet18", rounds=1500, clients=100, participation=0.1, batch_size=50, dirichlet=0.6
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "digits": dict(model="cnn", rounds=60, clients=50, participation=0.2, batch_size=10, dirichlet=0.3,
                   local_epochs=5, augment="none", crop_padding=1, eval_every=10),
    "cifar10": dict(_PAPER, local_epochs=5, crop_padding=4),
    "cifar100": dict(_PAPER, local_epochs=2, crop_padding=4),
    "tinyimagenet": dict(_PAPER, local_epochs=2, crop_padding=8),
}  # fmt: skip


# Values that the paper does not state, so that they are ours: the setting, the method and the data set ("": any).
OURS = (
    ("clip", "", ""),
    ("smu_mu", "", ""),
    ("mu", "fedprox", ""),
    ("alpha", "fedcm", "cifar100"),
    ("alpha", "fedcm", "tinyimagenet"),
    ("alpha", "fedadam_amended", "cifar100"),
    ("alpha", "fedadam_amended", "tinyimagenet"),
)


def ours(name: str, algorithm: str) -> list[str]:
    """The data sets on which the value of a method's setting is ours, [""] for all of them."""
    return [dataset for setting, method, dataset in OURS if setting == name and method in ("", algorithm)]


@dataclass
class Resolved:
    """Final settings and, for each, where it came from: default, preset, file or flag."""

    config: Config
    sources: dict[str, str]

    def table(self) -> str:
        record = self.config.record()
        width = max(map(len, record))
        return "\n".join(f"{name:<{width}}  {_show(record[name]):<14}  {self.sources[name]}" for name in record)


def _show(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else printable(value) or '""'


def resolve(
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    dataset_kind: str | None = None,
    shards: Mapping[str, Any] | None = None,
    recorded: bool = False,
) -> Resolved:
    """Merge all sources and check the result.

    When the data set is a directory, ``dataset_kind`` names its preset and ``shards`` holds what it was prepared with.
    ``recorded``: the file is a run's own record, which names every setting; only those that differ from the presets
    count as chosen by hand.
    """
    from .algorithms import find

    file = dict(file or {})
    given = {**file, **flags}
    algorithm = coerce(SETTINGS["algorithm"], given.get("algorithm", SETTINGS["algorithm"].default))
    method, known = find(algorithm), settings_of(algorithm)
    if recorded:
        file = {name: value for name, value in file.items() if name in known or not _of_other_methods(name)}
    for name in (*file, *flags):
        if name not in known:
            raise UserError(_unknown(name, algorithm, method.hypers))
    values: dict[str, Any] = {name: coerce(setting, setting.default) for name, setting in known.items()}
    sources = dict.fromkeys(known, "default")

    def take(new: Mapping[str, Any], source: str, changes_only: bool = False) -> None:
        for name, value in new.items():
            value = coerce(known[name], value)
            if not changes_only or value != values[name]:
                values[name], sources[name] = value, source

    kind = dataset_kind or str(given.get("dataset", values["dataset"]))
    take(PRESETS.get(kind, {}), f"preset {kind}")
    take(method.presets.get("", {}), f"preset {algorithm}")
    take(method.presets.get(kind, {}), f"preset {kind}, {algorithm}")
    for name in known:
        if not {"", kind}.isdisjoint(ours(name, algorithm)):
            sources[name] += ", ours"
    tuned = {**method.tuned.get("", {}), **method.tuned.get(kind, {})}
    if given.get("preset") == "tuned":
        take(tuned, f"preset tuned, {algorithm}")
    take(method.requires, f"preset {algorithm}")
    take(shards or {}, "shards")
    take(file, "file", changes_only=recorded)
    take(flags, "flag")
    if values["preset"] == "tuned" and not tuned:
        values["preset"], sources["preset"] = "paper", f"no tuned values for {algorithm}"
    if values["lr_schedule"] == "cosine" and not values["lr_horizon"]:
        # Written down, so that a run that is extended later does not change its rates.
        values["lr_horizon"], sources["lr_horizon"] = max(1, values["rounds"]), "rounds"
    if values["robust"] != "none" and sources["on_nonfinite"] == "default":
        values["on_nonfinite"], sources["on_nonfinite"] = "skip", "robust"
    if not values["out"]:
        name = method.name or method.__name__
        values["out"] = f"runs/{Path(values['dataset']).name}-{name}-seed{values['seed']}"
    check(values, sources, known)
    for name, value in method.requires.items():
        if values[name] != value:
            raise UserError(f"--{flag(name)}: got {_show(values[name])}, expected {_show(value)} for {algorithm}")
    if values["decay_mode"] == "inside" and not method.amends:
        raise UserError(f"--decay-mode inside: {algorithm} has no g_a, expected l2 or decoupled")
    method.check(values)
    config = Config(**{name: values[name] for name in SETTINGS}, hyper={name: values[name] for name in method.hypers})
    return Resolved(config, sources)


def _of_other_methods(name: str) -> bool:
    """Whether a setting is one that some built-in method has; a run's record once had those of all methods."""
    from .algorithms import built_in_hypers

    return name in built_in_hypers()


def _unknown(name: str, algorithm: str, hypers: Mapping[str, Setting]) -> str:
    """Why there is no setting ``name``."""
    if not _of_other_methods(name):
        return f"unknown setting {shortened(name)}{did_you_mean(name, [*SETTINGS, *hypers])}"
    own = ", ".join(f"--{flag(n)}" for n in hypers) or "none"
    return f"--{flag(name)} is not a setting of {algorithm}: leave it out (its own are: {own})"


def coerce(setting: Setting, value: Any) -> Any:
    """The value in the setting's type; text is parsed as on a command line."""
    kind = setting.kind
    try:
        if kind == "bool":
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        if kind == "int":
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(value) if str(value).lstrip("-").isdigit() else int(float(value))
        if kind == "float":
            if isinstance(value, bool) or not math.isfinite(float(value)):
                raise ValueError
            return float(value)
        if kind == "list[float]":
            return [
                float(v) for v in (value if isinstance(value, (list, tuple)) else str(value).replace(",", " ").split())
            ]
        if not isinstance(value, str):
            raise ValueError
        return value
    except (KeyError, ValueError, TypeError, OverflowError):
        raise UserError(f"--{flag(setting.name)}: got {shortened(value)}, expected {kind}") from None


def check(values: Mapping[str, Any], sources: Mapping[str, str], known: Mapping[str, Setting]) -> None:
    """Ranges, choices and contradictions."""
    by_hand = {n for n, s in sources.items() if s in ("file", "flag")}
    for name, setting in known.items():
        value = values[name]
        if setting.choices and value not in setting.choices:
            hint = did_you_mean(str(value), setting.choices)
            raise UserError(
                f"--{flag(name)}: got {shortened(value)}, expected one of {', '.join(setting.choices)}{hint}"
            )
        for bound, fails, text in (
            (setting.least, operator.lt, "at least"),
            (setting.most, operator.gt, "at most"),
            (setting.above, operator.le, "more than"),
            (setting.below, operator.ge, "less than"),
        ):
            if bound is not None and fails(value, bound):
                raise UserError(f"--{flag(name)}: got {value}, expected {text} {bound}")
    for name in PATHS:
        check_path(values[name], f"--{flag(name)}")
    if values["norm"]:
        norm_groups(values["norm"])
        if ":" not in values["model"]:
            raise UserError(
                f"--norm has no effect on --model {values['model']}, only on torchvision:NAME and your own models: "
                "leave it out"
            )
    if "smu_mu" in by_hand and values["activation"] != "smu":
        raise UserError(f"--smu-mu has no effect on --activation {values['activation']}, only on smu: leave it out")
    if values["init_partial"] and not values["init"]:
        raise UserError("--init-partial: got no --init, expected --init FILE with the values to take")
    if values["diagnose_images"] and not values["diagnose"]:
        raise UserError("--diagnose-images: got no --diagnose, expected --diagnose N, every how many rounds")
    if "local_steps" in by_hand and "local_epochs" in by_hand and values["local_steps"]:
        raise UserError("--local-steps and --local-epochs contradict each other: give one of them")
    for name, schedules in SCHEDULES.items():
        if name in by_hand and values["lr_schedule"] not in schedules:
            raise UserError(
                f"--{flag(name)} has no effect on --lr-schedule {values['lr_schedule']}, only on "
                f"{' and '.join(schedules)}: leave it out"
            )
    if values["sampling"] == "fixed" and fixed_number(values["clients"], values["participation"]) < 1:
        raise UserError(
            f"--participation {values['participation']} of {values['clients']} clients selects none: "
            f"expected at least {1 / values['clients']:.3g}, or --sampling bernoulli"
        )
    _check_robust(values, by_hand)
    for name in ("sums", "robust", "precision"):
        if values["wire"] == "bf16" and values[name] in NOT_ROUNDED[name]:
            raise UserError(
                f"--wire bf16 would round what --{name} {values[name]} computes: got both, expected --wire fp32"
            )
    if any(not 0 < t <= 1 for t in values["targets"]):
        raise UserError(f"--targets: got {values['targets']}, expected fractions between 0 and 1, such as 0.7")


def trimmed(trim: float, participants: int) -> int:
    """How many participants --robust trimmed leaves out at each end."""
    return math.floor(trim * participants + 1e-9)  # 0.29 * 100 is just under 29


def _check_robust(values: Mapping[str, Any], by_hand: Set[str]) -> None:
    robust, number = values["robust"], fixed_number(values["clients"], values["participation"])
    if "trim" in by_hand and robust != "trimmed":
        raise UserError(f"--trim has no effect on --robust {robust}, only on trimmed: leave it out")
    if robust == "none":
        return
    if "on_nonfinite" in by_hand and values["on_nonfinite"] == "stop":
        raise UserError(
            f"--robust {robust} leaves clients out whose result is not finite: got --on-nonfinite stop, expected skip"
        )
    if robust != "clip" and values["weighting"] != "uniform":
        raise UserError(
            f"--robust {robust} has no weights: got --weighting {values['weighting']}, expected uniform or clip"
        )
    if values["sampling"] == "fixed" and number < 3:
        raise UserError(
            f"--robust {robust}: got {number} participant{'s' * (number > 1)} in a round, expected at least 3: raise "
            "--participation"
        )
    if robust == "trimmed" and values["sampling"] == "fixed" and not trimmed(values["trim"], number):
        raise UserError(
            f"--trim {values['trim']} of {number} participants leaves out none: expected at least {1 / number:.3g}"
        )


def norm_groups(norm: str) -> int:
    """The groups of a GroupNorm that ``--norm`` asks for; 0 for one that has no number of them."""
    kind, _, number = norm.partition(":")
    if norm in ("layer", "instance", "none"):
        return int(norm == "layer")
    if kind != "group" or not number.isdecimal() or not 0 < int(number) <= MOST[int]:
        raise UserError(f"--norm: got {shortened(norm)}, expected group:N such as group:2, layer, instance or none")
    return int(number)


def flag(name: str) -> str:
    return name.replace("_", "-")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings from a TOML file, or from JSON as a run records them."""
    check_path(os.fspath(path), "--config")
    path = Path(path)
    if path.suffix.lower() in OTHER_FILES:
        kind = path.suffix[1:].upper()
        raise UserError(f"--config: got {path}, a {kind} file; settings are TOML, one NAME = VALUE per line: FILE.toml")
    try:
        data = read_json(path) if is_record(path) else read_toml(path)
    except OSError as error:
        raise UserError(f"--config: cannot read {path}: {reason(error)}") from None
    except ValueError as error:
        raise UserError(f"--config: {path} is not valid {path.suffix[1:].upper() or 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"--config: {path} holds {type(data).__name__}, expected one table of settings")
    return data


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a settings file was written by a run: runs write JSON, people write TOML."""
    return Path(path).suffix == ".json"


def dumps(config: Config) -> str:
    """The record of a run's settings."""
    return json.dumps(config.record(), indent=2) + "\n"


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Settings that change the result and differ between a checkpoint and this run."""
    record = new.record()
    return [
        f"{name}: {_show(old[name])} in the checkpoint, {_show(record[name])} now"
        for name, value in record.items()
        if not (name in SETTINGS and SETTINGS[name].runtime) and name in old and old[name] != value
    ]


def add_arguments(
    parser: argparse._ActionsContainer,
    settings: Mapping[str, Setting],
    algorithm: str = "",
    shown: bool = True,
    values: Mapping[str, Any] | None = None,
) -> None:
    """One option per setting; absent ones stay absent, so that a preset can show through.

    ``values``: what they would be, for the help; their defaults otherwise.
    """
    for name, setting in settings.items():
        default = (values or {}).get(name, setting.default)
        default = "none" if default in ("", []) else default
        where = ours(name, algorithm)
        note = f"; ours{' on ' * any(where)}{' and '.join(where)}: the paper states none" if where else ""
        text = f"{setting.help}{note} [{default}]".replace("%", "%%")
        extra: dict[str, Any] = dict(dest=name, default=argparse.SUPPRESS, help=text if shown else argparse.SUPPRESS)
        if setting.kind == "bool":
            parser.add_argument(f"--{flag(name)}", action=argparse.BooleanOptionalAction, **extra)
        else:
            extra["metavar"] = "{" + ",".join(setting.choices) + "}" if setting.choices else name.upper()
            if setting.kind == "list[float]":
                extra["nargs"] = "*"
            parser.add_argument(f"--{flag(name)}", **extra)


def data_root(config: Config) -> Path:
    return Path(config.data_dir or os.environ.get("FEDLADA_DATA") or "data")
