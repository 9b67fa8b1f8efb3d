"""Work that nothing waits for until later, on a second stream of the GPU; on a CPU it is simply done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

AHEAD = 4  # pieces of work that may be under way


class Beside:
    """Runs work beside the current stream, in the order given.

    The allocator hands freed memory to the next user on the same stream, unaware of the second one. So what a piece
    of work reads is held here until the current stream has waited for it: when AHEAD later pieces have been given, or
    at ``join``.
    """

    def __init__(self, device: torch.device | str):
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def __call__(self, work: Callable[[], object], *reads: Tensor) -> None:
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            self.under_way.append((self.stream.record_event(), reads))
        self._wait(AHEAD)

    def join(self) -> None:
        """Let the current stream wait for everything given so far."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self.under_way) > left:
            done, _ = self.under_way.popleft()
            torch.cuda.current_stream().wait_event(done)
