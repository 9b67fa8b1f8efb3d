"""Run directories in any condition: one that cannot be read is named, and left out where that was asked for."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
from hostile import DAMAGES, DEEP, LONG, OBSTACLES, VALUES, change_json, change_lines, damage_file, one_line
from hostile_trials import recorded, run_files, to_json, try_report
from hypothesis import HealthCheck, example, given, settings
from synthetic_runs import write_run

from fedlada_mpi.analysis import load, page
from fedlada_mpi.report import main

NAMES = dict(dataset="$x_{<b>", algorithm="$a$ $b_{<script>alert(1)</script>", model=f"a\nb\0\ud800|{LONG}")
METRICS = b"".join(to_json(recorded(t)) + b"\n" for t in (1, 2, 3))


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("template") / "run", {"algorithm": "fedlada", "rounds": 4}, 4)


@pytest.fixture
def runs(template, tmp_path):
    """A folder with one good run, and a function that adds another with the name of a case."""
    (tmp_path / "runs").mkdir()
    shutil.copytree(template, tmp_path / "runs" / "good")

    def add(case: str):
        folder = tmp_path / "runs" / re.sub(r"\W+", "-", f"case {case}")[:80]
        shutil.copytree(template, folder)
        return folder

    return tmp_path / "runs", add


def report(folder, out, capsys) -> tuple[str, str]:
    """The terminal's lines and the page of a report that must be written."""
    assert main([str(folder), "--out", str(out), "--skip-broken"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(one_line(line) for line in captured.out.splitlines())
    return captured.out, (out / "index.html").read_text()


def test_bad_folders_among_good_ones(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    folder, add = runs
    bad, partly = [], []
    for kind in (*DAMAGES, *OBSTACLES):
        case = add(f"config {kind}")
        damage_file(case / "config.json", kind)
        bad.append(case)
    for kind in set(OBSTACLES) - {"missing", "a broken link"}:
        case = add(f"metrics {kind}")
        damage_file(case / "metrics.jsonl", kind)
        bad.append(case)
    for kind in (*DAMAGES, *OBSTACLES):
        case = add(f"summary {kind}")
        damage_file(case / "summary.json", kind)
        partly.append(case)
    for kind in DAMAGES:
        case = add(f"damaged metrics {kind}")
        damage_file(case / "metrics.jsonl", kind)
        partly.append(case)
    for i, value in enumerate(v for v in VALUES if not isinstance(v, str)):
        case = add(f"algorithm {i}")
        change_json(case / "config.json", algorithm=value)
        bad.append(case)
    terminal, text = report(folder, tmp_path / "out", capsys)
    for case in bad:
        assert re.search(rf"left out: {case}/\S+ cannot be read", terminal), case
        assert re.search(rf"<li>{case}/\S+ cannot be read", text), case
    assert f"{1 + len(partly)} runs of" in terminal
    assert len(bad) + len(partly) > 50


def test_a_broken_run_is_left_out_only_where_that_was_asked_for(runs, tmp_path, capsys):
    folder, add = runs
    for case in ("one", "two"):
        damage_file(add(case) / "config.json", "garbage")
    for more in ([], ["--pack", str(tmp_path / "records")]):
        assert main([str(folder), "--out", str(tmp_path / "out"), *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {folder}/case-one/config.json cannot be read as settings: ")
        assert error.endswith(
            "(and 1 more): repair or remove it, or leave out what cannot be read with --skip-broken\n"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert main([str(folder), "--pack", str(tmp_path / "records"), "--skip-broken"]) == 0
    assert capsys.readouterr().out.count("left out: ") == 2
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["good"]


@pytest.mark.slow
def test_values_of_any_type(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    folder, add = runs
    for i, value in enumerate(VALUES):
        case = add(f"values {i}")
        keys = ("round", "test_acc", "seconds", "seconds_by_rank", "participants", "bytes_up", "consistency")
        odd = [to_json(recorded(2, **{key: value})) for key in keys]
        change_lines(case / "metrics.jsonl", lambda lines, odd=odd: [*lines, *odd])
        change_json(case / "config.json", seed=i)
        change_json(case / "summary.json", status=value)
    terminal, _ = report(folder, tmp_path / "out", capsys)
    assert "unreadable lines in metrics.jsonl were left out" in terminal
    assert f"{1 + len(VALUES)} runs of 1 setting" in terminal


def test_long_names_make_no_long_reports(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    _, add = runs
    case = add("long")
    change_json(case / "config.json", dataset="d" * 1_000_000, algorithm="own:" + "a" * 1_000_000)
    change_json(case / "summary.json", method="m" * 1_000_000, status="s" * 1_000_000)
    report(case, tmp_path / "out", capsys)
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.suffix != ".png") < 1_000_000


def test_names_that_are_no_formulas_tags_or_files(runs, tmp_path, capsys):
    _, add = runs
    case = add("names")
    change_json(case / "config.json", **NAMES)
    _, text = report(case, tmp_path / "out", capsys)
    assert "<script>alert" not in text
    drawn = set(re.findall(r'figures/([^"]+)\.svg', text))
    assert len(drawn) == 3
    assert all((tmp_path / "out" / "figures" / f"{name}.png").exists() for name in drawn)


@settings(derandomize=True, deadline=None, max_examples=20, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(run_files)
@example({"config.json": DEEP.encode(), "metrics.jsonl": b"", "summary.json": b""})
@example({"config.json": b"{}", "metrics.jsonl": b'{"round": 2147483647, "test_acc": 0.5}\n', "summary.json": b"[]"})
@example({"config.json": b"{}", "metrics.jsonl": b'{"round": 1, "test_acc": 1e99}\n', "summary.json": b"null"})
@example(
    {"config.json": b"{}", "metrics.jsonl": METRICS + b'{"round": 5, "test_acc": Infinity}\n', "summary.json": b"1"}
)
@example({"config.json": b'{"targets": [NaN, 1e300]}', "metrics.jsonl": b'{"round": 1}\n', "summary.json": b"1"})
def test_any_run_directory_is_reported_or_left_out(tmp_path_factory, monkeypatch, files):
    monkeypatch.setattr(page, "plotly", lambda: "")
    try_report(files, tmp_path_factory.mktemp("run"))


def test_where_nothing_is_readable(runs, tmp_path, capsys):
    folder, add = runs
    shutil.rmtree(folder / "good")
    for kind in ("garbage", "a FIFO"):
        damage_file(add(kind) / "config.json", kind)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"error: {folder}/case-a-FIFO/config.json cannot be read: it is not a regular file (and 1 "
    )
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for path in (LONG, "\0", "nowhere"):
        assert main([path, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_paths_that_are_not_there_are_refused(runs, tmp_path, capsys):
    folder, _ = runs
    (folder / "loop").symlink_to(".")
    (tmp_path / "notes.txt").write_text("mine")
    odd = os.fsencode(tmp_path) + b"/\xff"
    shutil.copytree(folder / "good", os.fsdecode(odd))
    paths = [str(folder), os.fsdecode(odd), "--out", str(tmp_path / "out")]
    for wrong in (str(tmp_path / "notes.txt"), "nowhere"):
        assert main([wrong, *paths, "--skip-broken"]) == 2
        assert capsys.readouterr().err.startswith(f"error: there is no directory {wrong}: give run directories")
    assert main(paths) == 0
    assert "2 runs of 1 setting" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(runs, tmp_path, capsys):
    folder, add = runs
    (add("closed") / "config.json").chmod(0)
    add("locked").chmod(0)
    printed, _ = report(folder, tmp_path / "out", capsys)
    assert printed.count("Permission denied") == 2


def test_rounds_far_apart_take_no_memory(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    record = json.dumps(recorded(2**31 - 1)).encode()
    change_lines(tmp_path / "metrics.jsonl", lambda lines: [*lines, record])
    from fedlada_mpi.analysis.groups import group

    (one,) = group([load.read(tmp_path)])
    assert one.curve("test_acc")[0].tolist() == [1, 2, 3, 4, 2**31 - 1]
