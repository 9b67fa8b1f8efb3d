"""Steps that are replayed from graphs; by stand-ins for CUDA's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlada_mpi.rounds.trainer import AT_ONCE, CapturedSteps


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, AT_ONCE - 1), (0, AT_ONCE), (3, 3 + 2 * AT_ONCE + 2), (4, 4)])
def test_as_many_steps_as_asked_in_as_few_graphs_as_there_are(first, last):
    taken, x = [], torch.zeros(1)
    steps = CapturedSteps(None, "plan", None, None)
    graphs = {number: SimpleNamespace(replay=lambda number=number: taken.append(number)) for number in (AT_ONCE, 1)}
    steps.graphs[2, x.data_ptr()] = graphs
    steps.run(None, SimpleNamespace(x=x), 2, first, last)
    assert sum(taken) == last - first
    assert taken.count(1) < AT_ONCE


def test_a_step_is_captured_once_by_itself_and_in_a_row():
    captured = []

    class Capture:
        def __call__(self, work):
            return self.repeated(work, 1)

        def repeated(self, work, times):
            for _ in range(times):
                work()
            captured.append(times)

    k, batches, x = torch.zeros(1, dtype=torch.int64), [], torch.zeros(1)
    plan = SimpleNamespace(steps=4, at=lambda number, count: batches.append(int(number)))
    buffers = SimpleNamespace(parts=lambda s, count: None, k=k, plan=plan)
    side = SimpleNamespace(submit=lambda work: work(), join=lambda: None)
    steps = CapturedSteps(buffers, "plan", Capture(), side)
    assert steps.prepare(lambda parts, batch: None, SimpleNamespace(x=x), [2])
    assert not steps.prepare(lambda parts, batch: None, SimpleNamespace(x=x), [2])
    assert captured == [1, AT_ONCE]
    assert batches == [number % 4 for number in range(1 + AT_ONCE)]  # the number of a step begins anew after the last
