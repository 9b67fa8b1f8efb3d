"""What a run with ``--secure`` does not hide, found before its first round: sums to which too few silos contribute."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..algorithms import Round
from ..rounds.costs import MOST_ROUNDS
from ..settings.privacy import FEWEST_SILOS
from ..support import rng
from ..support.errors import PublicError
from .assemble import Session


class Contributors:
    """How many silos have participants in a round. Of two, each would learn the other's sum."""

    def __init__(self, session: Session):
        self.session = session

    @cached_property
    def _rank_of(self) -> np.ndarray:
        ranks = np.full(self.session.manifest.clients, -1)
        for rank, owned in enumerate(self.session.owners.clients_of):
            ranks[owned] = rank
        return ranks

    def are_few(self, t: int, participation: float | None = None) -> bool:
        """Whether a round is not to be trained; one without participants shows nothing."""
        c = self.session.config
        if c.dp != "none":  # whose participants nobody knows, and whose sums have noise
            return False
        share = c.participation if participation is None else participation
        ranks = self._rank_of[rng.participants(c.clients, share, c.sampling, c.seed, t)]
        return 0 < len(np.unique(ranks[ranks >= 0])) < FEWEST_SILOS

    def refuse_few(self) -> None:
        """Refuse a run with such rounds."""
        c, start = self.session.config, self.session.start
        rounds = range(start, min(c.rounds, start + MOST_ROUNDS))
        few = next((t for t in rounds if self.are_few(t)), None)
        if few is None:
            return
        larger = [share / 20 for share in range(1, 21) if share / 20 > c.participation]
        enough = next((share for share in larger if not any(self.are_few(t, share) for t in rounds)), None)
        hint = f"--participation {enough:g} would do" if enough else "choose another --seed"
        raise PublicError(
            f"--secure: the participants of round {few + 1} belong to fewer than {FEWEST_SILOS} silos, which shows "
            f"their sums: {hint}"
        )

    def check(self, r: Round, participants: np.ndarray) -> None:
        """On a silo: refuse an order that the settings do not give, by which a server could single it out."""
        silo = self.session.silo
        drawn = silo.sample(r.t)
        if not np.array_equal(participants, np.empty(0) if drawn is None else drawn):
            raise PublicError(f"round {r.t + 1}: the server asks for other participants than those of --seed")
        if self.are_few(r.t):
            raise PublicError(f"round {r.t + 1}: the server asks for a sum of fewer than {FEWEST_SILOS} silos")


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
    return found
