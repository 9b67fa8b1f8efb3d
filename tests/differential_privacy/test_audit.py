"""An attack on the released sums, which must not tell more than epsilon allows (Steinke et al., NeurIPS 2023).

Each of 1,000 canaries is among the clients if a coin says so, and alone in a direction of its own. From what is
released, an attacker guesses the coins of those that he is most sure of. Where (epsilon, 0)-privacy holds, no more
guesses are right than a binomial of e^epsilon / (1 + e^epsilon); so right guesses are a lower bound of epsilon.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import bdtrc
from torch import nn

import fedlada_mpi
from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import Round, Vectors
from fedlada_mpi.mpi import World
from fedlada_mpi.mpi.plan import plan_transport
from fedlada_mpi.privacy.accounting import calibrated
from fedlada_mpi.privacy.mechanism import Mechanism
from fedlada_mpi.privacy.sampling import secret_sample
from fedlada_mpi.rounds import aggregate
from fedlada_mpi.rounds.aggregate import Part, Sent, private

CANARIES, GUESSES, EPSILON, DELTA = 1000, 300, 2.0, 1e-5
ROUNDS, SHARE = 3, 0.8


def at_least(right: int, guesses: int, confidence: float = 0.95) -> float:
    """The epsilon that so many right guesses show."""
    low, high = 0.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        chance = bdtrc(right - 1, guesses, 1 / (1 + math.exp(-middle)))
        low, high = (middle, high) if chance < 1 - confidence else (low, middle)
    return low


@pytest.mark.parametrize(("right", "guesses", "shown"), [(100, 100, 3.49), (1000, 1000, 5.81), (900, 1000, 2.02)])
def test_the_bound_by_hand(right, guesses, shown):
    """(1 - 0.05^(1/100)) of guesses wrong, and so on."""
    assert at_least(right, guesses) == pytest.approx(shown, abs=0.01)


def shown_by(scores: np.ndarray, coins: np.ndarray) -> float:
    order = np.argsort(scores)
    right = coins[order[-GUESSES:]].sum() + (~coins[order[:GUESSES]]).sum()
    return at_least(int(right), 2 * GUESSES)


def released(noise: float, coins: np.ndarray) -> np.ndarray:
    """The sum of the means of some rounds; canaries send five times the clip."""
    given = dict(algorithm="fedavg", dp="client", noise_multiplier=noise, delta=DELTA, clip_norm=1.0, clients=CANARIES)
    config = algorithms.resolve({**given, "participation": SHARE}).config
    method, scores = algorithms.create(config), np.zeros(CANARIES)
    there = np.flatnonzero(coins)
    with World() as world:
        transport = plan_transport(world, CANARIES, torch.float32, torch.device("cpu"), "auto", "fp32")
        a = aggregate.create(world, config, method, transport, torch.float32)
        a.protect(Mechanism.of(config, noise), Vectors(x=torch.zeros(CANARIES)), torch.ones(CANARIES))
        a.clip = 1.0
        for t in range(ROUNDS):
            clients = secret_sample(there, SHARE)
            rows = torch.zeros(len(clients), CANARIES)
            rows[torch.arange(len(clients)), torch.from_numpy(clients)] = 5.0
            a.begin(len(clients))
            a.prepare(Round(t, 0.1, 1.0, SHARE * CANARIES, CANARIES), np.empty(0, np.int64))
            none = np.zeros(len(clients))
            part = Part(slice(None), {"offset": rows}, np.arange(len(clients)), False)
            a.add(Sent(clients, none + 1, none, none, {}, [part]))
            a.reduce(clients, communicates=True)
            scores += a.means(1.0, 1)["offset"].double().numpy()
    return scores


def test_an_attack_on_the_mechanism(monkeypatch):
    """20 of 20 attacks show less than the epsilon that the noise was calibrated for; without noise they show more."""
    draws = np.random.default_rng(3)
    noise = calibrated(SHARE, ROUNDS, EPSILON, DELTA)
    shown = []
    for _ in range(20):
        coins = draws.random(CANARIES) < 0.5
        shown.append(shown_by(released(noise, coins), coins))
    assert max(shown) < EPSILON
    monkeypatch.setattr(private.PrivatePlainSums, "_release", lambda self: None)
    assert shown_by(released(noise, coins), coins) > EPSILON


def audited_run(out, coins: np.ndarray) -> float:
    """A canary is a client with one example in a dimension of its own; one that is not there has an empty one."""
    inputs = np.eye(CANARIES, dtype=np.float32) * coins[:, None]
    test = inputs[:2], np.ones(2, np.float32)
    data = fedlada_mpi.Data(inputs=inputs, targets=coins.astype(np.float32), clients=np.arange(CANARIES), test=test)
    model = nn.Linear(CANARIES, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = dict(dp="client", epsilon=EPSILON, delta=DELTA, clip_norm=0.5, participation=SHARE, rounds=ROUNDS)
    settings |= dict(
        data_dir=out.parent / "data",
        local_steps=1,
        batch_size=1,
        lr=1.0,
        weight_decay=0.0,
        max_clients_at_once=200,
        eval_every=0,
    )
    run = fedlada_mpi.train(
        data=data, model=model, algorithm="fedavg", task="regression", out=out, quiet=True, **settings
    )
    assert run.summary["privacy"]["epsilon"] <= EPSILON
    return shown_by(run.model.module.weight.detach().double().numpy()[0], coins)


@pytest.mark.slow
def test_an_attack_on_whole_runs(out, monkeypatch):
    draws = np.random.default_rng(4)
    coins = draws.random(CANARIES) < 0.5
    assert audited_run(out / "with", coins) < EPSILON
    monkeypatch.setattr(private.PrivatePlainSums, "_release", lambda self: None)
    assert audited_run(out / "without", coins) > EPSILON
