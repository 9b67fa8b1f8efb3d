"""The report: reading runs in any state, the numbers in its tables, its files, and the page in a real browser."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, chromium
from synthetic_runs import write_run

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.report import (
    build,
    claims,
    figures,
    groups,
    load,
    measures,
    page,
    paper,
    series,
    tables,
    tuning,
    usage,
)
from fedlada_mpi.report.__main__ import main
from fedlada_mpi.report.groups import Group, Stat, group
from fedlada_mpi.rundir import client_values


def run(test_acc, *, seed=0, status="finished", rounds=None, **changes):
    """A run in memory with these test accuracies, one participant and a vector of ten bytes."""
    settings = {**groups._preset("cifar10", changes.get("algorithm", "fedavg")), "seed": seed, **changes}
    n = len(test_acc)
    settings["rounds"] = n if rounds is None else rounds
    values = {name: np.full(n, np.nan) for name in (*load.NUMBERS, *load.OPTIONAL, "participants")}
    values |= {f"seconds_{p}": np.full(n, 0.5) for p in load.ALL_PHASES}
    values |= {"test_acc": np.array(test_acc, float), "participants": np.full(n, 2.0)}
    values |= {"paper_units": np.full(n, 4.0), "bytes_down": np.full(n, 20.0), "bytes_up": np.full(n, 10.0)}
    return load.Run(Path(f"run{seed}"), settings, np.arange(1, n + 1), values, status=status)


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_a_line_being_written_is_left_out_and_a_broken_one_is_counted():
    records, skipped = load.parse(b'{"round": 1, "lr": 0.5}\n{"round": 2}\n{"round": 3, "l')
    assert [r["round"] for r in records] == [1, 2]
    assert skipped == 0
    records, skipped = load.parse(b'{"round": 1}\n\x00\x00{"ro\n[3]\n{"round": 4}\n')
    assert [r["round"] for r in records] == [1, 4]
    assert skipped == 2
    assert load.parse(b"") == ([], 0)
    assert load.parse(b'{"round": 1') == ([], 0)


def test_of_a_round_done_twice_the_last_record_counts():
    records, _ = load.parse(b'{"round": 1, "lr": 1}\n{"round": 2, "lr": 2}\n{"round": 2, "lr": 3}\n')
    assert [r["lr"] for r in records] == [1, 3]


def test_nothing_measured_is_not_a_number_and_never_zero():
    rounds, columns = load._columns(
        [{"round": 1, "test_acc": None}, {"round": 2, "test_acc": 0.5, "seconds": {"train": 2}}]
    )
    assert rounds.tolist() == [1, 2]
    assert np.isnan(columns["test_acc"][0])
    assert columns["test_acc"][1] == 0.5
    assert np.isnan(columns["train_loss"]).all()
    assert np.isnan(columns["seconds_train"][0])
    assert columns["seconds_train"][1] == 2


def test_ranks_are_averaged_over_the_rounds_of_the_latest_world():
    def record(*wait):
        return {"round": 1, "seconds_by_rank": {"wait": list(wait)}}

    assert load._by_rank([record(9, 9), record(1, 2, 3), record(3, 4, 5)])["wait"].tolist() == [2, 3, 4]
    assert load._by_rank([{"round": 1}]) == {}


def test_mean_and_spread_over_seeds():
    one = Group({}, [run([0.1, 0.4]), run([0.3, 0.8], seed=1), run([], seed=2, rounds=2, status="stopped")])
    rounds, mean, std, count = one.curve("test_acc")
    assert rounds.tolist() == [1, 2]
    assert mean == pytest.approx([0.2, 0.6])
    assert std == pytest.approx([math.sqrt(0.02), math.sqrt(0.08)])  # sample deviation of 0.1 0.3, and of 0.4 0.8
    assert count.tolist() == [2, 2]


def test_seeds_of_different_lengths_are_averaged_over_the_rounds_that_all_have():
    short = run([0.2, 0.6], seed=1, rounds=4, status="stopped")
    (one,) = group([run([0.1, 0.4, 0.3, 0.9]), short])
    assert one.curve("test_acc")[0].tolist() == [1, 2]
    assert one.latest(measures.final("test_acc", 100)).values == pytest.approx((40, 60))
    assert one.latest(measures.best(None)).values == pytest.approx((40, 60))
    assert one.latest(tables._seconds).values == (1, 1)  # two rounds of half a second, of both
    assert one.over(measures.test_at(4)) == Stat((90.0,), 2)  # of a certain round: by those that have it
    assert one.over(measures.rounds_to("test_acc", 0.8)) == Stat((4.0,), 2)
    said = "FedAvg: seeds have 2 to 4 rounds: means over the rounds that all have, up to 2."
    assert groups.uneven([one]) == [said]
    assert all(said in table.notes for table in (tables.overview([one]), tables.cost([one])))
    assert "FedAvg on CIFAR-10: seeds have 2 to 4" in " ".join(paper.tables([one])[0].notes)


def test_seeds_evaluated_in_different_rounds_are_averaged_over_those_that_all_have():
    none = math.nan
    (one,) = group([run([0.3, 0.2, 0.9, 0.4]), run([none, 0.6, none, 0.5], seed=1), run([none], seed=2, rounds=4)])
    assert one.curve("test_acc")[0].tolist() == [2, 4]
    assert one.latest(measures.best(None)).values == pytest.approx((40, 60))
    assert one.over(measures.rounds_to("test_acc", 0.4)).values == (4, 2)  # not 3, where the other was not evaluated
    assert one.over(measures.test_at(3)).values == pytest.approx((20, 60))
    assert "evaluated in different rounds: means over the rounds that all have, up to 4" in one.uneven
    assert group([run([0.1, 0.2]), run([0.2, 0.3], seed=1)])[0].uneven == ""


def test_a_round_that_was_not_evaluated_is_not_in_the_curve():
    assert Group({}, [run([0.1, math.nan, 0.3])]).curve("test_acc")[0].tolist() == [1, 3]


def test_rounds_to_a_level():
    reach = measures.rounds_to("test_acc", 0.5)
    assert reach(run([0.4, 0.5, 0.3])) == 2
    assert reach(run([0.4, 0.4])) == math.inf
    assert reach(run([0.4, 0.4], rounds=9, status="stopped")) is None
    assert reach(run([])) is None
    assert reach(run([math.nan, math.nan])) is None


def test_communication_to_a_level_is_counted_through_that_round():
    assert measures.total_to("bytes_down", 0.5)(run([0.1, 0.2, 0.6, 0.7])) == 60
    assert measures.total_to("paper_units", 0.5, per_participant=True)(run([0.1, 0.2, 0.6, 0.7])) == 6
    assert measures.total_to("bytes_down", 0.9)(run([0.1, 0.2])) is None


def test_a_tuned_run_is_named_and_not_held_against_the_paper():
    tuned = dict(algorithm="fedlada", preset="tuned", weight_decay=0.05)
    one, two = group([run([0.5], algorithm="fedlada"), run([0.6], **tuned)])
    assert (one.departures(), two.departures()) == ({}, {"preset": "tuned"})
    assert groups.labels([one, two]) == ["FedLADA", "FedLADA tuned"]
    where = {"dataset": "cifar10", "algorithm": "fedlada", "rounds": 1}
    assert paper.match([two], where) == (None, [])
    assert paper.match([one, two], {**where, "preset": "tuned"}) == (two, [])


def with_clients(directory: Path, accuracies: list[float]) -> Path:
    """A run of two rounds, whose clients were evaluated one by one after the second."""
    write_run(directory, {"dataset": "digits", "algorithm": "fedavg", "rounds": 2, "clients": len(accuracies)}, 2)
    sums = np.array([[5.0] * len(accuracies), [10 * a for a in accuracies], [10.0] * len(accuracies)])
    silos = np.arange(1, len(accuracies) + 1).clip(max=2)
    values = client_values.ClientValues(directory, 0, np.ones((len(accuracies), 2), int), silos)
    spread = values.add(2, sums, np.array([[20, 40], [3, 7], [10, 10]]))
    values.write()
    first, second = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (first, {**second, **spread})))
    return directory


def test_clients_one_by_one(tmp_path):
    with_clients(tmp_path / "runs" / "a", [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "old", {"dataset": "digits", "algorithm": "scaffold", "rounds": 2}, 2)
    build([tmp_path / "runs"], tmp_path / "report")
    (row,) = rows_of(tmp_path / "report/tables/clients.csv")
    found = {name: float(value) for name, value in row.items() if "accuracy" in name and value and "std" not in name}
    assert [found[f"train accuracy %: {n}"] for n in ("mean", "worst tenth")] == pytest.approx([70, 50])
    assert [found[f"test accuracy %: {n}"] for n in ("mean", "spread")] == pytest.approx([50, 0])
    assert (tmp_path / "report/figures/clients_digits_clients_3.png").exists()
    assert 'src="figures/clients_digits_clients_3.png"' in (tmp_path / "report/index.html").read_text()
    run = load.read(tmp_path / "runs" / "a")
    assert run.clients["train_acc"].tolist() == pytest.approx([0.5, 0.7, 0.9])
    one, two = rows_of(tmp_path / "report/tables/silos.csv")
    assert [(row["Silo"], row["Clients"], row["Images"]) for row in (one, two)] == [("1", "1", "2"), ("2", "2", "4")]
    assert [float(row["accuracy %: train"]) for row in (one, two)] == pytest.approx([50, 80])
    assert [float(row[f"loss: {part}"]) for row in (one, two) for part in ("train", "test")] == [0.5, 3, 0.5, 3]
    assert 'src="figures/silos_digits_clients_3.png"' in (tmp_path / "report/index.html").read_text()
    assert load.read(tmp_path / "runs" / "old").clients == {}


def test_an_unreadable_file_of_clients_is_named(tmp_path):
    directory = with_clients(tmp_path / "runs" / "a", [0.5, 0.7, 0.9])
    (directory / "clients.h5").write_bytes(b"garbage")
    build([tmp_path / "runs"], tmp_path / "report")
    (row,) = rows_of(tmp_path / "report/tables/runs.csv")
    assert row["State"].startswith("finished, unreadable clients.h5 (")
    assert (tmp_path / "report/figures/clients_digits_clients_3.png").exists()


def test_what_a_run_ran_on():
    node = {"ranks": 4, "cpu": "a", "devices": {"NVIDIA H200": 3, "x86_64 CPU": 1}}
    last = {
        "ranks": 8,
        "nodes": {"n1": node, "n2": node},
        "fedlada_mpi": "9.1",
        "commit": "0123456789",
        "modified": True,
    }
    words = "8 ranks on 2 nodes, NVIDIA H200, x86_64 CPU, version 9.1"
    summary = {"environment": {}, "segments": [{"ranks": 1}, last]}
    assert load._ran_on(summary) == f"{words} at 01234567 modified, 2 segments"
    assert load._ran_on({"environment": {**last, "commit": None}, "segments": []}) == words
    for other in (
        {"environment": {"ranks": 2}},
        {"environment": 3, "segments": 1},
        {"environment": last, "segments": [0]},
    ):
        assert load._ran_on(other) == ""


def test_accuracy_after_so_many_rounds_needs_so_many_rounds():
    assert measures.test_at(2)(run([0.1, 0.2, 0.9])) == pytest.approx(20)
    assert measures.test_at(4)(run([0.1, 0.2, 0.9])) is None
    assert measures.test_at(2)(run([0.1, math.nan, 0.9])) == pytest.approx(10)
    assert measures.best(2)(run([0.3, 0.2, 0.9])) == pytest.approx(30)
    assert measures.best(None, "round")(run([0.3, 0.2, 0.9])) == 3


def test_cells_distinguish_missing_unreached_and_partial():
    assert tables.stat(Stat((), 3)).text == "–"
    assert tables.stat(Stat((), 3, beyond=1500)).text == "> 1,500"
    assert tables.stat(Stat((10.0, 12.0), 3)).text == "11.0 ± 1.4 (2 of 3)"
    assert tables.stat(Stat((52.0,), 1)).text == "52"
    assert tables.size(Stat((2.5e9,), 1)).text == "2.50 GB"
    assert tables.size(Stat((2.5e9,), 1)).value == 2.5e9


def test_runs_of_the_same_seed_count_once_and_the_longer_one():
    (one,) = group([run([0.1]), run([0.1, 0.2]), run([0.3, 0.4], seed=1)])
    assert [r.done for r in one.runs] == [2, 2]
    assert one.repeated == 1


def test_groups_differ_in_settings_that_matter_and_no_others():
    runs = [run([0.1]), run([0.1], seed=1, out="elsewhere", device="cpu"), run([0.1], participation=0.5)]
    assert [len(g.runs) for g in group(runs)] == [2, 1]


def test_names_distinguish_groups_and_no_more():
    alphas = group(
        [run([0.1], algorithm="fedlada", alpha=a) for a in (0.1, 0.5)] + [run([0.1], algorithm="scaffold", alpha=1.0)]
    )
    assert groups.labels(alphas) == ["SCAFFOLD", "FedLADA α=0.1", "FedLADA α=0.5"]
    assert groups.labels(group([run([0.1], dirichlet=0.3)])) == ["FedAvg"]
    mixed = group([run([0.1]), run([0.1], participation=0.5), run([0.1], local_epochs=9)])
    assert groups.labels(mixed) == ["FedAvg", "FedAvg local epochs=9", "FedAvg participation=0.5"]


def test_names_do_not_repeat_what_all_groups_share():
    """Also a setting that is one method's preset, and so no departure of it."""
    same = {"lr": 1e-3, "weight_decay": 1e-2, "decay_mode": "decoupled"}
    shared = group([run([0.1], **same), run([0.1], algorithm="fedlada", **same)])
    assert groups.labels(shared) == ["FedAvg", "FedLADA"]


def test_the_papers_own_numbers_are_consistent():
    """Relations that the paper's text states between its tables."""
    found = {t["id"]: t for t in paper.contents()["tables"]}
    fedlada, localadam = (
        found["rounds_to_train_98"]["columns"][0]["paper"][6],
        found["rounds_to_train_98"]["columns"][0]["paper"][5],
    )
    assert fedlada / localadam == pytest.approx(1.33, abs=0.005)
    at2 = {c["name"]: c["paper"] for c in found["rounds_to_test"]["columns"]}
    assert at2["CIFAR-10, 70 %"][0] / at2["CIFAR-10, 70 %"][6] == pytest.approx(2.11, abs=0.01)
    gains = found["optimizer_combinations"]["columns"]
    assert [p - 34.5 for p in gains[0]["paper"]] == pytest.approx(gains[1]["paper"])
    units = found["communication_to_target"]["columns"]
    assert units[1]["paper"][6] == 2 * units[0]["paper"][6] == 90
    for table in found.values():
        ((setting, values),) = table["rows"].items()
        assert any(setting in config.settings_of(name) for name in algorithms.names())
        for column in table["columns"]:
            assert len(column["paper"]) == len(column.get("also", column["paper"])) == len(values)
            if column["measure"] != "test_at_fit":
                measures.named(column)


def test_every_experiment_of_the_paper_fills_its_tables_and_figures(tmp_path):
    """The settings of the grids and those of paper.toml name the same runs."""
    from fedlada_mpi import experiments

    runs = []
    for name in experiments.experiments():
        for planned in experiments.load(name).runs:
            settings = resolve({}, planned.given).config.record()
            fake = run([0.99], seed=settings["seed"])
            fake.settings, fake.series["train_acc"] = {**settings, "rounds": 1}, np.array([0.99])
            fake.rounds = np.array([1500])
            runs.append(fake)
    found = group(runs)
    not_planned = {("headline", "FedAdam(*)")}  # in the paper on TinyImageNet only
    for table in paper.tables(found):
        if table.id != "communication_to_target":
            assert not table.empty, table.id
            ours = [i for i, c in enumerate(table.columns) if c.name == "ours"]
            rows = [row for row in table.rows if (table.id, row[0].text) not in not_planned]
            assert not {row[i].text for row in rows for i in ours} & {"–", "not run"}, table.id
    assert [f.id for f in paper.figures(found) if f.missing] == []


def test_a_table_of_the_paper_shows_ours_next_to_it():
    curve = [0.5] * 51 + [0.71] * 1449
    runs = [
        run(curve, algorithm="fedlada", alpha=0.1, lr=1e-3, weight_decay=1e-2, decay_mode="decoupled", precision="tf32")
    ]
    table = {t.id: t for t in paper.tables(group(runs))}["rounds_to_test"]
    row = {r[0].text: r for r in table.rows}["FedLADA"]
    assert [c.full for c in table.columns[1:4]] == [
        "CIFAR-10, 70 %: ours",
        "CIFAR-10, 70 %: paper",
        "CIFAR-10, 70 %: difference",
    ]
    assert [c.text for c in row[1:7]] == ["52", "44.6", "+7.4 (+17 %)", "> 1,500", "186.4", "> +1,314"]
    assert [c.text for c in row[7:10]] == ["not run", "93.9", "–"]
    assert row[3].tone == "worse"
    assert table.notes == ["FedLADA on CIFAR-10 was run with tf32."]
    fedavg = {r[0].text: r for r in table.rows}["FedAvg"]
    assert fedavg[1].text == "not run"


def test_cells_without_a_value_say_how_far_the_runs_got():
    column = {"measure": "test_at", "round": 1500}
    ongoing, short = group([run([0.5] * 7, rounds=9, status="stopped")]), group([run([0.5] * 8)])
    measure = measures.named(column)
    assert paper._ours(Stat(), None, column).text == "not run"
    assert paper._ours(ongoing[0].over(measure), ongoing[0], column).text == "at round 7"
    assert paper._ours(short[0].over(measure), short[0], column).text == "at round 8"
    reach = {"measure": "rounds_to_test", "level": 0.9}
    assert paper._ours(short[0].over(measures.named(reach)), short[0], reach).text == "> 8"
    assert paper._ours(ongoing[0].over(measures.named(reach)), ongoing[0], reach).text == "at round 7"


def test_never_agrees_with_never_only_after_the_papers_rounds():
    column = {"measure": "rounds_to_test", "paper": []}
    assert paper._difference(Stat((), 1, 1500), math.inf, column).text == "agree"
    assert paper._difference(Stat((), 1, 300), math.inf, column).text == "–"
    assert paper._difference(Stat((9.0,), 1), math.inf, column).text == "reached"
    assert paper._difference(Stat((), 1, 300), 500, column).text == "–"


def test_a_level_reached_behind_the_horizon_is_never():
    late = run([0.5] * 1600 + [0.9] * 100)
    assert measures.rounds_to("test_acc", 0.8)(late) == 1601
    assert measures.rounds_to("test_acc", 0.8, 1500)(late) == math.inf
    assert measures.total_to("paper_units", 0.8, horizon=1500)(late) is None
    stat = group([late])[0].over(measures.rounds_to("test_acc", 0.8, 1500), 1500)
    assert (stat.values, stat.beyond) == ((), 1500)


def test_no_verdict_from_a_part_of_the_runs():
    column = {"measure": "rounds_to_test", "paper": []}
    part = paper._difference(Stat((40.0,), 2, 1500), 80.0, column)
    assert (part.text, part.tone) == ("1 of 2 reached it", "")
    assert paper._difference(Stat((40.0,), 1), 80.0, column).tone == "better"
    unfinished = paper._difference(Stat((40.0,), 2), 80.0, column)
    assert (unfinished.text, unfinished.tone) == ("1 of 2 runs", "")


def test_two_values_of_the_paper_are_both_shown():
    column = {"measure": "rounds_to_train", "paper": [977, 740]}
    assert paper._printed(977, column, 1511).text == "977 or 1,511"
    cell = paper._difference(Stat((900.0,), 1), 977, column, 1511)
    assert (cell.text, cell.tone) == ("−77 (−8 %) or −611 (−40 %)", "")
    assert paper._printed(740, column, math.nan).text == "740"
    assert paper._difference(Stat(), 977, column, 1511).text == "–"
    assert paper._difference(Stat((900.0,), 2, 1500), 977, column, 1511).text == "1 of 2 reached it"


def test_factors_are_relative_to_the_least():
    found = {"a": Stat((40.0,), 1), "b": Stat((20.0,), 1), "c": Stat((10.0,), 2)}  # c: one of two seeds only
    assert paper._relative(found, "a", {"over": "least"}).mean == 2.0
    assert paper._relative({**found, "c": Stat((10.0,), 2, 1500)}, "c", {"over": "least"}) == Stat((), 2)


def test_the_round_of_a_table_that_does_not_name_it_is_fitted():
    runs = [run([0.1, 0.4, 0.7], algorithm="scaffold", alpha=a) for a in (0.0, 1.0)]
    measure, note = paper._fitted(group(runs), [41.0, 42.0], 1500)
    assert [measure(r) for r in runs] == pytest.approx([40.0, 40.0])
    assert "after round 2:" in note
    assert "2 of 2 rows" in note
    assert "once two rows" in paper._fitted([None, None], [1.0, 2.0], 1500)[1]
    alone, note = paper._fitted([group(runs)[0], None], [41.0, 42.0], 3)
    assert alone(runs[0]) == pytest.approx(70.0)
    assert "once two rows" in note


FEDLADA = {"algorithm": "fedlada", "alpha": 0.1, "lr": 1e-3, "weight_decay": 1e-2, "decay_mode": "decoupled"}


def claim(runs, text: str):
    table = claims.tables(group(runs))[0]
    return [cell.text for cell in next(row for row in table.rows if row[0].text.startswith(text))[1:]]


def test_claims_of_the_text():
    ours = run([0.5] * 1499 + [0.86], **FEDLADA)
    text = "FedLADA ends about 4.2 points above FedAvg, CIFAR-10"
    assert claim([ours], text) == ["–", "about 4.2 points", "not run", "4.30"]
    assert claim([ours, run([0.5] * 1499 + [0.82])], text) == ["4.00", "about 4.2 points", "yes", "4.30"]
    assert claim([ours, run([0.5] * 1499 + [0.85])], text)[:3] == ["1.00", "about 4.2 points", "no"]
    assert claim([ours, run([0.5] * 300)], text)[2] == "not run"
    half = [run([0.5] * 1499 + [0.82]), run([0.5] * 300, seed=1, rounds=1500, status="stopped")]
    assert claim([ours, *half], text)[2] == "undecided"


def test_claims_of_tuned_runs_are_apart():
    """FedAvg has tuned settings, FedCM has none and is the same in both."""
    runs = [run([0.5] * 1499 + [0.80], **FEDLADA), run([0.5] * 1499 + [0.84], algorithm="fedcm", alpha=0.1)]
    runs.append(run([0.5] * 1499 + [0.86], **{**FEDLADA, "preset": "tuned", "weight_decay": 0.05}))
    paper_s, tuned = claims.tables(group([*runs, run([0.5] * 1499 + [0.79])]))
    assert (paper_s.id, tuned.id, tuned.title) == ("claims", "claims_tuned", "Claims of the text, tuned")
    text = "FedLADA ends above FedCM, CIFAR-10"
    found = [next(row for row in table.rows if row[0].text == text) for table in (paper_s, tuned)]
    assert [[row[1].text, row[3].text] for row in found] == [["−4.00", "no"], ["2.00", "yes"]]
    against_fedavg = next(row for row in tuned.rows if row[0].text.startswith("FedLADA ends about 4.2 points"))
    assert against_fedavg[3].text == "not run"
    assert any("without tuned settings" in note for note in tuned.notes)


def learning(at: int, rounds: int, **changes) -> load.Run:
    """A run that learns the training set in round ``at``, or not in its rounds."""
    one = run([0.5] * rounds, **changes)
    one.series["train_acc"] = np.where(one.rounds < at, 0.5, 0.99)
    return one


def test_claims_of_speed_use_the_rounds_that_were_run_as_a_bound():
    text = "FedLADA learns the training set over 3 times as fast as FedAdam, CIFAR-10"
    fedadam = {"algorithm": "fedadam", "server_lr": 0.1}
    ours = learning(100, 150, **FEDLADA)
    assert claim([ours, learning(310, 400, **fedadam)], text) == ["3.10", "over 3 times", "yes", "3.34"]
    assert claim([ours, learning(900, 400, **fedadam)], text)[::2] == ["> 4.00", "yes"]
    assert claim([ours, learning(900, 200, **fedadam)], text)[::2] == ["> 2.00", "undecided"]
    assert claim([learning(900, 150, **FEDLADA), learning(310, 400, **fedadam)], text)[::2] == ["< 2.07", "no"]
    seeds = [learning(310, 400, **fedadam), learning(900, 400, seed=1, **fedadam)]  # at least (310 + 400) / 2
    assert claim([ours, *seeds], text)[::2] == ["> 3.55", "yes"]


def test_claims_by_the_papers_own_tables():
    """Worked out by hand from Tables speed, at1 and at2."""
    (table,) = claims.tables([])
    printed = {row[0].text: row[4].text for row in table.rows}
    speed = "FedLADA learns the training set"
    expected = {
        f"{speed} about 1.2 times as fast as LocalAdam, CIFAR-10": 575 / 765,
        f"{speed} about 1.2 times as fast as LocalAdam, CIFAR-100": 746 / 618,
        f"{speed} over 1.5 times as fast as the best SGD-based method, CIFAR-10": 740 / 765,
        f"{speed} over 1.5 times as fast as the best SGD-based method, CIFAR-100": 966 / 618,
        f"{speed} over 1.5 times as fast as the best SGD-based method, TinyImageNet": 1338 / 878,
        f"{speed} over 3 times as fast as FedAdam, CIFAR-100": 2778 / 618,
        "FedLADA is about 1.3 times as fast as the second to 70, 40 and 28 %, mean of the data sets": (
            (65.5 / 44.6 + 120.5 / 93.9 + 115.9 / 110.2) / 3
        ),
        "FedLADA ends about 1 point above FedCM, CIFAR-100": 52.6 - 52.0,
        "FedLADA ends about 7.8 points above LocalAdam, TinyImageNet": 41.9 - 34.1,
    }
    assert {text: printed[text] for text in expected} == {text: f"{value:.2f}" for text, value in expected.items()}
    assert printed["FedLADA ends about 7.5 points above LocalAdam, CIFAR-10"] == "–"
    assert {row[3].text for row in table.rows} == {"not run"}
    assert table.empty


def test_a_method_that_is_another_one_at_some_alpha():
    runs = group([run([0.5])])
    assert paper.match(runs, {"dataset": "cifar10", "algorithm": "scaffold", "alpha": 0.0})[0] is runs[0]
    assert paper.match(runs, {"dataset": "cifar10", "algorithm": "scaffold", "alpha": 0.25})[0] is None
    table = {t.id: t for t in paper.tables(runs)}["scaffold_scale"]
    assert "FedAvg stands for SCAFFOLD at α=0." in table.notes


def test_cost_counts_the_share_of_a_gpu():
    alone, shared = run([0.5] * 4), run([0.5] * 2, rounds=4, status="stopped", algorithm="scaffold")
    alone.usage = usage.Usage("NVIDIA H200", 1, [], 1.0)
    shared.usage = usage.Usage("NVIDIA H200", 2, [], 4.0)
    unknown = run([0.5] * 4, algorithm="fedprox")
    rows = {row[1].text: [cell.text for cell in row[2:]] for row in tables.cost(group([alone, shared, unknown])).rows}
    assert rows["FedAvg"] == ["1", "4", "0.500", "2.0 s", "1", "1", "2", "NVIDIA H200"]
    assert rows["SCAFFOLD"][1] == "2 of 4, 1 unfinished"
    assert rows["SCAFFOLD"][6] == "0"  # 1 s on 2 GPUs, a quarter of them
    assert rows["FedProx"][4:] == ["–", "–", "–", "–"]


def test_gains_and_ratios_are_against_the_named_row():
    found = {"fedavg": Stat((40.0, 44.0), 2), "fedlada": Stat((21.0,), 1), "fedcm": Stat((), 1)}
    assert paper._relative(found, "fedlada", {"over": "fedavg"}).mean == 0.5
    assert paper._relative(found, "fedlada", {"minus": "fedavg"}).mean == -21
    assert paper._relative(found, "fedcm", {"minus": "fedavg"}).mean is None


def test_other_settings_than_the_papers_are_not_compared_with_it():
    assert paper.match(group([run([0.1], participation=0.2)]), {"dataset": "cifar10", "algorithm": "fedavg"}) == (
        None,
        [],
    )
    shards = group([run([0.1], dataset="/data/shards/cifar10")])
    assert paper.match(shards, {"dataset": "cifar10", "algorithm": "fedavg"})[0] is shards[0]


def test_times_have_the_unit_that_suits_them():
    shown = {seconds: tables.duration(Stat((seconds,), 1)).text for seconds in (0.004, 4.0, 90.0, 600.0, 9000.0)}
    assert shown == {0.004: "0.004 s", 4.0: "4.0 s", 90.0: "90 s", 600.0: "10.0 min", 9000.0: "2.5 h"}
    assert tables.duration(Stat((600.0,), 1)).value == 600
    assert tables.duration(Stat()).text == "–"


def test_one_task_has_no_axes_of_others():
    found = group([run([0.1, 0.2]), run([0.2, 0.3], algorithm="scaffold")])
    text = page.render(found, [], [], "runs")
    (figure,) = (spec for spec in paper.figures(found) if spec.id == "all_methods")
    wanted = [f"all_methods:{i}" for i, panel in enumerate(figure.panels) if panel.groups]
    assert len(wanted) == 2 < len(figure.panels)
    assert re.findall(r'data-panel="(all_methods:\d+)"', text) == wanted
    assert "<b>1</b><span>task</span>" in text
    assert "<b>2.0 s</b><span>of training</span>" in text


def test_thinning_keeps_the_ends_and_true_values():
    assert series.thinned(5, 10).tolist() == [0, 1, 2, 3, 4]
    chosen = series.thinned(1500, 200)
    assert len(chosen) == 200
    assert chosen[0] == 0
    assert chosen[-1] == 1499


def test_what_was_spent_by_a_round():
    one = Group({}, [run([0.1, 0.2, 0.3])])
    assert series.spent(one, "units", np.array([1, 3])).tolist() == [2, 6]
    assert series.spent(one, "bytes", np.array([2])).tolist() == [60]


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A small grid in every state: two methods finished, one seed going on, one not begun."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedlada"):
        for seed in (0, 1):
            write_run(root / f"{method}{seed}", {"algorithm": method, "seed": seed, "rounds": 30, "targets": [0.3]}, 30)
    ongoing = write_run(root / "ongoing", {"algorithm": "scaffold", "rounds": 30}, 12, status=None)
    with open(ongoing / "metrics.jsonl", "a") as file:
        file.write('{"round": 13, "test_a')
    write_run(root / "begun", {"algorithm": "localadam", "rounds": 30}, 0, status=None)
    (root / "broken").mkdir()
    (root / "broken/config.json").write_text("{")
    return root


@pytest.fixture(scope="session")
def report(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    return out, build([digits], out, skip_broken=True)


def test_the_report_of_runs_in_every_state(report):
    out, lines = report
    assert lines[-1].startswith("6 runs of 4 settings,")
    assert any("broken/config.json" in line for line in lines)
    overview = {row["Method"]: row for row in rows_of(out / "tables/overview.csv")}
    assert list(overview) == ["FedAvg", "LocalAdam", "SCAFFOLD", "FedLADA"]
    assert overview["FedAvg"]["Final test % seeds"] == "2"
    assert float(overview["FedAvg"]["Final test % std"]) > 0
    assert overview["SCAFFOLD"]["Rounds"] == "12"
    assert overview["SCAFFOLD"]["Final test % std"] == ""
    assert overview["LocalAdam"]["Final test %"] == ""
    target = {row["Method"]: row for row in rows_of(out / "tables/targets_digits.csv")}
    assert float(target["FedLADA"]["30 %: rounds"]) > 5
    assert target["FedAvg"]["30 %: rounds"] == "> 30"
    assert target["SCAFFOLD"]["30 %: rounds"] == ""
    states = {row["Directory"].rsplit("/")[-1]: row["State"] for row in rows_of(out / "tables/runs.csv")}
    assert states == {
        **dict.fromkeys(("fedavg0", "fedavg1", "fedlada0", "fedlada1"), "finished"),
        **dict.fromkeys(("ongoing", "begun"), "unfinished"),
    }


def test_figures_are_there_as_png_and_svg(report):
    out, _ = report
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {"curves_digits", "phases_digits", "ranks_digits"}
    for name in names:
        assert (out / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"figures/{name}.svg").read_text()


def test_markdown_has_as_many_cells_in_every_line(report):
    out, _ = report
    for path in (out / "tables").glob("*.md"):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in path.read_text().splitlines() if line.startswith("|")}
        assert len(widths) == 1, path


def test_the_page_asks_for_nothing_from_outside(report):
    text = (report[0] / "index.html").read_text()
    own = text.replace(page.plotly(), "")
    assert not re.search(r"""(src|href)=["'](https?:)?//""", own)
    assert "NaN" not in re.search(r'id="data">(.*?)</script>', own, re.S).group(1)


def test_a_single_run_is_enough(tmp_path, digits):
    lines = build([digits / "fedlada0"], tmp_path)
    assert lines[-1].startswith("1 run of 1 setting,")
    assert "Test accuracy" in (tmp_path / "index.html").read_text()


def test_without_the_charting_library_the_page_shows_pictures(tmp_path, digits, monkeypatch):
    monkeypatch.setattr(page, "plotly", lambda: "")
    lines = build([digits], tmp_path, skip_broken=True)
    assert "fedlada_mpi[report]" in lines[-2]
    text = (tmp_path / "index.html").read_text()
    assert '<img src="figures/curves_digits.png"' in text
    assert 'data-curves="' not in text
    assert 'alt="Digits, curves over the rounds: FedAvg, SCAFFOLD, FedLADA"' in text


def test_many_groups_are_drawn_apart():
    many = group(
        [run([0.1, 0.2], algorithm=m, alpha=a) for m in ("fedlada", "fedcm") for a in np.linspace(0.1, 1, 9).tolist()]
    )
    names = [name for name, _ in figures.plan(many)]
    assert "test_acc_cifar_10" in names
    assert "curves_cifar_10" not in names
    assert len(set(series.looks(many[:9]))) == 9


def test_mistakes_are_reported_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert main([str(tmp_path), "--out", str(tmp_path / "r")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: there is no directory")
    assert "no runs under" in lines[1]
    assert len(lines) == 2


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not chromium(), reason="no browser: apt-get install chromium")
def test_the_page_in_a_browser(report, tmp_path):
    """No message on the console, and the tables and curves are in the document."""
    # High enough for all charts, which are drawn only when they are near what is read.
    with Browser(tmp_path / "profile", height=20000) as browser:
        browser.open(report[0] / "index.html", "document.body.dataset.drawn == 2")
        document = browser.run("document.documentElement.outerHTML")
        assert browser.messages == []
    curves = document[document.index('data-curves="0"') :]
    assert curves.count('class="js-line"') >= 3
    assert all(name in curves for name in ("FedAvg", "SCAFFOLD", "FedLADA"))
    assert document.count('<table class="sortable">') == len(list((report[0] / "tables").glob("*.csv")))
    assert json.loads(re.search(r'id="data">(.*?)</script>', document, re.S).group(1))["groups"]


def test_the_rule_of_tuning():
    """Means over rounds 151 to 200 by hand: 0.6, 0.7 and, where seed 1 has no counterpart, that of seed 0 alone."""
    early, late = [0.9] * 150, [0.5, 0.7] * 25
    runs = [run([*early, *late]), run([*early, *[0.2] * 50], seed=1)]
    assert tuning.measured(group(runs)) == {}
    runs.append(run([*early, *[0.7] * 50, 0.1], weight_decay=2e-3))
    assert tuning.measured(group(runs))["fedavg"] == pytest.approx({1e-3: 60.0, 2e-3: 70.0})
    assert tuning.chosen(group(runs)) == {"fedavg": 2e-3}
    rows = tuning.table(group(runs)).rows
    assert [[cell.text for cell in row] for row in rows] == [["FedAvg", "0.001", "60.00", "70.00", "0.002"]]
    other = [run([0.8] * 200, weight_decay=5e-3, lr=0.2), run([0.8] * 200, weight_decay=5e-3, dataset="cifar100")]
    assert {*tuning.measured(group([*runs, *other]))["fedavg"]} == {1e-3, 2e-3}
    short = run([0.9] * 199, weight_decay=5e-3)
    assert tuning.chosen(group([*runs, short])) == {}
