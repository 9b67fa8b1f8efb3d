"""Which stream runs what, and when its memory is let go; by stand-ins for CUDA's streams."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import pytest
import torch

from fedlada_mpi.gpu import side_stream
from fedlada_mpi.gpu.side_stream import SideStream


class Stream:
    """Notes what it runs and waits for."""

    current: Stream

    def __init__(self, device=None):
        self.ran, self.waited = [], []

    def wait_stream(self, other):
        self.waited.append(other)

    def record_event(self):
        return self, len(self.ran)

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def main(monkeypatch):
    """The current stream."""
    Stream.current = Stream()

    @contextmanager
    def stream(other):
        before, Stream.current = Stream.current, other
        yield
        Stream.current = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    return Stream.current


@pytest.mark.parametrize(("work", "streams"), [(1, 3), (side_stream.SMALL, 3), (side_stream.SMALL + 1, 1)])
def test_pieces_of_small_steps_take_turns(main, monkeypatch, work, streams):
    monkeypatch.setattr(side_stream, "MAX_PENDING", 2)
    monkeypatch.setattr(side_stream, "STREAMS", 3)
    side = SideStream("cuda")
    side.divide(work)
    held = []
    for piece in range(8):
        read = torch.zeros(1)
        held.append(weakref.ref(read))
        side.submit(lambda piece=piece: Stream.current.ran.append(piece), read)
        del read
        waiting = 2 * streams
        assert [ref() is not None for ref in held] == [i > piece - waiting for i in range(piece + 1)]
    assert [stream.ran for stream in side.streams[:streams]] == [list(range(i, 8, streams)) for i in range(streams)]
    assert all(other is main for stream in side.streams for other in stream.waited)
    side.join()
    assert main.waited == [(side.streams[i % streams], i // streams + 1) for i in range(8)]
    assert not side.pending


def test_without_a_gpu_work_is_done_at_once():
    side, done = SideStream("cpu"), []
    side.divide(1)
    side.submit(lambda: done.append(1))
    assert done == [1]
