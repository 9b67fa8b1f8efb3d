"""Writing on disks that are full or fail: one line, no crash, nothing written through links."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from limits import LIMIT

from fedlada_mpi.rundir.files import write_atomically
from fedlada_mpi.support import disk
from fedlada_mpi.support.errors import UserError

# Files may not become longer than a limit, which is tried in steps of 1500 bytes; HDF5 alone would crash the process.
LIMITED = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from fedlada_mpi.support import disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
failed, path = 0, Path(sys.argv[1])
for limit in range(0, 60_000, 1500):
    path.unlink(missing_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with disk.new_hdf5(path) as file:
            for i in range(3):
                file.create_dataset(f"{i}/x", data=np.arange(3000.0, dtype="f"), chunks=(1000,), fletcher32=True)
            file.attrs["settings"] = "x" * 3000
    except OSError as error:
        assert error.errno == 27, error
        failed += 1
print(failed)
"""


def test_hdf5_on_a_full_disk_raises_and_does_not_crash(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "x.h5"], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert 30 <= int(done.stdout) < 40, "all that are too small, and not those that are large enough"
    with h5py.File(tmp_path / "x.h5") as file:
        assert all(np.array_equal(file[f"{i}/x"][:], np.arange(3000)) for i in range(3))


@pytest.mark.parametrize(
    ("code", "cure"),
    [("ENOSPC", "make room"), ("EDQUOT", "make room"), ("EROFS", "make it writable"), ("EIO", "check the disk")],
)
def test_every_error_is_one_line(code, cure, tmp_path, monkeypatch):
    number = getattr(errno, code)
    (tmp_path / "x").write_text("before")

    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        UserError, match=rf"^cannot write {tmp_path}/x: {os.strerror(number)}.*: {cure}, then add --resume$"
    ):
        write_atomically(tmp_path / "x", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "before")]


def test_a_temporary_name_that_is_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "x.tmp").symlink_to(victim)
    with pytest.raises(UserError, match=rf"File exists: remove {tmp_path}/x.tmp, then add --resume"):
        write_atomically(tmp_path / "x", "after")
    assert victim.read_text() == "mine"
    (tmp_path / "x.tmp").unlink()
    (tmp_path / "x.tmp").write_text("left over, and longer than what is written now")
    write_atomically(tmp_path / "x", "after")
    assert (tmp_path / "x").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim", "x"]


def test_what_a_link_leads_to_is_never_removed(tmp_path):
    target = tmp_path / "target"
    (target / "folder").mkdir(parents=True)
    for name in ("target", "target/folder"):
        link = tmp_path / "link"
        link.symlink_to(tmp_path / name)
        disk.remove(link)
        assert not link.is_symlink()
    assert (target / "folder").is_dir()
    disk.remove(target)
    disk.remove(Path(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []
