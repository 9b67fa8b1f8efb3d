"""The course of a search with pretended runs: decisions, kills at every step, failures, two at once, changed plans."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fedlada_mpi import tune
from fedlada_mpi.rundir import lock
from fedlada_mpi.rundir.columns import ACCURACY, LOSS, Columns
from fedlada_mpi.settings import load
from fedlada_mpi.support.errors import DIVERGED, UserError
from fedlada_mpi.tuning import journal, outcomes, page, results, search
from fedlada_mpi.tuning.plan import parse_plan
from fedlada_mpi.tuning.search import Ended, Search

# Nine trials, with all of these values in another order.
PLAN = {
    "base": {"algorithm": "fedavg", "eval_every": 1},
    "search": {"weight_decay": [i / 10 for i in range(9)]},
    "tune": {"strategy": "halving", "trials": 9, "rounds": 9, "seeds": 2},
}


def accuracy(given, t):
    """0.3 is the best on the last rung; 0.6 seems to be on the first one."""
    decay, seed = given["weight_decay"], given.get("seed", 0)
    good = 1 - abs(decay - 0.3) if t > 1 else 1 - abs(decay - 0.6)
    return round(0.5 * good + 0.01 * t + 0.02 * seed, 6)


class Killed(BaseException):
    """Of the process."""


class Pretended:
    """Stands in for what starts runs; ``statuses`` has those of runs that fail, by decay and rounds."""

    def __init__(self, statuses=None):
        self.statuses, self.calls = statuses or {}, []

    def __call__(self, runs):
        failed = {}
        for index, run in enumerate(runs):
            self.calls.append((run.given["weight_decay"], run.given.get("seed", 0), run.rounds))
            if status := self.statuses.get((run.given["weight_decay"], run.rounds)):
                failed[index] = status
            else:
                train(run)
        return Ended(0, failed)


def train(run, until=None):
    """As a run does: it goes on where it is, and leaves its metrics, checkpoint and results."""
    done, last = run.rounds_done(), until or run.rounds
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "config.json").write_text(json.dumps(run.given))
    with open(run.directory / "metrics.jsonl", "a") as file:
        for t in range(done + 1, last + 1):
            tested = accuracy(run.given, t) - 0.1 if run.given["eval_test"] == "end" and t == run.rounds else None
            record = {"round": t, "val_acc": accuracy(run.given, t), "test_acc": tested, "seconds": {"total": 1.0}}
            file.write(json.dumps(record) + "\n")
    if last == run.rounds:
        (run.directory / "checkpoint" / f"round_{last:06d}").mkdir(parents=True, exist_ok=True)
        (run.directory / "summary.json").write_text(json.dumps({"status": "finished", "rounds": last}))


def make(path, runner=None, **tune_changes):
    plan = parse_plan({**PLAN, "tune": {**PLAN["tune"], **tune_changes}}, "p", path)
    return Search(plan, runner or Pretended(), say=lambda _: None)


def decided(path):
    return json.loads((path / "tune.json").read_text())


def decays(found, stage):
    return sorted(each.run.given["weight_decay"] for each in found.stages[stage])


def test_a_search_by_hand(tmp_path):
    one = make(tmp_path)
    assert one.run() == 0
    state = one.state()
    assert state.finished
    # Round 1: 0.6, 0.5 and 0.7 are the best three, of 0.5 and 0.7 both are; round 3: 0.5 is the nearest to 0.3.
    assert decays(state, 1) == [0.5, 0.6, 0.7]
    assert decays(state, 2) == [0.5]
    winner = state.winners["fedavg"]
    assert winner.settings == {"weight_decay": 0.5}
    assert winner.score == pytest.approx(0.5 * 0.8 + 0.09)
    # Seeds 1 and 2, and the test set is 0.1 worse.
    assert winner.tests == pytest.approx({1: 0.41, 2: 0.43})
    assert winner.mean == pytest.approx(0.42)
    assert winner.std == pytest.approx(0.02 / math.sqrt(2))
    first, second, third = decided(tmp_path)["decisions"]
    assert [(each["stage"], each["rounds"]) for each in (first, second, third)] == [(0, 1), (1, 3), (2, 9)]
    order = [one.plan.searches[0].points[i]["weight_decay"] for i in first["methods"]["fedavg"]["best first"]]
    assert [order[0], {*order[1:3]}, {*order[3:5]}, *order[5:]] == [0.6, {0.5, 0.7}, {0.4, 0.8}, 0.3, 0.2, 0.1, 0.0]
    assert first["methods"]["fedavg"]["go on"] == sorted(first["methods"]["fedavg"]["best first"][:3])
    assert second["methods"]["fedavg"]["go on"] == third["methods"]["fedavg"]["best first"] == [winner.trial]
    # Every round once: a trial that goes on is not started over.
    assert sorted(one.runner.calls) == sorted(
        [
            *((i / 10, 0, 1) for i in range(9)),
            (0.5, 0, 3),
            (0.6, 0, 3),
            (0.7, 0, 3),
            (0.5, 0, 9),
            (0.5, 1, 9),
            (0.5, 2, 9),
        ]
    )


def test_the_same_command_again_starts_nothing(tmp_path):
    make(tmp_path).run()
    again = make(tmp_path)
    assert again.run() == 0
    assert again.runner.calls == []


SMALL = dict(trials=4, factor=2, rounds=4, seeds=1)


class Counted:
    """Counts what a search writes and starts, and kills it before or after one of these steps."""

    def __init__(self, kill_at=-1, after=False):
        self.steps, self.kill_at, self.after = 0, kill_at, after

    def step(self, action, *arguments):
        self.steps += 1
        if self.steps - 1 == self.kill_at and not self.after:
            raise Killed
        action(*arguments)
        if self.steps - 1 == self.kill_at:
            raise Killed

    def run(self, path, monkeypatch):
        def runner(runs):
            for run in runs:
                self.step(train, run)
            return Ended(0, {})

        write = journal.write_atomically
        with monkeypatch.context() as patch:
            patch.setattr(journal, "write_atomically", lambda *arguments: self.step(write, *arguments))
            return make(path, runner, **SMALL).run()


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_step(tmp_path, monkeypatch, after):
    """What follows is decided as if nothing had happened."""
    counted = Counted()
    counted.run(tmp_path / "whole", monkeypatch)
    assert counted.steps == (4 + 2 + 1 + 1) + 5  # runs; the journal at the beginning, and after each stage
    for kill_at in range(counted.steps):
        path = tmp_path / f"killed{kill_at}"
        with pytest.raises(Killed):
            Counted(kill_at, after).run(path, monkeypatch)
        assert make(path, **SMALL).run() == 0
        assert decided(path) == decided(tmp_path / "whole")


def test_killed_in_the_middle_of_a_run_that_goes_on(tmp_path):
    """The score of the rung before stays what it was, also where the journal is lost."""
    make(tmp_path / "whole").run()

    def runner(runs):
        for run in runs:
            train(run, until=min(run.rounds, 5))
            if run.rounds == 9:
                (run.directory / "summary.json").unlink()  # as when the results are about to be replaced
                raise Killed
        return Ended(0, {})

    with pytest.raises(Killed):
        make(tmp_path / "killed", runner).run()
    (tmp_path / "killed" / "tune.json").unlink()
    assert make(tmp_path / "killed").run() == 0
    assert decided(tmp_path / "killed") == decided(tmp_path / "whole")


def test_checkpoints_are_those_of_runs_that_go_on(tmp_path):
    """Of trials that are out, and of all once the winner is known; its own runs may get more rounds later."""

    def with_checkpoint():
        return {path.parents[1].name.split("_")[-2] for path in tmp_path.glob("trials/*/checkpoint/round_*")}

    stopped = make(tmp_path, lambda runs: Pretended()(runs) if runs[0].rounds < 9 else Ended(75, {}))
    assert stopped.run() == 75
    assert with_checkpoint() == {"decay=0.5"}
    own = tmp_path / "notes.txt"
    own.write_text("kept")
    assert make(tmp_path).run() == 0
    assert with_checkpoint() == set()
    assert len([*tmp_path.glob("winner/*/checkpoint/round_*")]) == 2
    assert own.read_text() == "kept"


def test_a_trial_that_has_failed_goes_on_from_its_checkpoint(tmp_path):
    """On the second rung, where its results on the first one would have no checkpoint to continue from."""
    assert make(tmp_path, Pretended({(0.5, 3): 1, (0.6, 3): DIVERGED})).run() == 0
    kept = [*tmp_path.glob("trials/*/checkpoint/round_*")]
    assert [(path.parents[1].name.split("_")[-2], path.name) for path in kept] == [("decay=0.5", "round_000001")]


def test_a_journal_knows_what_was_removed(tmp_path):
    """Directories of trials that were left out may go."""
    stopped = make(tmp_path, lambda runs: Pretended()(runs) if runs[0].rounds < 9 else Ended(75, {}))
    assert stopped.run() == 75
    for directory in (tmp_path / "trials").iterdir():
        if "weight_decay=0.5" not in directory.name:
            shutil.rmtree(directory)
    rest = make(tmp_path)
    assert rest.run() == 0
    assert {rounds for _, _, rounds in rest.runner.calls} == {9}


def test_diverged_and_failed_trials_are_the_worst(tmp_path):
    """0.6 diverges, and is not started again; 0.5 fails for another reason, and is tried twice."""
    runner = Pretended({(0.6, 1): DIVERGED, (0.5, 1): 1})
    one = make(tmp_path, runner)
    assert one.run() == 0
    assert runner.calls.count((0.6, 0, 1)) == 1
    assert runner.calls.count((0.5, 0, 1)) == 2
    state = one.state()
    shown = "\n".join(results.status_rows(one.plan, state))
    assert "diverged" in shown
    assert "failed" in shown
    assert results.closing_lines(one.plan, state)[-1].startswith("1 run failed, not by diverging: see log.txt")
    text = page.write(one.plan, state).read_text()
    assert "diverged" in text
    again = make(tmp_path)
    assert again.run() == 0
    assert again.runner.calls == []
    # What failed is started again on request, and all that follows is decided anew; a divergence stays.
    assert again.retry_failed() == 1
    assert again.run() == 0
    assert again.runner.calls[:2] == [(0.5, 0, 1), (0.5, 0, 3)]
    assert again.retry_failed() == 0


def test_a_failed_trial_starts_again_also_where_directories_were_removed(tmp_path):
    """Those of trials that were left out are not trained again."""
    one = make(tmp_path, Pretended({(0.5, 1): 1}))
    assert one.run() == 0
    shutil.rmtree(tmp_path / "trials")
    again = make(tmp_path)
    assert again.retry_failed() == 1
    assert again.run() == 0
    assert again.runner.calls == [(0.5, 0, 1), (0.5, 0, 3), (0.5, 0, 9), (0.5, 1, 9), (0.5, 2, 9)]
    assert make(tmp_path).retry_failed() == 0


def test_what_failed_is_to_do_again_on_request(tmp_path, capsys):
    path = tmp_path / "p.toml"
    path.write_text("[search]\nweight_decay = [0.1, 0.2]\n[tune]\nstrategy = 'grid'\nrounds = 1\nseeds = 0\n")
    plan = parse_plan(load(path), "p", tmp_path / "out")
    assert Search(plan, Pretended({(0.1, 1): 1}), say=lambda _: None).run() == 0
    command = [str(path), "--out", str(tmp_path / "out"), "--todo"]
    assert tune.main(command) == 0
    assert capsys.readouterr().out == ""
    assert tune.main([*command, "--retry-failed"]) == 0
    assert capsys.readouterr().out == "0 0\n"


def test_methods_of_one_name_are_told_apart(tmp_path):
    """Whose files' letters are the same, too."""
    text = "from fedlada_mpi.algorithms.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    methods = [f"{tmp_path}/{name}.py:Mine" for name in ("my-own", "my_own")]
    for method in methods:
        Path(method.removesuffix(":Mine")).write_text(text)
    tables = {**PLAN, "base": {**PLAN["base"], "algorithm": methods}, "tune": {**PLAN["tune"], **SMALL}}
    one = Search(parse_plan(tables, "p", tmp_path / "p"), Pretended(), say=lambda _: None)
    assert one.run() == 0
    text = page.write(one.plan, one.state()).read_text()
    for method in methods:
        # As a winner, in the costs of three rungs and of the winners' runs, and above its trials.
        assert text.count(f"Mine ({method.removesuffix(':Mine')})") >= 6
    written = results.write_settings(one.plan, one.state())
    assert [load(path)["algorithm"] for path in written] == methods
    assert len(list(one.plan.root.rglob("landscape_*.svg"))) == 2


def test_an_undefined_score_is_the_worst(tmp_path, monkeypatch):
    monkeypatch.setattr("test_search.accuracy", lambda given, t: None if given["weight_decay"] == 0.6 else 0.5)
    one = make(tmp_path, strategy="random", seeds=0)
    assert one.run() == 0
    state = one.state()
    assert [each.state for each in state.outcomes.values()].count("undefined") == 1
    assert state.winners["fedavg"].settings != {"weight_decay": 0.6}


def test_no_trial_has_a_score(tmp_path):
    runner = Pretended({(i / 10, 1): DIVERGED for i in range(9)})
    one = make(tmp_path, runner)
    assert one.run() == DIVERGED
    state = one.state()
    assert state.winners == {}
    assert results.write_settings(one.plan, state) == []
    assert "no trial has a score" in results.closing_lines(one.plan, state)[0]
    assert "no trial has a score" in page.write(one.plan, state).read_text()


def test_bad_input_of_a_run_stops_the_search(tmp_path):
    """As where the disk is full: it says nothing about the trial."""
    with pytest.raises(UserError, match=r"1 of 9 runs were refused, see .*log\.txt"):
        make(tmp_path, Pretended({(0.2, 1): 2})).run()
    rest = make(tmp_path)
    assert rest.run() == 0
    assert rest.runner.calls[0] == (0.2, 0, 1)


def test_runs_that_others_have_begun_are_waited_for(tmp_path):
    with pytest.raises(UserError, match="9 of 9 runs of this stage are in use elsewhere"):
        make(tmp_path, lambda runs: Ended(0, {})).run()


def test_less_is_better_where_the_task_says_so(tmp_path, monkeypatch):
    """The column is that of accuracies, as if they were errors."""
    error = replace(ACCURACY, larger_is_better=False)
    monkeypatch.setattr(outcomes, "columns_of", lambda directory: Columns((LOSS, error), error))
    one = make(tmp_path, strategy="random")
    assert one.run() == 0
    assert one.state().winners["fedavg"].settings == {"weight_decay": 0.8}


def test_the_score_is_a_mean_of_evaluations(tmp_path):
    """Of rounds 7, 8 and 9 on the last rung; on the first there is one."""
    one = make(tmp_path, mean_of=3)
    one.run()
    assert one.state().winners["fedavg"].score == pytest.approx(0.4 + 0.08)


def test_runs_of_other_code_are_not_taken(tmp_path):
    """Such as one from before a default has changed."""
    one = make(tmp_path)
    run = one.state().stages[0][0].run
    train(run)
    (run.directory / "config.json").write_text(json.dumps({**run.given, "weighting": "size"}))
    with pytest.raises(UserError, match="made with other code or defaults, changed since: weighting from size to unif"):
        one.run()
    accepting = Search(one.plan, Pretended(), accept_changed_code=True, say=lambda _: None)
    assert accepting.run() == 0
    assert (run.given["weight_decay"], 0, 1) not in accepting.runner.calls


@pytest.mark.parametrize("as_array", [False, True])
def test_runs_that_the_journal_knows_were_of_the_same_code(tmp_path, monkeypatch, as_array):
    """The code has changed before the winner's runs, when nobody reads the directories of the trials any more."""
    monkeypatch.chdir(tmp_path)
    net = tmp_path / "net.py"
    net.write_text("width = 16")
    tables = {**PLAN, "base": {**PLAN["base"], "model": "net.py:net"}, "tune": {**PLAN["tune"], **SMALL}}

    def make_it(accept=False, runner=None):
        plan = parse_plan(tables, "p", tmp_path / "found")
        return Search(plan, runner or Pretended(), accept, say=lambda _: None)

    stopped = make_it(runner=lambda runs: Ended(75, {}) if "seed" in runs[0].given else Pretended()(runs))
    assert stopped.run() == 75
    net.write_text("width = 8")
    last = stopped.plan.stages - 1
    for _ in range(2):  # the journal still has the code that it began with
        other = make_it()
        with pytest.raises(UserError, match=r"found: net\.py has changed since the search began: restore the code"):
            other.run_one(last, 0) if as_array else other.run()
        assert other.runner.calls == []
    assert other.state().stage == last  # it can be looked at
    accepting = make_it(accept=True)
    assert (accepting.run_one(last, 0) if as_array else accepting.run()) == 0
    assert len(accepting.runner.calls) == 1


def test_two_searches_at_once(tmp_path):
    one = make(tmp_path)
    with lock.hold(tmp_path, journal.LOCK), pytest.raises(lock.Busy, match="is in use by process"):
        one.run()
    assert one.runner.calls == []


def test_the_page_of_a_search_that_is_at_work(tmp_path, capsys):
    path, out = tmp_path / "p.toml", tmp_path / "out"
    path.write_text("[search]\nweight_decay = [0.1, 0.2]\n[tune]\nstrategy = 'grid'\nrounds = 1\nseeds = 0\n")
    train(parse_plan(load(path), "p", out).trial("fedlada", 0, 0))
    with lock.hold(out, journal.LOCK):
        assert tune.main([str(path), "--out", str(out), "--page"]) == 0
    assert capsys.readouterr().out == f"{out / page.NAME}\n"
    assert "At work: as of" in (out / page.NAME).read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": {**PLAN["tune"], "rounds": 12}}, "tune.rounds was 9, and is 12 now"),
        ({"search": {"weight_decay": [i / 10 for i in range(10)]}}, "search.weight_decay was "),
        ({"base": {**PLAN["base"], "lr": 0.2}}, "base.lr was not there, and is 0.2 now"),
    ],
)
def test_a_changed_plan_is_refused(tmp_path, changes, message):
    make(tmp_path).run()
    other = Search(parse_plan({**PLAN, **changes}, "p", tmp_path), Pretended())
    with pytest.raises(UserError) as error:
        other.run()
    assert f"{tmp_path} holds the search of another plan: {message}" in str(error.value)
    assert other.runner.calls == []


def test_the_order_of_a_grid_that_has_begun_must_stay(tmp_path):
    """Its trials are numbered in that order: the score of one would be taken for another's."""
    space = {"weight_decay": [0.1, 0.3], "lr": [0.1, 0.2]}
    plan = {**PLAN, "search": space, "tune": {"strategy": "grid", "rounds": 3, "seeds": 1}}
    assert Search(parse_plan(plan, "p", tmp_path), Pretended(), say=lambda _: None).run() == 0
    other = {**plan, "search": dict(reversed(space.items()))}
    with pytest.raises(UserError, match="another order: got lr, weight_decay, expected weight_decay, lr;"):
        Search(parse_plan(other, "p", tmp_path), Pretended()).run()
    drawn = {**PLAN, "search": space, "tune": {"strategy": "random", "trials": 2, "rounds": 3, "seeds": 1}}
    for order in (space, other["search"]):
        plan = parse_plan({**drawn, "search": order}, "p", tmp_path / "drawn")
        assert Search(plan, Pretended(), say=lambda _: None).run() == 0


def test_what_the_decisions_do_not_depend_on_may_change(tmp_path):
    """The title, more seeds of the winner, and where it is computed."""
    make(tmp_path).run()
    tune_table = {**PLAN["tune"], "seeds": 3}
    other = parse_plan(
        {"title": "T", **PLAN, "base": {**PLAN["base"], "device": "cpu"}, "tune": tune_table}, "p", tmp_path
    )
    again = Search(other, Pretended(), say=lambda _: None)
    assert again.run() == 0
    assert again.runner.calls == [(0.5, 3, 9)]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 1}', '{"format": 1, "outcomes": [{"stage": 0}], "plan": {}}']
)
def test_a_damaged_journal(tmp_path, content):
    make(tmp_path).run()
    good = (tmp_path / "tune.json").read_text()
    (tmp_path / "tune.json").write_text(content)
    with pytest.raises(UserError, match=r"tune.json.*remove it, and the same command|holds the search of another plan"):
        make(tmp_path).run()
    (tmp_path / "tune.json").unlink()
    rest = make(tmp_path)
    assert rest.run() == 0
    assert rest.runner.calls == []
    assert (tmp_path / "tune.json").read_text() == good


def test_stages_as_arrays(tmp_path):
    """One process per run, in any order, the elements of a stage at once; the journal is that of a whole search."""
    make(tmp_path / "whole").run()
    path = tmp_path / "arrays"
    assert make(path).todo() == [(0, list(range(9))), (1, [0, 1, 2]), (2, [0]), (3, [0, 1])]
    with pytest.raises(UserError, match="stage 1 cannot begin: 9 runs of stage 0 have not ended"):
        make(path).run_one(1, 0)
    for stage, indices in make(path).todo():
        with ThreadPoolExecutor(len(indices)) as pool:
            assert {*pool.map(lambda i, stage=stage: make(path).run_one(stage, i), reversed(indices))} == {0}
    assert make(path).todo() == []
    assert make(path).run_one(0, 3) == 0
    assert decided(path) == decided(tmp_path / "whole")
    with pytest.raises(UserError, match="--index: got 3, expected 0 to 2 on stage 1"):
        make(path).run_one(1, 3)
    with pytest.raises(UserError, match="--stage: got 4, expected 0 to 3"):
        make(path).run_one(4, 0)


def test_an_element_of_an_array_that_fails(tmp_path):
    runner = Pretended({(0.1, 1): 1, (0.2, 1): DIVERGED, (0.3, 1): 2})
    found = make(tmp_path, runner)
    points = [point["weight_decay"] for point in found.plan.searches[0].points]
    statuses = {decay: found.run_one(0, points.index(decay)) for decay in (0.1, 0.2, 0.3, 0.4)}
    assert statuses == {0.1: 1, 0.2: 0, 0.3: 2, 0.4: 0}
    assert runner.calls.count((0.1, 0, 1)) == search.ATTEMPTS
    left = [points[i] for i in make(tmp_path).todo()[0][1]]
    assert sorted(left) == [0.0, 0.3, 0.5, 0.6, 0.7, 0.8]


def test_settings_of_the_winner(tmp_path):
    from fedlada_mpi.algorithms import resolve

    one = make(tmp_path)
    one.run()
    (path,) = results.write_settings(one.plan, one.state())
    assert path == tmp_path / "tuned.toml"
    assert load(path) == {
        "algorithm": "fedavg", "eval_every": 1, "weight_decay": 0.5, "rounds": 9, "validation": 0.1,
    }  # fmt: skip
    assert resolve({}, load(path)).config.weight_decay == 0.5
    assert "# test accuracy 42.00% ± 1.41%, 2 seeds.\n" in path.read_text()


def test_texts_in_toml(tmp_path):
    values = {"a": 'say "é 𝛼"\n', "b": True, "c": [0.5, 1e-05], "d": 3}
    text = results.toml(values)
    assert text == 'a = "say \\"é 𝛼\\"\\n"\nb = true\nc = [0.5, 1e-05]\nd = 3\n'
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    assert load(path) == values


def test_what_belongs_together(tmp_path, capsys):
    path = tmp_path / "p.toml"
    path.write_text("[search]\nlr = [0.1, 0.2]\n[tune]\nstrategy = 'grid'\nrounds = 4\n")
    for words, message in (
        (["--index", "0"], "--stage and --index belong together"),
        (["--parallel", "0"], "--parallel: got 0"),
        (["-n", "2", "--launcher", "srun"], "leave one of them out"),
        (["--launcher", "srun 'x"], "--launcher: got srun 'x, expected a command as for a shell: No closing quotation"),
        (["--retry-failed", "--page"], "--retry-failed is for the whole search, or for --todo"),
        (["--paralel", "2"], "did you mean '--parallel'?"),
    ):
        assert tune.main([str(path), "--out", str(tmp_path / "out"), *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert tune.main([str(path), "--out", str(tmp_path / "out"), "--todo"]) == 0
    assert capsys.readouterr().out == "0 0-1\n1 0-2\n"
    assert not (tmp_path / "out").exists()
