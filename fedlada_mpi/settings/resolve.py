"""From everything that was given to the settings of a run, and where each value came from.

    python -m fedlada_mpi.run --dataset cifar10 --algorithm scaffold --print-config

A setting is taken from the first of: command line, ``--config FILE``, preset of the method, preset of the data set,
default.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.errors import UserError, shortened
from ..support.suggestions import did_you_mean
from .checks import check, check_with_data
from .configurable import Configurable
from .fields import FEW, SETTINGS, Config, Setting, coerce, flag, shown
from .presets import PRESETS, not_in_paper
from .privacy import FEWEST_SILOS


@dataclass
class Resolved:
    """Final settings and, for each, where it came from: default, preset, file or flag."""

    config: Config
    sources: dict[str, str]

    def table(self) -> str:
        record = self.config.record()
        width = max(map(len, record))
        return "\n".join(f"{name:<{width}}  {shown(record[name]):<14}  {self.sources[name]}" for name in record)


def chosen(name: str, flags: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> Any:
    """A setting as it is given by hand, or its default."""
    return coerce(SETTINGS[name], {**(file or {}), **flags}.get(name, SETTINGS[name].default))


def resolve(
    algorithm: str,
    method: type[Configurable],
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    dataset_kind: str | None = None,
    shards: Mapping[str, Any] | None = None,
    recorded: bool = False,
    of_other_methods: Container[str] = (),
    data_known: bool = True,
) -> Resolved:
    """Merge all sources and check the result; ``method`` is the class that ``algorithm`` names.

    When the data set is a directory, ``dataset_kind`` names its preset and ``shards`` holds what it was prepared with.
    ``recorded``: the file is a run's own record, which names every setting; only those that differ from the presets
    count as chosen by hand. ``of_other_methods``: the settings that any built-in method has; a run's record once had
    them all. ``data_known``: else what depends on the data is not checked.
    """
    file, known = dict(file or {}), {**SETTINGS, **method.hypers}
    if recorded:
        file = {name: value for name, value in file.items() if name in known or name not in of_other_methods}
    for name in (*file, *flags):
        if name not in known:
            if recorded and name not in flags:
                which = f"unknown setting {shortened(name)} in the record of the run (config.json)"
                raise UserError(f"{which}: use the version of fedlada_mpi that wrote it, or remove it there")
            raise UserError(_unknown(name, algorithm, method.hypers, of_other_methods))
    values: dict[str, Any] = {name: coerce(setting, setting.default) for name, setting in known.items()}
    sources = dict.fromkeys(known, "default")

    def take(new: Mapping[str, Any], source: str, changes_only: bool = False) -> None:
        for name, value in new.items():
            value = coerce(known[name], value)
            if not changes_only or value != values[name]:
                values[name], sources[name] = value, source

    kind = dataset_kind or chosen("dataset", flags, file)
    take(PRESETS.get(kind, {}), f"preset {kind}")
    take(method.presets.get("", {}), f"preset {algorithm}")
    # What a method has as all of them do, the data may know better.
    shared = {n for n, v in method.presets.get("", {}).items() if v == known[n].default}
    take({n: v for n, v in PRESETS.get(kind, {}).items() if n in shared}, f"preset {kind}")
    take(method.presets.get(kind, {}), f"preset {kind}, {algorithm}")
    for name in known:
        if not {"", kind}.isdisjoint(not_in_paper(name, algorithm)):
            sources[name] += ", ours"
    preset = chosen("preset", flags, file)
    others = {"tuned": method.tuned, "closest": method.closest}
    own = {**others[preset].get("", {}), **others[preset].get(kind, {})} if preset in others else {}
    take(own, f"preset {preset}, {algorithm}")
    take(method.requires, f"preset {algorithm}")
    take(shards or {}, "shards")
    usual = values["task"]
    clients = coerce(known["clients"], {**values, **file, **flags}["clients"])
    if sources["participation"] == "default" and clients <= FEW:
        take({"participation": 1.0}, "few clients")
    take(file, "file", changes_only=recorded)
    take(flags, "flag")
    if preset in others and not own:
        values["preset"], sources["preset"] = "paper", f"no {preset} values for {algorithm}"
    if values["task"] != usual and sources["loss"] not in ("file", "flag"):
        values["loss"], sources["loss"] = known["loss"].default, "default"  # that of the data belongs to its own task
    _derive(values, sources)
    if not values["out"]:
        name = method.name or method.__name__
        values["out"] = f"runs/{Path(values['dataset']).name}-{name}-seed{values['seed']}"
    check(values, sources, known)
    if data_known:
        check_with_data(values)
    if data_known and not recorded:  # earlier versions have taken and ignored it
        _check_augmentation(values, sources)
    _check_method(algorithm, method, values)
    config = Config(**{name: values[name] for name in SETTINGS}, hyper={name: values[name] for name in method.hypers})
    return Resolved(config, sources)


def _derive(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Values that depend on other settings."""
    if values["lr_schedule"] == "cosine" and not values["lr_horizon"]:
        # Written down, so that a run that is extended later does not change its rates.
        values["lr_horizon"], sources["lr_horizon"] = max(1, values["rounds"]), "rounds"
    if values["robust"] != "none" and sources["on_nonfinite"] == "default":
        values["on_nonfinite"], sources["on_nonfinite"] = "skip", "robust"
    if values["dp"] != "none":
        for name, value in (("sampling", "bernoulli"), ("on_nonfinite", "skip"), ("eval_train_every", 0)):
            if sources[name] not in ("file", "flag"):
                values[name], sources[name] = value, "dp"
    if values["secure"]:
        if sources["sums"] == "default":  # clients compute alike on any number of ranks
            values["sums"], sources["sums"] = "exact", "secure"
        if values["min_silos"] < FEWEST_SILOS and sources["min_silos"] == "default":
            values["min_silos"], sources["min_silos"] = FEWEST_SILOS, "secure"


def _check_augmentation(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for name in ("flip", "crop", "crop_padding"):
        if values["augment"] != "paper" and sources[name] in ("file", "flag"):
            raise UserError(f"--{flag(name)} has no effect on images that are not augmented: add --augment paper")


def _check_method(algorithm: str, method: type[Configurable], values: Mapping[str, Any]) -> None:
    if values["dp"] != "none":
        method.check_dp(algorithm, values)
    for name, value in method.requires.items():
        if values[name] != value:
            raise UserError(f"--{flag(name)}: got {shown(values[name])}, expected {shown(value)} for {algorithm}")
    if values["decay_mode"] == "inside" and not method.amends:
        raise UserError(f"--decay-mode inside: {algorithm} has no g_a, expected l2 or decoupled")
    method.check(values)


def _unknown(name: str, algorithm: str, hypers: Mapping[str, Setting], of_other_methods: Container[str]) -> str:
    """Why there is no setting ``name``."""
    if name not in of_other_methods:
        return f"unknown setting {shortened(name)}{did_you_mean(name, [*SETTINGS, *hypers])}"
    own = ", ".join(f"--{flag(n)}" for n in hypers) or "none"
    return f"--{flag(name)} is not a setting of {algorithm}: leave it out (its own are: {own})"
