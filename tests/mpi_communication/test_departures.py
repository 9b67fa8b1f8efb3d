"""Ranks that are lost under ULFM: the others go on, and the result is that of a run with the same departures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi4py import MPI
from tiers import slow

BEFORE = 0.0
two_losses = pytest.mark.skipif(
    MPI.get_vendor() >= ("Open MPI", (5, 0, 10)), reason="this Open MPI crashes at a loss while it makes a communicator"
)


@pytest.mark.parametrize(
    ("ranks", "method", "adopt", "faults", "lost"),
    [
        (4, "fedlada", False, {2: ("reduce", 3, 1e-3)}, 1),
        pytest.param(
            4,
            "scaffold",
            False,
            {1: ("train", 5, BEFORE), 3: ("recovery", 1, 1e-3)},
            2,
            marks=[two_losses, pytest.mark.slow],
        ),
        slow(3, "scaffold", True, {1: ("train", 5, BEFORE)}, 1),
        (4, "fedadam", False, {0: ("bcast", 4, 1e-3)}, 1),
        slow(3, "fedcm", False, {0: ("results", 1, BEFORE)}, 1),
        slow(3, "fedlada", False, {2: ("train", 3, -1.0)}, 1),
    ],
    ids=["a silo in Reduce", "a second one in the recovery", "adopted", "the server in Bcast", "at the end", "stopped"],
)
def test_the_others_go_on(campaign, ranks, method, adopt, faults, lost):
    words = campaign.words(faults, method, adopt)
    status, printed = campaign.run(ranks, words)
    assert campaign.compare(method, ranks, adopt, Path(words[-1]), status) == lost, printed
    assert "left after round" in printed


@pytest.mark.slow
def test_too_few_silos_stop_with_a_checkpoint(campaign):
    words = campaign.words({1: ("train", 5, BEFORE)}, "scaffold", False, "--min-silos", "3")
    status, printed = campaign.run(4, words)
    out = Path(words[-1])
    assert status == 75, printed
    assert f"2 silos left, and --min-silos is 3: stopped, --resume {out} goes on" in printed
    status, printed = campaign.run(4, ["{}", "--resume", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    assert (status, summary["status"]) == (0, "finished"), printed


@pytest.mark.slow
@pytest.mark.parametrize(("method", "saved"), [("fedadam", 3), ("scaffold", 2)])
def test_lost_while_asked_to_stop(campaign, method, saved):
    """No round is done without it; what a lost silo kept of its clients is in the last checkpoint alone."""
    faults = {1: ("evaluate", 4, BEFORE), 2: ("evaluate", 4, "asked")}
    words = campaign.words(faults, method, False)
    status, printed = campaign.run(4, words)
    out = Path(words[-1])
    assert status == 75, printed
    assert f"asked to stop: stopped, --resume {out} goes on" in printed
    assert max(path.name for path in (out / "checkpoint").glob("round_*")) == f"round_{saved:06d}"
    status, printed = campaign.run(4, ["{}", "--resume", str(out)])
    campaign.compare(method, 4, True, out, status)


@pytest.mark.slow
def test_lost_after_the_last_round_of_a_run_that_was_asked_to_stop(campaign):
    """All rounds are done: it has finished."""
    words = campaign.words({0: ("results", 1, BEFORE), 2: ("evaluate", 6, "asked")}, "scaffold", False)
    status, printed = campaign.run(4, words)
    assert campaign.compare("scaffold", 4, False, Path(words[-1]), status) == 1, printed


@pytest.mark.slow
def test_too_few_silos_before_the_first_round_end_all_ranks(campaign):
    words = campaign.words({1: ("train", 1, BEFORE)}, "fedavg", False, "--min-silos", "3")
    status, printed = campaign.run(4, words)
    assert status == 2, printed
    assert printed.count("error: 2 silos left, and --min-silos is 3: start again") == 1


@pytest.mark.slow
def test_one_that_exits_ends_the_run_which_can_be_resumed(campaign):
    """MPI does not tell the others of such a one."""
    words = campaign.words({1: ("checkpoint", 2, "exit")}, "scaffold", False)
    status, printed = campaign.run(3, words)
    out = Path(words[-1])
    assert status not in (0, -1), printed
    assert printed.count("error: ") == 1, printed
    assert "waits for rank 1, whose process" in printed
    status, printed = campaign.run(3, ["{}", "--resume", str(out)])
    assert status == 0, printed
    assert campaign.compare("scaffold", 3, False, out, status) == 0


@pytest.mark.slow
def test_an_interrupt_of_one_rank_ends_all(campaign):
    words = campaign.words({2: ("train", 3, "interrupt")}, "fedavg", False)
    status, printed = campaign.run(3, words)
    assert status == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "KeyboardInterrupt" in printed


@pytest.mark.slow
def test_what_is_recorded_where_one_rank_is_left(campaign):
    words = campaign.words({1: ("train", 3, BEFORE)}, "fedavg", True)
    status, printed = campaign.run(2, words)
    out = Path(words[-1])
    assert campaign.compare("fedavg", 2, True, out, status) == 1, printed
    records = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in records)


@pytest.mark.slow
def test_a_defect_ends_all_ranks(campaign):
    words = campaign.words({1: ("defect", 2, BEFORE)}, "fedavg", False)
    status, printed = campaign.run(3, words)
    assert status == 1
    assert printed.count("Traceback") == 1, printed
    assert "rank 1 of 3 failed" in printed


@pytest.mark.slow
def test_a_task_with_metrics_of_all_predictions_goes_on(campaign, tmp_path):
    """With adopted clients and exact sums, to the same bits; the clients' own test examples move with them."""
    common = ["--dataset", "dd", "--data-dir", str(tmp_path / "data"), "--algorithm", "scaffold", "--rounds", "4"]
    common += ["--eval-every", "1", "--eval-clients", "1", "--sums", "exact", "--adopt"]
    records = {}
    for name, faults in (("plain", {}), ("lost", {2: ("train", 3, BEFORE)})):
        out = tmp_path / name
        status, printed = campaign.run(4, [json.dumps(faults), *common, "--out", str(out)])
        assert status == 0, printed
        records[name] = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert "left after round" in printed
    for plain, lost in zip(records["plain"], records["lost"], strict=True):
        for column in ("test_cindex", "train_cindex", "test_loss", "train_loss", "client_test_cindex_mean"):
            assert plain[column] == lost[column], (plain["round"], column)
