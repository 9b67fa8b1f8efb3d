"""--profile: the trace's phases by round and rank, what is printed, and that results are the same to the bit."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from ranks import SIZE, barrier, is_root
from training_runs import Run, arguments, make_data, run_here, same

from fedlada_mpi import train
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.rounds import trace
from fedlada_mpi.run import main
from fedlada_mpi.rundir.columns import PHASES
from fedlada_mpi.settings import Parser, add_arguments
from fedlada_mpi.settings.checks import profiled_rounds
from fedlada_mpi.settings.fields import SETTINGS
from fedlada_mpi.support.errors import UserError

COMMON = dict(rounds=4, local_steps=2, eval_every=1)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "profile", [4, 6, 5, 3], silos=4)


def event(name, ts, dur, cat="cpu_op", tid=1, pid=77):
    return dict(ph="X", cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur)


def annotation(name, ts, dur):
    return event(name, ts, dur, "user_annotation")


HOST = [
    annotation("round 3", 0.0, 100.0),
    annotation("train", 10.0, 60.0),
    event("aten::matmul", 20.0, 40.0),
    event("aten::mm", 25.0, 30.0),
    event("aten::mm", 25.0, 7.0, tid=2),  # of another thread, hence within nothing
    annotation("eval", 70.0, 20.0),
    event("aten::mm", 70.0, 20.0),
]


def unpacked(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_an_item_has_the_time_that_is_not_of_what_it_calls():
    found = trace.account(HOST, most=3)
    assert found.seconds == pytest.approx(100e-6)
    assert {phase: round(s * 1e6) for phase, s in found.phases.items() if s} == {"train": 60, "eval": 20}
    assert found.busy == pytest.approx(80e-6)
    items = [(item.name, round(item.seconds * 1e6), item.count) for item in found.items]
    # 30 + 7 + 20; the round: 100 - 60 - 20; training: 60 - 40
    assert items == [("aten::mm", 57, 3), (trace.BETWEEN, 20, 1), ("train, outside torch's operations", 20, 1)]
    assert trace.Account.recorded(json.loads(json.dumps(found.record()))) == found
    shares, first, *_ = found.lines()
    assert shares == "bcast 0%, train 60%, reduce 0%, server 0%, eval 20%"
    assert first == "  57.0%  aten::mm (3 times)"


def test_where_there_is_a_gpu_items_are_its_kernels():
    kernels = [event("gemm", 5.0, 50.0, "kernel", pid=0), event("gemm", 60.0, 10.0, "kernel", pid=0)]
    found = trace.account([*HOST, *kernels, event("copy", 90.0, 9.0, "gpu_memcpy", pid=0)], most=5)
    assert [(item.name, round(item.seconds * 1e6), item.count) for item in found.items] == [
        ("gemm", 60, 2),
        ("copy", 9, 1),
    ]


def test_ranks_are_processes_on_one_time_axis(tmp_path):
    """A clock that began 5 us later; launches and kernels of two ranks, whose numbers are the same."""
    for rank, base in enumerate((1_000_000, 1_005_000)):
        exported = {
            "baseTimeNanoseconds": base,
            "traceEvents": [
                dict(ph="M", name="process_name", pid=77, tid=0, ts=0.0, args={"name": "python"}),
                dict(ph="M", name="process_name", pid=5, tid=0, ts=0.0, args={"name": "python"}),  # without events
                event("aten::mm", 10.0, 4.0),
                event("gemm", 12.0, 3.0, "kernel", tid=7, pid=0) | {"args": {"occupancy": float("nan")}},
                dict(ph="s", id=9, pid=77, tid=1, ts=10.0, cat="ac2g", name="ac2g"),
                event("PyTorch Profiler (0)", 0.0, 99.0, "Trace", pid="Spans"),
            ],
        }
        events = trace.of_rank(exported, process=77, rank=rank, size=2, origin=1_002_000)
        trace.rank_file(tmp_path, rank).write_bytes(trace.packed(events))
    (tmp_path / "all").write_bytes(trace.joined([trace.rank_file(tmp_path, rank) for rank in (0, 1)]))
    events = unpacked(tmp_path / "all")
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1", 2: "rank 0, GPU 0", 3: "rank 1, GPU 0"}
    timed = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert timed == [("aten::mm", 0, 8, 4), ("gemm", 2, 10, 3), ("aten::mm", 1, 13, 4), ("gemm", 3, 15, 3)]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


@pytest.mark.ranks
def test_a_profiled_run(data, out, capfd):
    plain = run_here(data, out / "plain", **COMMON)
    capfd.readouterr()
    profiled = run_here(data, out / "profiled", **COMMON, profile="2-3")
    printed = capfd.readouterr().out
    assert all(torch.equal(profiled.model[name], plain.model[name]) for name in plain.model)
    assert [record.pop("profiled", False) for record in profiled.metrics] == [False, True, True, False]
    same(profiled, plain)
    folder = out / "profiled" / "profile"
    names = ["trace.json.gz", *(f"rank_{rank:04d}.json.gz" for rank in range(SIZE))]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    ranges = [e for e in unpacked(folder / "trace.json.gz") if e.get("cat") == "user_annotation"]
    for rank in range(SIZE):
        mine = [e for e in ranges if e["pid"] == rank]
        rounds = [e for e in mine if e["name"].startswith("round ")]
        assert [e["name"] for e in rounds] == ["round 2", "round 3"]
        for whole in rounds:
            within = [e for e in mine if e is not whole and 0 <= e["ts"] - whole["ts"] < whole["dur"]]
            assert {e["name"] for e in within} == {*PHASES} - ({"server"} if rank else set())
        assert len([e for e in unpacked(trace.rank_file(folder, rank)) if e["ph"] == "X"]) > len(mine)
    if is_root():
        text = printed.partition("profile of rounds 2 to 3")[2].splitlines()
        assert "train" in text[0]
        assert ("slowest rank" in text[0]) == (SIZE > 1)
        assert all("%" in line and " time" in line for line in text[1:6])
        assert "trace.json.gz: open it at" in text[6]


@pytest.mark.ranks
def test_a_run_that_ends_within_the_profiled_rounds_goes_on(data, out, capfd):
    """The profiler of the process is free again, and the rounds that are left are profiled."""
    whole = run_here(data, out / "whole", **COMMON)
    settings = dict(**COMMON, checkpoint_every=1, profile="2-4")

    def fail(record):
        if record["round"] == 3:
            raise ZeroDivisionError

    words = arguments(data, out / "ended", settings)
    given = {w[2:].replace("-", "_"): v for w, v in zip(words[::2], words[1::2], strict=True)}
    with pytest.raises((ZeroDivisionError, UserError)):
        train(**given, on_round=fail, quiet=True)
    barrier()
    assert not (out / "ended" / "profile").exists()
    assert main(["--resume", str(out / "ended")]) == 0
    barrier()
    if is_root():
        assert "profile of rounds 3 to 4" in capfd.readouterr().out
    resumed = Run(out / "ended", data)
    assert [record.pop("profiled", False) for record in resumed.metrics] == [False, True, True, True]
    same(resumed, whole)
    ranges = {e["name"] for e in unpacked(out / "ended" / "profile" / "trace.json.gz") if e["ph"] == "X"}
    assert {name for name in ranges if name.startswith("round ")} == {"round 3", "round 4"}


@pytest.mark.ranks
def test_rounds_that_are_over_are_not_profiled(data, out, capfd):
    run_here(data, out, **{**COMMON, "rounds": 2})
    assert main(["--resume", str(out), "--rounds", "3", "--profile", "1-2"]) == 0
    barrier()
    if is_root():
        assert "note: --profile 1-2 has nothing to profile, as this run goes on with round 3" in capfd.readouterr().out
    assert not (out / "profile").exists()


def test_the_option_without_a_value_means_rounds_3_to_5():
    parser = Parser()
    add_arguments(parser, {"profile": SETTINGS["profile"], "rounds": SETTINGS["rounds"]})
    for words, value in ((["--profile", "--rounds", "9"], "3-5"), (["--profile", "7"], "7")):
        assert parser.parse_all(words).profile == value
    assert [list(profiled_rounds(text)) for text in ("3-5", "7", "none")] == [[3, 4, 5], [7], []]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(profile="x"), "--profile: got 'x', expected rounds such as 3-5 or 7, or none"),
        (dict(profile="0-2"), "--profile: got '0-2', expected"),
        (dict(profile="5-3"), "--profile: got '5-3', expected"),
        (dict(profile="-1"), "--profile: got '-1', expected"),
        (dict(profile="3-40"), "--profile: got 3-40, 38 rounds, expected at most 20, as traces are large"),
        (dict(profile="3-5", rounds=2), "--profile: got 3-5, expected rounds of the run, which has --rounds 2"),
        (dict(profile="3-5", secure=True), "--profile 3-5 times what single silos do, which --secure does not allow"),
        (dict(profile="3-5", silo_dir="/x"), "--profile 3-5 writes to --out from every rank, which --silo-dir does"),
        (dict(profile="3-5", dp="client"), "--dp client: got --profile 3-5, expected none: how long"),
    ],
)
def test_refused(given, message):
    with pytest.raises(UserError) as found:
        resolve(given)
    assert str(found.value).startswith(message)
    assert "\n" not in str(found.value)
