"""A further stream of the GPU for work whose results are needed later; on a CPU the work is simply done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

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
        self.waiting: dict[Callable[[list[Any]], object], list[tuple[Any, ...]]] = {}

    def submit(self, work: Callable[[], object], *reads: Tensor) -> None:
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            self.pending.append((self.stream.record_event(), reads))
        self._wait(MAX_PENDING)

    def submit_together(self, work: Callable[[list[Any]], object], part: tuple[Tensor | None, ...], most: int) -> None:
        """As ``submit``, for small pieces: ``work`` is given the parts, which it reads, of up to so many at once."""
        parts = self.waiting.setdefault(work, [])
        parts.append(part)
        if len(parts) >= most:
            del self.waiting[work]
            self.submit(lambda: work(parts), *(tensor for part in parts for tensor in part if tensor is not None))

    def forget(self) -> None:
        """Drop what still waits for others: what a step that failed has left would be written into the next one's."""
        self.waiting.clear()

    def join(self) -> None:
        """Let the current stream wait for everything submitted so far; what still waits for others runs on it."""
        for work in tuple(self.waiting):
            work(self.waiting.pop(work))
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self.pending) > left:
            done, _ = self.pending.popleft()
            torch.cuda.current_stream().wait_event(done)
