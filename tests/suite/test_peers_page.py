"""docs/bench/peers: the workloads, how a result is checked, and that the pages have the results that were measured."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from repository import ROOT

FOLDER = ROOT / "docs" / "bench" / "peers"
MODULES = ("common", "frameworks", "table", "run")


@pytest.fixture(scope="module")
def peers():
    """The modules there, which import one another by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def report():
    return json.loads((FOLDER / "x86-64.json").read_text())


def test_the_workloads(peers):
    common = peers.common
    sets = [common.client_data(client) for client in range(common.CLIENTS[common.DIGITS])]
    images, labels = map(torch.cat, zip(*sets, strict=True))
    assert images.shape == (1500, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert torch.bincount(labels).min() > 100
    assert len(common.examples("test")[1]) == 297
    for workload, make in ((common.MOVING, common.resnet), (common.DIGITS, common.CNN)):
        first, second = common.flat(make()), common.flat(make())
        assert first.numel() == common.PARAMETERS[workload]
        assert torch.equal(first, second)


def test_a_round_of_the_digits_learns(peers, tmp_path):
    job = peers.common.job(["digits", "plain", "--rounds", "2", "--record", str(tmp_path / "record.json")])
    model = job.model()
    before = peers.common.accuracy(model)
    for client in range(job.clients):
        job.work(model, client)
    job.round_ended(1.0)
    job.round_ended(3.5)
    job.finish(model)
    record = json.loads(job.record.read_text())
    assert (record["rounds"], record["seconds"]) == (2, [2.5])
    assert before < 0.3 < 0.7 < record["accuracy"]


@pytest.mark.parametrize("left_out", [None, 0, 4, 5, 9])
def test_a_mean_without_one_client_is_wrong(peers, left_out):
    common = peers.common
    torch.manual_seed(0)
    start = torch.cat([torch.ones(10), torch.randn(1000) * 0.02])
    x = start
    for _ in range(10):
        parts = [x + (client + 1) * common.STEP for client in range(10) if client != left_out]
        x = sum(parts) / len(parts)
    assert (common.error_of_mean(x, start, 10) <= 1) == (left_out is None)


def test_judging_a_record(peers):
    judged = peers.run.judged
    row = judged({"rounds": 4, "seconds": [9.0, 3.0, 1.0], "error": 0.1}, "moving", 4)
    assert (row["median"], row["min"], row["max"], row["right"]) == (2.0, 1.0, 3.0, True)
    wrong = judged({"rounds": 22, "seconds": [1.0, 1.0], "accuracy": 0.5}, "digits", 22)
    assert (wrong["right"], wrong["problem"]) == (False, "the result is wrong")


def test_two_sessions_are_pooled(peers):
    first = row("torch", "digits", "1 process", 2.0, seconds=[1.0, 2.0, 4.0], accuracy=0.9)
    second = row("torch", "digits", "1 process", 8.0, seconds=[8.0, 8.0, 9.0], accuracy=0.8)
    for each, busy in ((first, 0.1), (second, 0.3)):
        each |= {"busy_before": busy, "left_behind": 0, "total_seconds": 5.0}
    both = peers.run.pooled(first, second)
    assert (both["median"], both["min"], both["max"], both["accuracy"]) == (6.0, 1.0, 9.0, 0.8)
    assert (both["sessions"], both["busy_before"]) == (2, 0.3)
    wrong = {**second, "right": False, "problem": "the result is wrong"}
    assert peers.run.pooled(first, wrong) is wrong


def test_what_a_run_leaves_behind_is_ended(peers):
    """A child that has left its session, and whose parent is gone."""
    mark = f"test-{os.getpid()}"
    orphan = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3)"
    subprocess.run([sys.executable, "-c", orphan], env={**os.environ, peers.run.MARK: mark}, check=True)
    (process,) = peers.run.marked(mark)
    assert peers.run.end_all(mark) == 1
    assert not list(peers.run.marked(mark))
    assert process != os.getpid()


def row(framework: str, workload: str, way: str, median: float, **more: object) -> dict[str, object]:
    times = {"median": median, "min": median / 2, "max": median * 2, "right": True}
    return {"framework": framework, "workload": workload, "way": way, **times, **more}


def test_the_table(peers):
    made = {
        "versions": {"fedlada_mpi": {"fedlada_mpi": "1.0"}, "flower": {"flwr": "2.0"}},
        "not_installed": {"pfl": "pip: no such version"},
        "results": [
            row("flower", "moving", "1 worker", 1.5),
            row("flower", "moving", "2 workers", 1.25),
            {"framework": "flower", "workload": "digits", "way": "1 worker", "problem": "ended after 5 s"},
            row("fedlada_mpi", "moving", "2 ranks", 0.25),
            row("fedlada_mpi", "digits", "2 ranks", 0.02, accuracy=0.9),
            row("fedlada_mpi", "digits", "1 process", 0.01, accuracy=0.1, right=False, problem="the result is wrong"),
        ],
    }
    assert peers.table.table(made).splitlines()[2:] == [
        "| fedlada_mpi 1.0 | 0.250 (0.125 to 0.500) | **2 ranks** | 0.020 (0.010 to 0.040) "
        "| **2 ranks**; 1 process the result is wrong | 0.900 |",
        "| Flower simulation (Ray) 2.0 | 1.25 (0.625 to 2.50) | **2 workers**; 1 worker 1.50 | ended after 5 s |  |  |",
        "| pfl-research | not installed: pip: no such version | | | | |",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_have_what_was_measured(peers, report, page):
    text = (ROOT / page).read_text()
    assert peers.table.put(peers.table.PAGES[page](report), text) == text, "python docs/bench/peers/table.py writes it"


def test_what_was_measured_is_right(peers, report):
    """Every framework has a right result of both workloads, or a reason; the cores were free when a run began."""
    for framework in peers.frameworks.FRAMEWORKS:
        for workload in (peers.common.MOVING, peers.common.DIGITS):
            rows = peers.table.rows_of(report, framework.name, workload)
            assert framework.name in report["not_installed"] or rows[0].get("right") or rows[0]["problem"]
    assert max(row["busy_before"] for row in report["results"]) < 0.7
