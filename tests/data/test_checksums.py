"""A file is hashed once per node, and again whenever it could have changed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fedlada_mpi.data import checksums
from fedlada_mpi.data.checksums import cache_file, first_wrong, sha256


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1e9)
    return cache_file()


@pytest.fixture
def files(tmp_path) -> dict[Path, str]:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    return {tmp_path / name: sha256(tmp_path / name) for name in "abc"}


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr(checksums, "sha256", counted)
    return names


def test_sha256_by_another_program(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_only_once(files, hashed):
    assert first_wrong(files) is None
    assert sorted(hashed) == ["a", "b", "c"]
    hashed.clear()
    assert first_wrong(files) is None
    assert hashed == []
    assert first_wrong(files, trust_cache=False) is None
    assert sorted(hashed) == ["a", "b", "c"]


def test_a_changed_file_is_found(files, hashed):
    first_wrong(files)
    path = next(iter(files))
    before = path.stat()
    path.write_bytes(b"A" + path.read_bytes()[1:])
    # Its size and even its time are as before.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hashed.clear()
    assert first_wrong(files) == path
    assert hashed == ["a"]
    assert first_wrong(files) == path, "a wrong file is not remembered"


def test_another_checksum_is_another_question(files):
    first_wrong(files)
    path = next(iter(files))
    assert first_wrong({path: "0" * 64}) == path


def test_young_files_are_not_remembered(files, hashed, monkeypatch):
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", 60)
    for _ in range(2):
        assert first_wrong(files) is None
    assert len(hashed) == 6


def garbage(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(os.urandom(3000) + b"\n\n\xff\n" + b"0" * 500)


def a_folder(cache: Path) -> None:
    cache.mkdir(parents=True)


def a_pipe(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    os.mkfifo(cache)


def a_file_above(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("in the way")


def a_device(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/dev/full")


@pytest.mark.parametrize("obstacle", [garbage, a_folder, a_pipe, a_file_above, a_device])
def test_a_cache_that_cannot_be_used(files, cache, obstacle):
    obstacle(cache)
    path = next(iter(files))
    for _ in range(2):
        assert first_wrong(files) is None
        assert first_wrong({**files, path: "0" * 64}) == path


def test_no_permission(files, cache, hashed, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    for _ in range(2):
        assert first_wrong(files) is None
    assert len(hashed) == 6
    assert not cache.exists()


def test_it_stays_small(files, cache, hashed):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\n" * checksums.MAX_CACHE_BYTES)
    first_wrong(files)
    assert cache.stat().st_size < 1000
    hashed.clear()
    first_wrong(files)
    assert hashed == []


def test_writers_at_once(tmp_path, hashed):
    """As ranks of one node: nothing is lost."""
    sums = []
    for number in range(40):
        path = tmp_path / f"{number:02d}"
        path.write_text(f"file {number}")
        sums.append({path: sha256(path)})
    threads = [threading.Thread(target=first_wrong, args=(part,)) for part in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hashed.clear()
    assert first_wrong({path: checksum for part in sums for path, checksum in part.items()}) is None
    assert hashed == []


def test_hosts_do_not_share_one(monkeypatch):
    here = cache_file()
    monkeypatch.setattr(checksums.socket, "gethostname", lambda: "another")
    assert cache_file() != here
