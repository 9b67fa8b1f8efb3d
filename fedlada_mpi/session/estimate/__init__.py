"""How long a run takes, what it moves and how much memory it needs, before it is started (``--estimate``).

The run is put together as it would be (``estimation``), and a few of its rounds are trained and timed (``probe``);
nothing of it is written. All its rounds are planned in advance, and their times follow from those (``forecast``,
``extrapolation``).
"""

from .estimation import estimate
from .result import Estimate

__all__ = ["Estimate", "estimate"]
