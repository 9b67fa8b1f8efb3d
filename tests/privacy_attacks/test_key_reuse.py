"""No mask is used twice: what two messages with the same mask have in common would show.

Nor are two sums made of the same model and batches with different silos, whose difference a lost silo has sent.
"""

from __future__ import annotations

import hashlib
import subprocess
from itertools import product
from pathlib import Path

import losing
import numpy as np
import pytest
import torch
from limits import LIMIT
from ranks import python, tolerant_mpirun
from repository import ROOT

from fedlada_mpi.privacy.agreement import AES, Epoch
from fedlada_mpi.privacy.masks import Masks, received_digest

LOSING = str(ROOT / "tests" / "helpers" / "losing.py")
SETTINGS = (
    "--secure --min-silos 3 --rounds 4 --local-steps 2 --participation 1 --checkpoint-every 2 --device cpu "
    "--model linear --algorithm fedlada"
)


def epoch(own: str = "a", other: str = "b", key: bytes = bytes(32)) -> Epoch:
    return Epoch(("a", "b", "c"), own, AES, False, 2, {other: key})


def test_every_message_has_a_key_of_its_own():
    digests = [received_digest([torch.full((3,), value)], about) for value, about in product((1.0, 2.0), ([0], [1]))]
    given = product(("round 0", "round 1", "numbers"), (1, 2, -1), digests)
    keys = [epoch().streams(*message)[0][0] for message in given]
    keys += [epoch(key=b"another".ljust(32)).streams("round 0", 1, digests[0])[0][0]]
    assert len(set(keys)) == len(keys) == 3 * 3 * 4 + 1


def test_names_and_numbers_of_messages_do_not_run_together():
    """That of one message never is the beginning of another's."""
    assert epoch().streams("ab", 1, b"c") != epoch().streams("a", 1, b"bc")


def test_both_silos_of_a_pair_have_the_same_stream_with_opposite_signs():
    (key, sign), (other_key, other_sign) = (
        epoch(own, other).streams("round 0", 3, b"")[0] for own, other in ("ab", "ba")
    )
    assert (key, sign) == (other_key, -other_sign)


def test_a_message_that_was_sent_is_refused():
    masks, rows = Masks(epoch()), torch.zeros(1, 8, dtype=torch.int64)
    masks.start("round", 3, rows, [torch.zeros(2)])
    masks.ready()
    with pytest.raises(RuntimeError, match="the masks of round 3 have been used"):
        masks.start("round", 3, rows, [torch.zeros(2)])


def test_masks_depend_on_all_that_was_received():
    """The vectors of messages before, and what the server has told."""

    def second(first: float, told: str) -> bytes:
        masks, words = Masks(epoch(), lambda: told), np.zeros(4, np.int64)
        masks.start("round", 1, torch.zeros(1, 8, dtype=torch.int64), [torch.full((2,), first)])
        masks.words(words)
        return words.tobytes()

    assert second(1.0, "a") == second(1.0, "a")
    assert len({second(1.0, "a"), second(2.0, "a"), second(1.0, "b")}) == 3


def test_short_messages_are_numbered():
    masks, sent = Masks(epoch()), [np.zeros(4, np.int64) for _ in range(2)]
    for words in sent:
        masks.words(words, [torch.zeros(2)])
    assert not np.any(sent[0] == sent[1])


def lose(folder: Path, ranks: int, kills: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = [*SETTINGS.split(), "--dataset", str(folder / "digits"), "--out", str(folder / "out"), *more]
    line = [tolerant_mpirun(), "--with-ft", "ulfm", "-n", str(ranks), python(), LOSING, str(folder / "log"), kills]
    return subprocess.run([*line, *words], capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)


@pytest.mark.slow
def test_silos_are_lost_and_the_run_is_resumed_without_them(tmp_path, monkeypatch):
    """One at the sum of a round, one after it; what is left is resumed from a checkpoint with fewer silos."""
    from data_prep import PrepareSettings, prepare

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/helpers")
    prepare(PrepareSettings("digits", tmp_path / "digits", clients=12, silos=3))
    done = lose(tmp_path, 6, '{"2": 21, "4": 12}')
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "void" in done.stdout
    done = lose(tmp_path, 4, "{}", "--resume", "--rounds", "5")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = losing.entries(tmp_path / "log")
    assert sum("killed" in line for rank in lines.values() for line in rank) == 2
    assert len([line for line in lines[1] if "key" in line]) > 5 * 2
    assert not losing.keys_used_twice(tmp_path / "log")
    assert not losing.sums_that_tell(tmp_path / "log")


def test_the_checks_find_what_they_look_for(tmp_path):
    """A key that a silo used twice, and two sums of one round with different silos."""
    log = losing.Log(tmp_path, 1, 0)
    for silos in (["a", "b", "c"], ["a", "b"]):
        log.write(key="5f2c")
        log.write(sent={"round": 2, "digest": "91aa", "silos": silos})
    assert losing.keys_used_twice(tmp_path) == ["rank 1 used 1 of 2 keys again"]
    assert losing.sums_that_tell(tmp_path) == ["round 2 of 91aa: [('a', 'b'), ('a', 'b', 'c')]"]


def test_digests_are_of_all_bytes():
    """Of a vector that ends within a piece: by hand."""
    vector = torch.arange(1300, dtype=torch.float32)
    content = vector.numpy().tobytes()
    pieces = b"".join(hashlib.sha256(content[i : i + 2048]).digest() for i in (0, 2048, 4096))
    assert received_digest([vector], [7]) == hashlib.sha256(b"[7]" + pieces).digest()
    assert received_digest([pieces], [7]) == received_digest([vector], [7])
