"""Which rank owns which clients, and that it reads their data and no other."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import SIZE, communicator
from training_runs import make_data, run_here

from fedlada_mpi.data import checksums
from fedlada_mpi.data.owners import even_runs, owned_clients, shared_out
from fedlada_mpi.data.shards import files_of, read_clients, read_manifest, read_silos
from fedlada_mpi.session import loading

SIZES = [3, 9, 4, 6, 5, 8, 2]


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "owners", SIZES, silos=3)


def loads(sizes: list[int], ends: list[int]) -> list[int]:
    return [sum(sizes[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_all_clients_are_shared_out(data):
    manifest = read_manifest(data.shards)
    owners = shared_out(manifest, 4, servers=1)
    assert [*map(list, owners.clients_of)] == [[], *map(list, owned_clients(manifest, 3))]
    assert owners.only_serves == [True, False, False, False]
    assert owners.mask(manifest.clients).all()


def test_by_hand():
    assert even_runs(np.array([5, 5, 5, 5]), 1) == [4]
    assert even_runs(np.array([8, 1, 1, 1, 1, 4]), 3) == [1, 5, 6]
    assert even_runs(np.array([1, 1, 100]), 3) == [1, 2, 3], "no rank is idle that could have a client"
    assert even_runs(np.array([1, 1, 100, 1]), 2) == [2, 4]
    assert even_runs(np.array([7, 7]), 4) == [1, 2, 2, 2]


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=9), runs=st.integers(1, 6))
@example(sizes=[1, 0], runs=1)  # images end before clients do
def test_the_largest_load_is_the_least_possible(sizes, runs):
    ends = even_runs(np.array(sizes), runs)
    assert len(ends) == runs
    assert ends[-1] == len(sizes)
    assert ends == sorted(ends)
    assert len({0, *ends}) - 1 == min(runs, len(sizes)), "as few idle ranks as possible"
    cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), runs - 1)
    assert max(loads(sizes, ends)) == min(max(loads(sizes, [*cut, len(sizes)])) for cut in cuts)


def test_equal_clients_are_divided_as_files_are():
    """So a run on shards for its own number of ranks adds up in the order of the files."""
    for clients, runs in itertools.product(range(1, 60), range(1, 12)):
        expected = np.cumsum([len(part) for part in np.array_split(np.arange(clients), runs)]).tolist()
        assert even_runs(np.full(clients, 30), runs) == expected


def test_very_many_clients_take_no_time():
    sizes = np.random.default_rng(0).integers(1, 500, 100_000)
    load = loads(sizes.tolist(), even_runs(sizes, 1000))
    assert max(load) < 1.02 * sizes.sum() / 1000


def test_owners(data):
    manifest = read_manifest(data.shards)
    assert [ids.tolist() for ids in manifest.client_ids] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [ids.tolist() for ids in owned_clients(manifest, 3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [ids.tolist() for ids in owned_clients(manifest, 2, silo_per_rank=True)] == [[0, 1, 2, 3, 4], [5, 6]]
    assert [len(ids) for ids in owned_clients(manifest, 9)] == [1] * 7 + [0] * 2
    assert [len(ids) for ids in owned_clients(manifest, 5, silo_per_rank=True)] == [3, 2, 2, 0, 0]


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(clients=st.lists(st.integers(0, len(SIZES) - 1), unique=True))
@example(clients=[])
def test_clients_are_read_as_they_were_written(clients, data):
    manifest = read_manifest(data.shards)
    shard = read_clients(manifest, clients)
    assert shard.client_ids.tolist() == clients
    for row, client in enumerate(clients):
        mine = slice(shard.offsets[row], shard.offsets[row + 1])
        assert np.array_equal(shard.inputs[mine], data.images[client])
        assert np.array_equal(shard.targets[mine], data.labels[client])


def test_a_rank_reads_its_part_of_a_file(tmp_path):
    data = make_data(tmp_path, [2000] * 5, silos=1)
    manifest = read_manifest(data.shards)
    whole = manifest.files["silo_0001.h5"]["bytes"]

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    read_clients(manifest, [3], verify=False)
    assert whole / 5 < bytes_read() - before < whole / 4
    before = bytes_read()
    read_silos(manifest, [0], verify=False)
    assert bytes_read() - before > whole


@pytest.mark.ranks
def test_ranks_share_the_files_and_verify_each_once(data, out, monkeypatch):
    hashed: list[str] = []
    owned: list[list[int]] = []
    sha256 = checksums.sha256

    def read(manifest, clients, verify):
        owned.append(clients.tolist())
        return read_clients(manifest, clients, verify)

    monkeypatch.setenv("XDG_CACHE_HOME", str(out))
    monkeypatch.setattr(checksums, "sha256", lambda path: (hashed.append(path.name), sha256(path))[1])
    monkeypatch.setattr(loading, "read_clients", read)
    run_here(data, out, algorithm="fedavg", rounds=1, local_steps=1)
    if SIZE > 1:
        hashed, owned = (list(itertools.chain(*communicator().allgather(found))) for found in (hashed, owned))
    assert sorted(hashed) == ["silo_0001.h5", "silo_0002.h5", "silo_0003.h5", "test.h5"]
    manifest = read_manifest(data.shards)
    expected = owned_clients(manifest, max(1, SIZE - 1))
    assert owned == [[]] * (SIZE > 1) + [clients.tolist() for clients in expected]
    assert SIZE != 4 or sum(len(files_of(manifest, clients)) for clients in expected) == 4, "one file has two readers"
