"""What a run with ``--secure`` does not hide, found before its first round: sums to which too few silos contribute."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..rounds.costs import MOST_ROUNDS
from ..settings.privacy import FEWEST_SILOS
from ..support import rng
from ..support.errors import PublicError
from .assemble import Session


class Contributors:
    """How many silos have participants in a round."""

    def __init__(self, session: Session):
        self.session = session

    @cached_property
    def _rank_of(self) -> np.ndarray:
        ranks = np.full(self.session.manifest.clients, -1)
        for rank, owned in enumerate(self.session.owners.clients_of):
            ranks[owned] = rank
        return ranks

    def of(self, t: int) -> int:
        c = self.session.config
        ranks = self._rank_of[rng.participants(c.clients, c.participation, c.sampling, c.seed, t)]
        return len(np.unique(ranks[ranks >= 0]))

    @property
    def rounds(self) -> range:
        """Those to come; of very many the first."""
        start = self.session.start
        return range(start, min(self.session.config.rounds, start + MOST_ROUNDS))

    def refuse_one_alone(self) -> None:
        """Where a round's participants are all of one silo, its sum is that silo's."""
        for t in self.rounds:
            if self.of(t) == 1:
                raise PublicError(
                    f"--secure: all participants of round {t + 1} belong to one silo, whose sum would be seen: raise "
                    "--participation, or choose another --seed"
                )


def notes(session: Session) -> list[str]:
    """For the banner."""
    if session.epoch is None or not session.masked:
        return []
    found = []
    if not session.epoch.signed:
        found.append("the silos' keys are not signed (--silo-keys): a server in the middle could read the sums")
    hosts = [rank["host"] for rank in session.ranks]
    if crowded := sum(hosts.count(host) > 1 for host in hosts[1:]):
        found.append(f"{crowded} silos share a machine with others, who may read their memory if the account is theirs")
    contributors = Contributors(session)
    if few := sum(contributors.of(t) < FEWEST_SILOS for t in contributors.rounds):
        found.append(
            f"the participants of {few} of the rounds to come belong to 2 silos, of which each learns the other's sum"
        )
    return found
