"""What was meant by a name that there is not: what other programs call it, or what is spelt alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# By words in lower case without - and _; "" is what there is nothing for, although some name may look like it.
_NAMES = {
    "lr": "learning-rate local-lr client-lr eta eta-l step-size",
    "server_lr": "global-lr server-learning-rate eta-g",
    "local_epochs": "epochs epoch num-epochs local-epoch n-epochs",
    "local_steps": "steps num-steps max-steps local-iterations local-updates",
    "rounds": "num-rounds n-rounds comm-rounds global-rounds communication-rounds iterations",
    "clients": "num-clients n-clients total-clients num-users users parties",
    "participation": "fraction fraction-fit sample-ratio join-ratio client-fraction participation-rate sampling-rate",
    "batch_size": "batch bs local-bs local-batch-size train-batch-size minibatch",
    "algorithm": "method algo strategy optimizer aggregator",
    "model": "net network arch architecture",
    "dirichlet": "dirichlet-alpha concentration non-iid-alpha beta-dirichlet",
    "partition": "split non-iid noniid iid",
    "weight_decay": "wd l2 regularization",
    "clip": "grad-clip gradient-clipping max-grad-norm clip-grad-norm",
    "precision": "dtype amp mixed-precision",
    "out": "output output-dir save-dir log-dir logdir results-dir save-path",
    "data_dir": "data-path data-root dataset-dir",
    "dataset": "data dataset-name",
    "init": "pretrained weights checkpoint-path",
    "eval_every": "eval-interval test-every test-interval eval-freq",
    "checkpoint_every": "save-every save-interval checkpoint-interval",
    "seed": "random-seed rng-seed manual-seed",
    "lr_schedule": "scheduler lr-scheduler",
    "ranks": "np num-processes nproc nproc-per-node workers processes",
    "cuda": "gpu",
    "bf16": "bfloat16 fp16 float16 half",
    "fp32": "float32 float full 32",
    "fp64": "float64 double 64",
    "loss": "criterion loss-function",
    "metrics": "metric",
}
SYNONYMS = {synonym.replace("-", ""): name for name, words in _NAMES.items() for synonym in words.split()}


def plain(name: str) -> str:
    """A name as it is compared: cifar10 for --CIFAR-10."""
    return name.lower().replace("-", "").replace("_", "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'fedavg'?)`` if a known name means the same or is close, else nothing."""
    names = {plain(word): word for word in known}
    if (word := plain(name)) in names:  # another spelling
        return f" (did you mean {names[word]!r}?)"
    if (meant := SYNONYMS.get(word)) is not None and (not meant or plain(meant) in names):
        return f" (did you mean {names[plain(meant)]!r}?)" if meant else ""
    match = difflib.get_close_matches(name, list(names.values()), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""
