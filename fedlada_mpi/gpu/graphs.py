"""Work on the GPU captured once as a CUDA graph and replayed without the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Capture:
    """Captures work that is replayed one piece at a time, so that all pieces share one pool of memory."""

    def __init__(self) -> None:
        # With priority over side streams (``side_stream.py``), which nothing waits for.
        self.stream = torch.cuda.Stream(priority=-1)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """``work`` as a graph; it also runs here, for what is compiled, loaded or chosen at a first run.

        What it leaves behind may be meaningless: its first run is without kernels.
        """
        self._prepare(work)
        return self.repeated(work, 1)

    def repeated(self, work: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
        """Work that has been captured, several times in one graph: between two graphs a GPU waits some microseconds."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            for _ in range(times):
                work()
        return graph

    def _prepare(self, work: Callable[[], object]) -> None:
        # Here, as importing Triton takes time that no other run need spend.
        from .compile_ahead import compile_ahead

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            compile_ahead(work)
            work()
            work()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.empty_cache()


def capture_on(device: torch.device) -> Capture | None:
    """A capture for a GPU; on a CPU work simply runs, so None."""
    return Capture() if device.type == "cuda" else None
