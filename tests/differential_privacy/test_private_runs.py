"""Runs with ``--dp``: what they write, what they refuse, and what becomes of the budget when they are killed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ranks import SIZE, barrier
from tiers import on_ranks_with_all
from training_runs import arguments, make_data, run_here

from fedlada_mpi import algorithms
from fedlada_mpi.privacy import budget as budgets
from fedlada_mpi.rounds.aggregate import private
from fedlada_mpi.rounds.server import Server
from fedlada_mpi.rounds.silo import Silo
from fedlada_mpi.run import main
from fedlada_mpi.session import privacy_notes
from fedlada_mpi.support import rng
from fedlada_mpi.support.errors import UserError

SIZES = [3, 9, 5, 1, 7, 4, 6, 2]
COMMON = dict(participation=0.5, local_steps=2, batch_size=4, delta=1e-3, clip_norm=1.0, dp="client", rounds=3)
DP = dict(COMMON, noise_multiplier=0.8)
KEPT_BACK = ("participants", "local_loss", "train_loss", "train_acc", "consistency")


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "private", SIZES, silos=3)


def private_run(data, out, **more):
    code = main(arguments(data, out, {**DP, "sampling": "bernoulli", "precision": "fp32", **more}))
    barrier()
    return code


def ledger(out):
    entries = [json.loads(line) for line in (out / "privacy.jsonl").read_text().splitlines()]
    return [entry["round"] for entry in entries if "round" in entry]


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.ranks), on_ranks_with_all("scaffold")])
def test_what_a_private_run_records(method, data, out):
    run = run_here(data, out, algorithm=method, sampling="bernoulli", adaptive_clip=True, eval_every=1, **DP)
    assert ledger(out) == [1, 2, 3]
    assert len(run.metrics) == 3
    for record in run.metrics:
        assert [record[name] for name in KEPT_BACK] == [None] * len(KEPT_BACK)
        assert record["seconds_by_rank"] == {"train": [], "wait": []}
        assert "nonfinite" not in record
        assert record["test_acc"] is not None
        assert record["bytes_up"] == run.metrics[0]["bytes_up"] > 0
    spent = [record["epsilon"] for record in run.metrics]
    assert spent == sorted(spent)
    assert run.summary["privacy"] == {"epsilon": spent[-1], "delta": 1e-3, "releases": 3}
    clips = [record["clip_norm"] for record in run.metrics]
    assert clips[0] == 1.0
    for record, following in zip(run.metrics, clips[1:], strict=False):
        assert following == pytest.approx(record["clip_norm"] * np.exp(-0.2 * (record["within_clip"] - 0.5)))
    assert all(tensor.isfinite().all() for tensor in run.model.values())


def test_runs_of_one_seed_differ(data, out):
    """By noise and by participants."""
    runs = [run_here(data, out / name, sampling="bernoulli", algorithm="fedavg", **DP) for name in "ab"]
    assert not np.allclose(runs[0].x, runs[1].x)


def test_participants_are_not_those_of_the_seed(data, out, monkeypatch):
    """Nor does anything that the server sends depend on them."""
    seen, orders, train = [], [], Silo._train
    monkeypatch.setattr(
        Silo, "_train", lambda self, r, called, who: (seen.append(who.tolist()), train(self, r, called, who))[1]
    )
    order = Server.order
    monkeypatch.setattr(Server, "order", lambda self, what: (order(self, what), orders.append(dict(what)))[0])
    run_here(data, out, sampling="bernoulli", algorithm="fedavg", **{**DP, "rounds": 12})
    public = [rng.participants(len(SIZES), 0.5, "bernoulli", 0, t).tolist() for t in range(12)]
    assert seen != public
    assert 18 < sum(map(len, seen)) < 78  # of 96, and less likely than 1e-9 otherwise
    rounds = [what for what in orders if what["do"] == "round"]
    assert {(what["participants"], what["round"]["participants"], what["round"]["steps"]) for what in rounds} == {
        (None, 4.0, 2.0)
    }


def test_mean_of_many_releases(data, out, monkeypatch):
    """Without noise and with everybody, the model is that of a run without --dp and with the same clip."""
    monkeypatch.setattr(private.PrivatePlainSums, "_release", lambda self: None)
    settings = {**DP, "participation": 1.0, "clip_norm": 1e6, "algorithm": "fedavg"}
    ours = run_here(data, out / "private", sampling="bernoulli", **settings)
    plain = {name: value for name, value in settings.items() if name not in ("dp", "delta", "clip_norm")}
    del plain["noise_multiplier"]
    theirs = run_here(data, out / "plain", **plain)
    np.testing.assert_allclose(ours.x, theirs.x, atol=1e-6)


class Killed(BaseException):
    """As a kill, nothing handles it."""


STEPS = [
    (Server, "order"),
    (Silo, "train"),
    (Server, "step"),
    (Silo, "exchange"),
    (Silo, "report"),
    (Server, "publish"),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_killed_at_any_step_every_release_is_in_the_ledger(step, data, out, monkeypatch):
    """The second round ends at a step, before and after it; --resume does it again, which costs again."""
    cls, name = step
    original, calls = getattr(cls, name), []
    released = []  # rounds whose sums got noise
    release = private.PrivatePlainSums._release
    monkeypatch.setattr(
        private.PrivatePlainSums, "_release", lambda self: (released.append(ledger(out)[-1]), release(self))[1]
    )

    def killed(self, *given):
        calls.append(given)
        at = [call for call in calls if name != "order" or call[0]["do"] == "round"]
        if len(at) == 2:
            raise Killed
        return original(self, *given)

    monkeypatch.setattr(cls, name, killed)
    settings = dict(algorithm="fedavg", checkpoint_every=1, eval_every=1)
    with pytest.raises(Killed):
        private_run(data, out, **settings)
    monkeypatch.setattr(cls, name, original)
    before = ledger(out)
    assert before[:1] == [1]
    assert set(released) <= set(before)
    assert main(["--resume", str(out)]) == 0
    after = ledger(out)
    assert after == [*before, 2, 3]
    assert set(released) == {1, 2, 3}
    spent = [json.loads(line)["epsilon"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert spent == sorted(spent)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["privacy"]["releases"] == len(after)


def test_a_run_stops_at_its_budget(data, out, capsys, monkeypatch):
    """Two rounds are calibrated for, and five are asked for by a resume."""
    assert private_run(data, out, algorithm="fedavg", noise_multiplier=0.0, epsilon=1.0, rounds=2) == 0
    monkeypatch.setattr(budgets, "calibrated", None)
    capsys.readouterr()
    for _ in range(2):
        assert main(["--resume", str(out), "--rounds", "5"]) == 75
        assert "more than --epsilon 1 at delta 0.001: the run stops here" in capsys.readouterr().out
    assert ledger(out) == [1, 2]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["privacy"]["epsilon"] <= 1


def test_the_banner_says_how_loud_the_noise_is(data, out, capsys, monkeypatch):
    assert private_run(data, out, algorithm="fedlada", noise_multiplier=50.0, rounds=1) == 0
    printed = capsys.readouterr().out
    assert "noise multiplier 50 at delta 0.001; clip 1; noise of a sum 50 x the clip in every coordinate" in printed
    assert "note     the noise of a mean is" in printed
    assert "--dp with fedlada: the noise of every coordinate is far above its second moment" in printed
    monkeypatch.setattr(privacy_notes, "TOO_LOUD", 1e3)
    assert private_run(data, out / "quieter", algorithm="fedavg", rounds=1) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.skipif(SIZE > 1, reason="settings are the same on all ranks")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(sampling="fixed"), "got --sampling fixed, expected bernoulli"),
        (dict(weighting="size"), "got --weighting size, expected uniform"),
        (dict(robust="median"), "got --robust median, expected none"),
        (dict(on_nonfinite="stop"), "got --on-nonfinite stop, expected skip"),
        (dict(sums="exact"), "got --sums exact, expected fast"),
        (dict(wire="bf16"), "got --wire bf16, expected fp32"),
        (dict(eval_clients=1), "got --eval-clients 1, expected 0"),
        (dict(diagnose=1), "got --diagnose 1, expected 0"),
        (dict(eval_train_every=1), "got --eval-train-every 1, expected 0"),
        (dict(validation=0.1), "got --validation 0.1, expected 0.0"),
        (dict(epsilon=8), "got both of --epsilon and --noise-multiplier, expected one"),
        (dict(noise_multiplier=0), "got none of --epsilon and --noise-multiplier, expected one, such as --epsilon 8"),
        (dict(clip_norm=0), "got no --clip-norm"),
        (dict(delta=0), "--delta: got 0, expected more than 0 and less than 1 / 50 clients, such as 2e-03"),
        (dict(delta=0.02), "--delta: got 0.02, expected more than 0 and less than 1 / 50 clients"),
        (dict(delta=1e-300), "--delta: got 1e-300, expected at least 1e-14"),
        (dict(clip_norm=1e-300), "--clip-norm: got 1e-300, expected at least 1e-09"),
        (dict(noise_multiplier=1e-9), "--noise-multiplier: got 1e-09, expected at least 0.05"),
        (dict(dp="none", weighting="size"), "--delta has no effect without --dp: add --dp client, or leave it out"),
        (dict(algorithm="fedpd"), "got --algorithm fedpd, expected another: clients send models"),
        (dict(algorithm="fedsplit"), "got --algorithm fedsplit, expected another: clients send models"),
        (dict(algorithm="feddr"), "got --algorithm feddr, expected another"),
        (dict(algorithm="fednova", local_steps=0), "--algorithm fednova needs --local-steps K, such as 10"),
        (dict(algorithm="fedcm", local_steps=0), "--algorithm fedcm needs --local-steps K"),
        (dict(algorithm="fedlada", local_steps=0), "--algorithm fedlada needs --local-steps K"),
        (dict(algorithm="local_adaptivity"), "--correction joint divides by a mean that has noise"),
    ],
)
def test_refusals(given, message):
    base = {name: value for name, value in DP.items() if name != "rounds"}
    with pytest.raises(UserError) as caught:
        algorithms.resolve({"algorithm": "fedavg", **base, **given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_given_is_as_dp_needs_it():
    resolved = algorithms.resolve({"algorithm": "fedavg", **DP})
    assert (resolved.config.sampling, resolved.sources["sampling"]) == ("bernoulli", "dp")
    assert (resolved.config.on_nonfinite, resolved.config.eval_train_every) == ("skip", 0)


def test_clients_that_are_not_finite_leave_no_trace(data, out):
    """A rate that overflows for all: the model is noise, and nobody is named."""
    given = {**DP, "local_steps": 20}
    run = run_here(data, out, algorithm="fedavg", sampling="bernoulli", lr=1e12, weight_decay=1e12, clip=0, **given)
    assert all("nonfinite" not in record for record in run.metrics)
    start = torch.load(data.init, weights_only=True)
    moved = np.concatenate([(run.model[name] - start[name]).flatten().numpy() for name in start])
    expected = 0.8 / 4 * np.sqrt(3)
    assert np.std(moved) == pytest.approx(expected, rel=0.1)
