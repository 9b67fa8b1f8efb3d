"""``--estimate``: formulas by hand, times from a clock that the test sets, and nothing on the disk."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from limits import LIMIT
from ranks import SIZE, is_root
from training_runs import arguments, make_data

from fedlada_mpi.run import main, parse
from fedlada_mpi.session import estimate as package
from fedlada_mpi.session.estimate import probe as probes
from fedlada_mpi.session.estimate.extrapolation import Measured, Span, extrapolate
from fedlada_mpi.session.estimate.forecast import Fit, PlannedRounds, Work, samples
from fedlada_mpi.session.estimate.result import duration
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError

SIZES = np.array([10, 20, 30, 5])  # with batches of 10: 1, 2, 3 and 1 steps


def planned(rank_of=(0, 0, 1, 1), limit=0, **settings) -> PlannedRounds:
    config = Config(
        **{"clients": 4, "participation": 1.0, "local_epochs": 1, "batch_size": 10, "rounds": 3, **settings}
    )
    return PlannedRounds(config, SIZES, np.array(rank_of), limit)


def test_the_work_of_the_slowest_rank():
    """Rank 0 has 1 + 2 steps, rank 1 has 3 + 1; in turns, each client's count, and together the longest's."""
    assert planned().work(0) == Work(client_steps=4, steps=3)
    assert planned(limit=1).work(0) == Work(client_steps=4, steps=4)
    assert planned(rank_of=(0, 0, 0, 0)).work(0) == Work(client_steps=7, steps=3)
    assert planned().work(0, cut=2) == Work(client_steps=4, steps=2)
    assert planned(rank_of=(0, 0, -1, -1)).work(0) == Work(client_steps=3, steps=2)
    assert planned(rank_of=(-1,) * 4).work(0) == Work()


def test_stacks_of_one_width_are_padded():
    """Clients 0 and 3 share a stack of two, the others have one each with a second row that is theirs again."""
    rounds = planned(rank_of=(0,) * 4, limit=2, sums="exact", max_clients_at_once=2)
    assert rounds.work(0) == Work(client_steps=2 * 3 + 2 * 2 + 2 * 1, steps=3 + 2 + 1)


def test_graphs_are_captured_once_for_every_number_of_clients(monkeypatch):
    """A rank that grows from two to three clients captures all anew."""
    drawn = {0: [0, 1], 1: [0, 1], 2: [0, 1, 2]}
    rounds = planned(rank_of=(0,) * 4)
    monkeypatch.setattr(rounds, "participants", lambda t: np.array(drawn[t]))
    assert rounds.running(0) == {2, 1}
    assert rounds.running(2) == {3, 2, 1}
    assert rounds.captures() == 2 + 0 + 3


def test_rounds_that_are_timed_differ_in_their_work():
    works = [Work(4, 2), Work(8, 2), Work(8, 2), Work(), Work(2, 1)]
    assert [works[t] for t in samples(works)] == [Work(8, 2), Work(4, 2), Work(2, 1)]
    assert len(samples([Work(4, 2)] * 9)) == 1
    assert samples([Work()]) == []


def test_a_fit_finds_the_numbers_that_made_the_times():
    works = [Work(10, 1), Work(40, 4), Work(2, 2), Work(8, 8)]
    times = [(work, 0.5 + 0.1 * work.steps + 0.02 * work.client_steps) for work in works]
    fit = Fit.of(times)
    assert (fit.fixed, fit.per_step, fit.per_client_step) == pytest.approx((0.5, 0.1, 0.02))
    assert fit.seconds(Work(100, 10)) == pytest.approx(3.5)


def test_a_fit_has_no_negative_numbers_and_needs_one_time():
    fit = Fit.of([(Work(1, 1), 1.0), (Work(2, 2), 3.0)])
    assert min(fit.fixed, fit.per_step, fit.per_client_step) >= 0
    assert Fit.of([(Work(8, 2), 0.25)]).seconds(Work(8, 2)) == pytest.approx(0.25)


def test_a_whole_run_by_hand():
    """Ten rounds of 0.3 s, of which the first two stand for all; two evaluations, one checkpoint and the results."""
    measured = Measured(
        rounds=[(Work(1, 1), [0.2, 0.1, 0.6]), (Work(3, 1), [0.4, 0.3, 0.8])],
        phases={},
        first=2.0,
        capture=0.5,
        evaluations={("test",): [1.0, 0.5, 2.0]},
        first_evaluations=0.25,
        start=4.0,
        checkpoint=0.125,
    )
    mean, total = extrapolate(measured, [Work(1, 1), Work(3, 1)], 10, Counter({("test",): 2}), captures=3, saves=1)
    assert mean == Span(*(pytest.approx(value) for value in (0.3, 0.2, 0.7)))
    once = 4.0 + 2.0 + 3 * 0.5 + 0.25 + 2 * 0.125
    by_hand = (once + 3.0 + 2 * 1.0, once + 2.0 + 2 * 0.5, once + 7.0 + 2 * 2.0)
    assert total == Span(*(pytest.approx(value) for value in by_hand))


def test_the_ends_of_a_span_are_in_order():
    """A slow repetition of short rounds alone makes a step look cheap: the slowest ones then promise the most."""
    measured = Measured(
        [(Work(1, 1), [0.1, 0.1, 0.9]), (Work(10, 10), [1.0, 1.0, 1.0])], {}, 0.0, 0.0, {}, first_evaluations=0.0
    )
    for span in extrapolate(measured, [Work(100, 100)], 3, Counter(), captures=0, saves=0):
        assert span.least < span.expected == span.most
        assert span.least == pytest.approx(span.expected / 5)


class FakeProbe:
    """Rounds that take what a formula says, on a clock of their own; the first ones and new graphs take longer."""

    def __init__(self, here: PlannedRounds, per_step: float, monkeypatch):
        self.here, self.per_step, self.now, self.asked = here, per_step, 0.0, []
        self.known: set[int] = set()
        monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def round(self, t: int, steps: int = 0) -> dict[str, float]:
        self.asked.append((t, steps))
        work, running = self.here.work(t, steps), self.here.running(t, steps)
        seconds = 0.5 + self.per_step * work.steps + 0.25 * self.per_step * work.client_steps
        seconds += 7.0 * (not self.known) + 0.75 * len(running - self.known)
        self.known |= running
        self.now += seconds
        return {"train": seconds, "eval": 0.0, "total": seconds}

    def evaluation(self, due) -> float:
        self.now += 1.5
        return 1.5


@pytest.mark.parametrize("per_step", [0.001, 0.6, 10.0])
def test_times_are_extrapolated_from_rounds_that_are_cut(per_step, monkeypatch):
    """Of a hundred steps: all of them where they are quick, else as few as tell what one takes."""
    here = planned(local_steps=100, local_epochs=1, rounds=50, participation=0.5, seed=3)
    probe = FakeProbe(here, per_step, monkeypatch)
    measured = probes.measure(probe, here, Counter({("test",): 2}), np.array([[0.0, 3.0, 0.0]]))
    works = here.works()
    assert {work.client_steps for work in works} == {100, 200}  # one or two participants on the slowest rank
    expected = np.mean([0.5 + per_step * (work.steps + 0.25 * work.client_steps) for work in works])
    mean, _ = extrapolate(measured, works, 50, Counter({("test",): 2}), 0, 1)
    if per_step < 10:
        assert mean.expected == pytest.approx(expected, rel=0.02)
        assert measured.capture == pytest.approx(0.75)
    else:  # a single round is so long that those with less work are not timed
        assert mean.expected == pytest.approx(expected, rel=0.2)
    assert measured.first == pytest.approx(7.75)
    assert measured.evaluations == {("test",): [1.5] * probes.REPEATS}
    assert max(steps for _, steps in probe.asked) <= 8
    assert probe.now < 200


def test_long_evaluations_are_not_run(monkeypatch):
    probe = FakeProbe(planned(), 0.001, monkeypatch)
    batches = np.array([[9.0, 4.0, 0.0], [11.0, 0.0, 0.0]])
    measured = probes.measure(probe, planned(), Counter({("test", "train"): 1}), batches)
    assert measured.evaluations == {("test", "train"): [13.0]}


def test_durations():
    assert [duration(s) for s in (0.01234, 12.34, 754, 9000)] == ["0.0123 s", "12.3 s", "12 min 34 s", "2 h 30 min"]


CLIENTS, ROUNDS, WORD = 6, 4, 8


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "estimate", [6] * CLIENTS, silos=3)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(probes, "REPEATS", 1)


SETTINGS = dict(algorithm="scaffold", rounds=ROUNDS, local_steps=2, participation=0.5, eval_every=2, checkpoint_every=1)


def files(folder) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*")}


@pytest.mark.ranks
def test_bytes_memory_and_no_file(data, out, shared_tmp, quick):
    """SCAFFOLD sends x and c down, offset and dc up, and a client keeps c_i; three of six clients, in double."""
    line = arguments(data, out, SETTINGS)
    before = files(shared_tmp)
    found = package.estimate(parse([*line, "--estimate"])[0])
    assert files(shared_tmp) == before
    assert (found is None) == (not is_root())
    if found is None:
        return
    d = data.network.layout.numel
    assert found.bytes_down == found.bytes_up == ROUNDS * 3 * 2 * d * WORD
    size = data.network.layout.size
    assert found.bytes_mpi == ROUNDS * (2 + 2) * (SIZE - 1) * size * WORD
    assert found.checkpoint_bytes == (2 + CLIENTS) * size * WORD
    assert (found.checkpoints, found.evaluations["test+train"][0]) == (ROUNDS, ROUNDS // 2)
    assert found.predicted_memory < found.host_memory < 4e9
    assert found.gpu_memory == 0
    assert 0 < found.round.least <= found.round.expected <= found.round.most
    assert found.total.expected > found.start + ROUNDS * found.round.expected
    assert found.notes == []
    assert "whole run" in str(found)


@pytest.mark.skipif(SIZE > 1, reason="one process stands for several")
def test_one_process_stands_for_many_ranks(data, tmp_path, quick, capsys):
    line = arguments(data, tmp_path / "out", {**SETTINGS, "diagnose": 2})
    found = package.estimate(parse([*line, "--estimate", "4"])[0], 4)
    assert found.bytes_mpi == ROUNDS * (2 + 2) * 3 * data.network.layout.size * WORD
    assert found.ranks == 4
    assert "without the time of messages" in found.notes[0]
    assert found.notes[1] == "without what --diagnose adds"
    assert main([*line, "--estimate", "4"]) == 0
    assert "4 ranks" in capsys.readouterr().out.splitlines()[0]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--estimate", "0"], "got '0', expected a number of ranks"),
        (["--estimate", "many"], "got 'many', expected a number of ranks"),
        (["--estimate", "--resume"], "leave --resume out"),
        (["--estimate", "--print-config"], "not allowed with argument"),
        (["--estimate", "--secure"], "without --secure"),
        (["--estimate", "--rounds", "0"], "got --rounds 0, expected at least one round"),
        (["--estimate", "4", "-n", "2"], "leave the number, or -n 2, out"),
    ],
)
def test_what_cannot_be_estimated_is_refused(data, tmp_path, flags, message, capsys):
    try:
        status = main([*arguments(data, tmp_path / "out", SETTINGS), *flags])
    except (SystemExit, UserError) as ended:
        status = getattr(ended, "code", 2)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_two_ranks_end_with_0(data, tmp_path, mpirun):
    line = arguments(data, tmp_path / "out", SETTINGS)
    done = mpirun(2, *line, "--estimate", timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("whole run") == 1
    refused = mpirun(2, *line, "--estimate", "4")
    assert refused.returncode == 2
    assert refused.stderr.count("error: --estimate 4: this run has 2 ranks already") == 1
    assert not any(tmp_path.iterdir())
