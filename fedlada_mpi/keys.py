"""Keys by which the silos of a run with --secure know each other.

    python -m fedlada_mpi.keys new hospital_a --dir keys     hospital_a.key, which stays there, and hospital_a.pub
    python -m fedlada_mpi.keys show --dir keys               the fingerprints of all public keys, to be compared

Every silo makes its own pair and sends the .pub file to all others. People compare the fingerprints, by telephone for
instance, before the first run with --silo-keys keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .privacy import key_files
from .settings import Parser
from .support.errors import UserError
from .support.inputs import check_path


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m fedlada_mpi.keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("new", "show"), help="make a pair of keys, or show those that are there")
    parser.add_argument("name", nargs="?", default="", help="of the silo; with show: of one alone")
    parser.add_argument("--dir", default="keys", help="where the keys are, the --silo-keys of a run [keys]")
    try:
        options = parser.parse_all(argv)
        check_path(options.dir, "--dir")
        print(_new(Path(options.dir), options.name) if options.do == "new" else _show(Path(options.dir), options.name))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _new(directory: Path, name: str) -> str:
    if not name:
        raise UserError("new: got no name, expected that of the silo: python -m fedlada_mpi.keys new NAME")
    public = key_files.new(directory, name)
    return (
        f"{public.with_suffix('.key')}  keep it: whoever has it can pass for {name}\n{public}  for all other silos\n"
        f"fingerprint  {key_files.fingerprint(key_files.public_key(directory, name))}"
    )


def _show(directory: Path, name: str) -> str:
    names = [name] if name else key_files.names(directory)
    if not names:
        raise UserError(f"--dir: {directory} has no public keys: python -m fedlada_mpi.keys new NAME makes them")
    width = max(map(len, names))
    return "\n".join(
        f"{each:<{width}}  {key_files.fingerprint(key_files.public_key(directory, each))}" for each in names
    )


if __name__ == "__main__":
    sys.exit(main())
