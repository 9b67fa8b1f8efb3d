"""What a run records, in numbers computed by hand; and what it keeps of a file that is not as it wrote it."""

import json

import pytest
from hostile import DEEP
from hostile_trials import metrics_files, recorded, try_metrics
from hypothesis import example, given, settings

from fedlada_mpi.rundir.metrics import DAMAGED, Recorder, summarise


def test_targets_by_hand():
    seen = {2: 0.3, 4: 0.7, 6: 0.65, 8: 0.7}
    same = dict(
        train_acc=0.1,
        train_loss=1.0,
        test_loss=2.0,
        seconds={"total": 0.5},
        bytes_down=6,
        bytes_up=3,
        bytes_mpi=8,
        paper_units=2,
    )
    records = [dict(same, round=t, test_acc=seen.get(t)) for t in range(1, 10)]
    found = summarise(records, [0.3, 0.65, 0.9])
    assert found["targets"] == {"0.3": 2, "0.65": 4, "0.9": None}
    assert found["best"] == {"round": 4, "test_acc": 0.7}
    assert (found["rounds"], found["final"]["round"], found["seconds"]) == (9, 8, 4.5)
    spent = dict(bytes_down=54, bytes_up=27, bytes_mpi=72, paper_units=18)
    assert {name: found[name] for name in spent} == spent
    nothing = dict.fromkeys(("seconds", *spent), 0)
    assert summarise([], [0.5]) == {"rounds": 0, "final": None, "best": None, "targets": {"0.5": None}, **nothing}


def lines(*rounds: int) -> bytes:
    return b"".join(json.dumps(recorded(t)).encode() + b"\n" for t in rounds)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(metrics_files)
@example(lines(1, 2) + b'{"round": 3, "l')
@example(lines(1) + DEEP.encode() + b"\n" + lines(3))
@example(lines(1) + b'{"round": 1e400}\n{"round": true}\n[1]\nnull\n\n' + lines(2))
@example(json.dumps(recorded(1, bytes_down=None)).encode() + b"\n")
@example(json.dumps(recorded(1, train_acc=None)).encode() + b"\n")
@example(json.dumps(recorded(1, seconds={})).encode() + b"\n")
@example(json.dumps(recorded(1, seconds_by_rank={"train": [1, None], "wait": None})).encode() + b"\n")
def test_a_run_goes_on_from_any_metrics_file(tmp_path_factory, content):
    try_metrics(content, tmp_path_factory.mktemp("metrics"))


@pytest.mark.parametrize(
    ("content", "rounds", "left_out"),
    [
        (lines(1, 2, 3, 4, 5, 6, 7), [1, 2, 3, 4, 5], 0),  # those behind the checkpoint are repeated
        (lines(1, 2) + b'{"round": 3', [1, 2], 0),  # cut off by a kill
        (lines(1, 2) + b"\0\0garbage\n" + lines(3, 4, 5, 6), [1, 2, 3, 4, 5], 1),
        (lines(1, 7, 2), [1, 2], 0),
        (lines(1) + json.dumps(recorded(1, lr=0.25)).encode() + b"\n", [1], 0),
    ],
)
def test_what_a_resumed_run_keeps(content, rounds, left_out, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with Recorder(tmp_path, resumed_at=5) as recorder:
        pass
    assert [record["round"] for record in recorder.records] == rounds
    assert recorder.left_out == left_out
    assert (tmp_path / DAMAGED).exists() == bool(left_out)
    if left_out:
        assert (tmp_path / DAMAGED).read_bytes() == content
    if content.count(b'"round": 1,') == 2:
        assert recorder.records[0]["lr"] == 0.25
