"""What the ranks of runs open, as the system calls show it: each the directory of its own silo alone."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from ranks import SIZE
from repository import ROOT
from silo_dirs import NAMES, make_silos

SCRIPT = str(ROOT / "tests" / "helpers" / "several_runs.py")
TRACED = 'exec strace -f --seccomp-bpf -qq -e trace=open,openat,openat2,execve -o "$0/rank-$OMPI_COMM_WORLD_RANK" "$@"'


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(SIZE > 1, reason="starts ranks of its own")
def test_no_rank_opens_the_files_of_another(tmp_path, mpirun):
    """With --secure and without."""
    if not shutil.which("strace"):
        pytest.skip("needs strace: apt-get install strace")
    made = make_silos(tmp_path / "silos", [[7, 4], [5], [6]])
    words = ["--silo-dir", str(made / "secure" / "{silo}"), "--silos", ",".join(NAMES), "--rounds", "2"]
    words += ["--local-epochs", "1", "--algorithm", "scaffold", "--checkpoint-every", "1"]
    lines = [[*words, "--out", str(tmp_path / "out" / name), *more] for name, more in (("a", []), ("b", ["--secure"]))]
    ranks = ("-c", TRACED, str(tmp_path), sys.executable, SCRIPT, str(tmp_path), json.dumps(lines))
    mpirun(4, command=ranks, interpreter="/bin/sh", timeout=500, check=True)
    for rank in range(4):
        assert [run["status"] for run in json.loads((tmp_path / f"{rank}.json").read_text())] == [0, 0]
        calls = (tmp_path / f"rank-{rank}").read_text()
        assert "metrics.jsonl" in calls
        opened = {*re.findall(rf'"{re.escape(str(made))}/([^"]*)"', calls)}
        own = f"secure/{NAMES[rank - 1]}" if rank else "nothing"
        assert not [path for path in opened if not path.startswith(own)]
        assert not rank or {f"{own}/silo.h5", f"{own}/test.h5", f"{own}/private.json"} <= opened
        run = [path for path in re.findall(rf'"({re.escape(str(tmp_path / "out"))}[^"]*)"', calls) if rank]
        assert not run  # that of the server, which a silo need not be able to read
