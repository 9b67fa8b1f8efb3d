"""Results that are not finite: the run ends and says so, or goes on without the clients they come from."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import torch
from ranks import is_root
from reference import Settings, federate
from training_runs import Run, arguments, disagreement, make_data, run_here

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms.scaffold import Scaffold
from fedlada_mpi.run import main
from fedlada_mpi.rundir import checkpoint
from fedlada_mpi.rundir.files import to_json

# Copies of one image per client; batches of 3 make 2, 6, 4, 2 steps in two epochs, by which a method can tell them.
SIZES, STEPS, SPOILT = [3, 8, 5, 2], [2, 6, 4, 2], 1
SGD = dict(lr=0.2, lr_decay=0.8, weight_decay=0.05, clip=0.6)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "nonfinite", SIZES, silos=3, one_image_per_client=True)


def strict(line: str):
    """Parse JSON as the standard has it, without NaN and Infinity."""

    def refuse(name: str):
        raise ValueError(name)

    return json.loads(line, parse_constant=refuse)


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", ["fedavg", "fedlada"])
def test_a_diverging_run_ends_before_anything_is_lost(algorithm, data, out, capsys):
    """Decay by a factor of -999 per step overflows after some rounds; the round before is the last that is kept."""
    settings = dict(
        algorithm=algorithm, rounds=60, local_steps=1, lr=1.0, weight_decay=1000.0, lr_decay=1.0, precision="fp32",
        checkpoint_every=1, eval_every=1, clip=0,
    )  # fmt: skip
    assert main(arguments(data, out, settings)) == 3
    printed = capsys.readouterr().err
    rounds = [strict(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = rounds[-1]
    assert 2 <= last < 59
    assert rounds == list(range(1, last + 1))
    if is_root():
        assert printed.startswith(f"error: round {last + 1}: the result of client")
        assert printed.count("\n") == 1
        assert f"the last checkpoint is {checkpoint.folder(out, last)}" in printed
    else:
        assert printed == ""
    with h5py.File(checkpoint.folder(out, last) / "server.h5") as file:
        assert all(np.isfinite(file[name][:]).all() for name in file if name != "run")
    assert not (out / "model.pt").exists()
    assert main([*arguments(data, out, settings), "--resume"]) == 3, "it does the same again"
    assert [path.name for path in checkpoint.complete(out)][-1] == f"round_{last:06d}"


def spoil(monkeypatch, which):
    """A method that is SCAFFOLD, but what some clients send is not finite."""

    class Spoilt(Scaffold):
        name = "spoilt"

        def finish(self, c, s, r):
            sent = super().finish(c, s, r)
            bad = which(c.steps.squeeze(1))
            sent["offset"][bad, 0] = torch.nan
            c.c_i[bad] = torch.nan
            return sent

    monkeypatch.setitem(algorithms._built_in(), "spoilt", Spoilt)


@pytest.mark.ranks
@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("at_once", [0, 1])
def test_a_client_that_is_left_out(weighting, at_once, data, out, monkeypatch):
    """As the reference does with the other participants only; the client's own state stays as it was."""
    spoil(monkeypatch, lambda steps: steps == STEPS[SPOILT])
    run = run_here(
        data, out, algorithm="spoilt", on_nonfinite="skip", rounds=4, local_epochs=2, batch_size=3, participation=0.75,
        weighting=weighting, max_clients_at_once=at_once, eval_every=1, **SGD,
    )  # fmt: skip
    included = [[client for client in p if client != SPOILT] for p in run.participants]
    assert included != run.participants
    settings = Settings(weighting=weighting, alpha=1.0, **SGD)
    expected = federate("scaffold", data.start, data.gradients, data.sizes, STEPS, included, settings)
    assert disagreement(run.x, expected[-1].x, data.start) < 1e-9
    np.testing.assert_allclose(run.server["c"], expected[-1].vectors["c"], rtol=1e-9, atol=1e-12)
    for record, reference, participants in zip(run.metrics, expected, run.participants, strict=True):
        assert record.get("nonfinite") == ([SPOILT] if SPOILT in participants else None)
        assert record["consistency"] == pytest.approx(reference.consistency, rel=1e-9)


@pytest.mark.ranks
def test_one_such_client_ends_the_run_by_default(data, out, monkeypatch, capsys):
    spoil(monkeypatch, lambda steps: steps == STEPS[SPOILT])
    settings = dict(algorithm="spoilt", rounds=2, local_epochs=2, batch_size=3, participation=1.0, **SGD)
    assert main(arguments(data, out, settings)) == 3
    assert capsys.readouterr().err == (
        "error: round 1: the result of client 1 is not finite: lower --lr, set --clip, or leave such clients out with "
        "--on-nonfinite skip; there is no checkpoint yet\n" if is_root() else ""
    )  # fmt: skip
    assert (out / "metrics.jsonl").read_text() == ""


@pytest.mark.ranks
def test_rounds_without_any_finite_client(data, out, monkeypatch, capsys):
    spoil(monkeypatch, lambda steps: steps > 0)
    settings = dict(
        algorithm="spoilt", on_nonfinite="skip", rounds=30, local_epochs=2, batch_size=3, participation=0.5, **SGD
    )
    assert main(arguments(data, out, settings)) == 3
    if is_root():
        assert "and no client's was for 10 rounds" in capsys.readouterr().err
    metrics = Run(out, data).metrics
    assert [record["round"] for record in metrics] == list(range(1, 10))
    assert all(record["consistency"] is None and record["local_loss"] is None for record in metrics)


@pytest.mark.ranks
def test_a_server_step_that_overflows_is_named_as_such(data, out, monkeypatch, capsys):
    """Also where clients were left out in the same round."""
    spoil(monkeypatch, lambda steps: steps == STEPS[SPOILT])
    monkeypatch.setattr(Scaffold, "server", lambda self, s, mean, r: s.x.fill_(torch.inf))
    settings = dict(algorithm="spoilt", on_nonfinite="skip", rounds=2, local_epochs=2, batch_size=3, **SGD)
    assert main(arguments(data, out, settings)) == 3
    if is_root():
        assert capsys.readouterr().err.startswith(
            "error: round 1: the server's step gave parameters that are not finite"
        )


def test_numbers_that_json_does_not_have():
    value = {"a": [1.5, float("nan")], "b": (float("inf"), {"c": -float("inf")}), "d": "NaN"}
    assert strict(to_json(value)) == {"a": [1.5, None], "b": [None, {"c": None}], "d": "NaN"}
    assert to_json({"a": 0.1}) == '{"a": 0.1}'
