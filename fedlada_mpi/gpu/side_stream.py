"""Further streams of the GPU for work whose results are needed later; on a CPU the work is simply done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

MAX_PENDING = 4  # pieces of work under way at a time, on a stream
# Small products leave most of a GPU idle, and gradients of parameters take longer, one after another, than those of
# activations, on which they wait. So they may have several streams; one for all until a measurement shows a gain.
STREAMS = 1
SMALL = 4_000_000_000  # multiply-adds of a forward pass of all clients


class SideStream:
    """Runs pieces of work, none of which needs another, concurrently with the current stream.

    The allocator hands freed memory to the next user on the same stream, unaware of the others. So what a piece of work
    reads is held here until the current stream has waited for it: once MAX_PENDING later pieces have been submitted to
    every stream, or at ``join``.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if self.device.type == "cuda" else []
        self.used = 1  # of the streams
        self.turn = 0
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def divide(self, multiply_adds: int) -> None:
        """Have as many streams as a step with so many in its forward pass takes; nothing is pending."""
        self.used = STREAMS if multiply_adds <= SMALL else 1
        self.turn = 0

    def submit(self, work: Callable[[], object], *reads: Tensor) -> None:
        if not self.streams:
            work()
            return
        stream = self.streams[self.turn]
        self.turn = (self.turn + 1) % self.used
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            self.pending.append((stream.record_event(), reads))
        self._wait(MAX_PENDING * self.used)

    def join(self) -> None:
        """Let the current stream wait for everything submitted so far."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self.pending) > left:
            done, _ = self.pending.popleft()
            torch.cuda.current_stream().wait_event(done)
