"""A search as array jobs that follow each other: one trial diverges, and the search goes on to its page."""

from __future__ import annotations

import re

import pytest
from at_once import at_once
from repository import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]
PLAN = """\
[base]
algorithm = "fedavg"
participation = 0.1
local_steps = 3
clip = 0
[search]
lr = [0.05, 0.1, 1e11]
[tune]
strategy = "halving"
trials = 3
rounds = 4
first_rounds = 1
factor = 2
seeds = 1
"""


@at_once
def test_stages_follow_each_other(user):
    (user.folder / "small.toml").write_text(PLAN)
    text = user.run(ROOT / "jobs/submit-tune.sh", "small.toml", "--limit", 2, "--time=10").stdout
    found = re.findall(r"job (\d+), stage (\d), runs (\S+) into", text)
    assert [(stage, runs) for _, stage, runs in found] == [("0", "0-2"), ("1", "0"), ("2", "0")]
    page = re.search(r"page: job (\d+)", text)[1]
    fields = user.cluster.wait(page, 300)
    outputs = [user.output(f"{job}_{index}") for job, *_ in found for index in range(3)]
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), [user.output(page), *outputs]
    assert (user.folder / "runs/small/tune.html").is_file()
    assert "lr = 0." in (user.folder / "runs/small/tuned.toml").read_text()
    assert len(list(user.folder.glob("runs/small/trials/*/failure.json"))) == 1

    # The same command again has nothing left but the page.
    text = user.run(ROOT / "jobs/submit-tune.sh", "small.toml").stdout
    assert "search small: all runs are finished in runs/small" in text
    user.run("scancel", re.search(r"page: job (\d+)", text)[1])
