"""Several ranks on one GPU: what one rank for each GPU, or NVIDIA's Multi-Process Service, would gain.

Only the standard library is imported; torch where a GPU is asked for its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .mps import CONTROL

# 10 of 100 clients of FedLADA in TF32; docs/performance.md, "Several ranks on one GPU".
PLAIN = "(11 on an H200: 0.41 s, with MPS 0.26 s a round, as one rank 0.16 s)"
BY_MPS = "by MPS (11 on an H200: 0.26 s a round, as one rank 0.16 s)"


def gpu_id(index: int) -> str:
    """What tells a GPU of this machine from all others."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def advice(gpus: Sequence[str], by_mps: bool, may_join: bool = True) -> tuple[str, str]:
    """What was found and what to do where ranks share a GPU, empty where none do.

    ``gpus``: of every rank, empty for a CPU. ``may_join``: whether one rank may read what several read now.
    """
    ranks = Counter(filter(None, gpus))
    sharing = max(ranks.values(), default=0)
    if sharing < 2 or (by_mps and not may_join):
        return "", ""
    found = f"{sharing} ranks share a GPU {BY_MPS if by_mps else PLAIN}"
    fewer = "start one rank, without mpirun or -n" if len(ranks) == 1 else f"-n {len(ranks)} --server-trains"
    cures = [fewer] * may_join + [f"start MPS first: {CONTROL} -d"] * (not by_mps)
    return found, ", or ".join(cures)
