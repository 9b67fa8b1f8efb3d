"""A further stream of the GPU for work whose results are needed later; on a CPU the work is simply done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

MAX_PENDING = 4  # pieces of work under way at a time


class SideStream:
    """Runs pieces of work, none of which needs another, concurrently with the current stream.

    The allocator hands freed memory to the next user on the same stream, unaware of the others. So what a piece of work
    reads is held here until the current stream has waited for it: once MAX_PENDING later pieces have been submitted,
    or at ``join``.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(device) if self.device.type == "cuda" else None
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def submit(self, work: Callable[[], object], *reads: Tensor) -> None:
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            self.pending.append((self.stream.record_event(), reads))
        self._wait(MAX_PENDING)

    def join(self) -> None:
        """Let the current stream wait for everything submitted so far."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self.pending) > left:
            done, _ = self.pending.popleft()
            torch.cuda.current_stream().wait_event(done)
