"""Command lines: one option per setting; what cannot be read is one line, with the nearest option that there is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..support.errors import UserError, shortened
from ..support.suggestions import did_you_mean
from .fields import Setting, flag
from .presets import not_in_paper

LONGEST = 200  # message of argparse, which may repeat all that was given


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(message if len(message) <= LONGEST else message[: LONGEST - 1] + "…")

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options; what belongs to none is refused."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            nearest = did_you_mean(name, known) if name.startswith("-") else ", which belongs to no option"
            raise UserError(f"got {shortened(name)}{nearest}: --help lists the options")
        return options


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
        where = not_in_paper(name, algorithm)
        note = f"; ours{' on ' * any(where)}{' and '.join(where)}: the paper states none" if where else ""
        text = f"{setting.help}{note} [{default}]".replace("%", "%%")
        extra: dict[str, Any] = dict(dest=name, default=argparse.SUPPRESS, help=text if shown else argparse.SUPPRESS)
        if setting.kind == "bool":
            parser.add_argument(f"--{flag(name)}", action=argparse.BooleanOptionalAction, **extra)
        else:
            extra["metavar"] = "{" + ",".join(setting.choices) + "}" if setting.choices else name.upper()
            if setting.kind == "list[float]":
                extra["nargs"] = "*"
            if setting.bare:
                extra |= dict(nargs="?", const=setting.bare)
            parser.add_argument(f"--{flag(name)}", **extra)
