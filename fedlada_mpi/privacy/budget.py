"""The budget of a run: its ledger, what is spent, and whether another round may begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..settings import Config
from ..support.errors import PublicError, UserError
from .accounting import Accountant, calibrated
from .ledger import CALIBRATION, LEDGER, VOID, Ledger
from .mechanism import Mechanism


class Spending:
    """Releases of one mechanism, with a ledger of all that there have been."""

    def __init__(self, config: Config, ledger: Ledger, mechanism: Mechanism):
        self.limit, self.delta, self.ledger, self.mechanism = config.epsilon, config.delta, ledger, mechanism
        self.release, earlier = mechanism.release, ledger.releases
        self.accountant = Accountant(config.delta, earlier, [self.release])
        self.earlier = self.released = len(earlier)
        self.allowed = 0  # releases that are known to be within the budget, which need not be computed again

    @property
    def epsilon(self) -> float:
        """That is spent."""
        return self.accountant.epsilon

    @property
    def after_next(self) -> float:
        """The epsilon after one more release."""
        return self.accountant.epsilon_after(self.release)

    def permits(self) -> bool:
        """Whether one more release stays within the budget; always, where only the noise is given."""
        return not self.limit or self.released < self.allowed or self.after_next <= self.limit

    def spend(self, number: int, clip: float) -> None:
        """Write down the release of round ``number``, which may begin when this returns."""
        share, noise = self.release
        self.ledger.add({"round": number, "q": share, "z": noise, "clip": clip})
        self.accountant.add(self.release)
        self.released += 1

    @property
    def refusal(self) -> str:
        """Why no other round begins."""
        return (
            f"epsilon {self.epsilon:.4g} is spent, and one more round would make it {self.after_next:.4g}, more than "
            f"--epsilon {self.limit:g} at delta {self.delta:g}: the run stops here"
        )

    def summary(self) -> dict[str, float]:
        return {"epsilon": self.epsilon, "delta": self.delta, "releases": self.released}


class Budget(Spending):
    """On the root, which chooses the noise.

    >>> budget = Budget(config, start=0)
    >>> while budget.permits():
    ...     budget.spend(number=1, clip=1.0)
    """

    def __init__(self, config: Config, start: int, clients: int | None = None):
        """For a run that goes on after round ``start``, with so many clients; with all, unless they are given."""
        ledger = Ledger(Path(config.out))
        _refuse_lost_entries(ledger, start)
        self.pending: dict[str, Any] | None = None  # a calibration that is not in the ledger yet
        found: dict[str, Any] = {"z": config.noise_multiplier}
        if config.epsilon:
            found = self._calibration(config, ledger, start)
        super().__init__(config, ledger, Mechanism.of(config, found["z"], clients))
        self.allowed = found.get("rounds", 0) if {*ledger.releases} <= {self.release} else 0
        if not start and not self.permits():
            raise UserError(
                f"{ledger.path} has {self.earlier} releases, which cost epsilon {self.epsilon:.3g} of --epsilon "
                f"{self.limit:g}, and they count, also if the run is started again: choose another --out"
            )

    def _calibration(self, config: Config, ledger: Ledger, start: int) -> dict[str, Any]:
        asked = dict(epsilon=config.epsilon, delta=config.delta, q=config.participation)
        # A run that goes on keeps its noise, also when it is asked for more rounds.
        if found := ledger.calibration(asked if start else {**asked, "rounds": config.rounds}):
            return found
        noise = calibrated(config.participation, config.rounds, config.epsilon, config.delta)
        found = {**asked, "rounds": config.rounds, "z": noise}
        self.pending = {CALIBRATION: found}
        return found

    def spend(self, number: int, clip: float) -> None:
        self._add_pending()
        super().spend(number, clip)

    def leave_out(self, number: int) -> None:
        """Write down that round ``number`` is void, unless something of it was released before."""
        if number not in self.ledger.rounds:
            self._add_pending()
            self.ledger.add({"round": number, VOID: True})

    def _add_pending(self) -> None:
        if self.pending is not None:
            self.ledger.add(self.pending)
            self.pending = None


class SiloBudget(Spending):
    """Of one silo, which takes part in no release that its own ledger does not allow, whatever the server says."""

    def __init__(self, config: Config, folder: Path, mechanism: Mechanism):
        super().__init__(config, Ledger(folder), mechanism)
        asked = config.noise_multiplier
        if asked and mechanism.noise != asked:
            raise PublicError(f"--dp: the server asks for noise {mechanism.noise:g}, and the settings for {asked:g}")
        left = max(1, config.rounds - self.released)
        if self.limit and self.accountant.epsilon_after(self.release, left) <= self.limit:
            self.allowed = self.released + left

    def spend(self, number: int, clip: float) -> None:
        if not self.permits():
            raise PublicError(f"round {number}: the server asks for a release beyond the budget: {self.refusal}")
        super().spend(number, clip)


def _refuse_lost_entries(ledger: Ledger, start: int) -> None:
    missing = set(range(1, start + 1)) - ledger.rounds
    if missing:
        raise UserError(
            f"{ledger.path} lacks {len(missing)} of the {start} rounds of this run, whose epsilon is then not known: "
            f"put {LEDGER} back as it was, or start another run with another --out"
        )
