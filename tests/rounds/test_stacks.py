"""Stacks of one width, as under ``--sums exact``: a client's bits do not depend on who trains beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlada_mpi.algorithms import Round, resolve
from fedlada_mpi.bench import Bench, Workload
from fedlada_mpi.rounds.aggregate import Collector, Sent
from fedlada_mpi.rounds.trainer import chunks
from fedlada_mpi.session.process_state import torch_state_restored

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
CLIENTS = 5


class Recorder(Collector):
    """Keeps what every client sends, as bytes."""

    def begin(self, count: int) -> None:
        self.sent: dict[tuple[int, str, int | None], bytes] = {}
        self.losses: dict[int, float] = {}

    def add(self, sent: Sent) -> None:
        self.losses |= dict(zip(sent.clients.tolist(), sent.losses.tolist(), strict=True))
        for part in sent.parts:
            for name, rows in part.rows.items():
                for client, row in zip(sent.clients.tolist(), part.which, strict=True):
                    self.sent[client, name, part.where.start] = rows[row].cpu().numpy().tobytes()


def sent_by(groups: list[list[int]], device: str, **settings) -> list[dict]:
    """What all clients send, and their losses, when ``groups`` of them are on ranks of their own."""
    config = resolve({"dataset": "digits", "algorithm": "scaffold", "local_epochs": 1, **settings}).config
    found: list[dict] = [{}, {}]
    with torch_state_restored():
        for group in groups:
            bench = Bench(Workload.of_images(config), CLIENTS, torch.device(device))
            recorder = Recorder(bench.algorithm, bench.network.layout.size, torch.float32, bench.device)
            for t in range(2):
                r = Round(t, config.lr, bench.steps, CLIENTS, CLIENTS)
                bench.trainer.round(bench.s, r, np.array(group), recorder)
            found[0] |= recorder.sent
            found[1] |= recorder.losses
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["stacked", "generic"])
@pytest.mark.parametrize("width", [1, 5])
def test_bits_do_not_depend_on_the_ranks(width, engine, device):
    """Groups as of 1, 2, 3 and 5 ranks; those of the last are mostly padding."""
    settings = {"sums": "exact", "max_clients_at_once": width, "engine": engine}
    alone = sent_by([[0, 1, 2, 3, 4]], device, **settings)
    assert len(alone[1]) == CLIENTS
    for groups in ([[0, 2, 4], [1, 3]], [[4], [0, 1], [2, 3]], [[0], [1], [2], [3], [4]]):
        assert sent_by(groups, device, **settings) == alone, groups


def test_padding_sends_nothing():
    """A stack of four with one client sends what that client sends alone, up to rounding."""
    padded, alone = (
        sent_by([[3]], "cpu", sums="exact", max_clients_at_once=width, precision="fp64") for width in (4, 1)
    )
    assert padded[0].keys() == alone[0].keys()
    for key, row in alone[0].items():
        np.testing.assert_allclose(np.frombuffer(padded[0][key]), np.frombuffer(row), rtol=1e-9, atol=1e-12)


def test_stacks_of_one_width_have_one_number_of_steps():
    """Rows 0, 3 and 4 take two steps, rows 1 and 2 one; without a width, all train together, the longest first."""
    rows, steps = np.arange(5), np.array([2, 1, 1, 2, 2])
    assert [chunk.tolist() for chunk in chunks(rows, steps, 2, alike=True)] == [[0, 3], [4], [1, 2]]
    assert [chunk.tolist() for chunk in chunks(rows, steps, 0)] == [[0, 3, 4, 1, 2]]
