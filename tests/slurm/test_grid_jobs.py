"""A grid as an array job with a limit, one element that fails, and the report that depends on all."""

from __future__ import annotations

import time

import pytest
from at_once import at_once
from cluster import END_STATES

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]
GRID = """\
title = "Three runs, and one whose shards do not exist"
[base]
rounds = 2
participation = 0.1
local_epochs = 1
[[runs]]
seed = 0
algorithm = ["fedavg", "fedlada"]
[[runs]]
dataset = "no/such/shards"
algorithm = "fedavg"
[[runs]]
seed = 1
algorithm = "fedavg"
"""


@at_once
def test_array_with_a_limit_a_failed_element_and_its_report(user):
    (user.folder / "small.toml").write_text(GRID)
    array, indices, report = user.submit_grid("small.toml", "--limit", 2, "--time=10")
    assert indices == "0-3"

    most = 0
    deadline = time.monotonic() + 150
    while user.cluster.job(report)["JobState"] not in END_STATES and time.monotonic() < deadline:
        running = user.run("squeue", "-h", "--array", "--states=RUNNING", "-j", array, check=False).stdout
        most = max(most, len(running.splitlines()))
        time.sleep(0.3)
    assert most == 2

    elements = [user.cluster.wait(f"{array}_{index}", 5) for index in range(4)]
    states = [(fields["JobState"], fields["ExitCode"], fields["Restarts"]) for fields in elements]
    good = ("COMPLETED", "0:0", "0")
    assert states == [good, good, ("FAILED", "2:0", "0"), good], [user.output(f"{array}_{i}") for i in range(4)]
    assert "no/such/shards" in user.output(f"{array}_2")
    assert len(list(user.folder.glob("runs/small/*/model.pt"))) == 3

    fields = user.cluster.wait(report, 30)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), user.output(report)
    assert fields["StartTime"] >= max(element["EndTime"] for element in elements)
    assert list(user.folder.glob("report/small/*.html"))

    # The same command again submits what is left.
    array, indices, report = user.submit_grid("small.toml")
    assert indices == "2"
    user.run("scancel", array, report)
