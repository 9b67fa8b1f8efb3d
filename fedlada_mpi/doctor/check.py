"""What a check of the doctor is, and the state that checks pass on to later ones."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..gpu.sharing import gpu_id

if TYPE_CHECKING:
    from ..mpi import World

OK, WARN, FAIL, SKIP = "ok", "warn", "FAIL", "skip"


@dataclass
class Here:
    """What earlier checks have learnt, for later ones."""

    out: Path = Path("runs")
    world: World | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)  # facts() of every rank
    cuda: bool = False

    @property
    def neighbours(self) -> list[dict[str, Any]]:
        """The ranks on this machine, this one included."""
        if self.world is None:
            return [facts()]
        return [rank for rank in self.ranks if rank["machine"] == self.ranks[self.world.rank]["machine"]]

    @property
    def machines(self) -> int:
        """The number of machines that the ranks run on."""
        return len({rank["machine"] for rank in self.ranks}) or 1


# Status, what was found and, where something is to be done, the command.
Result = tuple[str, ...]
Examine = Callable[[Here], Result]


class Check(NamedTuple):
    name: str
    examine: Examine
    fix: str  # what to do if it raises an exception
    needs: str  # the checks that must have passed, separated by blanks


CHECKS: list[Check] = []


def check(name: str, fix: str = "", needs: str = "") -> Callable[[Examine], Examine]:
    """Decorator that registers a function as a check, one line of the report."""

    def register(examine: Examine) -> Examine:
        CHECKS.append(Check(name, examine, fix, needs))
        return examine

    return register


def facts(local_rank: int = 0) -> dict[str, Any]:
    """What ranks need to know of one another; the checks themselves report what does not work."""
    facts: dict[str, Any] = {"machine": platform.node(), "cores": sorted(os.sched_getaffinity(0))}
    facts |= {"torch": False, "gpu": ""}
    with contextlib.suppress(Exception):
        facts["machine"] = Path("/proc/sys/kernel/random/boot_id").read_text()  # containers may share a host name
        import torch

        facts["torch"] = True
        index = local_rank % torch.cuda.device_count()
        facts["gpu"] = gpu_id(index)
    return facts
