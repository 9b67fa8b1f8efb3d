"""Lost silos with ``--secure``: a round of which something was sent is never sent again with others."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlada_mpi.data.owners import owned_clients
from fedlada_mpi.privacy.silo_files import LOG, ROUNDS, SiloFiles, inputs_digest
from fedlada_mpi.run import main
from fedlada_mpi.settings import Config
from fedlada_mpi.support import disk, rng
from fedlada_mpi.support.errors import UserError

SECURE = ["--secure", "--participation", "0.8"]


def test_rounds_that_others_have_sent(tmp_path):
    files = SiloFiles(tmp_path / "a", "a", inputs="s", silos="all")
    for number in (1, 2, 3):
        files.begun(number)
    assert files.void_until == 0
    files.begun(3)  # with the same silos, the sum is the same
    fewer = SiloFiles(tmp_path / "a", "a", inputs="s", silos="fewer")
    assert fewer.void_until == 3
    with pytest.raises(UserError, match="round 3 was sent with other silos before"):
        fewer.begun(3)
    fewer.begun(4)
    assert SiloFiles(tmp_path / "a", "a", "s", "fewer").void_until == 3
    assert SiloFiles(tmp_path / "a", "a", "s", "all").void_until == 4
    assert SiloFiles(tmp_path / "a", "a", "other inputs", "fewer").void_until == 0


def test_runs_that_begin_alike():
    """With the same model and batches: of whole data sets, whatever the seed, where the model is that of a file."""
    sizes = np.array([7, 10])

    def digest(**settings):
        return inputs_digest(Config(**{"model": "linear", "batch_size": 10, **settings}), "data", sizes)

    assert digest(lr=0.1) == digest(lr=0.2)
    assert digest(seed=1) != digest(seed=2)
    for given in ({"init": "model.pt"}, {"model": "own.py:pretrained"}):
        assert digest(seed=1, **given) == digest(seed=2, **given)
        assert digest(seed=1, **given, batch_size=9) != digest(seed=2, **given, batch_size=9)
        assert digest(seed=1, **given, augment="paper") != digest(seed=2, **given, augment="paper")
    assert digest(init="model.pt", batch_size=9) == digest(init="./model.pt", batch_size=9)
    known = hashlib.sha256(json.dumps(["data", 1, "linear", ""]).encode()).hexdigest()
    assert digest(seed=1) == known  # as in the records of version 1.0


def test_a_line_that_was_cut_off_counts_for_nothing(tmp_path):
    files = SiloFiles(tmp_path, "a", inputs="s", silos="all")
    files.begun(1)
    files.begun(2)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-9])
    assert SiloFiles(tmp_path, "a", "s", "fewer").void_until == 1
    # Nor does it take the next one with it, of a run that goes on.
    SiloFiles(tmp_path, "a", "s", "all").begun(2)
    assert SiloFiles(tmp_path, "a", "s", "fewer").void_until == 2


def test_two_runs_at_once_do_not_send_a_round_with_different_silos(tmp_path, monkeypatch):
    files, fewer = (SiloFiles(tmp_path, "a", inputs="s", silos=silos) for silos in ("all", "fewer"))
    files.begun(1)
    with pytest.raises(UserError, match="round 1 was sent with other silos before"):
        fewer.begun(1)
    # In the same moment: the other's line comes between this run's look and its own line.
    append = disk.append_line

    def meanwhile(path: Path, line: bytes) -> None:
        append(path, line.replace(b"fewer", b"all"))
        append(path, line)

    monkeypatch.setattr(disk, "append_line", meanwhile)
    with pytest.raises(UserError, match="round 2 was sent with other silos before"):
        fewer.begun(2)
    assert SiloFiles(tmp_path, "a", "s", "all").void_until == 2


def test_files_are_the_silos_own(tmp_path):
    files = SiloFiles(tmp_path / "a", "a", inputs="s")
    assert files.conceal("label 3 of patient 17") == "a: error 1 on this silo, see its own log"
    assert files.conceal("again") == "a: error 2 on this silo, see its own log"
    files.begun(1)
    assert "error 1: label 3 of patient 17" in (tmp_path / "a" / LOG).read_text()
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "a", *(tmp_path / "a").iterdir())] == [0, 0, 0]


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


def same(out: Path, expected: dict) -> bool:
    ours = torch.load(out / "model.pt", weights_only=True)
    return all(torch.equal(ours[name], value) for name, value in expected.items())


def void(out: Path) -> list[int]:
    return [record["round"] for record in records(out) if record.get("void")]


def test_the_others_go_on(campaign, monkeypatch):
    """Silos leave in the sum of round 2, after that of round 4, which makes these void, and before one."""
    faults = {2: ("reduce", 2, 1e-3), 4: ("evaluate", 3, 0.0), 6: ("train", 5, 0.0)}
    words = campaign.words(faults, "scaffold", False, *SECURE)
    status, printed = campaign.run(7, words)
    assert status == 0, printed
    out, left = Path(words[-1]), {}
    assert void(out) == [2, 4]
    for entry in json.loads((out / "summary.json").read_text())["left"]:
        left.setdefault(entry["after"], []).append(entry["rank"])
    assert sorted(rank for several in left.values() for rank in several) == [2, 4, 6]
    assert same(out, reference(campaign, monkeypatch, "scaffold", [2, 4], left, ranks=7))
    for path in out.glob(f"silos/*/{ROUNDS}"):
        sent = {(entry["round"], entry["silos"]) for entry in map(json.loads, path.open())}
        assert len({number for number, _ in sent}) == len(sent), f"{path}: a round with two sets of silos"


@pytest.mark.slow
def test_the_run_stops_and_can_be_resumed(campaign, monkeypatch):
    """Without the server, and with too few silos; with the same silos as before no round is void, with others one."""
    status, printed = campaign.run(4, campaign.words({0: ("bcast", 3, 1e-3)}, "fedlada", False, *SECURE))
    assert status == 75, printed
    assert "the server left" in printed
    words = campaign.words({1: ("reduce", 4, 0.0)}, "fedlada", False, *SECURE)
    status, printed = campaign.run(4, words)
    assert status == 75, printed
    assert "2 silos left, and --min-silos is 3" in printed
    out = Path(words[-1])
    other = shutil.copytree(out, campaign.out())
    status, printed = campaign.run(4, ["{}", "--resume", str(out)])
    assert status == 0, printed
    assert void(out) == []
    assert same(out, reference(campaign, monkeypatch, "fedlada", [], {}, ranks=4))
    status, printed = campaign.run(6, ["{}", "--resume", str(other)])
    assert status == 0, printed
    assert "note: round 4 is void, as other silos have sent sums of the same models" in printed
    assert void(other) == [4]
