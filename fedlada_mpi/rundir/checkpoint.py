"""Checkpoints: all that a run needs to go on, in HDF5, written under a temporary name and renamed when complete.

    checkpoint/round_000050/server.h5          the server's vectors, the settings, digests of data and code, SEGMENTS
    checkpoint/round_000050/clients_0003.h5    what clients of rank 3 keep across rounds, by client id
    checkpoint/round_000050/files.json         the names of these files and their checksums

The last two are kept. Randomness has no state (``rng.py``), so there is none to save. A file that differs in one bit
from what was written is refused. The message says how to go back to the checkpoint before it; that is not done
automatically, because damage is rarely alone.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from ..algorithms import Vectors
from ..mpi import World
from ..settings import CODE, DATASETS, Config, as_code, differences, is_of_0_1, own_settings
from ..support import disk
from ..support.code_digest import changed
from ..support.errors import UserError
from ..support.inputs import read_json, require_regular
from . import lock
from .files import CHECKPOINT_NAMES, CHECKPOINTS, checkpoint_folder, complete_checkpoints
from .files import DATA as DATA

State = dict[str, dict[int, Tensor]]  # what clients keep across rounds, by name and client

KEEP_CHECKPOINTS = 2
LIST = "files.json"  # the files of a checkpoint with their CRC-32; only names in checkpoints of version 0.1.0
MODEL = "model"  # attribute: the digest of the model's constants; checkpoints of version 0.1 have none, nor of DATA
ORDER = "order_of_parameters"  # of the parameters in a vector; earlier versions did not write it
# Of the run up to the checkpoint, next to the server's vectors; earlier versions wrote none.
SEGMENTS = "run/segments"  # provenance.py
RECORDS = "run/records"  # metrics.py
PREVIOUS = "run/previous_x"  # before the last step, with --diagnose


# In files.py, which needs neither torch nor h5py.
folder, complete = checkpoint_folder, complete_checkpoints


def remove_unfinished(out: Path) -> None:
    """Remove what a run that was killed left of checkpoints."""
    for path in (out / CHECKPOINTS).glob(f"{CHECKPOINT_NAMES}.tmp"):
        with disk.writing(path):
            disk.remove(path)


def write_vectors(path: Path, vectors: Mapping[str, Tensor], attributes: Mapping[str, Any] | None = None) -> int:
    """Write a file; returns its checksum."""
    with disk.writing(path, needed=sum(value.nbytes for value in vectors.values())):
        with disk.new_hdf5(path) as file:
            for name, value in vectors.items():
                file.create_dataset(name, data=value.cpu().numpy())
            file.attrs.update(attributes or {})
        return _checksum(path)


def _checksum(path: Path) -> int:
    require_regular(path)
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


class Draft:
    """A checkpoint after round ``t`` on its way: its folder has another name until all files are there.

    Every rank writes its own files, and the root lists them:

    >>> draft.prepare()                     # on the root
    >>> checksums = draft.write()           # on every rank
    >>> draft.publish(checksums_of_all)     # on the root
    """

    def __init__(
        self,
        out: Path,
        t: int,
        rank: int,
        config: Config,
        server: Mapping[str, Tensor],
        state: State,
        digests: Mapping[str, str] | None = None,
        order_of_sums: Mapping[str, Any] | None = None,
        elsewhere: Callable[[int, State], None] | None = None,
    ):
        """``server``: what the root writes; ``state``: of this rank's clients, which ``elsewhere`` writes to a place
        of the silo's own, if it is given."""
        self.out, self.t, self.rank, self.server, self.state = out, t, rank, server, state
        self.elsewhere = elsewhere
        self.final = folder(out, t)
        self.temporary = self.final.with_name(self.final.name + ".tmp")
        self.about = {
            "round": t,
            "config": json.dumps(config.record()),
            **(digests or {}),
            CODE: json.dumps(config.code),
            "order_of_sums": json.dumps(order_of_sums or {}),
        }

    def prepare(self) -> None:
        lock.keep(self.out)
        with disk.writing(self.temporary):
            remove_unfinished(self.out)
            self.temporary.mkdir(parents=True)

    def write(self) -> dict[str, int]:
        """The files of this rank; returns their checksums."""
        checksums = {}
        if self.elsewhere is not None:
            self.elsewhere(self.t, self.state)
        if self.rank == 0:
            checksums["server.h5"] = write_vectors(self.temporary / "server.h5", self.server, self.about)
        if self.elsewhere is None and any(self.state.values()):
            rows = {f"{client}/{name}": v for name, clients in self.state.items() for client, v in clients.items()}
            name = f"clients_{self.rank:04d}.h5"
            checksums[name] = write_vectors(self.temporary / name, rows)
        return checksums

    def publish(self, files: Mapping[str, int]) -> None:
        """Give the folder its name, once these files are there; and remove old checkpoints."""
        lock.keep(self.out)
        with disk.writing(self.temporary):
            disk.write_new(self.temporary / LIST, json.dumps(files).encode())
            disk.remove(self.final)
            disk.publish(self.temporary, self.final)
            for old in complete(self.out)[:-KEEP_CHECKPOINTS]:
                disk.remove(old)

    def discard(self) -> None:
        """Remove what is there of one that will not be completed."""
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)


def save(world: World, draft: Draft) -> None:
    """Write a checkpoint, and wait until it is complete; collective."""
    world.on_root(draft.prepare)
    try:
        publish(world, draft, world.collectively(draft.write))
    except UserError:
        draft.discard()
        raise


def publish(world: World, draft: Draft, checksums: dict[str, int]) -> None:
    """Complete a checkpoint that every rank has written; ``checksums``: of this rank's files. Collective."""
    by_rank = world.allgather_json(checksums)
    world.on_root(lambda: draft.publish({name: value for rank in by_rank for name, value in rank.items()}))


def latest(out: Path, config: Config) -> int:
    """The newest checkpoint's round, 0 if there is none; settings that would change the result are refused."""
    folders = complete(out)
    if not folders:
        return 0
    newest = folders[-1]
    path = newest / LIST
    try:
        files = _files(newest)
        path = newest / "server.h5"
        verify(path, files[path.name])
        with h5py.File(path) as file:
            saved, t = json.loads(file.attrs["config"]), int(file.attrs["round"])
            digest, ordered = file.attrs.get(DATA), ORDER in file.attrs
        if not isinstance(saved, dict) or folder(out, t) != newest:
            raise ValueError(f"it is of round {t}, or has no settings")
    except DAMAGE as error:
        raise _damaged(path, error) from None
    of_0_1, saved = is_of_0_1(saved), own_settings(saved)
    # Shards may have been moved: ``refuse_other_digests`` compares the data themselves.
    if digest and not {saved.get("dataset"), config.dataset} <= {*DATASETS}:
        saved.pop("dataset", None)
    refuse_other_settings(out, saved, config)
    if ":" not in config.model or not (ordered or of_0_1):  # else the orders are compared
        _refuse_other_layout(out, saved, config)
    return t


def _files(directory: Path) -> dict[str, int | None]:
    """The names of a checkpoint's files and their checksums; None where an older version wrote no checksums."""
    listed = read_json(directory / LIST)
    files: dict[str, int | None] = dict.fromkeys(listed) if isinstance(listed, list) else dict(listed)
    if "server.h5" not in files or not all(re.fullmatch(r"server\.h5|clients_\d+\.h5", name) for name in files):
        raise ValueError(f"it lists {', '.join(map(str, files)) or 'nothing'}")
    if extra := {path.name for path in directory.glob("*.h5")} - files.keys():
        raise ValueError(f"it does not list {', '.join(sorted(extra))}")
    return files


def verify(path: Path, expected: int | None) -> None:
    """Raise OSError or ValueError unless the file is as it was written; None: its checksum is not known."""
    checksum = _checksum(path)
    if expected is not None and checksum != expected:
        raise ValueError(f"its checksum is {checksum}, expected {expected}")


def _refuse_other_layout(out: Path, saved: dict[str, Any], config: Config) -> None:
    """Raise if the other engine wrote the checkpoint: it orders the parameters differently."""
    before = saved.get("engine", config.engine)
    if "generic" in (before, config.engine) and before != config.engine:
        raise UserError(
            f"--engine: got {config.engine}, but {out} was started with --engine {before}, which stores parameters in "
            f"another order: use --engine {before}, or another --out"
        )


def order_of_sums(out: Path, t: int) -> dict[str, Any]:
    """What the order of the sums depended on up to the checkpoint; empty in checkpoints of older versions."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            return dict(json.loads(file.attrs.get("order_of_sums", "{}")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def read_more(out: Path, t: int, name: str) -> np.ndarray | None:
    """What ``save`` wrote as ``more[name]``; None if the checkpoint does not have it."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            return np.asarray(file[name][:]) if name in file else None
    except DAMAGE as error:
        raise _damaged(path, error) from None


def refuse_other_settings(out: Path, saved: dict[str, Any], config: Config) -> None:
    """Raise if the run in ``out`` was started with settings that give another result."""
    changed = differences(saved, config)
    if changed:
        raise UserError(
            f"--resume: {out} was started with other settings ({'; '.join(changed)}): use them, or another --out"
        )


def refuse_other_code(out: Path, t: int, config: Config) -> None:
    """Raise if a user's code that the settings name is not what the checkpoint was computed with."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            before = as_code(json.loads(file.attrs.get(CODE, "{}")))
    except DAMAGE as error:
        raise _damaged(path, error) from None
    if names := changed(before, config.code):
        have = "have" if len(names) > 1 else "has"
        raise UserError(
            f"--resume: {', '.join(names)} {have} changed since the run in {out} began: restore the code, use another "
            "--out, or go on with it as it is by --accept-changed-code"
        )


def attribute(out: Path, name: str) -> str:
    """Of the newest checkpoint; empty if there is none, or it does not have it."""
    for saved in complete(out)[-1:]:
        with suppress(*DAMAGE), h5py.File(saved / "server.h5") as file:
            return str(file.attrs.get(name, ""))
    return ""


def refuse_other_digests(out: Path, t: int, digests: dict[str, str], directory: Path) -> None:
    """Raise if the checkpoint is of other data than that in ``directory``, or of a model with other constants."""
    path = folder(out, t) / "server.h5"
    try:
        with h5py.File(path) as file:
            saved = {name: str(file.attrs.get(name, "")) for name in digests}
            record = json.loads(file.attrs["config"])
    except DAMAGE as error:
        raise _damaged(path, error) from None
    if saved[DATA] and saved[DATA] != digests[DATA]:
        raise UserError(
            f"--resume: {out} was trained on other data: got {digests[DATA][:12]} in {directory}, expected "
            f"{saved[DATA][:12]}: give --dataset the directory of those shards, or use another --out"
        )
    if saved[MODEL] and saved[MODEL] != digests[MODEL]:
        raise UserError(
            f"--resume: {out} was started with a model of other frozen parameters, buffers or shapes: use the code and "
            "the --init of that model, or another --out"
        )
    # Version 0.1.0 trained models of users' own on the generic engine alone.
    before = saved.get(ORDER) or ("generic" if is_of_0_1(record) and ":" in str(record.get("model")) else "")
    if before and before != digests.get(ORDER, before):
        engine = "--engine generic" if before == "generic" else "--engine auto and the torch that it was started with"
        raise UserError(f"--resume: {out} has the model's parameters in another order: use {engine}, or another --out")


def load(out: Path, t: int, s: Vectors, state: State, clients: set[int], world: World) -> None:
    """Fill the root's vectors, and the state of this rank's clients, whichever rank wrote it."""
    path = folder(out, t) / LIST
    server: dict[str, Tensor] = {}
    try:
        files = _files(path.parent)
        if world.rank == 0:
            path = path.with_name("server.h5")  # ``latest`` has verified it
            with h5py.File(path) as file:
                server = {name: read_vector(file, name, s.x) for name in vars(s)}
        names = sorted(files.keys() - {"server.h5"})
        for name in names[world.rank :: world.size]:
            path = path.with_name(name)
            verify(path, files[path.name])
    except DAMAGE as error:
        raise _damaged(path, error) from None
    # Outside of the block: an error of the device does not mean that the file is damaged.
    for name, vector in server.items():
        getattr(s, name).copy_(vector)
    load_state(folder(out, t), s.x, state, clients)


def load_state(saved: Path, like: Tensor, state: State, clients: set[int]) -> None:
    """Fill the state of ``clients`` from a checkpoint, as vectors of the shape, type and device of ``like``."""
    path = saved / LIST
    rows: list[tuple[str, int, Tensor]] = []
    try:
        names = sorted(_files(path.parent).keys() - {"server.h5"})
        for path in [path.with_name(name) for name in names] if state else ():
            require_regular(path)
            with h5py.File(path) as file:
                for client in clients.intersection(map(int, file)):
                    rows += [(name, client, read_vector(file, f"{client}/{name}", like)) for name in state]
    except DAMAGE as error:
        raise _damaged(path, error) from None
    for name, client, row in rows:
        state[name][client] = row.to(like)


def read_vector(file: h5py.File, name: str, like: Tensor) -> Tensor:
    """A vector of the file, which must have the shape and type of ``like``."""
    stored = file[name]
    expected = tuple(like.shape), str(like.dtype).removeprefix("torch.")
    if not isinstance(stored, h5py.Dataset) or (stored.shape, str(stored.dtype)) != expected:
        raise ValueError(f"{name} is not a vector of {expected[0][0]} {expected[1]}")
    return torch.from_numpy(stored[:])


# What h5py and json raise on a damaged file.
DAMAGE = (OSError, KeyError, TypeError, ValueError, RuntimeError)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({error}): remove {path.parent} and --resume from the checkpoint before it")
