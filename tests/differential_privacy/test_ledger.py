"""The ledger and the budget: on disk before a release, never shorter, and no round beyond the budget."""

from __future__ import annotations

import errno
import json
import os

import pytest

from fedlada_mpi.privacy import budget as budgets
from fedlada_mpi.privacy.accounting import Release
from fedlada_mpi.privacy.budget import Budget, SiloBudget
from fedlada_mpi.privacy.ledger import LEDGER, Ledger
from fedlada_mpi.privacy.mechanism import Mechanism
from fedlada_mpi.settings import Config
from fedlada_mpi.support.disk import WriteError
from fedlada_mpi.support.errors import PublicError, UserError

NOISE = 0.6945
ENTRY = {"round": 1, "q": 0.5, "z": 2.0, "clip": 1.0}


def asked(out, **more) -> Config:
    values = dict(out=str(out), dp="client", delta=1e-3, clip_norm=1.0, clients=100, participation=0.5, rounds=4)
    return Config(**{**values, "epsilon": 8.0, **more})


def test_entries_are_on_disk_when_they_are_added(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))
    ledger = Ledger(tmp_path)
    for number in (1, 2):
        ledger.add({**ENTRY, "round": number})
        assert (tmp_path / LEDGER).stat().st_ino in synced
        synced.clear()
        assert [json.loads(line)["round"] for line in (tmp_path / LEDGER).read_text().splitlines()][-1] == number
    again = Ledger(tmp_path)
    assert again.releases == [Release(0.5, 2.0)] * 2
    assert again.rounds == {1, 2}


def test_a_line_that_a_kill_has_cut_short_is_no_release(tmp_path):
    Ledger(tmp_path).add(ENTRY)
    with open(tmp_path / LEDGER, "a") as file:
        file.write('{"round": 2, "q"')
    ledger = Ledger(tmp_path)
    assert ledger.rounds == {1}
    ledger.add({**ENTRY, "round": 2})
    assert [json.loads(line)["round"] for line in (tmp_path / LEDGER).read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '{"round": 1, "q": 0.5}', '{"round": 1, "q": 0, "z": 1}', '{"void": true}', "null"]
)
def test_a_damaged_ledger_is_refused(line, tmp_path):
    (tmp_path / LEDGER).write_text(f"{json.dumps(ENTRY)}\n{line}\n")
    with pytest.raises(UserError, match="is damaged"):
        Ledger(tmp_path)


def test_a_ledger_that_is_removed_during_a_run_is_written_again(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(ENTRY)
    (tmp_path / LEDGER).unlink()
    ledger.add({**ENTRY, "round": 2})
    assert Ledger(tmp_path).rounds == {1, 2}


def test_releases_of_another_run_at_the_same_time_are_kept(tmp_path):
    """Such as of a copy of the run: a silo's ledger is that of both."""
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.add(ENTRY)
    with pytest.raises(UserError, match="has releases of another run"):
        other.add({**ENTRY, "round": 2})
    assert Ledger(tmp_path).rounds == {1}
    one.add({**ENTRY, "round": 3})
    assert Ledger(tmp_path).rounds == {1, 3}


@pytest.fixture
def noise(monkeypatch):
    """That a budget of 8 over 4 rounds takes, as the next test finds out."""
    monkeypatch.setattr(budgets, "calibrated", lambda *asked: NOISE)


def test_the_budget_ends_with_the_rounds_it_was_calibrated_for(tmp_path):
    budget, spent = Budget(asked(tmp_path), start=0), []
    assert budget.mechanism.noise == pytest.approx(NOISE, rel=1e-3)
    while budget.permits():
        budget.spend(len(spent) + 1, clip=1.0)
        spent.append(budget.epsilon)
    assert len(spent) == 4
    assert spent == sorted(spent)
    assert 8 * 0.995 < spent[-1] <= 8 < budget.after_next
    assert "one more round would make it" in budget.refusal


def test_a_resumed_run_keeps_its_noise_and_what_it_has_spent(tmp_path, noise, monkeypatch):
    first = Budget(asked(tmp_path), start=0)
    for number in (1, 2, 3):
        first.spend(number, clip=1.0)
    monkeypatch.setattr(budgets, "calibrated", None)  # would fail
    second = Budget(asked(tmp_path, rounds=50), start=2)  # killed in round 3, after its entry
    assert second.mechanism.noise == first.mechanism.noise
    assert second.epsilon == pytest.approx(first.epsilon, rel=1e-4)
    second.spend(3, clip=1.0)
    assert not second.permits()
    assert len(second.ledger.releases) == 4


def test_a_new_start_in_the_same_place_counts_what_was_released_there(tmp_path, noise):
    first = Budget(asked(tmp_path), start=0)
    for number in range(1, 5):
        first.spend(number, clip=1.0)
    with pytest.raises(UserError, match=r"has 4 releases, which cost epsilon (8|7\.99) .*another --out"):
        Budget(asked(tmp_path), start=0)


def test_void_rounds_release_nothing_and_do_not_count_as_lost(tmp_path, noise):
    """Of rounds that other silos have sent; a round that was void after its release has begun is a release."""
    first = Budget(asked(tmp_path), start=0)
    first.leave_out(1)
    first.leave_out(2)
    first.spend(3, clip=1.0)
    first.leave_out(3)
    again = Budget(asked(tmp_path), start=3)
    assert again.ledger.rounds == {1, 2, 3}
    assert [entry.get("round") for entry in again.ledger.entries] == [None, 1, 2, 3]  # first, the calibration
    assert again.earlier == 1
    assert again.epsilon == pytest.approx(first.epsilon)
    with pytest.raises(UserError, match="lacks 1 of the 4 rounds"):
        Budget(asked(tmp_path), start=4)


def test_a_run_that_has_lost_its_ledger_does_not_go_on(tmp_path):
    with pytest.raises(UserError, match="lacks 3 of the 3 rounds"):
        Budget(asked(tmp_path), start=3)


def test_without_epsilon_the_noise_is_given_and_nothing_ends(tmp_path):
    budget = Budget(asked(tmp_path, epsilon=0.0, noise_multiplier=0.7), start=0)
    for number in range(1, 20):
        assert budget.permits()
        budget.spend(number, clip=1.0)
    assert budget.epsilon > 8
    assert budget.summary() == {"epsilon": budget.epsilon, "delta": 1e-3, "releases": 19}


def test_a_silo_does_not_trust_the_server_with_its_budget(tmp_path, noise):
    """It takes part in what was agreed on, and in no more, also after another start."""
    config = asked(tmp_path)
    for number in range(1, 5):
        silo = SiloBudget(config, tmp_path, Mechanism.of(config, NOISE))
        silo.spend(number, clip=1.0)
    with pytest.raises(PublicError, match=r"round 5: the server asks for a release beyond the budget: epsilon 7\.99"):
        silo.spend(5, clip=1.0)
    assert len(Ledger(tmp_path).releases) == 4


def test_a_silo_counts_the_noise_that_it_is_told(tmp_path):
    """With less of it, the budget ends before four rounds."""
    config = asked(tmp_path)
    silo = SiloBudget(config, tmp_path, Mechanism.of(config, 0.8 * NOISE))
    silo.spend(1, clip=1.0)
    while silo.permits():
        silo.spend(2, clip=1.0)
    assert silo.released < 4
    with pytest.raises(PublicError, match="beyond the budget"):
        silo.spend(4, clip=1.0)
    given = asked(tmp_path / "other", epsilon=0.0, noise_multiplier=1.0)
    with pytest.raises(PublicError, match=r"the server asks for noise 0\.5, and the settings for 1"):
        SiloBudget(given, tmp_path / "other", Mechanism.of(given, 0.5))


class Full:
    """A disk on which a line fits in part, as long as it is full."""

    def __init__(self, monkeypatch):
        self.real, self.room = os.fsync, 10**9
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        if self.room < 10**9:
            os.ftruncate(handle, max(0, os.fstat(handle).st_size - self.room))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(handle)


@pytest.mark.parametrize("missing", [1, 7, 30])
def test_a_full_disk_permits_no_release(tmp_path, monkeypatch, missing):
    """What is left of the line counts for nothing; when there is room again, the ledger has what was released."""
    disk, ledger = Full(monkeypatch), Ledger(tmp_path)
    ledger.add(ENTRY)
    disk.room = missing
    with pytest.raises(WriteError, match=r"No space left on device .*make room, then add --resume"):
        ledger.add({**ENTRY, "round": 2})
    assert ledger.rounds == Ledger(tmp_path).rounds == {1}
    disk.room = 10**9
    ledger.add({**ENTRY, "round": 3})
    Ledger(tmp_path).add({**ENTRY, "round": 4})
    assert [json.loads(line)["round"] for line in (tmp_path / LEDGER).read_text().splitlines()] == [1, 3, 4]
