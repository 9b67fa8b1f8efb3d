"""From ``--dataset`` and the settings of a partition to the shards, which are prepared once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from limits import LIMIT
from ranks import python
from repository import ROOT

from data_prep import PrepareSettings, prepare
from fedlada_mpi.data.datasets import directory_of, ensure, resolve_dataset
from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError


@pytest.fixture
def mine(tmp_path) -> Path:
    """The shards of 40 images of two classes and four owners, with their raw data next to them."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (40, 2, 2), np.uint8), np.arange(40) % 2
    raw = tmp_path / "raw.npz"
    np.savez(
        raw, train_images=images, train_labels=labels, test_images=images, test_labels=labels,
        train_clients=np.arange(40) // 10,
    )  # fmt: skip
    prepare(PrepareSettings("npz", raw=raw, out=tmp_path / "data/mine", partition="dirichlet", clients=4, silos=2))
    return tmp_path / "data/mine"


def asked(mine: Path, **flags) -> tuple[Config, Path]:
    resolved, directory = resolve_dataset({"dataset": mine.name, "data_dir": str(mine.parent), **flags}, {})
    return resolved.config, directory


def test_a_name_is_found_in_the_data_root(mine, monkeypatch):
    config, directory = asked(mine)
    assert (directory, config.clients, config.dataset) == (mine, 4, "mine")
    monkeypatch.setenv("FEDLADA_DATA", str(mine.parent))
    assert resolve_dataset({"dataset": "mine"}, {})[1] == mine
    monkeypatch.delenv("FEDLADA_DATA")
    monkeypatch.chdir(mine.parents[1])
    assert resolve_dataset({"dataset": "mine"}, {})[1] == Path("data/mine")
    assert resolve_dataset({"dataset": "data/mine"}, {})[1] == Path("data/mine")
    monkeypatch.chdir(mine)
    assert resolve_dataset({"dataset": "."}, {})[1].samefile(mine)
    with pytest.raises(UserError, match=r"got 'mien', .*; .*/data has mine \(did you mean 'mine'\?\)$"):
        asked(mine.with_name("mien"))
    with pytest.raises(
        UserError, match=r"got 'mine', expected one of digits, .* or what python -m data_prep has written$"
    ):
        asked(mine.parent / "nowhere/mine")


def test_another_partition_is_prepared_from_the_raw_data(mine):
    config, directory = asked(mine, dirichlet=0.1, clients=5)
    assert directory == mine.with_name("mine-5clients-dirichlet0.1")
    lines: list[str] = []
    manifest = ensure(config, directory, 1, lines.append)
    assert lines == [f"preparing {directory}, once for all runs with these settings"]
    raw = mine.parents[1] / "raw.npz"
    plain = prepare(PrepareSettings("npz", raw=raw, out=mine.with_name("plain"), clients=5, silos=5, dirichlet=0.1))
    assert manifest.digest == plain.digest
    assert asked(mine, dirichlet=0.1, clients=5)[1] == directory
    assert ensure(config, directory, 1, lines.append).digest == plain.digest
    assert len(lines) == 1
    assert asked(directory)[0].dirichlet == 0.1
    assert sorted(path.name for path in mine.parent.iterdir()) == ["mine", "mine-5clients-dirichlet0.1", "plain"]


def test_a_concentration_asks_for_a_dirichlet_partition(mine):
    raw = mine.parents[1] / "raw.npz"
    prepare(PrepareSettings("npz", raw=raw, out=mine, partition="natural", silos=2, force=True))
    assert asked(mine)[0].partition == "natural"
    config, directory = asked(mine, dirichlet=0.1)
    assert (config.partition, directory.name) == ("dirichlet", "mine-4clients-dirichlet0.1")
    assert ensure(config, directory, 1).partition["dirichlet"] == 0.1
    with pytest.raises(UserError, match="the data has 4 owners: leave it out, or divide all examples anew"):
        ensure(*asked(directory, partition="natural", clients=5), 1)


def test_the_usual_partition_has_the_plain_name(tmp_path):
    """Whatever is prepared first: names do not depend on the order of runs."""
    where = dict(dataset="digits", data_dir=str(tmp_path))
    assert resolve_dataset(where, {})[1] == tmp_path / "digits"
    assert resolve_dataset({**where, "clients": 20}, {})[1] == tmp_path / "digits-20clients-dirichlet0.3"
    prepare(PrepareSettings("digits", out=tmp_path / "digits", clients=20, silos=2))
    assert resolve_dataset({**where, "clients": 20}, {})[1] == tmp_path / "digits"
    assert resolve_dataset(where, {})[1] == tmp_path / "digits-50clients-dirichlet0.3"


PARTITIONS = st.fixed_dictionaries(
    {
        "partition": st.sampled_from(["dirichlet", "iid", "pathological"]),
        "clients": st.integers(1, 9),
        "dirichlet": st.sampled_from([0.1, 0.30000000000000004, 0.3, 1.0, 1e-7]),
        "exhausted": st.sampled_from(["refill", "exact"]),
        "classes_per_client": st.integers(1, 3),
        "size_sigma": st.sampled_from([0.0, 0.5]),
        "partition_seed": st.integers(19, 21),
        "validation": st.sampled_from([0.0, 0.1]),
    }
)


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(PARTITIONS, PARTITIONS)
@example({"dirichlet": 0.3, "clients": 9}, {"dirichlet": 0.30000000000000004, "clients": 9})
def test_one_directory_per_partition(one, other):
    """Two runs share a directory if and only if a preparation with their settings writes the same."""
    configs = [Config(dataset="digits", data_dir="nowhere", **values) for values in (one, other)]
    wanted = []
    for values in (one, other):
        apart = {name: values[name] for name in ("clients", "partition_seed", "validation") if name in values}
        rule = PrepareSettings("digits", "x", **{n: v for n, v in values.items() if n not in apart}).rule
        wanted.append((rule, apart))
    assert (directory_of(configs[0]) == directory_of(configs[1])) == (wanted[0] == wanted[1])


def test_raw_data_that_is_gone_or_another(mine):
    raw = mine.parents[1] / "raw.npz"
    ensure(*asked(mine, clients=5), 1)
    content = raw.read_bytes()
    raw.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"clients 4, but .* 8, and .*raw.npz has changed since: .* --force$"):
        ensure(*asked(mine, clients=8), 1)
    raw.unlink()
    with pytest.raises(
        UserError, match=r"and their raw data is not there: add --clients 4, or prepare others with pyth"
    ):
        ensure(*asked(mine, clients=8), 1)
    raw.write_bytes(content)
    manifest = json.loads((mine / "manifest.json").read_text())
    (mine / "manifest.json").write_text(json.dumps({**manifest, "source": "0" * 64}))
    with pytest.raises(UserError, match=r"-5clients-dirichlet0.6 were prepared from other raw data than .*: rm -r "):
        ensure(*asked(mine, clients=5), 1)


def test_a_data_root_that_cannot_be_written(mine, monkeypatch):
    """What is prepared is used, and the rest is refused in one line."""
    plain = os.open

    def read_only(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return plain(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", read_only)
    assert ensure(*asked(mine), 1).clients == 4
    with pytest.raises(
        UserError, match=r"cannot be prepared \(.*Read-only file system.*\): make .*/data writable, or "
    ):
        ensure(*asked(mine, clients=5), 1)


def started(mine: Path, *words: str, kill_after: int = 0) -> subprocess.Popen:
    """A process that prepares another partition; it ends itself before the n-th file that it writes."""
    code = f"""
import os, signal, time
from fedlada_mpi.data import write
from fedlada_mpi.data.datasets import ensure, resolve_dataset
plain, count = write.write_file, [0]
def write_file(*arguments):
    count[0] += 1
    if count[0] == {kill_after}:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    plain(*arguments)
write.write_file = write_file
resolved, directory = resolve_dataset(dict(dataset="mine", data_dir={str(mine.parent)!r}, clients=5), {{}})
ensure(resolved.config, directory, 1, print)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def test_runs_at_once_and_one_that_is_killed(mine):
    """The first is killed in the middle; of the next three, one prepares and two wait."""
    killed = started(mine, kill_after=3)
    killed.communicate(timeout=LIMIT)
    assert killed.returncode == -signal.SIGKILL
    directory = mine.with_name("mine-5clients-dirichlet0.6")
    assert not (directory / "manifest.json").exists()
    assert [path.name for path in mine.parent.glob(".*")] == [".mine-5clients-dirichlet0.6.lock"]
    runs = [started(mine) for _ in range(3)]
    said = [run.communicate(timeout=LIMIT)[0].split(maxsplit=1)[:1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert said.count(["preparing"]) == 1
    assert {*map(tuple, said)} <= {("preparing",), ("waiting",), ()}
    assert read_manifest(directory).clients == 5
    assert not [*mine.parent.glob(".*"), *directory.glob(".*")]
