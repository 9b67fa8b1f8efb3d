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


def test_what_a_piece_of_work_reads_is_held_until_it_was_waited_for(main, monkeypatch):
    monkeypatch.setattr(side_stream, "MAX_PENDING", 2)
    side = SideStream("cuda")
    held = []
    for piece in range(5):
        read = torch.zeros(1)
        held.append(weakref.ref(read))
        side.submit(lambda piece=piece: Stream.current.ran.append(piece), read)
        del read
        assert [ref() is not None for ref in held] == [i > piece - 2 for i in range(piece + 1)]
    assert side.stream.ran == list(range(5))
    assert side.stream.waited == [main] * 5
    side.join()
    assert main.waited == [(side.stream, i + 1) for i in range(5)]
    assert not side.pending


def test_without_a_gpu_work_is_done_at_once():
    side, done = SideStream("cpu"), []
    side.submit(lambda: done.append(1))
    assert done == [1]


def test_small_pieces_are_submitted_together():
    side, done = SideStream("cpu"), []
    for piece in range(5):
        side.submit_together(done.append, (torch.full((1,), piece),), 2)
    assert [[int(part) for (part,) in parts] for parts in done] == [[0, 1], [2, 3]]
    for _ in range(2):
        side.join()
    assert [[int(part) for (part,) in parts] for parts in done[2:]] == [[4]]


def test_what_small_pieces_read_is_held_until_it_was_waited_for(main):
    side, read = SideStream("cuda"), torch.zeros(1)
    held = weakref.ref(read)
    side.submit_together(lambda parts: Stream.current.ran.append(len(parts)), (read, None), 1)
    del read
    assert side.stream.ran == [1]
    assert held() is not None
    side.join()
    assert main.waited == [(side.stream, 1)]
    assert held() is None


def test_who_waits_for_small_pieces_runs_what_is_left_of_them(main):
    side, read = SideStream("cuda"), torch.zeros(1)
    side.submit(lambda: Stream.current.ran.append("large"))
    side.submit_together(lambda parts: Stream.current.ran.append(len(parts)), (read, None), 2)
    assert side.stream.ran == ["large"]
    side.join()
    assert side.stream.ran == ["large"]
    assert main.ran == [1]  # while the side stream still has the large one
    assert main.waited == [(side.stream, 1)]


def test_what_a_step_that_failed_has_left_is_dropped():
    side, done = SideStream("cpu"), []
    side.submit_together(done.append, (torch.zeros(1),), 2)
    side.forget()
    side.join()
    assert not done
