"""Runs with ``--secure``: the same bits with and without masks on any number of ranks; what they record and refuse."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import SIZE, communicator, is_root
from tiers import slow
from training_runs import Run, arguments, disagreement, make_data, run_here, without_times

from fedlada_mpi.mpi.transport import Transport
from fedlada_mpi.privacy.grid import NumberGrid
from fedlada_mpi.rounds.aggregate import SecureSums
from fedlada_mpi.run import main
from fedlada_mpi.support.errors import PublicError, UserError

SIZES = [7, 12, 5, 9, 4, 15, 8, 6, 11, 3]
COMMON = dict(
    secure=True, precision="fp32", rounds=2, local_epochs=1, batch_size=10, eval_every=1, lr=0.05, seed=11,
    participation=0.8,
)  # fmt: skip
CASES = {
    "fedavg": dict(COMMON, algorithm="fedavg", weighting="size"),
    "fedlada": dict(COMMON, algorithm="fedlada", lr=0.01),
    "scaffold": dict(COMMON, algorithm="scaffold"),
    "fednova": dict(COMMON, algorithm="fednova", weighting="size"),
    # Its first and third round send no vectors.
    "fedpd": dict(COMMON, algorithm="fedpd", skip=0.5, seed=2, rounds=3, participation=1.0),
}
# One launch for several runs: starting Python and MPI costs more than the runs.
SCRIPT = (
    "import json, sys; from fedlada_mpi.run import main; sys.exit(max(main(line) for line in json.loads(sys.argv[1])))"
)
UNMASKED = dict(secure_neighbours=0)
four = pytest.mark.skipif(SIZE < 4, reason="takes a server and three silos")


def results(run: Run) -> list[dict[str, object]]:
    return [{k: v for k, v in without_times(record).items() if k != "bytes_mpi"} for record in run.metrics]


def assert_same(one: Run, other: Run) -> None:
    assert results(one) == results(other)
    assert all(torch.equal(one.model[key], value) for key, value in other.model.items())
    assert {k: v.tobytes() for k, v in one.server.items()} == {k: v.tobytes() for k, v in other.server.items()}


@pytest.fixture(scope="module")
def data(shared_tmp):
    return make_data(shared_tmp / "secure-runs", SIZES, silos=4)


@pytest.fixture
def alone(data, out):
    """A method without masks, in one process."""
    return lambda name: run_here(data, out / f"alone-{name}", **CASES[name], **UNMASKED)


@pytest.mark.skipif(SIZE > 1, reason="starts ranks of its own")
@pytest.mark.parametrize(
    ("ranks", "methods", "more"),
    [(4, {**dict.fromkeys(CASES, "all"), "scaffold": "2"}, {}), slow(6, {"fedlada": "4"}, dict(transport="shared"))],
)
def test_masks_and_ranks_change_no_bit(out, data, alone, mpirun, ranks, methods, more):
    """Of runs with so many neighbours for every silo."""
    lines = [
        arguments(data, out / name, CASES[name] | dict(secure_neighbours=neighbours) | more)
        for name, neighbours in methods.items()
    ]
    mpirun(ranks, json.dumps(lines), command=("-c", SCRIPT), check=True)
    for name in methods:
        assert_same(Run(out / name, data), alone(name))


@pytest.mark.skipif(SIZE > 1, reason="one process is enough")
def test_the_grid_is_fine(data, out, alone):
    """Against exact sums of floats: another rounding, and not the same bits."""
    plain = {name: value for name, value in CASES["fedlada"].items() if name != "secure"}
    secure, plain = alone("fedlada"), run_here(data, out / "plain", **plain, sums="exact")
    assert 0 < disagreement(secure.x, plain.x, plain.data.start) < 1e-5
    for ours, theirs in zip(secure.metrics, plain.metrics, strict=True):
        for name in ("local_loss", "train_loss", "test_loss", "consistency"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
        assert ours["train_acc"] == theirs["train_acc"]


@pytest.mark.skipif(SIZE > 1, reason="one process is enough")
def test_large_losses_are_not_cut_off(data, out, alone, monkeypatch):
    from fedlada_mpi.rounds.trainer import Trainer

    finish, expected = Trainer._finish, [record["local_loss"] for record in alone("fedavg").metrics]
    scaled = lambda *args: finish(*args[:5], args[5] / 1e30, args[6])  # noqa: E731  (the steps that losses are means of)
    monkeypatch.setattr(Trainer, "_finish", scaled)
    records = run_here(data, out / "scaled", **CASES["fedavg"], **UNMASKED).metrics
    assert [record["local_loss"] for record in records] == pytest.approx([1e30 * loss for loss in expected])
    assert not any("out_of_range" in record for record in records)


def test_evaluations_are_exact_or_not_defined():
    """Sums over two clients, of squared errors for instance: of any size, but for what is not finite."""
    sums = SimpleNamespace(evaluated=NumberGrid(2.0**32, 2), masked_sum=lambda words: words)
    sums.world = SimpleNamespace(rank=0)
    table = np.array([[3.0, 4.5], [2.0**33, 1e12], [-1e30, 1e38], [1.0, np.inf], [np.nan, 1.0], [2e57, 0.0]])
    expected = [7.5, 2.0**33 + 1e12, 1e38 - 1e30, np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(SecureSums.client_sums(sums, table), expected)


@pytest.mark.ranks
@four
def test_a_resumed_run_is_the_same(data, out):
    """With new keys; clients' state is in the silos' own files."""
    whole = run_here(data, out / "whole", **CASES["scaffold"] | dict(rounds=4, eval_every=2))
    run_here(data, out / "half", **CASES["scaffold"] | dict(rounds=2, eval_every=2))
    words = arguments(data, out / "half", CASES["scaffold"] | dict(rounds=4, eval_every=2))
    assert main([*words, "--resume"]) == 0
    resumed = Run(out / "half", data)
    if is_root():
        assert_same(resumed, whole)
        assert not [*(out / "half" / "checkpoint").rglob("clients_*.h5")]
        assert len([*(out / "half" / "silos").rglob("round_000004.h5")]) == SIZE - 1


@pytest.mark.ranks
@four
def test_what_is_recorded_of_silos(data, out, capfd):
    run = run_here(data, out, **CASES["fedavg"], secure_range=2.0**-10)
    if is_root():
        for record in run.metrics:
            assert [len(values) for values in record["seconds_by_rank"].values()] == [1, 1]
            assert record["out_of_range"] > 0
        assert "beyond --secure-range, which count as its end" in capfd.readouterr().out
        assert sorted(path.name for path in (out / "silos").iterdir()) == [f"silo_{i:04d}" for i in range(1, SIZE)]
        assert "seconds of a round: " in (out / "silos" / "silo_0002" / "log.txt").read_text()
        assert not (out / "clients.h5").exists()


@pytest.mark.ranks
@four
def test_an_error_on_a_silo_stays_there(data, out, monkeypatch, capfd):
    from fedlada_mpi.rounds.trainer import Trainer

    def fail(self, *_):
        if 4 in self.data.client_ids:
            raise UserError("client 4 has 17 images of class 3")
        return []

    monkeypatch.setattr(Trainer, "round", fail)
    assert main(arguments(data, out, CASES["fedavg"])) == 2
    if is_root():
        printed = capfd.readouterr().err
        assert "class 3" not in printed
        assert ": error 1 on this silo, see its own log" in printed
        assert [path for path in (out / "silos").rglob("log.txt") if "17 images of class 3" in path.read_text()]


@pytest.mark.ranks
@four
def test_a_silo_that_cannot_note_what_it_sends_sends_nothing(data, out, monkeypatch, capfd):
    from fedlada_mpi.privacy.silo_files import SiloFiles
    from fedlada_mpi.support.disk import WriteError

    def full(self, number):
        if self.name == "silo_0002":
            raise WriteError("cannot write rounds.jsonl")

    monkeypatch.setattr(SiloFiles, "begun", full)
    assert main(arguments(data, out, CASES["fedavg"])) == 2
    if is_root():
        assert "error: silo_0002: error 1 on this silo, see its own log" in capfd.readouterr().err


@pytest.mark.ranks
@four
def test_clients_that_diverge_are_counted_not_named(data, out, monkeypatch, capfd):
    from fedlada_mpi.rounds.trainer import Trainer

    finish = Trainer._finish

    def spoiled(self, parts, r, clients, weights, losses, collector):
        losses = np.where(np.isin(clients, [2, 7]), np.nan, losses)
        return finish(self, parts, r, clients, weights, losses, collector)

    monkeypatch.setattr(Trainer, "_finish", spoiled)
    settings = CASES["fedavg"] | dict(participation=1.0)
    run = run_here(data, out, **settings, on_nonfinite="skip")
    if is_root():
        assert [record["nonfinite"] for record in run.metrics] == [2, 2]
        printed = capfd.readouterr().out
        assert "left out 2 clients, whose result is not finite" in printed
    assert main([*arguments(data, out, settings), "--overwrite"]) == 3
    if is_root():
        assert "2 clients, whom the logs of their silos name, is not finite" in capfd.readouterr().err


@pytest.mark.ranks
@four
def test_sums_of_few_silos_are_not_sent(data, out, monkeypatch, capfd):
    """Of two, each could take away its own; where nobody's result is finite, there is nothing to see."""
    from fedlada_mpi.rounds.trainer import Trainer

    sums, bad, finish, reduce = [], range(SIZE - 2), Trainer._finish, Transport.reduce

    def spoiled(self, parts, r, clients, weights, losses, collector):
        factor = np.nan if communicator().rank in bad else 1.0
        return finish(self, parts, r, clients, weights, losses * factor, collector)

    monkeypatch.setattr(Trainer, "_finish", spoiled)
    monkeypatch.setattr(Transport, "reduce", lambda *args: (sums.append(1), reduce(*args)))
    settings = dict(CASES["fedavg"], on_nonfinite="skip", participation=1.0)
    assert main(arguments(data, out, settings)) == 3
    assert not sums
    if is_root():
        assert "round 1: only 2 silos have results that are finite, which a sum of" in capfd.readouterr().err
    bad = range(SIZE)
    assert main([*arguments(data, out, settings), "--overwrite"]) == 0


@pytest.mark.ranks
@four
def test_other_silos_make_rounds_void(data, out, capfd):
    """A run that is started again with other clients per silo, from the model that it had."""
    settings = CASES["fedavg"] | dict(rounds=3, silo_per_rank=False, batch_size=2)
    run_here(data, out, **settings)
    run = run_here(data, out, **settings | dict(rounds=4, silo_per_rank=True), overwrite=True)
    if is_root():
        assert [record.get("void", False) for record in run.metrics] == [True, True, True, False]
        assert "note: rounds 1 to 3 are void" in capfd.readouterr().out
        assert run.metrics[2]["participants"] == []
        assert run.metrics[3]["test_acc"] is not None


@pytest.mark.ranks
@pytest.mark.skipif(SIZE > 3, reason="has enough of them")
def test_too_few_silos(data, out, capfd):
    assert main(arguments(data, out, CASES["fedavg"])) == 2
    if is_root():
        assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")] == [
            f"error: --secure: got {max(1, SIZE - 1)} silo{'s' * (SIZE > 2)}, expected at least 3: start 4 ranks or "
            "more, of which rank 0 is the server"
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(robust="median"), "--robust median takes the vectors of single clients, which --secure does not allow"),
        (dict(adopt=True), "--adopt lets others read the data of a silo, which --secure does not allow"),
        (dict(server_trains=True), "--server-trains makes the server a silo"),
        (dict(eval_clients=1), "--eval-clients 1 records single clients"),
        (dict(diagnose=1), "--diagnose 1 adds up gradients that are not masked"),
        (dict(wire="bf16"), "--wire bf16 rounds what has to be exact"),
        (dict(sums="fast"), "--sums fast depends on the number of ranks"),
        (dict(min_silos=2), "--min-silos: got 2, expected at least 3 with --secure"),
        (dict(secure_neighbours="1"), "--secure-neighbours: got '1', expected all, a number from 2 on, or 0"),
        (dict(secure_neighbours="many"), "--secure-neighbours: got 'many'"),
        (dict(secure_range=-1), "--secure-range: got -1.0, expected more than 0"),
        (dict(secure=False, silo_keys="keys"), "--silo-keys has no effect without --secure"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(settings, message):
    from fedlada_mpi.algorithms import resolve

    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        resolve({"secure": True, **settings})


@pytest.mark.parametrize(
    ("own", "others", "refused"),
    [
        (dict(secure=True), {}, ""),
        (dict(secure=True), dict(secure_neighbours="0"), "--secure-neighbours: got 0 from the server, expected auto"),
        (dict(secure=True, secure_neighbours="0"), dict(secure_neighbours="0"), ""),
        (dict(secure=False), dict(secure=False, secure_neighbours="0"), ""),
        (dict(secure=True, dp="client"), {}, "--dp: got none from the server, expected client"),
        (dict(dp="client", epsilon="2"), dict(dp="client", epsilon=8.0), "--epsilon: got 8.0 from the server"),
        (dict(clip_norm=1.0), dict(clip_norm=5.0), "--clip-norm: got 5.0 from the server"),
        (dict(local_steps="2"), dict(local_steps=1), "--local-steps: got 1 from the server, expected 2"),
        (dict(alpha=0.3), dict(hyper={"alpha": 0.9}), "--alpha: got 0.9 from the server, expected 0.3"),
        (dict(out="here", device="cpu"), dict(out="there", device="cuda"), ""),
        (dict(silo_dir="here"), dict(silo_dir="there"), ""),
        (dict(silo_dir="here"), {}, "--silo-dir: got none from the server"),
        (dict(secure=True), dict(eval_clients=1), "what a silo does not do: --eval-clients 1 records single clients"),
        (dict(secure=True), dict(diagnose=1), "--diagnose 1 adds up gradients that are not masked"),
        (dict(secure=True), dict(algorithm="leak.py:Leak"), "--algorithm: the server asks for 'leak.py:Leak', which"),
        (dict(secure=True, algorithm="own.py:Own"), dict(algorithm="own.py:Own"), ""),
    ],
)
def test_a_silo_keeps_to_what_it_was_started_with(own, others, refused):
    from fedlada_mpi.session.plan import Request
    from fedlada_mpi.settings import Config

    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        Request(own).check_plan(Config(**{"secure": True, "sums": "exact", "min_silos": 3, **others}))


def test_a_silo_signs_by_its_own_keys(tmp_path):
    """Also where a file of settings says which they are."""
    from fedlada_mpi.session.plan import Plan, Request

    file = tmp_path / "own.toml"
    file.write_text('secure = true\nsilo_keys = "keys"\n')
    plan = Plan({"secure": True, "silo_keys": ""}, "", 0)
    assert plan.config(Request({}, str(file))).silo_keys == "keys"
    assert plan.config(Request({"silo_keys": "mine"}, str(file))).silo_keys == "mine"


def test_settings_that_follow():
    from fedlada_mpi.algorithms import resolve

    config = resolve({"secure": True}).config
    assert (config.sums, config.min_silos) == ("exact", 3)


def test_rounds_of_few_silos():
    """Two clients per round, of three silos with one client each."""
    from types import SimpleNamespace

    from fedlada_mpi.session.secure_rounds import Contributors
    from fedlada_mpi.settings import Config

    owners = SimpleNamespace(clients_of=[np.empty(0, int), np.array([0]), np.array([1]), np.array([2])])
    config = Config(clients=3, participation=0.67, rounds=5, sampling="fixed")
    session = SimpleNamespace(config=config, owners=owners, manifest=SimpleNamespace(clients=3), start=0)
    with pytest.raises(PublicError, match=r"round 1 belong to fewer than 3 silos.*--participation 0.85 would do"):
        Contributors(session).refuse_few()
    session.config = Config(clients=3, participation=1.0, rounds=5)
    Contributors(session).refuse_few()
