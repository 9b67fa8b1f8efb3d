"""One throw-away cluster for the session, a user's folder on it, and tests whose jobs run at the same time."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from at_once import STORIES
from cluster import END_STATES, Cluster, missing, wait_for
from limits import LIMIT
from ranks import python
from repository import ROOT


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = missing()
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Cluster() as cluster:
        yield cluster


class User:
    """A user who works in ``folder`` with the job scripts of this clone; ranks are forked, which saves their start."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.environment = {
            "FEDLADA_VENV": str(Path(python()).parent.parent),
            "FEDLADA_GPUS_PER_NODE": "0",
            "FEDLADA_RANKS": "2",
            "FEDLADA_DATA": str(data),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def run(self, *command: object, check: bool = True, timeout: float = LIMIT):
        return self.cluster.run(*command, check=check, timeout=timeout, cwd=self.folder, env=self.environment)

    def submit(self, *arguments: object) -> str:
        """The number of the job that ``jobs/submit.sh`` submits."""
        return self.run(ROOT / "jobs/submit.sh", *arguments).stdout.split()[-1]

    def submit_grid(self, *arguments: object) -> tuple[str, str, str]:
        """The array job, its indices and the report's job of ``jobs/submit-grid.sh``."""
        text = self.run(ROOT / "jobs/submit-grid.sh", *arguments).stdout
        match = re.search(r"job (\d+), runs (\S+)[\s\S]*report: job (\d+)", text)
        assert match, text
        return match[1], match[2], match[3]

    def output(self, job: str) -> str:
        """What a job, or an element of an array, has written so far."""
        return "".join(path.read_text() for path in self.folder.glob(f"logs/*-{job}.out"))

    def last_round(self, out: str) -> int:
        """The last round that a run has recorded, 0 before the first."""
        path = self.folder / out / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["round"] if lines else 0

    def wait_for_round(self, out: str, number: int, job: str) -> None:
        asked = 0.0

        def reached() -> bool:
            nonlocal asked
            output = self.output(job)
            assert "requeued" not in output, output
            if self.last_round(out) >= number:
                return True
            if time.monotonic() > asked + 1:  # rarely: a process of its own costs more than a look at files
                assert self.cluster.job(job)["JobState"] not in END_STATES, output
                asked = time.monotonic()
            return False

        wait_for(reached, f"round {number} in {out}", 200, interval=0.02)


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(cluster, tmp_path, tmp_path_factory.getbasetemp() / "slurm-data")


@pytest.fixture(scope="session")
def stories(cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory) -> dict[str, Future[None]]:
    """How the stories of the tests that were selected have ended, all of them by now: a later test may preempt jobs."""
    data = tmp_path_factory.getbasetemp() / "slurm-data"
    selected = [name for name in STORIES if name in {item.name for item in request.session.items}]
    # Not all: ranks that wait for others use the cores that these need.
    with ThreadPoolExecutor(4) as pool:
        users = {name: User(cluster, tmp_path_factory.mktemp(name), data) for name in selected}
        return {name: pool.submit(STORIES[name], user) for name, user in users.items()}
