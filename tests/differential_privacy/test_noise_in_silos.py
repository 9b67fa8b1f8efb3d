"""``--dp`` with ``--secure``: every silo adds a share of the noise to whole numbers, and nothing else is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import SIZE
from test_sensitivity import SIZES, data, distance, session  # noqa: F401  (a fixture)
from tiers import slow
from training_runs import run_here

from fedlada_mpi.algorithms import Round
from fedlada_mpi.rounds.aggregate import private
from fedlada_mpi.rounds.watchers.releases import Releases
from fedlada_mpi.support.errors import UserError

GRID = dict(secure=True, secure_neighbours="0")
DP = dict(dp="client", noise_multiplier=0.8, delta=1e-3, clip_norm=1.0, local_steps=2, batch_size=4, rounds=3)
four = pytest.mark.skipif(SIZE < 4, reason="takes a server and three silos")
alone = pytest.mark.skipif(SIZE > 1, reason="one process is enough")


@alone
@pytest.mark.parametrize("method", ["fedavg", "fedlada", slow("scaffold"), "local_momentum", slow("fednova")])
def test_without_noise_as_plain_sums(method, data, out, monkeypatch):  # noqa: F811
    """Of everybody: what is clipped, sent as a change, scaled and divided is the same on the grid."""
    monkeypatch.setattr(private.PrivatePlainSums, "_release", lambda self: None)
    monkeypatch.setattr(private.PrivateSecureSums, "_add_noise", lambda self, tail: None)
    given = dict(DP, algorithm=method, sampling="bernoulli", participation=1.0, clip_norm=0.05, lr=0.01)
    plain = run_here(data, out / "plain", **given)
    grid = run_here(data, out / "grid", **given, **GRID)
    moved = np.linalg.norm(plain.x - plain.data.start)
    assert np.linalg.norm(plain.x - grid.x) < 1e-5 * moved


def whole_sums(a) -> dict[str, np.ndarray]:
    """What a silo would send of its vectors, in the units in which they are clipped; then the rows begin anew."""
    rows = zip(a.vectors, a.rows[:, : a.transport.size], strict=True)
    return {name: row.double().numpy() * a.grids[name].step * a.scales.get(name, 1.0) for name, row in rows}


@alone
@pytest.mark.parametrize("method", ["fedlada", slow("scaffold"), slow("mimelite"), slow("local_momentum")])
def test_sensitivity_on_the_grid(method, data, out):  # noqa: F811
    with session(data, out, method, clip_norm=0.3, **GRID) as one:
        silo, a = one.silo, one.silo.aggregation
        for name, vector in vars(silo.s).items():
            vector.copy_(torch.rand(len(vector), generator=torch.Generator().manual_seed(1)))
            if name == "x":
                vector.mul_(0.1 * one.network.layout.real)
        a._fitting = lambda r: (0.0, np.inf)  # noise is not looked at here
        everybody, reached = list(range(len(SIZES))), []
        for lr in (0.01, 1e3, 1e30):
            for removed in (0, 2):
                found = []
                for who in (everybody, [c for c in everybody if c != removed]):
                    silo.trainer.client_state.vectors = {name: {} for name in silo.algorithm.client_state}
                    a.clip = 0.3
                    a.masks._used.clear()  # the same round again, with the same batches
                    r = Round(t=0, lr=lr, steps=2.0, participants=2.0, clients=len(SIZES))
                    a.prepare(r, np.empty(0, np.int64))
                    silo.trainer.round(silo.s, r, np.array(who), a)
                    found.append(whole_sums(a))
                    assert not any(a.counts.values())  # of whom there are, or what they lost
                reached.append(distance(*found) / 0.3)
        assert 0.9 < max(reached) <= 1 + 1e-6


@alone
@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("fedavg", dict(clip_norm=1e-9, secure_range=2.0**20, noise_multiplier=0.05), "is below the grid of"),
        ("fedavg", dict(noise_multiplier=100.0), r"too large for the grid .* expected --secure-range 128, or --clip-n"),
        # Whose noise on dc is 1 / (lr * K) times that on the offset: in the last round, at the smallest rate.
        ("scaffold", dict(lr=0.5, lr_schedule="step", lr_step=2, lr_decay=1e-3), "expected --secure-range 2048, or"),
        ("fedavg", dict(noise_multiplier=1e6, clip_norm=1e-6, adaptive_clip=True), "--adaptive-clip: noise of 1e"),
    ],
)
def test_noise_that_does_not_fit_the_grid_is_refused(method, given, expected, data, out):  # noqa: F811
    with pytest.raises(UserError, match=expected), session(data, out, method, **{**GRID, "rounds": 3, **given}):
        pass


@alone
def test_the_largest_clip_that_is_taken_does_not_wrap_around(data, out):  # noqa: F811
    """Ten deviations of all noise and a sum of everybody at the end of the range; an adaptive clip stays below."""
    with session(data, out, "fedavg", adaptive_clip=True, **GRID) as one:
        a, r = one.silo.aggregation, Round(t=0, lr=0.1, steps=2.0, participants=2.0, clients=len(SIZES))
        least, a.clip = a.clips
        a.prepare(r, np.empty(0, np.int64))
        grid = a.grids["offset"]
        units = a.deviation("offset") * a.excess / grid.step
        assert 10 * units + len(SIZES) * min(16, a.clip) / grid.step == pytest.approx(2**63)
        for clip in (2 * a.clip, np.inf, np.nan, least / 2, 0.0):  # as a server might ask for
            a.clip = clip
            with pytest.raises(UserError, match=r"round 1: noise on a clip of .* does not fit the grid"):
                a.prepare(r, np.empty(0, np.int64))
        records = [{"clip_norm": a.clips[1] * 0.99, "within_clip": 0.0}]
        assert Releases(one.silo, a, None, SimpleNamespace(records=records)).clip == a.clips[1]


@pytest.mark.ranks
@pytest.mark.parametrize("masks", ["all", "0"])
@four
def test_shares_of_silos_are_the_noise(masks, data, out):  # noqa: F811
    """Nobody's result is finite, so that the model is noise: of n silos, n / (n - 1) times the variance that is needed,
    as each of them knows its own share."""
    given = {**DP, "local_steps": 20, "adaptive_clip": True}
    given |= dict(secure=True, secure_neighbours=masks, participation=1.0, sampling="bernoulli", precision="fp32")
    run = run_here(data, out, algorithm="fedavg", lr=1e12, weight_decay=1e12, clip=0, **given)
    start = torch.load(data.init, weights_only=True)
    moved = np.concatenate([(run.model[name] - start[name]).flatten().numpy() for name in start])
    clips = np.array([record["clip_norm"] for record in run.metrics])
    z = 0.8 / np.sqrt(1 - 0.25)  # the least noise on the bits is that of the vectors
    expected = z * np.sqrt(np.square(clips).sum()) / len(SIZES) * np.sqrt((SIZE - 1) / (SIZE - 2))
    assert np.std(moved) == pytest.approx(expected, rel=0.1)
    for record in run.metrics:
        assert [record[name] for name in ("participants", "local_loss", "consistency", "train_acc")] == [None] * 4
        assert "nonfinite" not in record
    assert [json.loads(line)["round"] for line in (out / "privacy.jsonl").read_text().splitlines()] == [1, 2, 3]
