"""What ``--dp`` needs of the other settings: nothing but the noisy sums may leave the clients."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ..support.errors import UserError
from .fields import flag, shown

LEAST_NOISE = 0.05  # multiplier, below which epsilon has no meaning
LEAST_CLIP, MOST_CLIP = 1e-9, 1e12  # beyond which float32 loses what is learned, or the noise
LEAST_DELTA = 1e-14  # losses of less probability are taken for infinite

# The value that a setting must have, and why.
EXPECTED: dict[str, tuple[Any, str]] = {
    "sampling": ("bernoulli", "epsilon is that of a sample in which every client is with a probability of its own"),
    "weighting": ("uniform", "sizes are data of the clients"),
    "robust": ("none", "it compares single clients"),
    "on_nonfinite": ("skip", "the end of the run would tell that a client diverged"),
    "sums": ("fast", "noise is fresh in every run, so that no two have the same bits"),
    "wire": ("fp32", "what is rounded before it gets noise is not bounded by the clip"),
    "eval_clients": (0, "it is evaluated on clients' data without noise"),
    "diagnose": (0, "it is computed from clients' data without noise"),
    "profile": ("none", "how long a rank trains tells how many of its clients take part"),
    "eval_train_every": (0, "it is evaluated on clients' data without noise"),
    "validation": (0.0, "it is evaluated on clients' data without noise"),
}


def check_dp(values: Mapping[str, Any], by_hand: Set[str]) -> None:
    if values["dp"] == "none":
        for name in ("epsilon", "delta", "noise_multiplier", "clip_norm", "adaptive_clip"):
            if name in by_hand and values[name]:
                raise UserError(f"--{flag(name)} has no effect without --dp: add --dp client, or leave it out")
        return
    for name, (expected, why) in EXPECTED.items():
        if values[name] != expected and not (name == "sums" and values["secure"]):
            raise UserError(
                f"--dp {values['dp']}: got --{flag(name)} {shown(values[name])}, expected {shown(expected)}: {why}"
            )
    if bool(values["epsilon"]) == bool(values["noise_multiplier"]):
        got = "both" if values["epsilon"] else "none"
        raise UserError(f"--dp: got {got} of --epsilon and --noise-multiplier, expected one, such as --epsilon 8")
    if 0 < values["noise_multiplier"] < LEAST_NOISE:
        raise UserError(
            f"--noise-multiplier: got {values['noise_multiplier']:g}, expected at least {LEAST_NOISE:g}: with less "
            "noise, epsilon has no meaning"
        )
    if not values["clip_norm"]:
        raise UserError("--dp: got no --clip-norm, expected the largest norm of what a client sends, such as 1.0")
    if values["clip_norm"] < LEAST_CLIP:
        raise UserError(
            f"--clip-norm: got {values['clip_norm']:g}, expected at least {LEAST_CLIP:g}: with less, the model would "
            "not move"
        )


def check_delta(values: Mapping[str, Any]) -> None:
    """That of ``--dp``, whose limit is the number of clients."""
    if values["dp"] == "none":
        return
    if not 0 < values["delta"] < 1 / values["clients"]:
        raise UserError(
            f"--delta: got {values['delta']:g}, expected more than 0 and less than 1 / {values['clients']} clients, "
            f"such as {0.1 / values['clients']:.0e}: with more, a client's data might be published as it is"
        )
    if values["delta"] < LEAST_DELTA:
        raise UserError(
            f"--delta: got {values['delta']:g}, expected at least {LEAST_DELTA:g}, below which epsilon is not computed"
        )
