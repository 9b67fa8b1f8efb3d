"""The command lines of all commands: what cannot be read is one line, with the nearest option that there is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import UserError, did_you_mean, shortened

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
