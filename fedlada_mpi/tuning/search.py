"""The course of a search: rungs of trials, then the winners with their seeds.

    search = Search(load("plan.toml"), runner)
    search.run()                              # to its end; 0, or the exit status that a signal or an error asks for
    search.state().winners

A stage is a rung, or the winners' runs. Its runs are those of a grid: started, skipped, resumed and locked like them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ..experiments import PlannedRun
from ..rundir import lock
from ..rundir.columns import Metric
from ..rundir.files import remove_checkpoints
from ..support.errors import DIVERGED, UserError
from . import outcomes, strategies
from .journal import LOCK, Journal, Place
from .outcomes import FAILED, Outcome
from .plan import TunePlan

ATTEMPTS = 2  # of a run that fails otherwise than by diverging, which it would do again
BAD_INPUT = 2
# For others that write to the journal: many elements of an array may, and one on a lost node blocks them for a while.
WAIT_SECONDS = 1.5 * lock.STALE_SECONDS


class StageRun(NamedTuple):
    """A run, and its place in the search."""

    place: Place
    run: PlannedRun


class Ended(NamedTuple):
    """How runs have ended: an exit status where the search must stop, else 0; and those of the runs that failed."""

    stop: int
    statuses: dict[int, int]


Runner = Callable[[Sequence[PlannedRun]], Ended]


@dataclass(frozen=True)
class Winner:
    """The best trial of a method, its score, and the test results of its seeds so far, NaN where there is none."""

    method: str
    trial: int
    settings: dict[str, Any]  # those that were varied
    score: float
    tests: dict[int, float] = field(default_factory=dict)

    @property
    def _known(self) -> list[float]:
        return [value for value in self.tests.values() if not math.isnan(value)]

    @property
    def mean(self) -> float:
        return fmean(self._known) if self._known else math.nan

    @property
    def std(self) -> float:
        """The sample standard deviation over the seeds; NaN of fewer than two."""
        return stdev(self._known) if len(self._known) > 1 else math.nan


@dataclass
class State:
    """What is decided so far."""

    rungs: int
    stages: list[list[StageRun]]  # up to the one that is at work, or all
    finished: bool
    outcomes: dict[Place, Outcome]
    winners: dict[str, Winner]  # by method; without those all of whose trials failed
    objective: Metric | None  # None until a run has begun

    @property
    def stage(self) -> int:
        """The one that is at work."""
        return len(self.stages) - 1

    def todo(self) -> list[int]:
        """The runs of that stage whose outcome is not known."""
        return [i for i, each in enumerate(self.stages[-1]) if each.place not in self.outcomes]

    def course(self, method: str, trial: int) -> list[tuple[PlannedRun, Outcome | None]]:
        """A trial on the rungs that it was on so far; None where its outcome is not known."""
        found = (each for stage in self.stages[: self.rungs] for each in stage if each.place[1:] == (method, trial))
        return [(run, self.outcomes.get(place)) for place, run in found]

    def seeds(self, method: str) -> list[tuple[int, PlannedRun, Outcome | None]]:
        """The winner's runs by seed, once it is known."""
        final = self.stages[self.rungs] if len(self.stages) > self.rungs else []
        return [(p.number, run, self.outcomes.get(p)) for p, run in final if p.method == method]


class Search:
    """A plan, and what starts its runs."""

    def __init__(
        self, plan: TunePlan, runner: Runner, accept_changed_code: bool = False, say: Callable[[str], None] = print
    ):
        self.plan, self.runner, self.say = plan, runner, say
        self.accept = accept_changed_code

    def run(self) -> int:
        """To the end of the search; returns the exit status."""
        with lock.hold(self.plan.root, LOCK):
            journal = self._journal()
            attempts: dict[Place, int] = {}
            while not (state := self._advance(journal)).finished:
                journal.refuse_other_code()
                self.say(self.heading(state))
                if status := self._stage(state, attempts):
                    return status
            return 0 if len(state.winners) == len(self.plan.methods) else DIVERGED

    def run_one(self, stage: int, index: int) -> int:
        """One run of a stage, as an element of an array job does; others may be at work on the same stage."""
        if not 0 <= stage < self.plan.stages:
            raise UserError(f"--stage: got {stage}, expected 0 to {self.plan.stages - 1}")
        most = self.most_runs(stage)
        if not 0 <= index < most:
            raise UserError(f"--index: got {index}, expected 0 to {most - 1} on stage {stage}")
        state = self.note()
        if state.stage < stage:
            left = len(state.todo())
            raise UserError(
                f"stage {stage} cannot begin: {left} run{'s' * (left != 1)} of stage {state.stage} "
                f"{'have' if left != 1 else 'has'} not ended; start them first (--todo lists them)"
            )
        runs = state.stages[stage] if stage < len(state.stages) else []
        if index >= len(runs) or runs[index].place in state.outcomes:
            self.say(f"stage {stage}, run {index}: nothing to do")
            return 0
        self._journal().refuse_other_code()
        one, status = runs[index], 0
        for _ in range(ATTEMPTS):
            ended = self.runner([one.run])
            status = ended.stop or ended.statuses.get(0, 0)
            if ended.stop or status in (0, BAD_INPUT, DIVERGED):
                break
        if not ended.stop and status not in (0, BAD_INPUT):
            outcomes.write_failure(one.run, status)
        self.note()
        return 0 if status == DIVERGED else status

    def most_runs(self, stage: int) -> int:
        """Of a stage; fewer where trials have failed."""
        each = self.plan.rungs[stage].trials if stage < len(self.plan.rungs) else len(self.plan.seeds)
        return each * len(self.plan.methods)

    def todo(self) -> list[tuple[int, list[int]]]:
        """What is left, by stage: of the one at work, and of those after it all that there may be."""
        state = self.state()
        if state.finished:
            return []
        later = range(state.stage + 1, self.plan.stages)
        found = [(state.stage, state.todo()), *((stage, list(range(self.most_runs(stage)))) for stage in later)]
        return [(stage, indices) for stage, indices in found if indices]

    def note(self, wait: float = WAIT_SECONDS) -> State:
        """Write down what has become known; raises Busy if another process holds the journal all that time."""
        with _briefly_held(self.plan, wait):
            return self._advance(self._journal())

    def state(self) -> State:
        """What is decided so far; nothing is written."""
        return self._decide(self._journal())[0]

    def retry_failed(self) -> int:
        """Forget failures other than divergences, and all that was decided on their account; returns how many."""
        with lock.hold(self.plan.root, LOCK):
            journal = self._journal()
            state, _ = self._decide(journal)
            found = {
                each.place: each.run
                for stage in state.stages
                for each in stage
                if (known := state.outcomes.get(each.place)) and known.state == FAILED
            }
            if found:
                for run in found.values():
                    outcomes.forget_failure(run.directory)
                # Another trial may win now, whose seeds have the same places. On the rungs, a trial has its own.
                final = len(self.plan.rungs)
                kept = final if min(place.stage for place in found) < final else final + 1
                journal.outcomes = {
                    place: known
                    for place, known in journal.outcomes.items()
                    if place.stage < kept and place not in found
                }
                self._advance(journal)
        return len(found)

    def heading(self, state: State) -> str:
        """What the stage at work is."""
        at, runs, left = state.stage, len(state.stages[-1]), len(state.todo())
        if at == len(self.plan.rungs):
            seeds = len(self.plan.seeds)
            longer = f", {self.plan.winner_rounds} rounds" * (self.plan.winner_rounds != self.plan.rounds)
            winners = f"the winner{'s' * (len(state.winners) != 1)}"
            what = f"{winners} with {seeds} seed{'s' * (seeds != 1)}{longer}, then the test set"
        else:
            rung = self.plan.rungs[at]
            each = " of each method" * (len(self.plan.methods) > 1)
            what = f"{rung.trials} trial{'s' * (rung.trials != 1)}{each} to round {rung.rounds}"
        done = f", {runs - left} of {runs} runs are done" if left < runs else ""
        return f"stage {at + 1} of {self.plan.stages}: {what}{done}"

    def _journal(self) -> Journal:
        return Journal(self.plan, self.accept)

    def _advance(self, journal: Journal) -> State:
        state, decisions = self._decide(journal)
        journal.outcomes, journal.objective = state.outcomes, state.objective
        journal.write(decisions)
        self._remove_checkpoints(state)
        return state

    def _remove_checkpoints(self, state: State) -> None:
        """Of the trials that do not go on, unless ``retry_failed`` may ask for more of their rounds: some methods keep
        vectors of every client in them."""
        needed = {place[1:] for place, known in state.outcomes.items() if known.state == FAILED}
        if state.stage < state.rungs:
            needed |= {each.place[1:] for each in state.stages[-1]}
        for place, run in chain.from_iterable(state.stages[: min(state.stage, state.rungs)]):
            if place[1:] not in needed:
                remove_checkpoints(run.directory)

    def _decide(self, journal: Journal) -> tuple[State, list[dict[str, Any]]]:
        """All that follows from the plan and from the outcomes that are known."""
        plan, known = self.plan, dict(journal.outcomes)
        state = State(len(plan.rungs), [], False, known, {}, journal.objective)
        decisions: list[dict[str, Any]] = []
        going = {search.method: list(range(len(search.points))) for search in plan.searches}
        for at, rung in enumerate(plan.rungs):
            stage = [self._trial(at, method, number) for method in plan.methods for number in going[method]]
            state.stages.append(stage)
            self._look(stage, state, "val", plan.mean_of)
            if state.todo():
                return state, decisions
            more = state.objective is None or state.objective.larger_is_better
            last = at + 1 == len(plan.rungs)
            most = 1 if last else plan.rungs[at + 1].trials
            decision: dict[str, Any] = {"stage": at, "rounds": rung.rounds, "methods": {}}
            for method in plan.methods:
                scores = {n: known[Place(at, method, n)].score for n in going[method]}
                going[method] = strategies.promoted(scores, more, most)
                order = strategies.ranked(scores, more)
                decision["methods"][method] = {"best first": order, "go on": going[method]}
                if last and going[method]:
                    number = going[method][0]
                    point = next(each for each in plan.searches if each.method == method).points[number]
                    state.winners[method] = Winner(method, number, point, scores[number])
            decisions.append(decision)
        final = [each for winner in state.winners.values() for each in self._seeds(winner)]
        state.stages.append(final)
        self._look(final, state, "test", 1)
        for method, winner in state.winners.items():
            places = {seed: Place(len(plan.rungs), method, seed) for seed in plan.seeds}
            tests = {seed: known[place].score for seed, place in places.items() if place in known}
            state.winners[method] = replace(winner, tests=tests)
        state.finished = not state.todo()
        return state, decisions

    def _trial(self, rung: int, method: str, number: int) -> StageRun:
        last = rung + 1 == len(self.plan.rungs)
        run = self.plan.trial(method, number, rung)
        return StageRun(
            Place(rung, method, number), replace(run, accept_changed_code=self.accept, keep_checkpoints=not last)
        )

    def _seeds(self, winner: Winner) -> list[StageRun]:
        runs = self.plan.winner(winner.method, winner.trial)
        return [
            StageRun(Place(len(self.plan.rungs), winner.method, seed), replace(run, accept_changed_code=self.accept))
            for seed, run in zip(self.plan.seeds, runs, strict=True)
        ]

    def _look(self, stage: Sequence[StageRun], state: State, part: str, mean_of: int) -> None:
        """Take the outcomes from the directories of runs that have ended."""
        for place, run in stage:
            if place not in state.outcomes and (found := outcomes.of(run, part, mean_of)) is not None:
                state.outcomes[place] = found
            if state.objective is None and (run.directory / "config.json").is_file():
                state.objective = outcomes.objective_of(run)

    def _stage(self, state: State, attempts: dict[Place, int]) -> int:
        """Start what is to be done on a stage; returns the exit status where the search must stop."""
        left = [state.stages[-1][i] for i in state.todo()]
        ended = self.runner([each.run for each in left])
        bad = [left[i].run.directory for i, status in ended.statuses.items() if status == BAD_INPUT]
        for i, status in ended.statuses.items():
            if status == BAD_INPUT:
                continue
            place = left[i].place
            attempts[place] = attempts.get(place, 0) + 1
            if status == DIVERGED or attempts[place] >= ATTEMPTS:
                outcomes.write_failure(left[i].run, status)
        if ended.stop:
            return ended.stop
        if bad:
            raise UserError(
                f"{len(bad)} of {len(left)} runs were refused, see {bad[0] / 'log.txt'}: fix that, then give "
                "the same command again"
            )
        if not ended.statuses and (still := [one for one in left if outcomes.of(one.run, "val") is None]):
            raise UserError(
                f"{len(still)} of {len(left)} runs of this stage are in use elsewhere, such as "
                f"{still[0].run.directory}: wait for them, then give the same command again"
            )
        return 0


@contextmanager
def _briefly_held(plan: TunePlan, wait: float) -> Iterator[None]:
    """Hold the journal for a moment, once others that do so have let it go."""
    deadline = time.monotonic() + wait
    while True:
        try:
            held = lock.hold(plan.root, LOCK)
            held.__enter__()
            break
        except lock.Busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    try:
        yield
    finally:
        held.__exit__(None, None, None)
