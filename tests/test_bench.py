"""The benchmark's rows: built-in models next to others, each with the ordinary loop."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from limits import LIMIT
from ranks import find_mpirun, python

from fedlada_mpi import bench

SMALL = ["--dataset", "digits", "--only", "round", "--local-steps", "1", "--rounds", "1"]


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows_of_several_models(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert bench.main([*SMALL, "--participants", "2", "--model", "cnn", "mlp", "--baseline", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    assert [row["model"] for row in rows] == ["cnn", "mlp"]
    assert [row["what"] for row in rows] == ["fedlada round, 2 participants, fp32"] * 2
    for row in rows:
        assert row["times_faster_than_baseline"] == row["baseline_seconds"] / row["seconds"]
    assert "mlp: fedlada round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds -1", "--rounds: got -1, expected at least 0"),
        ("--participants", "argument --participants: expected at least one argument"),
        ("--participants 2 -1", "--participants: got -1, expected at least 1"),
        ("--json {}", "--json: got {}, which is a directory, expected a file"),
    ],
)
def test_what_is_refused(tmp_path, capsys, arguments, message):
    assert bench.main(arguments.format(tmp_path).split()) == 2
    assert capsys.readouterr().err == f"error: {message.format(tmp_path)}\n"


def test_rows_of_text_with_adapters(tmp_path, capsys):
    path = tmp_path / "bench.json"
    text = ["--dataset", "shakespeare", "--length", "5", "--tokens", "7", "--batch-size", "2", "--model", "gpt", "lstm"]
    common = [*text, "--only", "round", "evaluation", "--local-steps", "1", "--rounds", "1", "--participants", "2"]
    assert bench.main([*common, "--baseline", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    assert [row.get("model") for row in rows] == ["gpt", None, "lstm", None]
    assert rows[0]["baseline_seconds"] > 0
    assert {row["unit"] for row in rows} == {"rows"}
    adapted = [*common[:-2], "--participants", "1", "--lora", "2", "--lora-on", "attn", "--json", str(path)]
    adapted.remove("lstm")
    assert bench.main(adapted) == 0
    assert json.loads(path.read_text())["results"][0]["floor_seconds"] < rows[0]["floor_seconds"]
    assert "rows/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun")
def test_participants_are_divided_among_the_ranks(tmp_path):
    path = tmp_path / "bench.json"
    command = [find_mpirun(), "-n", "2", python(), "-m", "fedlada_mpi.bench", *SMALL]
    command += ["--participants", "1", "3", "--baseline", "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    rows = json.loads(path.read_text())["results"]
    assert [row["what"].split(",")[1] for row in rows] == [" 1 participant on 2 ranks", " 3 participants on 2 ranks"]


def test_rows_of_sums(tmp_path):
    path = tmp_path / "bench.json"
    common = ["--dataset", "digits", "--only", "sums", "--rounds", "1", "--participants", "3", "1"]
    assert bench.main([*common, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    kinds = [
        "fast, robust none",
        "exact, robust none",
        *(f"fast, robust {kind}" for kind in ("clip", "median", "trimmed")),
    ]
    assert [row["what"] for row in rows] == [f"sums {kind}, 3 participants" for kind in kinds]
    assert all(row["vectors"] == 2 and row["bytes_mpi"] == 0 for row in rows)
