"""What clients of a silo keep across rounds, in files of the silo's own: with ``--secure`` nobody else reads them.

FOLDER/checkpoint/round_000050.h5      by client, after round 50
FOLDER/checkpoint/round_000050.crc     its checksum
"""

from __future__ import annotations

from pathlib import Path

import h5py
from torch import Tensor

from ..support import disk
from ..support.errors import UserError
from . import checkpoint
from .checkpoint import State
from .files import CHECKPOINTS

KEEP = checkpoint.KEEP_CHECKPOINTS + 1  # the server may not have completed the last one


def save(folder: Path, t: int, state: State) -> None:
    """Write the state after round ``t``, and remove old ones."""
    final = _path(folder, t)
    temporary = final.with_name(f"{final.name}.tmp")
    with disk.writing(final):
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (temporary, final.with_suffix(".crc")):
            disk.remove(path)
    rows = {f"{client}/{name}": v for name, clients in state.items() for client, v in clients.items()}
    checksum = checkpoint.write_vectors(temporary, rows)
    with disk.writing(final):
        disk.remove(final)
        disk.publish(temporary, final)
        disk.write_new(final.with_suffix(".crc"), str(checksum).encode())
        for old in _complete(folder)[:-KEEP]:
            disk.remove(_path(folder, old))
            disk.remove(_path(folder, old).with_suffix(".crc"))


def load(folder: Path, t: int, like: Tensor, state: State, clients: set[int]) -> bool:
    """The state of ``clients`` as it was last written up to round ``t``; whether there is any."""
    found = [number for number in _complete(folder) if number <= t]
    if not found:
        return False
    path = _path(folder, found[-1])
    rows: list[tuple[str, int, Tensor]] = []
    try:
        checkpoint.verify(path, int(path.with_suffix(".crc").read_text()))
        with h5py.File(path) as file:
            for client in clients.intersection(map(int, file)):
                rows += [(name, client, checkpoint.read_vector(file, f"{client}/{name}", like)) for name in state]
    except checkpoint.DAMAGE as error:
        raise UserError(f"{path} is damaged ({error}): remove it to go on from the one before it") from None
    for name, client, row in rows:
        state[name][client] = row.to(like)
    return True


def _path(folder: Path, t: int) -> Path:
    return folder / CHECKPOINTS / f"round_{t:06d}.h5"


def _complete(folder: Path) -> list[int]:
    files = (folder / CHECKPOINTS).glob("round_*.crc")
    return sorted(int(number) for path in files if (number := path.stem.removeprefix("round_")).isdecimal())
