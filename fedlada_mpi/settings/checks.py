"""What settings may not be: out of range, or in contradiction to each other."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Set
from typing import Any

from ..support.errors import UserError, shortened
from ..support.inputs import check_path
from ..support.rng import fixed_number
from ..support.suggestions import did_you_mean
from .dp_checks import check_delta, check_dp
from .fields import MOST, Setting, flag
from .privacy import check_own_data, check_secure

# Settings that only some schedules of the local rate have.
SCHEDULES = {"lr_decay": ("exponential", "step"), "lr_step": ("step",), "lr_horizon": ("cosine",)}

MOST_PROFILED = 20  # rounds in a trace

AUGMENT = ("paper", "none")  # or a user's own

# What --wire bf16 contradicts; a median or trimmed mean is gathered, not summed.
NOT_ROUNDED = {"sums": ("exact",), "robust": ("median", "trimmed"), "precision": ("fp64",)}


def check_value(setting: Setting, value: Any, name: str) -> None:
    """Refuse a value out of the setting's range, NaN included; ``name`` is that of its option."""
    if setting.path:
        check_path(value, f"--{flag(name)}")
    if setting.choices and value not in setting.choices:
        hint = did_you_mean(str(value), setting.choices)
        raise UserError(f"--{flag(name)}: got {shortened(value)}, expected one of {', '.join(setting.choices)}{hint}")
    for bound, holds, text in (
        (setting.least, operator.ge, "at least"),
        (setting.most, operator.le, "at most"),
        (setting.above, operator.gt, "more than"),
        (setting.below, operator.lt, "less than"),
    ):
        if bound is not None and not holds(value, bound):
            raise UserError(f"--{flag(name)}: got {value}, expected {text} {bound}")


def check(values: Mapping[str, Any], sources: Mapping[str, str], known: Mapping[str, Setting]) -> None:
    """Ranges, choices and contradictions, but for those that depend on the data."""
    by_hand = {n for n, s in sources.items() if s in ("file", "flag")}
    for name, setting in known.items():
        check_value(setting, values[name], name)
    if ":" not in values["augment"] and values["augment"] not in AUGMENT:
        hint = did_you_mean(values["augment"], AUGMENT)
        raise UserError(
            f"--augment: got {shortened(values['augment'])}, expected {', '.join(AUGMENT)}, package.module:function or "
            f"path/file.py:function{hint}"
        )
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
    _check_lora(values, by_hand)
    if values["diagnose_images"] and not values["diagnose"]:
        raise UserError("--diagnose-images: got no --diagnose, expected --diagnose N, every how many rounds")
    if values["eval_clients"] and values["eval_test"] != "always":
        raise UserError(
            f"--eval-clients evaluates the test examples, too: got --eval-test {values['eval_test']}, expected always"
        )
    if "local_steps" in by_hand and "local_epochs" in by_hand and values["local_steps"]:
        raise UserError("--local-steps and --local-epochs contradict each other: give one of them")
    for name, schedules in SCHEDULES.items():
        if name in by_hand and values["lr_schedule"] not in schedules:
            raise UserError(
                f"--{flag(name)} has no effect on --lr-schedule {values['lr_schedule']}, only on "
                f"{' and '.join(schedules)}: leave it out"
            )
    _check_robust(values, by_hand)
    _check_profile(values)
    check_dp(values, by_hand)
    check_secure(values, by_hand)
    check_own_data(values)
    for name in ("sums", "robust", "precision"):
        if values["wire"] == "bf16" and values[name] in NOT_ROUNDED[name]:
            raise UserError(
                f"--wire bf16 would round what --{name} {values[name]} computes: got both, expected --wire fp32"
            )


def check_with_data(values: Mapping[str, Any]) -> None:
    """What contradicts the number of clients, or the task of the data."""
    if values["sampling"] == "fixed" and fixed_number(values["clients"], values["participation"]) < 1:
        raise UserError(
            f"--participation {values['participation']} of {values['clients']} clients selects none: "
            f"expected at least {1 / values['clients']:.3g}, or --sampling bernoulli"
        )
    _check_participants(values)
    check_delta(values)
    if values["task"] == "classification" and any(not 0 < t <= 1 for t in values["targets"]):
        raise UserError(f"--targets: got {values['targets']}, expected fractions between 0 and 1, such as 0.7")


def trimmed(trim: float, participants: int) -> int:
    """How many participants --robust trimmed leaves out at each end."""
    return math.floor(trim * participants + 1e-9)  # 0.29 * 100 is just under 29


def _check_robust(values: Mapping[str, Any], by_hand: Set[str]) -> None:
    robust = values["robust"]
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


def _check_participants(values: Mapping[str, Any]) -> None:
    """Enough of them for ``--robust``."""
    robust, number = values["robust"], fixed_number(values["clients"], values["participation"])
    if robust == "none" or values["sampling"] != "fixed":
        return
    if number < 3:
        raise UserError(
            f"--robust {robust}: got {number} participant{'s' * (number > 1)} in a round, expected at least 3: raise "
            "--participation"
        )
    if robust == "trimmed" and not trimmed(values["trim"], number):
        raise UserError(
            f"--trim {values['trim']} of {number} participants leaves out none: expected at least {1 / number:.3g}"
        )


def _check_lora(values: Mapping[str, Any], by_hand: Set[str]) -> None:
    for name in ("lora_on", "lora_alpha", "lora_fixed_a", "lora_train"):
        if name in by_hand and not values["lora"]:
            raise UserError(f"--{flag(name)}: got no --lora, expected --lora N, the rank of the adapters, such as 8")
    for name in ("lora_on", "lora_train"):
        try:
            re.compile(values[name])
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(
                f"--{flag(name)}: got {shortened(values[name])}, expected a regular expression: {error}"
            ) from None


def profiled_rounds(profile: str) -> range:
    """The rounds that ``--profile`` asks for, counted from 1."""
    if profile == "none":
        return range(0)
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", profile)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last:
        raise UserError(f"--profile: got {shortened(profile)}, expected rounds such as 3-5 or 7, or none")
    rounds = range(first, last + 1)
    if len(rounds) > MOST_PROFILED:
        raise UserError(
            f"--profile: got {profile}, {len(rounds)} rounds, expected at most {MOST_PROFILED}, as traces are large"
        )
    return rounds


def _check_profile(values: Mapping[str, Any]) -> None:
    rounds = profiled_rounds(values["profile"])
    if rounds and rounds.start > values["rounds"]:
        raise UserError(
            f"--profile: got {values['profile']}, expected rounds of the run, which has --rounds {values['rounds']}: "
            "such as --profile 1, or none"
        )


def norm_groups(norm: str) -> int:
    """The groups of a GroupNorm that ``--norm`` asks for; 0 for one that has no number of them."""
    kind, _, number = norm.partition(":")
    if norm in ("layer", "instance", "none"):
        return int(norm == "layer")
    if kind != "group" or not number.isdecimal() or not 0 < int(number) <= MOST[int]:
        raise UserError(f"--norm: got {shortened(norm)}, expected group:N such as group:2, layer, instance or none")
    return int(number)
