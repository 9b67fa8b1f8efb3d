"""Which silos share masks: a Harary graph over their names in order.

Every silo has its k nearest ones on a ring as neighbours. The graph stays connected when any k - 1 silos are taken out:
so many may collude with the server, and what is left is still hidden but for its sum.
"""

from __future__ import annotations

ALL_UP_TO = 16  # silos that share masks with all others, unless a number is given
BEYOND = 8  # neighbours in larger runs


def degree(silos: int, asked: int | None, everyone: bool = False) -> int:
    """How many neighbours each of ``silos`` has; ``asked``: None where the settings name no number."""
    if asked is None:
        asked = silos - 1 if everyone or silos <= ALL_UP_TO else BEYOND
    if asked % 2 and silos % 2:  # no graph has an odd number of odd degrees
        asked += 1
    return max(0, min(asked, silos - 1))


def neighbours(silo: int, silos: int, degree: int) -> list[int]:
    """Of ``silo``, one of 0 .. ``silos`` - 1."""
    if degree >= silos - 1:
        return [other for other in range(silos) if other != silo]
    steps = [sign * step for step in range(1, degree // 2 + 1) for sign in (1, -1)]
    steps += [silos // 2] * (degree % 2)
    return sorted((silo + step) % silos for step in steps)
