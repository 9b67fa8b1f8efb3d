"""Random numbers in a user's own method are functions of seed, round, client and step, whatever computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noisy_method import Noisy
from repository import ROOT
from training_runs import make_data, run_here, same

from fedlada_mpi.algorithms import Algorithm, create, resolve
from fedlada_mpi.algorithms.base import Traits
from fedlada_mpi.algorithms.dry_run import steps_alone
from fedlada_mpi.algorithms.hook_draws import CLIENT, client_draws, client_keys, server_draws

OWN = f"{ROOT / 'tests' / 'helpers' / 'noisy_method.py'}:"
SIZES = [4, 9, 6, 3, 8]
COMMON = dict(
    algorithm=f"{OWN}Noisy", sums="exact", precision="fp32", rounds=3, local_epochs=1, batch_size=3, participation=0.6,
    lr=0.05, eval_every=1, seed=3,
)  # fmt: skip


@pytest.mark.slow
def test_the_same_bits_in_turns_and_after_a_resume(shared_tmp):
    """Together, alone, in two runs; and other bits where a hook draws other numbers, or with another seed."""
    data = make_data(shared_tmp / "draws", SIZES, silos=2)
    whole = run_here(data, shared_tmp / "whole", **COMMON, max_clients_at_once=3)
    in_turns = run_here(data, shared_tmp / "turns", **COMMON, max_clients_at_once=1)
    run_here(data, shared_tmp / "resumed", **{**COMMON, "rounds": 1})
    resumed = run_here(data, shared_tmp / "resumed", **COMMON, resume=True)
    same(in_turns, whole)
    same(resumed, whole)
    for change in (dict(algorithm=f"{OWN}Quiet"), dict(seed=4)):
        other = run_here(data, shared_tmp / "other", **{**COMMON, **change}, overwrite=True)
        assert not np.array_equal(other.x, whole.x)


def test_elements_between_parameters_pass_nothing_on(shared_tmp):
    """The gradients' buffer is that of the next client, too; the layers write to parameters alone."""
    data = make_data(shared_tmp / "between", SIZES, silos=2)
    given = {**COMMON, "algorithm": f"{OWN}Shifted", "rounds": 1}
    whole, in_turns = (run_here(data, shared_tmp / f"{n}", **given, max_clients_at_once=n) for n in (3, 1))
    same(in_turns, whole)


def test_no_random_numbers_between_parameters():
    real = torch.tensor([1.0, 0.0, 1.0])
    with client_draws(drawing(), "begin", torch.tensor([1, 2]), real=real):
        drawn, filled, column = torch.randn(2, 3), torch.empty(2, 3).normal_(), torch.rand(2, 1)
    for rows in (drawn, filled):
        assert rows[:, 1].eq(0).all()
        assert rows[:, 0].ne(0).all()
    assert column.ne(0).all()


def drawing(seed: int = 0) -> Algorithm:
    method = Algorithm(resolve(dict(algorithm="fedavg", seed=seed)).config)
    method.traits = Traits(draws=True)
    return method


def drawn(method: Algorithm, hook: str, t: int, clients: list[int], step_keys: object = 0) -> torch.Tensor:
    with client_draws(method, hook, client_keys(method, t, np.array(clients)), step_keys):
        return torch.rand(len(clients), 5)


def test_every_hook_round_client_step_and_seed_has_its_own():
    a = drawing()
    together = drawn(a, "begin", 3, [4, 7])
    assert torch.equal(together[1:], drawn(a, "begin", 3, [7]))
    steps = [torch.tensor([k]) for k in (1, 2)]
    others = [drawn(a, hook, t, [7], k) for hook in CLIENT for t in (0, 1) for k in (0, *steps)]
    others += [drawn(a, "begin", 0, [8]), drawn(drawing(1), "begin", 0, [7]), together[:1], together[1:]]
    for hook in ("start", "server", "derive"):
        for t in (0, 1):
            with server_draws(a, hook, t):
                others.append(torch.rand(1, 5))
    every = torch.cat(others)
    assert len({number for row in every.tolist() for number in row}) == every.numel()


def test_a_method_that_does_not_draw_is_left_alone():
    method = create(resolve(dict(algorithm="fedavg")).config)
    torch.manual_seed(1)
    with client_draws(method, "begin", torch.zeros(1, dtype=torch.int64)), server_draws(method, "server", 0):
        found = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(found, torch.rand(3))


def test_parameters_without_a_gradient_do_not_step_alone_where_clients_draw():
    method = drawing()
    assert not steps_alone(method)
    method.traits = Traits()
    assert steps_alone(method)


def test_the_trial_finds_what_is_drawn_in_some_rounds_only():
    class Late(Algorithm):
        def direction(self, c, s, g):
            return g + torch.randn_like(g) if self.late() else g

        def late(self):
            return False

    class Hidden(Algorithm):
        def finish(self, c, s, r):
            sent = super().finish(c, s, r)
            return {"offset": getattr(torch, "randn" + "_like")(sent["offset"]) if r.t >= 5 else sent["offset"]}

    from fedlada_mpi.algorithms.dry_run import dry_run

    config = resolve(dict(algorithm="fedavg", rounds=10)).config
    for cls in (Late, Hidden, Noisy):
        assert dry_run(cls(config), [[slice(0, 7)]]).draws, cls
