"""The paper's tables and figures with our runs next to them."""

import math
import re

import numpy as np
import pytest
from synthetic_runs import run

from fedlada_mpi import algorithms, experiments
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.analysis import measures, page
from fedlada_mpi.analysis.groups import Stat, group
from fedlada_mpi.reproduction import comparison, figures, paper
from fedlada_mpi.reproduction.section import sections


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
        assert any(setting in algorithms.settings_of(name) for name in algorithms.names())
        for column in table["columns"]:
            assert len(column["paper"]) == len(column.get("also", column["paper"])) == len(values)
            if column["measure"] != "test_at_fit":
                paper.measure(column)


def test_every_experiment_of_the_paper_fills_its_tables_and_figures(tmp_path):
    """The settings of the grids and those of paper.toml name the same runs."""
    runs = []
    for name in experiments.experiments():
        for planned in experiments.load(name).runs:
            settings = resolve({}, planned.given).config.record()
            fake = run([0.99], seed=settings["seed"])
            fake.settings, fake.series["train_acc"] = {**settings, "rounds": 1}, np.array([0.999])
            fake.rounds = np.array([1500])
            runs.append(fake)
    found = group(runs)
    not_planned = {("headline", "FedAdam(*)")}  # in the paper on TinyImageNet only
    for table in comparison.tables(found):
        if table.id not in ("communication_to_target", "simulator"):  # these runs have round 1,500 alone
            assert not table.empty, table.id
            ours = [i for i, c in enumerate(table.columns) if c.name == "ours"]
            rows = [row for row in table.rows if (table.id, row[0].text) not in not_planned]
            assert not {row[i].text for row in rows for i in ours} & {"–", "not run"}, table.id
    assert [f.id for f in figures.figures(found) if f.missing] == []


def test_a_table_of_the_paper_shows_ours_next_to_it():
    curve = [0.5] * 51 + [0.71] * 1449
    runs = [
        run(curve, algorithm="fedlada", alpha=0.1, lr=1e-3, weight_decay=1e-2, decay_mode="decoupled", precision="tf32")
    ]
    table = {t.id: t for t in comparison.tables(group(runs))}["rounds_to_test"]
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
    measure = paper.measure(column)
    assert comparison._ours(Stat(), None, column).text == "not run"
    assert comparison._ours(ongoing[0].over(measure), ongoing[0], column).text == "at round 7"
    assert comparison._ours(short[0].over(measure), short[0], column).text == "at round 8"
    reach = {"measure": "rounds_to_test", "level": 0.9}
    assert comparison._ours(short[0].over(paper.measure(reach)), short[0], reach).text == "> 8"
    assert comparison._ours(ongoing[0].over(paper.measure(reach)), ongoing[0], reach).text == "at round 7"


def test_never_agrees_with_never_only_after_the_papers_rounds():
    column = {"measure": "rounds_to_test", "paper": []}
    assert comparison._difference(Stat((), 1, 1500), math.inf, column).text == "agree"
    assert comparison._difference(Stat((), 1, 300), math.inf, column).text == "–"
    assert comparison._difference(Stat((9.0,), 1), math.inf, column).text == "reached"
    assert comparison._difference(Stat((), 1, 300), 500, column).text == "–"


def test_a_level_reached_behind_the_horizon_is_never():
    late = run([0.5] * 1600 + [0.9] * 100)
    assert measures.rounds_to("test_acc", 0.8)(late) == 1601
    assert measures.rounds_to("test_acc", 0.8, 1500)(late) == math.inf
    assert measures.total_to("paper_units", 0.8, horizon=1500)(late) is None
    stat = group([late])[0].over(measures.rounds_to("test_acc", 0.8, 1500), 1500)
    assert (stat.values, stat.beyond) == ((), 1500)


def test_no_verdict_from_a_part_of_the_runs():
    column = {"measure": "rounds_to_test", "paper": []}
    part = comparison._difference(Stat((40.0,), 2, 1500), 80.0, column)
    assert (part.text, part.tone) == ("1 of 2 reached it", "")
    assert comparison._difference(Stat((40.0,), 1), 80.0, column).tone == "better"
    unfinished = comparison._difference(Stat((40.0,), 2), 80.0, column)
    assert (unfinished.text, unfinished.tone) == ("1 of 2 runs", "")


def test_two_values_of_the_paper_are_both_shown():
    column = {"measure": "rounds_to_train", "paper": [977, 740]}
    assert comparison._printed(977, column, 1511).text == "977 or 1,511"
    cell = comparison._difference(Stat((900.0,), 1), 977, column, 1511)
    assert (cell.text, cell.tone) == ("−77 (−8 %) or −611 (−40 %)", "")
    assert comparison._printed(740, column, math.nan).text == "740"
    assert comparison._difference(Stat(), 977, column, 1511).text == "–"
    assert comparison._difference(Stat((900.0,), 2, 1500), 977, column, 1511).text == "1 of 2 reached it"


def test_factors_are_relative_to_the_least():
    found = {"a": Stat((40.0,), 1), "b": Stat((20.0,), 1), "c": Stat((10.0,), 2)}  # c: one of two seeds only
    assert comparison._relative(found, "a", {"over": "least"}).mean == 2.0
    assert comparison._relative({**found, "c": Stat((10.0,), 2, 1500)}, "c", {"over": "least"}) == Stat((), 2)


def test_the_round_of_a_table_that_does_not_name_it_is_fitted():
    runs = [run([0.1, 0.4, 0.7], algorithm="scaffold", alpha=a) for a in (0.0, 1.0)]
    measure, note = comparison._fitted(group(runs), [41.0, 42.0], 1500)
    assert [measure(r) for r in runs] == pytest.approx([40.0, 40.0])
    assert "after round 2:" in note
    assert "2 of 2 rows" in note
    assert "once two rows" in comparison._fitted([None, None], [1.0, 2.0], 1500)[1]
    alone, note = comparison._fitted([group(runs)[0], None], [41.0, 42.0], 3)
    assert alone(runs[0]) == pytest.approx(70.0)
    assert "once two rows" in note


def test_a_method_that_is_another_one_at_some_alpha():
    runs = group([run([0.5])])
    assert paper.match(runs, {"dataset": "cifar10", "algorithm": "scaffold", "alpha": 0.0})[0] is runs[0]
    assert paper.match(runs, {"dataset": "cifar10", "algorithm": "scaffold", "alpha": 0.25})[0] is None
    table = {t.id: t for t in comparison.tables(runs)}["scaffold_scale"]
    assert "FedAvg stands for SCAFFOLD at α=0." in table.notes


def test_gains_and_ratios_are_against_the_named_row():
    found = {"fedavg": Stat((40.0, 44.0), 2), "fedlada": Stat((21.0,), 1), "fedcm": Stat((), 1)}
    assert comparison._relative(found, "fedlada", {"over": "fedavg"}).mean == 0.5
    assert comparison._relative(found, "fedlada", {"minus": "fedavg"}).mean == -21
    assert comparison._relative(found, "fedcm", {"minus": "fedavg"}).mean is None


def test_other_settings_than_the_papers_are_not_compared_with_it():
    assert paper.match(group([run([0.1], participation=0.2)]), {"dataset": "cifar10", "algorithm": "fedavg"}) == (
        None,
        [],
    )
    shards = group([run([0.1], dataset="/data/shards/cifar10")])
    assert paper.match(shards, {"dataset": "cifar10", "algorithm": "fedavg"})[0] is shards[0]


def test_one_task_has_no_axes_of_others():
    found = group([run([0.1, 0.2]), run([0.2, 0.3], algorithm="scaffold")])
    described = figures.figures(found)
    text = page.render(found, [], [], "runs", sections=sections([], described, ["png"], interactive=True))
    (figure,) = (each for each in described if each.id == "all_methods")
    wanted = [f"all_methods:{i}" for i, panel in enumerate(figure.panels) if panel.series]
    assert len(wanted) == 2 < len(figure.panels)
    assert re.findall(r'data-panel="(all_methods:\d+)"', text) == wanted
    assert "<b>1</b><span>task</span>" in text
    assert "<b>2.0 s</b><span>of training</span>" in text
