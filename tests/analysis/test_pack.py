"""Records of runs for others: what is kept, what is cut off, and how they are read again."""

import errno
import json
import lzma
import os

import numpy as np
import pytest
from hostile import DAMAGES, change_json, damage_file
from synthetic_runs import write_run

from fedlada_mpi.analysis import load, usage
from fedlada_mpi.analysis.pack import pack
from fedlada_mpi.report import main
from fedlada_mpi.rundir import metrics, results
from fedlada_mpi.support import disk
from fedlada_mpi.support.errors import UserError

SEGMENT = {
    "from": 1,
    "to": 4,
    "start": "2026-01-31T12:00:00Z",
    "end": "2026-01-31T12:01:40Z",
    "ranks": 2,
    "host": "login-7.example.org",
    "nodes": {"login-7.example.org": {"ranks": 2, "cpu": "Some CPU", "devices": {"NVIDIA H200": 2}}},
    "command": ["/home/me/fedlada_mpi/run.py", "--data-dir", "../secret/data", "--out=/scratch/me/runs/a", "--resume"],
}


def summarised(directory, **changes):
    segment = {**SEGMENT, **changes}
    summary = {"status": "finished", "rounds": 4, "environment": segment, "segments": [segment]}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
def run(tmp_path):
    settings = {"algorithm": "fedlada", "rounds": 4, "data_dir": "/scratch/me/data", "seed": 3}
    return summarised(write_run(tmp_path / "runs" / "a", settings, 4))


def test_a_record_is_read_like_the_run(run, tmp_path):
    assert main([str(run), "--pack", str(tmp_path / "records")]) == 0
    before, after = load.read(run), load.read(tmp_path / "records" / "a")
    assert {p.name for p in (tmp_path / "records" / "a").iterdir()} == {"config.json", "summary.json", metrics.PACKED}
    assert after.rounds.tolist() == [1, 2, 3, 4]
    assert after.series["participants"].tolist() == before.series["participants"].tolist()
    assert after.status == "finished"
    for name, values in before.series.items():
        digits = 5e-3 if name.startswith("seconds") else 5e-6
        np.testing.assert_allclose(after.series[name], values, rtol=digits, err_msg=name)
    np.testing.assert_allclose(after.by_rank["wait"], before.by_rank["wait"], rtol=5e-3)
    assert {n: v for n, v in after.settings.items() if v != before.settings[n]} == {"data_dir": "", "out": "runs/a"}


def test_a_record_has_no_settings_of_other_methods(run, tmp_path):
    change_json(run / "config.json", mu=0.1, eps_of_another=3)
    pack([run], tmp_path / "records")
    settings = json.loads((tmp_path / "records" / "a" / "config.json").read_text())
    assert "alpha" in settings
    assert not {"mu", "eps_of_another"} & settings.keys()


def test_a_record_names_no_host_and_no_directory(run, tmp_path):
    pack([run], tmp_path / "records")
    record = tmp_path / "records" / "a"
    text = (record / "config.json").read_text() + (record / "summary.json").read_text()
    assert not any(word in text for word in ("login", "example", "home", "me/", "scratch", "secret", str(tmp_path)))
    segment = json.loads((record / "summary.json").read_text())["segments"][0]
    assert segment["command"] == ["run.py", "--data-dir", "data", "--out=a", "--resume"]
    assert segment["host"] == "node0"
    assert list(segment["nodes"]) == ["node0"]
    assert segment["nodes"]["node0"]["devices"] == {"NVIDIA H200": 2}


def test_a_run_that_diverged_did_so_in_its_record(tmp_path):
    directory = write_run(tmp_path / "runs" / "b", {"rounds": 9}, 2, status=None)
    results.mark_diverged(directory, 2)
    pack([directory], tmp_path / "records")
    assert load.read(tmp_path / "records" / "b").status == "diverged"


def test_a_host_is_not_named_without_its_domain_either(run, tmp_path):
    summarised(run, host="login-7.example.org", note="login-7 and 10", nodes={"10.0.0.7": {}})
    pack([run], tmp_path / "records")
    segment = json.loads((tmp_path / "records" / "a" / "summary.json").read_text())["segments"][0]
    assert segment["note"] == "node1 and 10"
    assert list(segment["nodes"]) == ["node0"]


def test_all_records_are_written_or_none(run, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "b", {"rounds": 4}, 4)
    write_new, written = disk.write_new, []

    def full(path, content):
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write_new(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write_new", full)
        assert main([str(tmp_path / "runs"), "--pack", str(tmp_path / "records")]) == 2
    assert "No space left on device: give another directory with --pack" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "records").rglob("*") if path.is_file()]
    pack([tmp_path / "runs"], tmp_path / "records")
    (tmp_path / "runs" / "b" / "summary.json").unlink()
    pack([tmp_path / "runs"], tmp_path / "records")
    assert sorted(path.name for path in (tmp_path / "records" / "b").iterdir()) == ["config.json", metrics.PACKED]


def test_an_unfinished_run_and_a_second_packing(tmp_path):
    write_run(tmp_path / "runs" / "b", {"rounds": 9}, 2, status=None)
    pack([tmp_path / "runs"], tmp_path / "records")
    pack([tmp_path / "records"], tmp_path / "records")
    again = load.read(tmp_path / "records" / "b")
    assert (again.done, again.status, again.complete) == (2, "unfinished", False)
    assert again.series["participants"][0] > 0


def test_runs_on_one_node_at_the_same_time_share_its_gpu(run, tmp_path):
    """Over 100 s, the first run is alone for 40 s and one of two for 60 s: it has 40 + 30 s of the GPU."""
    other = write_run(tmp_path / "runs" / "b", {"rounds": 4}, 4)
    summarised(other, start="2026-01-31T12:00:40Z", end="2026-01-31T12:03:00Z")
    elsewhere = write_run(tmp_path / "runs" / "c", {"rounds": 4}, 4)
    summarised(elsewhere, nodes={"another": SEGMENT["nodes"]["login-7.example.org"]})
    shared = usage.at_once([load.read(directory).usage for directory in (run, other, elsewhere)])
    assert shared == pytest.approx([100 / 70, 140 / (80 + 30), 1])
    pack([tmp_path / "runs"], tmp_path / "records")
    assert usage.at_once([load.read(tmp_path / "records" / "a").usage]) == [pytest.approx(1.43)]


def test_runs_on_other_gpus_of_one_node_do_not_share_them(run, tmp_path):
    """The first two runs have a GPU each, the third one both, with three ranks: it shares either with another run."""
    login = SEGMENT["nodes"]["login-7.example.org"]
    directories = [run, *(write_run(tmp_path / "runs" / name, {"rounds": 4}, 4) for name in "bc")]
    for directory, gpus in zip(directories, (["GPU-1"], ["GPU-2"], ["GPU-1", "GPU-2"]), strict=True):
        node = {**login, "gpus": gpus, "devices": {"NVIDIA H200": 3 if len(gpus) > 1 else 1}}
        start = "2026-01-31T12:01:40Z" if len(gpus) > 1 else SEGMENT["start"]
        summarised(directory, start=start, end="2026-01-31T12:03:20Z", nodes={"login-7.example.org": node})
    found = [load.read(directory).usage for directory in directories]
    assert [each.gpus for each in found] == [1, 1, 2]
    assert usage.at_once(found[:2]) == [1, 1]
    # The first two are alone for half of 200 s, and one of two for the other half.
    assert usage.at_once(found) == pytest.approx([200 / 150, 200 / 150, 2])
    pack([tmp_path / "runs"], tmp_path / "records")
    text = (tmp_path / "records" / "c" / "summary.json").read_text()
    assert "GPU-" not in text
    assert load.read(tmp_path / "records" / "c").usage.gpus == 2


def test_two_runs_of_one_name_and_the_runs_own_folder_are_refused(run, tmp_path):
    write_run(tmp_path / "more" / "a", {"rounds": 4}, 4)
    with pytest.raises(UserError, match="have the same name"):
        pack([run, tmp_path / "more"], tmp_path / "records")
    with pytest.raises(UserError, match="give another directory"):
        pack([run], tmp_path / "runs")
    with pytest.raises(UserError, match="which is a run"):
        pack([run], run)
    assert (run / metrics.METRICS).exists()


def test_damaged_records_are_left_out_or_read_in_part(run, tmp_path):
    pack([run], tmp_path / "records")
    packed = tmp_path / "records" / "a" / metrics.PACKED
    content = packed.read_bytes()
    for kind in DAMAGES:
        packed.write_bytes(content)
        damage_file(packed, kind)
        try:
            assert load.read(packed.parent).done <= 4
        except UserError as error:
            assert "cannot be read: metrics.jsonl.xz is damaged (" in str(error)  # noqa: PT017 (not always raised)
    packed.write_bytes(lzma.compress(b"{}\n" * 1000, preset=9))
    assert load.read(packed.parent).done == 0


def test_a_record_that_unpacks_to_too_much_is_refused(run, tmp_path, monkeypatch):
    pack([run], tmp_path / "records")
    monkeypatch.setattr(metrics, "LARGEST", 2**25)
    packed = tmp_path / "records" / "a" / metrics.PACKED
    packed.write_bytes(lzma.compress(b"\n" * (2**25 + 1), preset=0))
    with pytest.raises(UserError, match="more than 33,554,432 bytes"):
        load.read(packed.parent)
