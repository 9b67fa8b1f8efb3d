"""Processes of this machine: the map over workers, and which processes are alive."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from pathlib import Path

import pytest
from limits import LIMIT
from ranks import python
from repository import ROOT

from fedlada_mpi.support import processes
from fedlada_mpi.support.processes import is_alive, process_map, start_time, this_process, usable_cores

QUOTA = {"quota": "150000", "period": "100000"}

# The first item is the last to finish. There is no `if __name__ == "__main__"`.
SCRIPT = """
import os, time
from fedlada_mpi.support.processes import process_map

def square(number):
    time.sleep(0.5 if number == 0 else 0)
    return number * number, os.getpid()

print("started")
squares, workers = zip(*process_map(square, range(6), 2))
print(*squares)
print(os.getpid() in workers, len(set(workers)) <= 2)
"""


@pytest.mark.parametrize(("items", "workers"), [([3, 1, 2], 1), ([3], 4), ([], 2)])
def test_one_worker_is_this_process(items, workers):
    seen = []

    def visit(item: int) -> tuple[int, int]:
        seen.append(item)
        return item, os.getpid()

    assert list(process_map(visit, items, workers)) == [(item, os.getpid()) for item in items]
    assert seen == items


def test_workers_of_a_plain_script_keep_the_order(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [python(), str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n0 1 4 9 16 25\nFalse True\n"


def test_this_process_takes_over_from_workers_that_were_ended():
    caller = os.getpid()

    def visit(item: int) -> int:
        if os.getpid() != caller and item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert list(process_map(visit, range(5), 2)) == [0, 1, 2, 3, 4]


def test_usable_cores():
    assert 1 <= usable_cores() <= os.cpu_count()


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        (
            "0::/job/step",
            {"cpu.max": "max 100000", "job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"},
            3,
        ),
        ("0::/of/the/host", {"cpu.max": "400000 100000"}, 4),  # in a container, which has its own group alone
        ("4:cpu,cpuacct:/a", {f"cpu,cpuacct/a/cpu.cfs_{k}_us": v for k, v in QUOTA.items()}, 1.5),
        ("4:cpuacct,cpu:/a", {f"cpu/a/cpu.cfs_{k}_us": v for k, v in QUOTA.items()}, 1.5),
        ("4:cpu:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:cpuset:/a", {"cpuset/a/cpu.max": "100000 100000"}, math.inf),
        ("0::/", {"cpu.max": "no numbers"}, math.inf),
        ("0::/", {}, math.inf),
        ("no group", {"cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_what_a_container_may_use(line, files, limit, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path.parent / "cpu.max").write_text("100000 100000\n")  # above all groups: never read
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    read = Path.read_text
    own = lambda path: line + "\n" if str(path) == "/proc/self/cgroup" else read(path)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", own)
    assert processes.core_limit() == limit
    assert usable_cores() == max(1, min(processes.bound_cores(), int(min(limit, 99))))


def test_which_processes_are_alive():
    me, gone = os.getpid(), subprocess.Popen([python(), "-c", ""])
    gone.wait()
    assert is_alive(me)
    assert is_alive(me, start_time(me))
    assert not is_alive(me, "1"), "another process that had this number"
    assert not is_alive(gone.pid)
    assert start_time(gone.pid) == ""


def test_a_process_that_nobody_has_waited_for_is_not_alive():
    ended = subprocess.Popen([python(), "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(ended.pid, start_time(ended.pid))
    ended.wait()


@pytest.mark.parametrize("other", [{"started": "1"}, {"boot": "another"}, {"namespace": "another"}])
def test_only_the_very_process_is_killed(other):
    """Not one that has its number now, nor one that has it here, where it is counted on another machine."""
    process = subprocess.Popen(["sleep", "60"])
    named = this_process()._replace(pid=process.pid, started=start_time(process.pid))
    named._replace(**other).kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    named.kill()
    assert process.wait(100) == -signal.SIGKILL
    assert named.state == "X"
    named.kill()  # which has ended
