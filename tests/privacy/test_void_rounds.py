"""Lost silos with ``--secure``: a round of which something was sent is never sent again with others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import SIZE, tolerant_mpirun
from repository import ROOT

from fedlada_mpi.data.owners import owned_clients
from fedlada_mpi.privacy.silo_files import LOG, ROUNDS, SiloFiles
from fedlada_mpi.run import main
from fedlada_mpi.support import rng
from fedlada_mpi.support.errors import UserError

sys.path.append(str(ROOT / "tests" / "campaigns"))

SECURE = ["--secure", "--participation", "0.8"]


def test_rounds_that_others_have_sent(tmp_path):
    files = SiloFiles(tmp_path / "a", "a", settings="s", silos="all")
    for number in (1, 2, 3):
        files.begun(number)
    assert files.void_until == 0
    files.begun(3)  # with the same silos, the sum is the same
    fewer = SiloFiles(tmp_path / "a", "a", settings="s", silos="fewer")
    assert fewer.void_until == 3
    with pytest.raises(UserError, match="round 3 was sent with other silos before"):
        fewer.begun(3)
    fewer.begun(4)
    assert SiloFiles(tmp_path / "a", "a", "s", "fewer").void_until == 3
    assert SiloFiles(tmp_path / "a", "a", "s", "all").void_until == 4
    assert SiloFiles(tmp_path / "a", "a", "other settings", "fewer").void_until == 0


def test_a_line_that_was_cut_off_counts_for_nothing(tmp_path):
    files = SiloFiles(tmp_path, "a", settings="s", silos="all")
    files.begun(1)
    files.begun(2)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-9])
    assert SiloFiles(tmp_path, "a", "s", "fewer").void_until == 1


def test_files_are_the_silos_own(tmp_path):
    files = SiloFiles(tmp_path / "a", "a", settings="s")
    assert files.conceal("label 3 of patient 17") == "a: error 1 on this silo, see its own log"
    assert files.conceal("again") == "a: error 2 on this silo, see its own log"
    files.begun(1)
    assert "error 1: label 3 of patient 17" in (tmp_path / "a" / LOG).read_text()
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "a", *(tmp_path / "a").iterdir())] == [0, 0, 0]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    if SIZE > 1:
        pytest.skip("starts ranks of its own")
    tolerant_mpirun()
    from departures import Campaign

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))
    yield Campaign(tmp_path_factory.mktemp("void"), 0)
    os.environ.clear()
    os.environ.update(before)


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def reference(campaign, monkeypatch, method: str, void: list[int], lost: dict[int, list[int]], ranks: int) -> dict:
    """One process without masks: nobody takes part in void rounds, nor do the silos ``lost`` after some rounds."""
    from departures import SETTINGS

    owned, draw = owned_clients(campaign.manifest, ranks - 1), rng.participants

    def participants(clients, share, sampling, seed, t):
        gone = [owned[rank - 1] for after, several in lost.items() if t >= after for rank in several]
        drawn = draw(clients, share, sampling, seed, t)
        return drawn[:0] if t + 1 in void else np.setdiff1d(drawn, np.concatenate([[], *gone]).astype(int))

    monkeypatch.setattr(rng, "participants", participants)
    out = campaign.out()
    words = [*SETTINGS, *SECURE, "--secure-neighbours", "0", "--algorithm", method, "--dataset", str(campaign.data)]
    assert main([*words, "--out", str(out)]) == 0
    return torch.load(out / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    ("method", "fault", "void"),
    [
        ("fedlada", ("reduce", 3, 1e-3), [3]),
        pytest.param("scaffold", ("evaluate", 3, 0.0), [3], marks=pytest.mark.slow),
        pytest.param("scaffold", ("train", 5, 0.0), [], marks=pytest.mark.slow),
    ],
    ids=["in Reduce", "after it", "before it"],
)
def test_the_others_go_on(campaign, monkeypatch, method, fault, void):
    words = campaign.words({2: fault}, method, False, *SECURE)
    status, printed = campaign.run(5, words)
    assert status == 0, printed
    out = Path(words[-1])
    assert [record["round"] for record in records(out) if record.get("void")] == void
    (left,) = json.loads((out / "summary.json").read_text())["left"]
    assert left["rank"] == 2
    expected = reference(campaign, monkeypatch, method, void, {left["after"]: [2]}, ranks=5)
    ours = torch.load(out / "model.pt", weights_only=True)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    for path in out.glob(f"silos/*/{ROUNDS}"):
        sent = {(entry["round"], entry["silos"]) for entry in map(json.loads, path.open())}
        assert len({number for number, _ in sent}) == len(sent), f"{path}: a round with two sets of silos"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "why"), [(0, "the server left"), (1, "2 silos left, and --min-silos is 3")])
def test_the_run_stops_and_can_be_resumed(campaign, monkeypatch, victim, why):
    words = campaign.words({victim: ("bcast", 6, 1e-3)}, "fedlada", False, *SECURE)
    status, printed = campaign.run(4, words)
    assert status == 75, printed
    assert why in printed
    out = Path(words[-1])
    status, printed = campaign.run(4, ["{}", "--resume", str(out)])
    assert status == 0, printed
    assert not any(record.get("void") for record in records(out))  # the same silos as before
    expected = reference(campaign, monkeypatch, "fedlada", [], {}, ranks=4)
    ours = torch.load(out / "model.pt", weights_only=True)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_resumed_with_other_silos(campaign):
    words = campaign.words({1: ("reduce", 4, 0.0)}, "fedlada", False, *SECURE)
    assert campaign.run(4, words)[0] == 75
    out = Path(words[-1])
    status, printed = campaign.run(6, ["{}", "--resume", str(out)])
    assert status == 0, printed
    assert "note: round 4 is void, as other silos have sent sums of the same models" in printed
    assert [record["round"] for record in records(out) if record.get("void")] == [4]
