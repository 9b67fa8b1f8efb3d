"""Everything a run needs to go on, in HDF5: written under a temporary name, renamed when complete; two are kept.

    checkpoint/round_000050/server.h5          the server's vectors, the settings
    checkpoint/round_000050/clients_0003.h5    what clients of rank 3 keep across rounds, by client id

Randomness has no state (``rng.py``), so there is none to save. HDF5's own checksums reveal a file that was damaged on
disk when it is read.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from .. import disk
from ..algorithms import Vectors
from ..config import Config, differences
from ..errors import UserError
from ..mpi import World

KEEP_CHECKPOINTS = 2
LIST = "files.json"  # names the files of a checkpoint, so that a missing one is noticed
CHUNK = 1 << 18


def folder(out: Path, t: int) -> Path:
    return out / "checkpoint" / f"round_{t:06d}"


def complete(out: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    folders = (p for p in (out / "checkpoint").glob("round_*") if p.name[6:].isdigit())
    return sorted(folders, key=lambda p: int(p.name[6:]))


def remove_unfinished(out: Path) -> None:
    """Remove what a run that was killed left of checkpoints."""
    for path in (out / "checkpoint").glob("round_*.tmp"):
        with disk.writing(path):
            disk.remove(path)


def _write(path: Path, vectors: dict[str, Tensor], attributes: dict[str, Any]) -> None:
    with disk.writing(path, needed=sum(value.nbytes for value in vectors.values())), disk.new_hdf5(path) as file:
        for name, value in vectors.items():
            chunk = (min(CHUNK, len(value)),)
            file.create_dataset(name, data=value.cpu().numpy(), chunks=chunk, fletcher32=True)
        file.attrs.update(attributes)


def save(
    world: World,
    out: Path,
    t: int,
    config: Config,
    s: Vectors,
    state: dict[str, dict[int, Tensor]],
    order_of_sums: dict[str, Any] | None = None,
) -> None:
    """The root writes the server's vectors, every rank its clients' state; then the folder gets its name."""
    final = folder(out, t)
    temporary = final.with_name(final.name + ".tmp")

    def prepare() -> None:
        with disk.writing(temporary):
            remove_unfinished(out)
            temporary.mkdir(parents=True)

    def write() -> None:
        if world.rank == 0:
            attributes = {
                "round": t,
                "config": json.dumps(asdict(config)),
                "order_of_sums": json.dumps(order_of_sums or {}),
            }
            _write(temporary / "server.h5", vars(s), attributes)
        if any(state.values()):
            rows = {f"{client}/{name}": v for name, clients in state.items() for client, v in clients.items()}
            _write(temporary / f"clients_{world.rank:04d}.h5", rows, {})

    def publish() -> None:
        names = sorted(path.name for path in temporary.glob("*.h5"))
        with disk.writing(temporary):
            disk.write_new(temporary / LIST, json.dumps(names).encode())
            disk.remove(final)
            disk.publish(temporary, final)
            for old in complete(out)[:-KEEP_CHECKPOINTS]:
                disk.remove(old)

    world.on_root(prepare)
    try:
        world.collectively(write)
        world.on_root(publish)
    except UserError:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def latest(out: Path, config: Config) -> int:
    """The newest checkpoint's round, 0 if there is none; settings that would change the result are refused."""
    folders = complete(out)
    if not folders:
        return 0
    path = folders[-1] / "server.h5"
    try:
        with h5py.File(path) as file:
            saved, t = json.loads(file.attrs["config"]), int(file.attrs["round"])
    except (OSError, KeyError, ValueError) as error:
        raise _damaged(path, error) from None
    refuse_other_settings(out, saved, config)
    return t


def order_of_sums(out: Path, t: int) -> dict[str, Any]:
    """What the order of the sums depended on up to the checkpoint; empty if it does not say."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            return dict(json.loads(file.attrs.get("order_of_sums", "{}")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def refuse_other_settings(out: Path, saved: dict[str, Any], config: Config) -> None:
    """Raise if the run in ``out`` was started with settings that give another result."""
    changed = differences(saved, config)
    if changed:
        raise UserError(
            f"--resume: {out} was started with other settings ({'; '.join(changed)}): use them, or another --out"
        )


def load(out: Path, t: int, s: Vectors, state: dict[str, dict[int, Tensor]], clients: set[int], server: bool) -> None:
    """Fill the server's vectors, and the state of this rank's clients, whichever rank wrote it."""
    path = folder(out, t)
    try:
        if server:
            path = folder(out, t) / "server.h5"
            with h5py.File(path) as file:
                for name, vector in vars(s).items():
                    vector.copy_(torch.from_numpy(file[name][:]))
        if state:
            names = json.loads((folder(out, t) / LIST).read_text())
            for path in [folder(out, t) / name for name in names if name.startswith("clients_")]:
                with h5py.File(path) as file:
                    for client in clients.intersection(map(int, file)):
                        for name in state:
                            state[name][client] = torch.from_numpy(file[f"{client}/{name}"][:]).to(s.x)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({error}): remove {path.parent} and --resume from the checkpoint before it")
