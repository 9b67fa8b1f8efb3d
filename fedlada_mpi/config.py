"""Settings of a run: one flat dataclass, the paper's presets, and where each value came from.

    python -m fedlada_mpi.run --dataset cifar10 --algorithm scaffold --print-config

A setting is taken from the first of: command line, ``--config FILE``, preset (data set, then
method), default. ``PRESETS`` and ``METHODS`` below are the only places that hold the paper's values.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean, printable, shortened
from .inputs import check_path, read_json, read_toml, reason
from .rng import fixed_number

DATASETS = ("digits", "cifar10", "cifar100", "tinyimagenet")
PATHS = ("dataset", "data_dir", "init", "out")
# Of settings without a limit of their own: counts fit into 32 bits, products of three rates into a float32.
MOST: dict[type, int] = {int: 2**31 - 1, float: 10**12}


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    runtime: bool = False,
) -> Any:
    """A field with its documentation and range; ``runtime`` ones may differ when a run is resumed."""
    most = MOST.get(type(default)) if most is None else most
    meta = dict(help=help, choices=choices, least=least, most=most, above=above, runtime=runtime)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class Config:
    dataset: str = setting("digits", f"one of {', '.join(DATASETS)}, or a directory of shards")
    data_dir: str = setting("", "where the shards are (default: $FEDLADA_DATA, else data/)", runtime=True)
    algorithm: str = setting("fedlada", "the federated method")
    model: str = setting("cnn", "resnet18, lenet, cnn, or your own as package.module:function")
    activation: str = setting("relu", "activation of lenet and cnn", choices=("relu", "gelu", "smu"))
    init: str = setting("", "start from this model.pt instead of a fresh initialisation")

    rounds: int = setting(100, "communication rounds T", least=0, runtime=True)
    clients: int = setting(50, "number of clients m", least=1)
    participation: float = setting(0.2, "share of the clients in a round", above=0, most=1)
    sampling: str = setting("fixed", "exactly S clients, or each with probability P", choices=("fixed", "bernoulli"))
    weighting: str = setting("uniform", "weights of the mean over participants", choices=("uniform", "size"))
    local_epochs: int = setting(5, "passes over a client's data in a round", least=1)
    local_steps: int = setting(0, "local steps K; 0 = given by local_epochs", least=0)
    batch_size: int = setting(50, "mini-batch of a client; 0 = all of its data", least=0)

    lr: float = setting(0.1, "local rate eta_l", above=0)
    server_lr: float = setting(1.0, "server rate eta_g", above=0)
    lr_decay: float = setting(0.998, "eta_t = lr * lr_decay^t", above=0, most=1)
    weight_decay: float = setting(1e-3, "lambda", least=0)
    decay_mode: str = setting("l2", "decay in the gradient, or in the step", choices=("l2", "decoupled"))
    clip: float = setting(10.0, "largest L2 norm of a gradient; 0 = off", least=0)
    on_nonfinite: str = setting(
        "stop", "when a client's result is not finite: end the run, or leave the client out", choices=("stop", "skip")
    )
    alpha: float = setting(0.1, "amended weight (scaffold: scale of its correction)", least=0)
    mu: float = setting(0.1, "proximal weight of fedprox", least=0)
    beta1: float = setting(0.9, "first-moment decay", least=0, most=1)
    beta2: float = setting(0.99, "second-moment decay", least=0, most=1)
    eps: float = setting(0.01, "denominator's epsilon of fedadam", above=0)
    eps_v: float = setting(1e-8, "v^0 = eps_v^2 of fedlada and localadam", above=0)
    v_init: str = setting("zero", "v at the start of a local round", choices=("zero", "server"))

    partition: str = setting(
        "dirichlet", "how clients get their images", choices=("dirichlet", "iid", "pathological", "natural")
    )
    dirichlet: float = setting(0.6, "concentration of the label priors", above=0)
    exhausted: str = setting("refill", "when a class runs out", choices=("refill", "exact"))
    classes_per_client: int = setting(2, "classes of a client under --partition pathological", least=1)
    size_sigma: float = setting(0.0, "spread of the clients' sizes (lognormal); 0 = equal", least=0, most=10)
    partition_seed: int = setting(20, "seed of the partition", least=0, most=2**32 - 1)

    augment: str = setting("paper", "flip and padded crop, or nothing", choices=("paper", "none"))
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
    server_trains: bool = setting(False, "rank 0 owns shards too", runtime=True)
    max_clients_at_once: int = setting(
        0, "clients trained together on a rank; 0 = as memory allows", least=0, runtime=True
    )
    eval_every: int = setting(1, "evaluate every this many rounds; 0 = only at the end", least=0, runtime=True)
    targets: list[float] = setting([], "test accuracies whose first round is reported", runtime=True)
    checkpoint_every: int = setting(50, "checkpoint every this many rounds; 0 = only at the end", least=0, runtime=True)
    out: str = setting("", "output directory (default: runs/DATASET-ALGORITHM-seedN)", runtime=True)


FIELDS = {f.name: f for f in fields(Config)}

# The paper's experimental set-up; "digits" is ours, sized for a laptop.
_PAPER = dict(
    model="resnet18", rounds=1500, clients=100, participation=0.1, batch_size=50, dirichlet=0.6, alpha=0.1
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "digits": dict(model="cnn", rounds=60, clients=50, participation=0.2, batch_size=10, dirichlet=0.3, alpha=0.1,
                   local_epochs=5, augment="none", crop_padding=1, eval_every=10),
    "cifar10": dict(_PAPER, local_epochs=5, crop_padding=4),
    "cifar100": dict(_PAPER, local_epochs=2, crop_padding=4),
    "tinyimagenet": dict(_PAPER, local_epochs=2, crop_padding=8),
}  # fmt: skip

_SGD = dict(lr=0.1, weight_decay=1e-3, decay_mode="l2", server_lr=1.0)
_ADAPTIVE = dict(lr=1e-3, weight_decay=1e-2, decay_mode="decoupled", server_lr=1.0)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": dict(_SGD),
    "fedprox": dict(_SGD, mu=0.1),
    "scaffold": dict(_SGD, alpha=1.0),
    "fedcm": dict(_SGD),
    "fedadam": dict(_SGD, server_lr=0.1),
    "fedadam_amended": dict(_SGD, server_lr=0.1),
    "localadam": dict(_ADAPTIVE, alpha=1.0),
    "fedlada": dict(_ADAPTIVE),
}
# Where a value depends on both.
BOTH: dict[tuple[str, str], dict[str, Any]] = {
    ("digits", "fedlada"): dict(lr=4e-3, alpha=0.3),
    ("digits", "localadam"): dict(lr=4e-3),
    ("cifar100", "fedlada"): dict(alpha=0.05),
    ("tinyimagenet", "fedlada"): dict(alpha=0.05),
}
# Settings that only some methods read; given to another by hand, they are a mistake.
USED_BY: dict[str, tuple[str, ...]] = {
    "alpha": ("scaffold", "fedcm", "fedadam_amended", "fedlada"),
    "mu": ("fedprox",),
    "beta1": ("fedadam", "fedadam_amended", "localadam", "fedlada"),
    "beta2": ("fedadam", "fedadam_amended", "localadam", "fedlada"),
    "eps": ("fedadam", "fedadam_amended"),
    "eps_v": ("localadam", "fedlada"),
    "v_init": ("localadam", "fedlada"),
}


@dataclass
class Resolved:
    """Final settings and, for each, where it came from: default, preset, file or flag."""

    config: Config
    sources: dict[str, str]

    def table(self) -> str:
        width = max(map(len, FIELDS))
        rows = [f"{name:<{width}}  {_show(getattr(self.config, name)):<14}  {self.sources[name]}" for name in FIELDS]
        return "\n".join(rows)


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
    file = dict(file or {})
    for name in (*file, *flags):
        if name not in FIELDS:
            raise UserError(f"unknown setting {shortened(name)}{did_you_mean(name, FIELDS)}")
    values: dict[str, Any] = {
        n: f.default_factory() if f.default_factory is not MISSING else f.default for n, f in FIELDS.items()
    }
    sources = dict.fromkeys(FIELDS, "default")

    def take(new: Mapping[str, Any], source: str, changes_only: bool = False) -> None:
        for name, value in new.items():
            value = coerce(name, value)
            if not changes_only or value != values[name]:
                values[name], sources[name] = value, source

    given = {**file, **flags}
    kind = dataset_kind or str(given.get("dataset", values["dataset"]))
    method = str(given.get("algorithm", values["algorithm"]))
    take(PRESETS.get(kind, {}), f"preset {kind}")
    take(METHODS.get(method, {}), f"preset {method}")
    take(BOTH.get((kind, method), {}), f"preset {kind}, {method}")
    take(shards or {}, "shards")
    take(file, "file", changes_only=recorded)
    take(flags, "flag")
    if not values["out"]:
        values["out"] = f"runs/{Path(values['dataset']).name}-{values['algorithm']}-seed{values['seed']}"
    check(values, sources)
    return Resolved(Config(**values), sources)


def coerce(name: str, value: Any) -> Any:
    """The value in the field's type; text is parsed as on a command line."""
    kind = FIELDS[name].type
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
        raise UserError(f"--{flag(name)}: got {shortened(value)}, expected {kind}") from None


def check(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Ranges, choices and contradictions."""
    by_hand = {n for n, s in sources.items() if s in ("file", "flag")}
    for name, value in values.items():
        meta = FIELDS[name].metadata
        if meta["choices"] and value not in meta["choices"]:
            hint = did_you_mean(str(value), meta["choices"])
            raise UserError(
                f"--{flag(name)}: got {shortened(value)}, expected one of {', '.join(meta['choices'])}{hint}"
            )
        for bound, fails, text in (
            ("least", operator.lt, "at least"),
            ("most", operator.gt, "at most"),
            ("above", operator.le, "more than"),
        ):
            if meta[bound] is not None and fails(value, meta[bound]):
                raise UserError(f"--{flag(name)}: got {value}, expected {text} {meta[bound]}")
    for name in PATHS:
        check_path(values[name], f"--{flag(name)}")
    method = values["algorithm"]
    if method not in METHODS:
        raise UserError(
            f"--algorithm: got {shortened(method)}, expected one of {', '.join(METHODS)}{did_you_mean(method, METHODS)}"
        )
    for name, methods in USED_BY.items():
        if name in by_hand and method not in methods and (method, name, values[name]) != ("localadam", "alpha", 1.0):
            raise UserError(f"--{flag(name)} has no effect on {method}, only on {', '.join(methods)}: leave it out")
    if "local_steps" in by_hand and "local_epochs" in by_hand and values["local_steps"]:
        raise UserError("--local-steps and --local-epochs contradict each other: give one of them")
    if method in ("fedcm", "fedadam_amended", "fedlada") and values["alpha"] > 1:
        raise UserError(f"--alpha: got {values['alpha']}, expected at most 1 for {method}")
    if method == "fedlada" and values["alpha"] == 0:
        raise UserError("--alpha: got 0, expected more than 0 for fedlada (the local gradient would have no weight)")
    for name in ("beta1", "beta2"):
        if values[name] == 1:
            raise UserError(f"--{name}: got 1, expected less than 1 (the gradient would have no weight)")
    if values["sampling"] == "fixed" and fixed_number(values["clients"], values["participation"]) < 1:
        raise UserError(
            f"--participation {values['participation']} of {values['clients']} clients selects none: "
            f"expected at least {1 / values['clients']:.3g}, or --sampling bernoulli"
        )
    if any(not 0 < t <= 1 for t in values["targets"]):
        raise UserError(f"--targets: got {values['targets']}, expected fractions between 0 and 1, such as 0.7")


def flag(name: str) -> str:
    return name.replace("_", "-")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings from a TOML file, or from JSON as a run records them."""
    check_path(os.fspath(path), "--config")
    path = Path(path)
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
    return json.dumps(asdict(config), indent=2) + "\n"


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Settings that change the result and differ between a checkpoint and this run."""
    return [
        f"{name}: {_show(old[name])} in the checkpoint, {_show(getattr(new, name))} now"
        for name, f in FIELDS.items()
        if not f.metadata["runtime"] and name in old and old[name] != getattr(new, name)
    ]


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """One option per setting; absent ones stay absent, so that a preset can show through."""
    for name, f in FIELDS.items():
        meta = f.metadata
        default = f.default if f.default is not MISSING else "none"
        text = f"{meta['help']} [{default if default != '' else 'none'}]".replace("%", "%%")
        extra: dict[str, Any] = dict(dest=name, default=argparse.SUPPRESS, help=text)
        if f.type == "bool":
            parser.add_argument(f"--{flag(name)}", action=argparse.BooleanOptionalAction, **extra)
        else:
            extra["metavar"] = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else name.upper()
            if f.type == "list[float]":
                extra["nargs"] = "*"
            parser.add_argument(f"--{flag(name)}", **extra)


def data_root(config: Config) -> Path:
    return Path(config.data_dir or os.environ.get("FEDLADA_DATA") or "data")
