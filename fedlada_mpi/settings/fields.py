"""The settings that all methods have: one declaration each, with its default, documentation, range and group.

A setting of a single method is declared in its class by ``hyper``; ``Config.hyper`` has its value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from ..support.code_digest import Code
from ..support.errors import UserError, printable, shortened

SHIPPED = ("digits", "randhie", "dd", "shakespeare", "digit-masks", "digit-mosaics")  # with the package
DATASETS = (*SHIPPED[:1], "cifar10", "cifar100", "tinyimagenet", *SHIPPED[1:])
# The built-in tasks and their losses, the first of which is the default; here, where nothing needs torch.
TASKS: dict[str, tuple[str, ...]] = {
    "classification": ("cross-entropy",),
    "multilabel": ("binary-cross-entropy",),
    "regression": ("squared", "absolute", "huber", "poisson"),
    "segmentation": ("cross-entropy",),
    "next-token": ("cross-entropy",),
    "survival": ("discrete", "cox"),
}
FEW = 10  # clients of data of one's own who all take part in a round
# Of settings without a limit of their own: counts fit into 32 bits, products of three rates into a float32.
MOST: dict[type, int] = {int: 2**31 - 1, float: 10**12}
MOST_RANGE = 2**20  # of --secure


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
    path: bool = False  # whether it names a file or a directory
    bare: str = ""  # what the option means that is given without a value
    group: str = ""  # in which --help lists it
    kind: str = ""  # bool, int, float, str or list[float]
    name: str = ""

    def named(self, name: str) -> Setting:
        kind = "list[float]" if isinstance(self.default, list) else type(self.default).__name__
        return replace(self, name=name, kind=kind)


def _setting(group: str, default: Any, help: str, **more: Any) -> Any:
    """A field of the settings."""
    meta = {"setting": Setting(default, help, group=group, **{**more, "most": _most(default, more.get("most"))})}
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


_data = partial(_setting, "data")
_method = partial(_setting, "method and model")
_training = partial(_setting, "training")
_evaluation = partial(_setting, "evaluation")
_machine = partial(_setting, "machine")
_privacy = partial(_setting, "privacy")
_output = partial(_setting, "output")


@dataclass
class Config:
    """The settings of a run.

    >>> Config(lr=0.05).lr
    0.05
    """

    dataset: str = _data("digits", f"one of {', '.join(DATASETS)}, or a name or directory of shards", path=True)
    data_dir: str = _data("", "where the shards are (default: $FEDLADA_DATA, else data/)", runtime=True, path=True)
    clients: int = _data(50, "number of clients m", least=1)
    partition: str = _data(
        "dirichlet", "how clients get their examples", choices=("dirichlet", "iid", "pathological", "natural")
    )
    dirichlet: float = _data(0.6, "concentration of the label priors", above=0)
    exhausted: str = _data("refill", "when a class runs out", choices=("refill", "exact"))
    classes_per_client: int = _data(2, "classes of a client under --partition pathological", least=1)
    size_sigma: float = _data(0.0, "spread of the clients' sizes (lognormal); 0 = equal", least=0, most=10)
    partition_seed: int = _data(20, "seed of the partition", least=0, most=2**32 - 1)
    validation: float = _data(
        0.0, "share of the training examples that chooses the best round (best.pt); 0 = none", least=0, below=1
    )
    augment: str = _data(
        "none",
        "flip and padded crop (paper, as CIFAR and TinyImageNet have it), nothing (none), or your own function of a "
        "batch as package.module:function or file.py:function",
    )
    flip: bool = _data(True, "flip half of the images, where they are augmented")
    crop: str = _data("half", "which images are cropped, where they are augmented", choices=("half", "always", "never"))
    # The place of a crop is drawn from 20 bits.
    crop_padding: int = _data(4, "zero pixels around an image before the crop", least=0, most=2**19 - 1)

    algorithm: str = _method("fedlada", "the federated method, or your own as package.module:Class or file.py:Class")
    task: str = _method(
        "classification",
        f"what is learned: {', '.join(TASKS)}, or your own as package.module:Class or file.py:Class",
    )
    loss: str = _method(
        "",
        "of the task, where it has several: "
        + "; ".join(f"{task}: {', '.join(losses)}" for task, losses in TASKS.items() if len(losses) > 1),
    )
    metrics: str = _method("", "further metrics of the task, separated by commas: classification: auc, balanced_acc")
    objective: str = _method(
        "", "the metric that decides which round is the best; -NAME: the smaller, the better (default: the task's)"
    )
    preset: str = _method(
        "paper",
        "what is not given: the paper's; tuned: a decay chosen on CIFAR-10 by one rule; closest: FedLADA's nearest to "
        "the paper's results, chosen on CIFAR-10's test data against the decay and the schedule that the paper states",
        choices=("paper", "tuned", "closest"),
    )
    model: str = _method(
        "cnn",
        "resnet18, lenet, lenet3, cnn, vit_tiny; of arrays linear, mlp, fcn, causal_cnn, gpt, lstm; torchvision:NAME, "
        "hf:FOLDER (transformers' format), or your own as package.module:function or file.py:function",
    )
    norm: str = _method(
        "", "exchange BatchNorm by group:N, layer, instance or none (torchvision:NAME: group:2 unless given)"
    )
    activation: str = _method(
        "relu", "activation of cnn, lenet, lenet3, mlp, fcn and causal_cnn", choices=("relu", "gelu", "smu")
    )
    smu_mu: float = _method(2.5, "mu of --activation smu; the larger, the closer to ReLU", above=0)
    init: str = _method("", "start from this model.pt instead of a fresh initialisation", path=True)
    init_partial: bool = _method(False, "take from --init what fits by name and shape, and leave the rest")
    lora: int = _method(
        0,
        "train adapters of this rank on linear layers, and freeze the model's own parameters; 0 = none",
        least=0,
        most=2**16,
    )
    lora_on: str = _method(
        "", "regular expression of the layers' names that --lora adapts (default: all that share no weights)"
    )
    lora_alpha: float = _method(16.0, "adapters are scaled by alpha / rank", above=0)
    lora_fixed_a: bool = _method(False, "train and send B of the adapters alone; A stays as it was drawn")
    lora_train: str = _method(
        "", "regular expression of parameters' names that --lora trains as they are, such as a new head"
    )
    server_lr: float = _method(1.0, "server rate eta_g", above=0)
    participation: float = _method(
        0.2, f"share of the clients in a round; data of your own: 1 for up to {FEW} clients", above=0, most=1
    )
    sampling: str = _method("fixed", "exactly S clients, or each with probability P", choices=("fixed", "bernoulli"))
    weighting: str = _method("uniform", "weights of the mean over participants", choices=("uniform", "size"))
    robust: str = _method(
        "none",
        "for the mean over participants: coordinate-wise median or trimmed mean, or clip to the median norm",
        choices=("none", "median", "trimmed", "clip"),
    )
    trim: float = _method(0.1, "share left out at each end by --robust trimmed", above=0, below=0.5)

    rounds: int = _training(100, "communication rounds T", least=0, runtime=True)
    local_epochs: int = _training(5, "passes over a client's data in a round", least=1)
    local_steps: int = _training(0, "local steps K; 0 = given by local_epochs", least=0)
    batch_size: int = _training(50, "mini-batch of a client; 0 = all of its data", least=0)
    lr: float = _training(0.1, "local rate eta_l", above=0)
    lr_schedule: str = _training(
        "exponential",
        "the local rate over the rounds (rounds/rates.py)",
        choices=("exponential", "constant", "cosine", "step"),
    )
    lr_decay: float = _training(0.998, "factor per round (exponential) or per lr_step rounds (step)", above=0, most=1)
    lr_step: int = _training(100, "rounds between the decays of --lr-schedule step", least=1)
    lr_horizon: int = _training(0, "rounds until the end of --lr-schedule cosine; 0 = --rounds", least=0)
    lr_warmup: int = _training(0, "rounds in which the rate rises linearly to its schedule", least=0)
    weight_decay: float = _training(1e-3, "lambda", least=0)
    decay_mode: str = _training(
        "l2",
        "decay in the gradient, in the step, or in the step inside alpha, where g_a does not amplify it",
        choices=("l2", "decoupled", "inside"),
    )
    decay_on: str = _training(
        "all", "decay of all parameters, or not of biases and norms (those of one axis)", choices=("all", "weights")
    )
    clip: float = _training(10.0, "largest L2 norm of a gradient; 0 = off", least=0)
    on_nonfinite: str = _training(
        "stop", "when a client's result is not finite: end the run, or leave the client out", choices=("stop", "skip")
    )
    seed: int = _training(0, "seed of sampling, batches, augmentation and initialisation", least=0, most=2**63 - 1)

    eval_every: int = _evaluation(1, "evaluate every this many rounds; 0 = only at the end", least=0, runtime=True)
    eval_train_every: int = _evaluation(
        -1,
        "evaluate on the training examples every this many rounds; 0 = only at the end, -1 = as eval_every",
        least=-1,
        runtime=True,
    )
    eval_test: str = _evaluation(
        "always",
        "evaluate on the test examples as often as eval_every says, only after the last round, or never, as where "
        "validation examples choose settings",
        choices=("always", "end", "never"),
        runtime=True,
    )
    eval_clients: int = _evaluation(
        0, "evaluate client by client every this many rounds and at the end; 0 = never", least=0, runtime=True
    )
    targets: list[float] = _evaluation(
        [], "test accuracies, or values of another objective, whose first round is reported", runtime=True
    )
    diagnose: int = _evaluation(
        0, "record drift, true gradient and step directions every this many rounds; 0 = never", least=0, runtime=True
    )
    diagnose_images: int = _evaluation(
        0, "about so many of all training examples for the true gradient of --diagnose; 0 = all", least=0, runtime=True
    )

    device: str = _machine("auto", "where to train", choices=("auto", "cpu", "cuda"), runtime=True)
    precision: str = _machine(
        "fp32",
        "arithmetic of gradients; states are float32 (fp64: all double)",
        choices=("fp64", "fp32", "tf32", "bf16"),
    )
    sums: str = _machine("fast", "exact: the same bits on any number of ranks", choices=("fast", "exact"))
    engine: str = _machine(
        "auto",
        "stacked kernels, or functional torch for any module (auto: stacked where the model has it)",
        choices=("auto", "stacked", "generic"),
        runtime=True,
    )
    data_on: str = _machine(
        "auto",
        "where examples are: on the device, or streamed to it from the host's memory or from the files on disk (auto: "
        "on the first of these where there is room); the results are the same",
        choices=("auto", "device", "host", "disk"),
        runtime=True,
    )
    compile: str = _machine("auto", "use compiled kernels on the GPU", choices=("auto", "on", "off"), runtime=True)
    transport: str = _machine(
        "auto",
        "how vectors move between ranks (auto: the fastest that works)",
        choices=("auto", "direct", "shared", "staged", "host"),
        runtime=True,
    )
    wire: str = _machine(
        "fp32",
        "bf16: sums, and the change of the model, are rounded where they cross between nodes (fp32: as computed)",
        choices=("fp32", "bf16"),
    )
    server_trains: bool = _machine(False, "rank 0 owns clients too", runtime=True)
    silo_per_rank: bool = _machine(False, "a silo file is read by one rank alone, which owns its clients", runtime=True)
    max_clients_at_once: int = _machine(
        0, "clients trained together on a rank; 0 = as memory allows (--sums exact, --dp: 1)", least=0, runtime=True
    )
    patience: int = _machine(
        7200, "seconds that a rank waits for others before the run ends with status 4; 0 = any", least=0, runtime=True
    )
    adopt: bool = _machine(
        False, "where a rank is lost (mpirun --with-ft ulfm), the others train its clients", runtime=True
    )
    min_silos: int = _machine(
        1, "stop with a checkpoint where fewer ranks with clients than this are left", least=1, runtime=True
    )

    secure: bool = _privacy(
        False, "the server learns the sums over all silos, and nothing of a single one: ranks other than 0 mask theirs"
    )
    secure_neighbours: str = _privacy(
        "auto",
        "silos that a silo shares masks with: all, or a number, which has to be larger than that of silos that may "
        "collude with the server; 0: the same sums without masks (auto: all of up to 16 silos, else 8)",
        runtime=True,
    )
    secure_range: float = _privacy(
        16.0,
        "largest absolute value of a coordinate that a client sends with --secure; what is sent as the change of a "
        "server's vector, such as v_hat, may change by an eighth of it",
        above=0,
        most=MOST_RANGE,
    )
    silo_keys: str = _privacy(
        "",
        "directory with the silos' public keys and this silo's own one (python -m fedlada_mpi.keys); without it, keys "
        "are not signed, and the server could stand in the middle",
        runtime=True,
        path=True,
    )
    silos: str = _privacy(
        "",
        "names of the silos by rank, from rank 1 on, separated by commas; FEDLADA_SILO in the environment of a rank is "
        "its own name (default: silo_0001, ...)",
        runtime=True,
    )

    silo_dir: str = _privacy(
        "",
        "directory that a rank alone reads, with what data_prep --silo has written there; {silo} stands for its name, "
        "as in '/secure/{silo}'; rank 0 serves, and has no data",
        runtime=True,
        path=True,
    )
    dp: str = _privacy(
        "none", "differential privacy of clients: bounded contributions, and noise", choices=("none", "client")
    )
    epsilon: float = _privacy(
        0.0, "of --dp for all rounds: the noise is calibrated for it, and the run stops at it", least=0
    )
    delta: float = _privacy(0.0, "of --dp, less than 1 / clients", least=0, below=1)
    noise_multiplier: float = _privacy(
        0.0, "deviation of the noise as a multiple of the clip, instead of --epsilon", least=0, most=1e6
    )
    clip_norm: float = _privacy(0.0, "largest L2 norm of all that a client sends in a round, with --dp", least=0)
    adaptive_clip: bool = _privacy(False, "--clip-norm is the first one, and follows the median of the norms")

    out: str = _output("", "output directory (default: runs/DATASET-ALGORITHM-seedN)", runtime=True, path=True)
    checkpoint_every: int = _output(50, "checkpoint every this many rounds; 0 = only at the end", least=0, runtime=True)
    profile: str = _output(
        "none",
        "write a trace of these rounds by torch's profiler, such as 7 or 3-5 (which --profile alone means), and print "
        "what takes most time in them",
        bare="3-5",
        runtime=True,
    )
    wandb: bool = _output(False, "record with Weights & Biases, too; its WANDB_* variables apply", runtime=True)
    mlflow: bool = _output(False, "record with MLflow, too; its MLFLOW_* variables apply", runtime=True)

    hyper: dict[str, Any] = field(default_factory=dict)  # the method's own settings
    code: Code = field(default_factory=dict)  # digests of the user's code that settings name
    columns: dict[str, Any] = field(default_factory=dict)  # of a task that does not classify (``rundir/columns.py``)

    def record(self) -> dict[str, Any]:
        """All settings by name, the method's own among them."""
        return {**{name: getattr(self, name) for name in SETTINGS}, **self.hyper}


SETTINGS: dict[str, Setting] = {
    f.name: f.metadata["setting"].named(f.name) for f in fields(Config) if "setting" in f.metadata
}


def grouped() -> dict[str, dict[str, Setting]]:
    """The settings by group, as --help lists them."""
    groups: dict[str, dict[str, Setting]] = {}
    for name, setting in SETTINGS.items():
        groups.setdefault(setting.group, {})[name] = setting
    return groups


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


def flag(name: str) -> str:
    return name.replace("_", "-")


def shown(value: Any) -> str:
    """A value as it is typed on a command line or in a file."""
    return json.dumps(value) if not isinstance(value, str) else printable(value) or '""'
