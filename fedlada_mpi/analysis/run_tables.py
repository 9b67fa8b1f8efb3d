"""The tables of any set of runs: results, targets, times, costs, and every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from ..rundir.columns import ACCURACY, DIAGNOSED, LOSS, PHASES, Metric
from ..support.errors import printable
from . import measures, usage
from .groups import Group, Stat, by_problem, labels, problems, slug, uneven
from .load import RecordedRun
from .series import TRAINED
from .tables import (
    HEAD,
    WORTH_A_COLUMN,
    Cell,
    Column,
    Table,
    decimals,
    duration,
    free_name,
    heading,
    metric_cell,
    named,
    number,
    objective_cell,
    per_objective,
    plain,
    seconds,
    size,
    stat,
    text,
    unit,
)

DIVERGED_NOTE = "Diverged: runs that left the finite numbers, and have only the rounds before."


def _recorded(groups: Sequence[Group], wanted: Sequence[measures.Measure], digits: int) -> list[list[Cell]]:
    """A row of measures for each group that has any of them."""
    rows = [(head, [stat(one.latest(measure), digits) for measure in wanted]) for one, head in named(groups)]
    return [[*head, *row] for head, row in rows if any(cell.value is not None for cell in row)]


def _chosen_by(groups: Sequence[Group]) -> tuple[bool, bool]:
    """Whether the best rounds of some are chosen by validation data, and those of some by the test data."""
    validated = [one.validated for one in groups]
    return any(validated), not all(validated) or not groups


def overview(groups: Sequence[Group]) -> list[Table]:
    """Of each objective, its values in the best round and in the last one."""
    return per_objective(groups, "overview", _overview)


def _overview(objective: Metric, groups: Sequence[Group]) -> Table:
    """Validation chooses the best round where there is any: the best of many test accuracies is too good."""
    by_validation, by_test = _chosen_by(groups)
    of, by_loss = unit(objective), objective == LOSS
    columns = [*HEAD, Column("Seeds"), Column("Rounds")]
    diverged = any(one.diverged for one in groups)
    columns += [Column("Diverged")] if diverged else []
    if by_validation:
        columns += [Column(name, "best by validation") for name in ("round", f"validation{of}", f"test{of}")]
    if by_test:
        columns += [Column(f"Best test{of}"), Column("at round")]
    columns += [Column(f"Final validation{of}")] if by_validation else []
    columns += [Column(f"Final test{of}"), Column(f"Final train{of}")]
    columns += [] if by_loss else [Column("Final train loss")]
    private = _any_private(groups)
    columns += [Column("Epsilon")] if private else []
    parts = ("val", "test", "train") if by_validation else ("test", "train")
    rows = []
    for one, head in named(groups):
        cell = partial(objective_cell, columns=one.columns)
        row = [*head, plain(len(one.runs)), _progress(one)]
        row += [Cell(f"{one.diverged} of {len(one.runs)}", float(one.diverged))] if diverged else []
        if by_validation:
            row.append(stat(one.latest(measures.best(None, "round", "val"))))
            row += [cell(one.latest(measures.best(None, part, "val"))) for part in ("val", "test")]
        if by_test:
            tested = [cell(one.latest(measures.best(None))), stat(one.latest(measures.best(None, "round")))]
            row += [Cell(), Cell()] if one.validated else tested
        row += [cell(one.latest(measures.final(objective.of(part), objective.scale))) for part in parts]
        row += [] if by_loss else [metric_cell(one.latest(measures.final(LOSS.of("train"))), LOSS, one.columns)]
        row += [stat(one.each(measures.epsilon), 2)] if private else []
        rows.append(row)
    accuracy = objective == ACCURACY
    what, value = ("Accuracies are", "accuracy") if accuracy else ("Final values are", objective.title)
    notes = [f"Mean ± standard deviation over seeds. {what} of the latest evaluated round."]
    if by_validation:
        notes = ["Mean ± standard deviation over seeds. Final: in the latest evaluated round."]
        notes += [f"Where there is validation data, it chooses the best round, and the test {value} is that of it."]
    notes += [] if objective.larger_is_better else ["Less is better."]
    notes += [DIVERGED_NOTE] if diverged else []
    notes += _uneven(groups) + _departures(groups)
    return Table("", heading(objective), columns, rows, notes=notes, section="results")


def results(groups: Sequence[Group]) -> list[Table]:
    """All metrics on the test data, of tasks that have more than their loss and their objective."""
    by_metrics: dict[tuple[Metric, ...], list[Group]] = {}
    for one in groups:
        if {*one.columns.metrics} - {LOSS, one.columns.objective}:
            by_metrics.setdefault((one.columns.objective, *one.columns.metrics), []).append(one)
    tables, taken = list[Table](), set[str]()
    for (objective, *metrics), members in by_metrics.items():
        columns = list(HEAD)
        columns += [Column(n, f"test {m.title}{unit(m)}") for m in metrics for n in ("final", "best round")]
        rows = []
        for one, head in named(members):
            row = list(head)
            for metric in metrics:
                best = measures.best(None, by="val" if one.validated else "test", metric=metric)
                wanted = (measures.final(metric.of("test"), metric.scale), best)
                row += [metric_cell(one.latest(measure), metric, one.columns) for measure in wanted]
            rows.append(row)
        most = "highest" if objective.larger_is_better else "lowest"
        notes = [
            "Mean ± standard deviation over seeds: in the latest evaluated round, and in the one with the "
            f"{most} {objective.title}, on validation data where there is some, else on the test data."
        ]
        name = free_name("results" if not tables else f"results_{slug(objective.name)}", taken)
        title = "Results" if len(by_metrics) == 1 else f"Results: {heading(objective)}"
        tables.append(Table(name, title, columns, rows, notes=notes, section="results"))
    return tables


def diagnostics(groups: Sequence[Group]) -> Table:
    """Means over the rounds that were diagnosed."""
    rows = _recorded(groups, [measures.per_round(name) for name in DIAGNOSED], 4)
    notes = [
        "Means over the rounds with --diagnose. Methods without g_a: the last global step in its place, and z = x."
    ]
    columns = [*HEAD, *(Column(TRAINED[n].title) for n in DIAGNOSED)]
    return Table("diagnostics", "Diagnostics", columns, rows, notes=notes, section="diagnostics")


def levels(groups: Sequence[Group], known: dict[str, list[float]]) -> dict[str, list[float]]:
    """Values of the objective worth a column: accuracies ``known`` for the data set and the runs' targets, else the
    highest tenths reached, or, of what is not a share, what all groups and what the best of them reached."""
    chosen = {}
    for problem, members in by_problem(groups).items():
        asked = {t for one in members for run in one.runs for t in run.settings["targets"]}
        objective = members[0].columns.objective
        known_levels = known.get(members[0].dataset, ()) if objective == ACCURACY else ()
        wanted = sorted(asked | set(known_levels), reverse=not objective.larger_is_better)
        chosen[problem] = wanted or _reached(members, objective)
    return chosen


def _reached(groups: Sequence[Group], objective: Metric) -> list[float]:
    """Levels that some or all of the groups have reached on the test data, the easiest first."""
    best, worst = (np.nanmax, min) if objective.larger_is_better else (np.nanmin, max)
    tested = [[run.series[objective.of("test")] for run in one.runs] for one in groups]
    tops = [[float(best(values)) for values in each if not np.isnan(values).all()] for each in tested]
    known = [each for each in tops if each]
    if not known:
        return []
    if objective.percent and objective.larger_is_better:
        return [t / 10 for t in range(1, 10) if t / 10 <= max(map(max, known))][-3:]
    by_ease = sorted(map(worst, known), reverse=not objective.larger_is_better)
    return list(dict.fromkeys(_easier(top, objective) for top in (by_ease[0], by_ease[-1])))


def _easier(value: float, objective: Metric) -> float:
    """The value with three digits, rounded to the side on which it is reached."""
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2) if value else 1.0
    rounded = (math.floor if objective.larger_is_better else math.ceil)(value / unit) * unit
    return float(f"{rounded:.6g}")


def targets(groups: Sequence[Group], wanted: dict[str, list[float]]) -> list[Table]:
    """Rounds and communication to each level of the objective on the test data, one table per problem."""
    tables = []
    for problem, name, members in problems(groups):
        columns, rows, objective = [HEAD[1]], [], members[0].columns.objective
        for level in wanted[problem]:
            over = f"{100 * level:g} %" if objective.percent else f"{level:g}"
            columns += [Column(n, over) for n in ("rounds", "Nd", "down", "up", "MPI")]
        for one, head in named(members):
            row = [head[1]]
            for level in wanted[problem]:
                row += [
                    stat(one.over(measures.rounds_to(objective.of("test"), level))),
                    stat(one.over(measures.total_to("paper_units", level, per_participant=True))),
                    *(size(one.over(measures.total_to(n, level))) for n in ("bytes_down", "bytes_up", "bytes_mpi")),
                ]
            rows.append(row)
        title = f"Rounds and communication to a test {objective.title}: {problem}"
        notes = [
            "Nd: the paper's unit, vectors of the model's length per participant. Down and up: bytes that all "
            "participants receive and send. MPI: bytes of vectors between ranks. “> T”: not reached in T rounds."
        ]
        if wanted[problem]:
            tables.append(Table(f"targets_{name}", title, columns, rows, notes=notes, section="results"))
    return tables


def phases(groups: Sequence[Group]) -> Table:
    """Without phases that hardly take any time in all groups, and without waiting where nobody can."""
    times = {p: [one.latest(measures.per_round(f"seconds_{p}")) for one in groups] for p in (*PHASES, "total")}

    def counts(phase: str) -> bool:
        pairs = zip(times[phase], times["total"], strict=True)
        return any(each.mean and each.mean >= WORTH_A_COLUMN * (total.mean or 0) for each, total in pairs)

    shown = [p for p in times if p == "total" or counts(p)]
    waiting = {id(one): _waiting(one) for one in groups}
    columns = [*HEAD, *(Column(p, "seconds a round") for p in shown)]
    if any(waiting.values()):
        columns += [Column("ranks"), *(Column(name, "waiting, seconds a round") for name in ("mean", "most"))]
        columns.append(Column("who waits", "waiting, seconds a round", False))
    place = {id(one): i for i, one in enumerate(groups)}
    rows = []
    for one, head in named(groups):
        waits = waiting[id(one)] or [Cell()] * 4
        row = [*head, *(seconds(times[p][place[id(one)]]) for p in shown)]
        rows.append([*row, *waits] if any(waiting.values()) else row)
    notes = ["Each phase is that of the slowest rank."]
    if any(waiting.values()):
        notes = [f"{notes[0][:-1]}; waiting is a rank's time without work of its own in a round."]
    if left_out := [p for p in times if p not in shown]:
        notes.append(f"Less than {100 * WORTH_A_COLUMN:g} % of a round, and left out: {', '.join(left_out)}.")
    return Table("phases", "Where the time goes", columns, rows, notes=notes, section="time")


def _waiting(one: Group) -> list[Cell]:
    """The number of ranks, how long they wait for each other in a round, and who does most; empty of a single rank."""
    waits = [run.by_rank["wait"] for run in one.runs if "wait" in run.by_rank and run.done == one.done]
    widest = max(map(len, waits), default=0)
    if widest < 2:
        return []
    wait = np.mean([w for w in waits if len(w) == widest], axis=0)
    rank = int(np.argmax(wait))
    times = (seconds(Stat((float(w),), 1)) for w in (wait.mean(), wait[rank]))
    return [plain(widest), *times, text("server" if rank == 0 else f"rank {rank}")]


def cost(groups: Sequence[Group]) -> Table:
    """What the runs took, and how far unfinished ones got."""
    names = ("Seeds", "Rounds", "Seconds a round", "Wall time", "GPUs", "Runs at once", "GPU-seconds")
    columns = [*HEAD, *map(Column, names), Column("Device", numeric=False)]
    of_run = dict(
        zip(
            (id(run.usage) for one in groups for run in one.runs),
            usage.at_once([run.usage for one in groups for run in one.runs]),
            strict=True,
        )
    )

    def gpu_seconds(run: RecordedRun) -> float | None:
        seconds, at_once = _seconds(run), of_run[id(run.usage)]
        return seconds * run.usage.gpus / at_once if seconds and run.usage.gpus and at_once else None

    rows = []
    for one, head in named(groups):
        devices = dict.fromkeys(run.usage.device for run in one.runs if run.usage.device)
        rows.append(
            [
                *head,
                plain(len(one.runs)),
                _progress(one),
                seconds(one.latest(measures.per_round("seconds_total"))),
                duration(one.latest(_seconds)),
                plain(one.over(lambda run: run.usage.gpus).mean),
                plain(one.over(lambda run: of_run[id(run.usage)]).mean),
                stat(one.latest(gpu_seconds), 0),
                text(printable(", ".join(devices))),
            ]
        )
    notes = [
        "Per run, means over seeds. Wall time is that of all rounds, evaluation included, without the start. "
        "GPU-seconds: wall time, times the GPUs, over the runs that shared them at that time."
    ]
    return Table("cost", "Cost", columns, rows, notes=[*notes, *_uneven(groups)], section="time")


def _departures(groups: Sequence[Group]) -> list[str]:
    """Notes on runs that have lost ranks."""
    return [
        f"{problem}, {name}, seed {run.seed}: "
        + ", ".join(f"{count} rank{'s' * (count != 1)} lost before round {t}" for t, count in run.left.items())
        for problem, members in by_problem(groups).items()
        for one, name in zip(members, labels(members), strict=True)
        for run in one.runs
        if run.left
    ]


def _uneven(groups: Sequence[Group]) -> list[str]:
    """Notes on groups whose seeds cannot be averaged as they are; with several problems, each under its name."""
    problems = by_problem(groups)
    return [
        f"{problem}, {note}" if len(problems) > 1 else note
        for problem, members in problems.items()
        for note in uneven(members)
    ]


def _progress(one: Group) -> Cell:
    """How many rounds the runs of a group have, and of how many where they are not finished."""
    done = sorted({run.done for run in one.runs})
    shown = number(done[0]) if len(done) == 1 else f"{done[0]:,} to {done[-1]:,}"
    unfinished = [run for run in one.runs if not run.complete]
    if unfinished:
        wanted = max(run.settings["rounds"] for run in unfinished)
        counts = {"unfinished": len(unfinished) - one.diverged, "diverged": one.diverged}
        shown += f" of {wanted:,}, " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return Cell(shown, float(done[-1]))


def runs(groups: Sequence[Group]) -> list[Table]:
    """All runs, those of each objective in a table."""
    tables = per_objective(groups, "runs", _runs)
    if len(tables) == 1:
        tables[0].title = "All runs"
    return tables


def _runs(objective: Metric, groups: Sequence[Group]) -> Table:
    by_validation, by_test = _chosen_by(groups)
    of = unit(objective)
    columns = [*HEAD, Column("Seed"), Column("Rounds"), Column("State", numeric=False)]
    columns += [Column(f"Test{of} at best validation")] if by_validation else []
    columns += [Column(f"Best test{of}")] if by_test else []
    private = _any_private(groups)
    columns += [Column(f"Final test{of}"), *([Column("Epsilon")] if private else []), Column("Time")]
    columns += [Column("Directory", numeric=False), Column("Ran on", numeric=False)]
    rows = []
    for one, head in named(groups):
        for run in one.runs:
            chosen = _of_run(measures.best(None, by="val"), run)
            tested = Cell() if one.validated else _of_run(measures.best(None), run)
            state = run.status if run.complete or run.status != "finished" else "unfinished"
            rows.append(
                [
                    *head,
                    plain(run.seed),
                    Cell(f"{run.done:,} of {run.settings['rounds']:,}", float(run.done)),
                    text(", ".join([state, *_problems(run)])),
                    *([chosen] if by_validation else []),
                    *([tested] if by_test else []),
                    _of_run(measures.final(objective.of("test"), objective.scale), run),
                    *([_epsilon(run)] if private else []),
                    duration(Stat(() if (seconds := _seconds(run)) is None else (seconds,), 1)),
                    text(printable(str(run.path))),
                    text(run.ran_on),
                ]
            )
    repeated = sum(one.repeated for one in groups)
    left = "1 run repeats" if repeated == 1 else f"{repeated} runs repeat"
    notes = [f"{left} the settings and seed of another, left out here."] if repeated else []
    return Table("", f"All runs: {objective.title}", columns, rows, notes=notes, section="runs")


def _of_run(measure: measures.Measure, run: RecordedRun) -> Cell:
    """Of the objective."""
    value = measure(run)
    return plain(value, 2 if run.columns.objective.percent else decimals(value))


def _any_private(groups: Sequence[Group]) -> bool:
    return any(run.settings["dp"] != "none" for one in groups for run in one.runs)


def _epsilon(run: RecordedRun) -> Cell:
    """What was spent; a lower bound where rounds followed the last one that recorded it."""
    spent, least = measures.epsilon(run), measures.final("epsilon")(run)
    if spent is not None or least is None:
        return plain(spent, 2)
    return Cell(f"≥ {number(least, 2)}", sort=least, hint="rounds followed that did not record it")


def _problems(run: RecordedRun) -> list[str]:
    lines = [f"{run.skipped} unreadable lines"] if run.skipped else []
    return [*lines, run.damaged] if run.damaged else lines


def _seconds(run: RecordedRun) -> float | None:
    """The time of all rounds."""
    total = run.series["seconds_total"]
    return None if not total.size or np.isnan(total).all() else float(np.nansum(total))
