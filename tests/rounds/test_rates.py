"""Schedules of the local rate, computed by hand."""

from __future__ import annotations

import pytest

from fedlada_mpi.algorithms import resolve
from fedlada_mpi.rounds.rates import local_rate
from fedlada_mpi.support.errors import UserError


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (dict(lr_decay=0.5), [8, 4, 2, 1, 0.5]),
        (dict(lr_schedule="constant"), [8, 8, 8, 8, 8]),
        (dict(lr_schedule="cosine", rounds=4), [8, 4 + 8**0.5, 4, 4 - 8**0.5, 4 - 8**0.5]),
        (dict(lr_schedule="cosine", rounds=4, lr_horizon=2), [8, 4, 4, 4, 4]),
        (dict(lr_schedule="step", lr_decay=0.25, lr_step=2), [8, 8, 2, 2, 0.5]),
        (dict(lr_schedule="constant", lr_warmup=4), [2, 4, 6, 8, 8]),
        (dict(lr_decay=0.5, lr_warmup=2), [4, 4, 2, 1, 0.5]),
    ],
)
def test_rates(settings, rates):
    config = resolve({"lr": 8, **settings}).config
    assert [local_rate(config, t) for t in range(5)] == pytest.approx(rates, rel=1e-15)


def test_the_end_of_the_cosine_is_written_down():
    """A run that is extended has other rates, unless it keeps the horizon that it started with."""
    assert resolve({"lr_schedule": "cosine", "rounds": 7}).config.lr_horizon == 7
    assert resolve({"lr_schedule": "cosine", "rounds": 0}).config.lr_horizon == 1
    assert resolve({"rounds": 7}).config.lr_horizon == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            dict(lr_schedule="constant", lr_decay=0.5),
            "--lr-decay has no effect on --lr-schedule constant, only on exponential and step: leave it out",
        ),
        (dict(lr_step=5), "--lr-step has no effect on --lr-schedule exponential, only on step: leave it out"),
    ],
)
def test_refused(given, words):
    with pytest.raises(UserError) as found:
        resolve(given)
    assert str(found.value) == words
