"""What stays in a silo's directory: results of rounds, what clients keep, and with whom it has added up."""

from __future__ import annotations

import json
import stat

import pytest
import torch

from fedlada_mpi.rundir.silo_folder import SiloFolder, added_up_with_others, log_error
from fedlada_mpi.support.errors import UserError


@pytest.fixture
def folder(tmp_path) -> SiloFolder:
    found = SiloFolder(tmp_path / "runs" / "x-1", "d1")
    found.begin(0)
    return found


def rounds(folder: SiloFolder) -> list[int]:
    return [json.loads(line)["round"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_rounds_that_are_done_again_are_recorded_once(folder):
    for number in (1, 2, 3):
        folder.record({"round": number, "test_loss": float("nan")})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "te')  # killed
    folder.begin(2)
    folder.record({"round": 3, "test_loss": 1.0})
    assert rounds(folder) == [1, 2, 3]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_what_clients_keep_comes_back(folder):
    state = {"c": {4: torch.arange(3.0)}}
    folder.save(5, state)
    found: dict = {"c": {}}
    folder.load(5, torch.zeros(3), found, {4})
    assert torch.equal(found["c"][4], state["c"][4])
    with pytest.raises(UserError, match="has changed since the run began"):
        SiloFolder(folder.path, "d2").load(5, torch.zeros(3), found, {4})
    with pytest.raises(UserError, match="has not kept"):
        folder.load(4, torch.zeros(3), found, {4})
    (folder.path / "run.json").write_text("[]")
    with pytest.raises(UserError, match="has nothing of this run"):
        folder.load(5, torch.zeros(3), found, {4})


def test_the_server_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = SiloFolder(None)
    server.begin(0)
    server.record({"round": 1})
    server.save(1, {})
    server.load(1, torch.zeros(1), {}, set())
    assert not [*tmp_path.iterdir()]


def test_sums_with_other_silos_are_noticed(tmp_path):
    assert not added_up_with_others(tmp_path, "d1", "abc")
    assert not added_up_with_others(tmp_path, "d1", "abc")
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 1
    assert not added_up_with_others(tmp_path, "d2", "ab")  # of other data
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('[]\n{"data"')  # killed
    assert added_up_with_others(tmp_path, "d1", "ab")
    assert added_up_with_others(tmp_path, "d1", "abc")
    assert stat.S_IMODE((tmp_path / "sums.jsonl").stat().st_mode) == 0o600


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "silo").mkdir()
    (tmp_path / "silo" / "log.txt").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "silo" / "sums.jsonl").symlink_to(tmp_path / "elsewhere")
    assert not log_error(tmp_path / "silo" / "log.txt", "text")
    with pytest.raises(UserError, match=r"sums\.jsonl: cannot be written"):
        added_up_with_others(tmp_path / "silo", "d", "s")
    assert not (tmp_path / "elsewhere").exists()
