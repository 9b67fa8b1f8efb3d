"""Checkpoints that are not as they were written: any changed bit is refused, in one line and with what to do."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from hostile import DAMAGES, OBSTACLES, damage_file
from hostile_trials import checkpoint_files, outcome, restore, try_checkpoint, write_checkpoint
from hypothesis import HealthCheck, example, given, settings

from fedlada_mpi.algorithms import Vectors
from fedlada_mpi.mpi import World
from fedlada_mpi.rundir import checkpoint
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError


@pytest.fixture(scope="module")
def world():
    ranks = World()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def original(world, tmp_path_factory):
    return write_checkpoint(world, tmp_path_factory.mktemp("original"))


@pytest.fixture
def copy(original, tmp_path):
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return checkpoint.complete(tmp_path)[0]


@settings(
    derandomize=True, deadline=None, max_examples=100, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(checkpoint_files)
@example(("server.h5", lambda content: content.replace(b'"lr": 0.1', b'"lr": 0.2')))
@example(("clients_0000.h5", lambda content: content.replace(b"c_i", b"c_j")))
@example((checkpoint.LIST, lambda content: b"{}"))
@example((checkpoint.LIST, lambda content: b'{"server.h5": 1, "../../x.h5": 2}'))
def test_any_change_is_refused(world, original, tmp_path, drawn):
    try_checkpoint(drawn, world, original, tmp_path / "damaged")


def test_every_bit_of_the_settings_counts(world, original, tmp_path):
    """A setting that differs in one bit would be refused as another setting, or be taken as it is."""
    content = (checkpoint.complete(original)[0] / "server.h5").read_bytes()
    at = content.index(b'"lr": 0.1') + 8
    drawn = ("server.h5", lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert try_checkpoint(drawn, world, original, tmp_path / "damaged") == "refused"
    assert outcome(lambda: restore(world, original)) == "accepted"


@pytest.mark.parametrize("name", ["server.h5", "clients_0000.h5", checkpoint.LIST])
@pytest.mark.parametrize("kind", [*OBSTACLES, *DAMAGES])
def test_something_else_in_place_of_a_file(name, kind, world, copy):
    damage_file(copy / name, kind)
    assert outcome(lambda: restore(world, copy.parents[1])) == "refused"


def without_checksums(folder) -> None:
    """The list as version 0.1.0 wrote it."""
    (folder / checkpoint.LIST).write_text(json.dumps(sorted(json.loads((folder / checkpoint.LIST).read_text()))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", np.zeros(4, np.float32)),
        ("x", np.zeros(1, np.float32)),  # would be broadcast
        ("x", np.zeros((5, 1), np.float32)),
        ("x", np.zeros(5, np.float64)),
        ("x", np.zeros(5, np.complex64)),  # would lose its imaginary part
        ("x", np.zeros(5, np.int32)),
        ("x", np.float32(1)),
        ("x", "text"),
        ("x", None),
        ("x/y", np.zeros(5, np.float32)),
    ],
)
def test_vectors_of_another_kind(name, value, world, copy):
    """Where checksums do not tell: an earlier version had none."""
    without_checksums(copy)
    assert outcome(lambda: restore(world, copy.parents[1])) == "accepted"
    with h5py.File(copy / "server.h5", "a") as file:
        del file["x"]
        if value is not None:
            file[name] = value
    assert outcome(lambda: restore(world, copy.parents[1])) == "refused"


def test_of_another_round(world, copy):
    copy.rename(copy.with_name("round_000009"))
    assert outcome(lambda: restore(world, copy.parents[1])) == "refused"


def test_the_other_engine_orders_parameters_otherwise(world, original, tmp_path):
    assert checkpoint.latest(original, Config(engine="stacked")) == 7
    with pytest.raises(UserError) as found:
        checkpoint.latest(original, Config(engine="generic"))
    assert str(found.value) == (
        f"--engine: got generic, but {original} was started with --engine auto, which stores parameters in another "
        "order: use --engine auto, or another --out"
    )
    s = Vectors(x=torch.zeros(5))
    generic, auto = (Config(engine=engine, model="own:model") for engine in ("generic", "auto"))
    save_checkpoint(world, tmp_path, 3, generic, s, {})
    with pytest.raises(UserError, match="use --engine generic"):
        checkpoint.latest(tmp_path, auto)
    # A model that cannot be traced has one order on both.
    save_checkpoint(world, tmp_path, 4, generic, s, {}, {checkpoint.ORDER: "generic"})
    assert checkpoint.latest(tmp_path, auto) == 4
    digests = {checkpoint.DATA: "", checkpoint.MODEL: "", checkpoint.ORDER: "generic"}
    checkpoint.refuse_other_digests(tmp_path, 4, digests, tmp_path)
    with pytest.raises(UserError, match="in another order: use --engine generic, or another --out"):
        checkpoint.refuse_other_digests(tmp_path, 4, {**digests, checkpoint.ORDER: "3f0c"}, tmp_path)
