"""Everything that uses MPI: nothing outside this folder imports mpi4py or calls a collective.

``world`` starts the ranks and ends all of them when one fails; ``messages`` has what they say to each other; ``plan``
chooses a ``transport`` for the flat vectors (``staged``, ``shared_window``: two more of them); ``timing`` times
collectives. This file and ``world`` do not import torch: a wrong launcher is noticed in the time that MPI itself
takes to start.
"""

from .world import Member, RankLost, World, implementation, is_root, several_ranks

__all__ = ["Member", "RankLost", "World", "implementation", "is_root", "several_ranks"]
