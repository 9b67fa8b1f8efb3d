"""Everything a run needs to go on, in HDF5: written under a temporary name, renamed when complete; two are kept.

    checkpoint/round_000050/server.h5          the server's vectors, the settings, the digest of the data
    checkpoint/round_000050/clients_0003.h5    what clients of rank 3 keep across rounds, by client id

Randomness has no state (``rng.py``), so there is none to save. HDF5's own checksums reveal a file that was damaged on
disk when it is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from ..algorithms import Vectors
from ..config import DATASETS, Config, differences
from ..errors import UserError
from ..mpi import World

KEEP_CHECKPOINTS = 2
LIST = "files.json"  # names the files of a checkpoint, so that a missing one is noticed
CHUNK = 1 << 18
DATA = "data"  # the attribute with the digest of the shards; checkpoints of version 0.1 have none


def folder(out: Path, t: int) -> Path:
    return out / "checkpoint" / f"round_{t:06d}"


def complete(out: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    folders = (p for p in (out / "checkpoint").glob("round_*") if p.name[6:].isdigit())
    return sorted(folders, key=lambda p: int(p.name[6:]))


def _write(path: Path, vectors: dict[str, Tensor], attributes: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, value in vectors.items():
            chunk = (min(CHUNK, len(value)),)
            file.create_dataset(name, data=value.cpu().numpy(), chunks=chunk, fletcher32=True)
        file.attrs.update(attributes)
        file.flush()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def save(
    world: World,
    out: Path,
    t: int,
    config: Config,
    s: Vectors,
    state: dict[str, dict[int, Tensor]],
    data_digest: str = "",
) -> None:
    """The root writes the server's vectors, every rank its clients' state; then the folder gets its name."""
    final = folder(out, t)
    temporary = final.with_name(final.name + ".tmp")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> None:
        if world.rank == 0:
            about = {"round": t, "config": json.dumps(config.record()), DATA: data_digest}
            _write(temporary / "server.h5", vars(s), about)
        if any(state.values()):
            rows = {f"{client}/{name}": v for name, clients in state.items() for client, v in clients.items()}
            _write(temporary / f"clients_{world.rank:04d}.h5", rows, {})

    def publish() -> None:
        names = sorted(path.name for path in temporary.glob("*.h5"))
        (temporary / LIST).write_text(json.dumps(names))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in complete(out)[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(old)

    def explained(action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            try:
                action()
            except OSError as error:
                raise UserError(f"cannot write {temporary}: {error}; make room and use --resume") from None

        return act

    world.on_root(explained(prepare))
    world.collectively(explained(write))
    world.on_root(explained(publish))


def latest(out: Path, config: Config) -> int:
    """The newest checkpoint's round, 0 if there is none; settings that would change the result are refused."""
    folders = complete(out)
    if not folders:
        return 0
    path = folders[-1] / "server.h5"
    try:
        with h5py.File(path) as file:
            saved, t = json.loads(file.attrs["config"]), int(file.attrs["round"])
            # Shards may have been moved: the digest of the data decides, once it is known.
            if file.attrs.get(DATA) and not {saved["dataset"], config.dataset} <= {*DATASETS}:
                del saved["dataset"]
    except (OSError, KeyError, ValueError) as error:
        raise _damaged(path, error) from None
    refuse_other_settings(out, saved, config)
    return t


def refuse_other_settings(out: Path, saved: dict[str, Any], config: Config) -> None:
    """Raise if the run in ``out`` was started with settings that give another result."""
    changed = differences(saved, config)
    if changed:
        raise UserError(
            f"--resume: {out} was started with other settings ({'; '.join(changed)}): use them, or another --out"
        )


def refuse_other_data(out: Path, t: int, digest: str, directory: Path) -> None:
    """Raise if the checkpoint was trained on other data than that in ``directory``, whose digest is given."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            saved = str(file.attrs.get(DATA, ""))
    except OSError as error:
        raise _damaged(path, error) from None
    if saved and saved != digest:
        raise UserError(
            f"--resume: {out} was trained on other data: got {digest[:12]} in {directory}, expected {saved[:12]}: "
            "give --dataset the directory of those shards, or use another --out"
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
