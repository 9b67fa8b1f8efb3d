"""The report: reading runs in any state, the numbers in its tables, its files, and the page in a real browser."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from browser import Browser, chromium
from synthetic_runs import rows_of, run, write_run

from fedlada_mpi.analysis import drawing, figures, groups, load, measures, page, run_tables, series, tables, usage
from fedlada_mpi.analysis.drawing import STYLES, plt
from fedlada_mpi.analysis.groups import Group, Stat, group
from fedlada_mpi.report import build, main
from fedlada_mpi.reproduction import comparison, paper
from fedlada_mpi.rundir import client_values


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
    rounds, columns = load._series(
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
    rounds, mean, std = one.curve("test_acc")
    assert rounds.tolist() == [1, 2]
    assert mean == pytest.approx([0.2, 0.6])
    assert std == pytest.approx([math.sqrt(0.02), math.sqrt(0.08)])  # sample deviation of 0.1 0.3, and of 0.4 0.8


def test_seeds_of_different_lengths_are_averaged_over_the_rounds_that_all_have():
    short = run([0.2, 0.6], seed=1, rounds=4, status="stopped")
    (one,) = group([run([0.1, 0.4, 0.3, 0.9]), short])
    assert one.curve("test_acc")[0].tolist() == [1, 2]
    assert one.latest(measures.final("test_acc", 100)).values == pytest.approx((40, 60))
    assert one.latest(measures.best(None)).values == pytest.approx((40, 60))
    assert one.latest(run_tables._seconds).values == (1, 1)  # two rounds of half a second, of both
    assert one.over(measures.test_at(4)) == Stat((90.0,), 2)  # of a certain round: by those that have it
    assert one.over(measures.rounds_to("test_acc", 0.8)) == Stat((4.0,), 2)
    said = "FedAvg: seeds have 2 to 4 rounds: means over the rounds that all have, up to 2."
    assert groups.uneven([one]) == [said]
    assert all(said in table.notes for table in (*run_tables.overview([one]), run_tables.cost([one])))
    assert "FedAvg on CIFAR-10: seeds have 2 to 4" in " ".join(comparison.tables([one])[0].notes)


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
    """A run of two rounds, whose clients of two images each were evaluated one by one after the second."""
    write_run(directory, {"dataset": "digits", "algorithm": "fedavg", "rounds": 2, "clients": len(accuracies)}, 2)
    count = len(accuracies)
    clients = client_values.Clients(np.full(count, 2), np.arange(1, count + 1).clip(max=2))
    values = client_values.ClientValues(directory, 0, clients)
    spread = values.add(2, {"train_loss": np.full(count, 0.5), "train_acc": np.array(accuracies)})
    values.write()
    first, second = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (first, {**second, **spread})))
    return directory


def test_clients_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "WORTH_A_PROCESS", 2)  # so that worker processes draw
    with_clients(tmp_path / "runs" / "a", [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "old", {"dataset": "digits", "algorithm": "scaffold", "rounds": 2}, 2)
    build([tmp_path / "runs"], tmp_path / "report")
    (row,) = rows_of(tmp_path / "report/tables/clients.csv")
    assert [float(row[f"train accuracy %: {n}"]) for n in ("mean", "worst tenth")] == pytest.approx([70, 50])
    assert not [name for name in row if "test" in name]
    assert (tmp_path / "report/figures/clients_digits_clients_3.png").exists()
    assert 'src="figures/clients_digits_clients_3.png"' in (tmp_path / "report/index.html").read_text()
    run = load.read(tmp_path / "runs" / "a")
    assert run.clients["train_acc"].tolist() == pytest.approx([0.5, 0.7, 0.9])
    one, two = rows_of(tmp_path / "report/tables/silos.csv")
    about = [[row[name] for name in ("Silo", "Clients", "examples: train")] for row in (one, two)]
    assert about == [["1", "1", "2"], ["2", "2", "4"]]
    assert [float(row["accuracy %: train"]) for row in (one, two)] == pytest.approx([50, 80])
    assert [float(row["loss: train"]) for row in (one, two)] == [0.5, 0.5]
    assert not [name for name in one if "test" in name]
    assert 'src="figures/silos_digits_clients_3.png"' in (tmp_path / "report/index.html").read_text()
    assert load.read(tmp_path / "runs" / "old").clients == {}


@pytest.mark.slow
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


def test_the_epsilon_shown_is_that_spent_by_all_rounds(tmp_path):
    settings = {"rounds": 4, "dp": "client", "epsilon": 8.0, "delta": 0.001, "clip_norm": 1.0, "algorithm": "fedavg"}
    spent, killed = (write_run(tmp_path / name, settings, 3, status="stopped") for name in "ab")
    for directory in (spent, killed):
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        lines[1]["epsilon"] = 4.0  # of the only round that was evaluated
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (spent / "summary.json").write_text('{"status": "stopped", "rounds": 3, "privacy": {"epsilon": 7.9}}')
    (killed / "summary.json").unlink()
    found = group([load.read(spent), replace(load.read(killed), settings={**load.read(killed).settings, "seed": 1})])
    (runs,), (overview,) = run_tables.runs(found), run_tables.overview(found)
    at = [column.name for column in runs.columns].index("Epsilon")
    assert [row[at].text for row in runs.rows] == ["7.90", "≥ 4.00"]
    assert overview.columns[-1].name == "Epsilon"
    assert overview.rows[0][-1].text == "7.90 (1 of 2)"


def test_runs_that_diverged_are_counted_and_named():
    runs = [
        run([0.1, 0.2, 0.3]),
        run([0.1], seed=1, status="diverged", rounds=3),
        run([0.1], seed=2, rounds=3, status=""),
    ]
    found = group(runs)
    (overview,) = run_tables.overview(found)
    row = dict(zip([column.name for column in overview.columns], overview.rows[0], strict=True))
    assert row["Rounds"].text == "1 to 3 of 3, 1 unfinished, 1 diverged"
    assert (row["Diverged"].text, row["Diverged"].value) == ("1 of 3", 1)
    assert run_tables.DIVERGED_NOTE in overview.notes
    assert [each.label for each in series.series(found)] == ["FedAvg, 1 of 3 diverged"]
    (table,) = run_tables.runs(found)
    at = [column.name for column in table.columns].index("State")
    assert [row[at].text for row in table.rows] == ["finished", "diverged", "–"]
    assert "Diverged" not in [column.name for column in run_tables.overview(group(runs[:1]))[0].columns]


def test_a_run_that_is_being_resumed_is_not_finished(tmp_path):
    directory = write_run(tmp_path / "a", {"rounds": 9}, 4)
    assert load.read(directory).complete
    write_run(directory, {"rounds": 9}, 6, status=None)
    assert (load.read(directory).status, load.read(directory).complete) == ("unfinished", False)


def test_cells_distinguish_missing_unreached_and_partial():
    assert tables.stat(Stat((), 3)).text == "–"
    assert tables.stat(Stat((), 3, beyond=1500)).text == "> 1,500"
    assert tables.stat(Stat((10.0, 12.0), 3)).text == "11.0 ± 1.4 (2 of 3)"
    assert tables.stat(Stat((52.0,), 1)).text == "52"
    assert tables.size(Stat((2.5e9,), 1)).text == "2.50 GB"
    assert tables.size(Stat((2.5e9,), 1)).value == 2.5e9


def test_what_does_not_vary_has_no_spread_and_units_follow_the_number():
    assert tables.stat(Stat((5.0, 5.0), 2)).text == "5"
    assert tables.stat(Stat((98.001, 98.002), 2), 2).text == "98.00"
    assert tables.stat(Stat((5.0, 5.0), 2)).std == 0  # in the CSV it is known
    assert tables.size(Stat((11.92e6, 11.92e6), 3)).text == "11.92 MB (2 of 3)"
    assert tables.size(Stat((1e6, 3e6), 2)).text == "2.00 ± 1.41 MB"
    assert tables.duration(Stat((600.0, 600.0), 3)).text == "10.0 min (2 of 3)"


def test_short_times_keep_two_digits():
    shown = {mean: tables.seconds(Stat((mean,), 1)).text for mean in (1.5, 0.0123, 0.00123, 0.000012, 1e-9, 0.0)}
    assert shown == {1.5: "1.500", 0.0123: "0.012", 0.00123: "0.0012", 0.000012: "0.000012", 1e-9: "0", 0.0: "0"}
    assert tables.seconds(Stat((0.0004, 0.0006), 2)).text == "0.00050 ± 0.00014"


def test_phases_that_hardly_take_time_and_ranks_that_cannot_wait_have_no_columns():
    quick, slow = run([0.5, 0.6]), run([0.5, 0.6], algorithm="fedlada")
    for one, reduced in ((quick, 0.0024), (slow, 0.0026)):  # 0.5 % of a round are 0.0025 s
        one.series["seconds_reduce"], one.by_rank = np.full(2, reduced), {"wait": np.zeros(1)}
        one.series["seconds_server"] = np.zeros(2)
    alone, both = run_tables.phases(group([quick])), run_tables.phases(group([quick, slow]))
    assert [column.name for column in alone.columns[2:]] == ["bcast", "train", "eval", "total"]
    assert alone.notes[1] == "Less than 0.5 % of a round, and left out: reduce, server."
    assert [column.name for column in both.columns[2:]] == ["bcast", "train", "reduce", "eval", "total"]
    slow.by_rank = {"wait": np.array([0.2, 0.1])}
    waits = {row[1].text: [cell.text for cell in row[-4:]] for row in run_tables.phases(group([quick, slow])).rows}
    assert waits == {"FedAvg": ["–"] * 4, "FedLADA": ["2", "0.150", "0.200", "server"]}


def validated(test_acc, val_acc, **changes):
    one = run(test_acc, **changes)
    one.series["val_acc"] = np.array(val_acc, float)
    return one


def test_validation_chooses_the_best_round():
    """The second of three rounds, though the test accuracy is highest in the third."""
    one = group([validated([0.1, 0.5, 0.9], [0.2, 0.8, 0.7], validation=0.1)])
    (table,) = run_tables.overview(one)
    row = dict(zip([column.full for column in table.columns], (cell.text for cell in table.rows[0]), strict=True))
    best = {name.rpartition(": ")[2]: text for name, text in row.items() if name.startswith("best by validation")}
    assert best == {"round": "2", "validation %": "80.00", "test %": "50.00"}
    assert row["Final validation %"] == "70.00"
    assert row["Final test %"] == "90.00"
    assert "Best test %" not in row
    (every,) = run_tables.runs(one)
    columns = [column.name for column in every.columns]
    assert every.rows[0][columns.index("Test % at best validation")].text == "50.00"
    assert "Best test %" not in columns


def test_without_validation_the_best_test_accuracy_stays_in_a_column_of_its_own():
    mixed = group([validated([0.5, 0.9], [0.8, 0.7], validation=0.1), run([0.3, 0.2])])
    (table,) = run_tables.overview(mixed)
    names = [column.full for column in table.columns]
    at = [names.index("best by validation: test %"), names.index("Best test %"), names.index("at round")]
    assert sorted([row[i].text for i in at] for row in table.rows) == [["50.00", "–", "–"], ["–", "30.00", "1"]]


def test_axes_of_accuracies_end_at_0_and_100():
    found = group([run([0.0, 0.97, 1.0], algorithm=m, seed=s) for m in ("fedavg", "fedlada") for s in (0, 1)])
    style = STYLES["screen"]
    for figure in (figures._curves("a", found, style), figures._facets("a", found, "test_acc", style)):
        shown = [axes for axes in figure.axes if axes.get_ylabel() == "Test accuracy (%)"]
        assert [axes.get_ylim() for axes in shown] == [(0, 100)] * 2
        plt.close(figure)


def test_data_sets_of_users_are_named_by_their_folder():
    named = {"photos": "photos", "/data/me/photos/": "photos", "data/cifar10": "CIFAR-10", "data/a.b": "a.b", ".": "."}
    for given, name in named.items():
        (one,) = group([run([0.1], dataset=given)])
        assert groups.dataset_name(one.dataset) == name


def test_runs_of_the_same_seed_count_once_and_the_longer_one():
    (one,) = group([run([0.1]), run([0.1, 0.2]), run([0.3, 0.4], seed=1)])
    assert [r.done for r in one.runs] == [2, 2]
    assert one.repeated == 1


def test_groups_differ_in_settings_that_matter_and_no_others():
    runs = [run([0.1]), run([0.1], seed=1, out="elsewhere", device="cpu"), run([0.1], participation=0.5)]
    assert [len(g.runs) for g in group(runs)] == [2, 1]


def test_seeds_of_other_data_are_not_averaged():
    known = (("fedavg", 0, "aa"), ("fedavg", 1, "bb"), ("fedlada", 0, ""))
    runs = [replace(run([0.1], seed=s, algorithm=m), data=d) for m, s, d in known]
    assert [(g.problem, g.method, len(g.runs)) for g in group(runs)] == [
        ("CIFAR-10, data aa", "fedavg", 1),
        ("CIFAR-10, data bb", "fedavg", 1),
        ("CIFAR-10, data not recorded", "fedlada", 1),
    ]
    assert [(g.problem, len(g.runs)) for g in group([runs[0], replace(runs[1], data="")])] == [("CIFAR-10", 2)]
    apart = group([runs[0], replace(run([0.1], partition_seed=1), data="bb")])
    assert not any(g.data for g in apart)  # which the settings tell


def test_which_data_a_run_had_is_read_from_its_summary_or_its_checkpoint(tmp_path):
    directory = write_run(tmp_path / "a", {"rounds": 4}, 4, status=None)
    assert load.read(directory).data == ""
    (directory / "checkpoint/round_000002").mkdir(parents=True)
    with h5py.File(directory / "checkpoint/round_000002/server.h5", "w") as file:
        file.attrs["data"] = "0123456789abcdef"
    assert load.read(directory).data == "01234567"
    (directory / "summary.json").write_text('{"status": "finished", "data": {"digest": "fedcba9876543210"}}')
    assert load.read(directory).data == "fedcba98"


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


def test_an_axis_of_a_plan_is_in_the_name_of_every_group():
    """As the directories name it: 0.1 and 1.0 are FedAvg's presets. What all groups share is not repeated."""
    rates = [dict(server_lr=server, lr=lr) for server in (0.5, 1.0) for lr in (0.05, 0.1)]
    runs = [replace(run([0.1], **each), named=frozenset(each)) for each in rates]
    assert groups.labels(group(runs)) == [
        *("FedAvg η_g=0.5 η_l=0.05", "FedAvg η_g=0.5 η_l=0.1", "FedAvg η_g=1 η_l=0.05", "FedAvg η_g=1 η_l=0.1")
    ]
    assert groups.labels(group(runs[2:])) == ["FedAvg η_l=0.05", "FedAvg η_l=0.1"]


def test_settings_of_own_methods_are_named_where_they_differ_or_were_given():
    mine = dict(algorithm="a.py:Mine", eps=0.001)
    default, other = run([0.1], **mine), run([0.1], **{**mine, "eps": 0.01})
    assert groups.labels(group([run([0.1]), default])) == ["FedAvg", "Mine"]
    given = replace(default, named=frozenset({"eps"}))
    assert groups.labels(group([run([0.1]), given])) == ["FedAvg", "Mine eps=0.001"]
    assert groups.labels(group([run([0.1]), default, other])) == ["FedAvg", "Mine eps=0.001", "Mine eps=0.01"]
    faster = run([0.1], **{**mine, "eps": 0.01, "lr": 0.5})
    assert groups.labels(group([default, faster])) == ["Mine eps=0.001", "Mine η_l=0.5 eps=0.01"]


def test_what_a_run_names_is_read_from_its_directory_and_its_command(tmp_path):
    rates = {"algorithm": "fedavg", "lr": 0.1, "server_lr": 0.1}
    path = write_run(tmp_path / "digits_fedavg_server_lr=0.1_seed=0", rates, 1)
    assert load.read(path).named == {"server_lr"}
    assert load.read(path.rename(tmp_path / "digits_fedavg_server_lr=0.2")).named == set()  # a name that is not right
    path = write_run(tmp_path / "mine", {"algorithm": "fedavg"}, 1)
    own = {"algorithm": "a.py:Mine", "eps": 0.1, "tau": 1, "nesterov": False}
    record = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**record, **own}))
    command = ["run.py", "--algorithm", "a.py:Mine", "--lr", "0.1", "--eps=0.1", "--no-nesterov"]
    (path / "summary.json").write_text(json.dumps({"status": "finished", "environment": {"command": command}}))
    assert load.read(path).named == {"eps", "nesterov"}


def test_the_title_of_a_plan_is_that_of_its_report(tmp_path):
    """Of one plan; none where there are runs of a second one, or some that are of no plan."""
    for folder, names in {"one": ["rates"], "same": ["rates"], "two": ["rates", "other"], "none": []}.items():
        write_run(tmp_path / folder / "run", {"algorithm": "fedavg"}, 1)
        for name in names:
            (tmp_path / folder / f"{name}.plan.json").write_text(json.dumps({"title": f"{name} <b>"}))
    titles = {
        folders: load.title(load.read(tmp_path / folder / "run") for folder in folders)
        for folders in (("one",), ("one", "same"), ("two",), ("none",), ("one", "none"), ("one", "two"))
    }
    assert titles == {**dict.fromkeys(titles, ""), ("one",): "rates <b>", ("one", "same"): "rates <b>"}
    (tmp_path / "one" / "rates.plan.json").write_text("[")
    assert load.title([load.read(tmp_path / "one" / "run")]) == ""
    assert "<h1>rates &lt;b&gt;</h1>" in page.render([], [], [], "runs", title="rates <b>")


def test_cost_counts_the_share_of_a_gpu():
    alone, shared = run([0.5] * 4), run([0.5] * 2, rounds=4, status="stopped", algorithm="scaffold")
    alone.usage = usage.Usage("NVIDIA H200", 1, [], 1.0)
    shared.usage = usage.Usage("NVIDIA H200", 2, [], 4.0)
    unknown = run([0.5] * 4, algorithm="fedprox")
    rows = {
        row[1].text: [cell.text for cell in row[2:]] for row in run_tables.cost(group([alone, shared, unknown])).rows
    }
    assert rows["FedAvg"] == ["1", "4", "0.500", "2.0 s", "1", "1", "2", "NVIDIA H200"]
    assert rows["SCAFFOLD"][1] == "2 of 4, 1 unfinished"
    assert rows["SCAFFOLD"][6] == "0"  # 1 s on 2 GPUs, a quarter of them
    assert rows["FedProx"][4:] == ["–", "–", "–", "–"]


def test_times_have_the_unit_that_suits_them():
    shown = {seconds: tables.duration(Stat((seconds,), 1)).text for seconds in (0.004, 4.0, 90.0, 600.0, 9000.0)}
    assert shown == {0.004: "0.004 s", 4.0: "4.0 s", 90.0: "90 s", 600.0: "10.0 min", 9000.0: "2.5 h"}
    assert tables.duration(Stat((600.0,), 1)).value == 600
    assert tables.duration(Stat()).text == "–"


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


def test_what_was_spent_goes_on_after_the_end_of_the_shortest_run():
    """Two units per participant in each of four rounds, of which one seed has two and no test."""
    (one,) = group([run([0.1, 0.2, 0.3, 0.4]), run([math.nan] * 2, seed=1, rounds=4)])
    assert one.curve("test_acc").rounds.tolist() == [1, 2, 3, 4]
    assert series.spent(one, "units", np.array([1, 2, 4])).tolist() == [2, 4, 8]
    assert series.spent(one, "bytes", np.array([4])).tolist() == [120]
    assert series.spent(one, "seconds", np.array([3])).tolist() == [1.5]


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


def test_the_papers_tables_are_written_for_its_experiments_only(report, tmp_path):
    out, _ = report
    known = {spec["id"] for spec in paper.contents()["tables"]} | {"claims"}
    assert not known & {path.stem for path in (out / "tables").iterdir()}
    assert "Against the paper" not in (out / "index.html").read_text()
    write_run(tmp_path / "runs", {"dataset": "cifar10", "algorithm": "fedavg", "rounds": 3}, 3)
    build([tmp_path / "runs"], tmp_path / "report")
    written = known & {path.stem for path in (tmp_path / "report/tables").iterdir()}
    assert "rounds_to_test" in written
    assert not written & {"alpha", "local_intervals"}  # of FedLADA
    text = (tmp_path / "report/index.html").read_text()
    assert "of the paper's tables and figures have no runs yet" in text
    assert 'id="table-rounds_to_test"' in text
    assert 'id="table-alpha"' not in text


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


def test_problems_whose_file_names_would_be_the_same_keep_their_files():
    names = ["a b", "a-b", "A_b", "x" * 70 + " y", "x" * 70 + "-y", "other"]
    assert len({*groups.slugs(names).values()}) == 6
    assert groups.slugs(names)["other"] == "other"
    found = group([run([0.1, 0.2], dataset=name, targets=[0.1]) for name in ("my-photos", "my photos")])
    planned = [name for name, _ in figures.plan(found)]
    assert len({*planned}) == len(planned)
    assert len({table.id for table in run_tables.targets(found, run_tables.levels(found, {}))}) == 2
    shown = page._curves(found, planned, False, lambda *names: " ".join(names))
    assert all(name in shown for name in planned if name.startswith("curves_"))


def test_long_names_stay_apart_in_figures():
    names = [f"{'long ' * 20}{end}" for end in ("a", "b")] + ["x" * 30 + c + "x" * 60 for c in "ab"] + ["short"]
    shown = drawing.fitting(names)
    assert len({*shown}) == 5
    assert max(map(len, shown)) <= 60
    assert [name[-3:] for name in shown] == ["g a", "g b", "(1)", "(2)", "ort"]
    found = group([run([0.1, 0.2], algorithm=f"own.py:{'Long' * 20}{end}") for end in "ab"])
    figure = figures._phases("p", found, STYLES["screen"])
    assert len(figure.axes[0].get_yticklabels()) == 2
    plt.close(figure)


def test_titles_and_logarithmic_axes_have_room():
    figure = plt.figure(figsize=(4, 3), dpi=100)
    shown = drawing.lines("mean of the errors of all clients ($)", 150, figure)
    assert shown == "mean of the errors\nof all clients (\\$)"
    plt.close(figure)
    one = run([0.1, 0.2])
    one.series["consistency"] = np.array([0.31, 0.3])
    figure = figures._curves("p", group([one]), STYLES["screen"])
    figure.draw_without_rendering()
    (axes,) = (each for each in figure.axes if each.get_ylabel().startswith("Consistency"))
    assert any(label.get_text() for label in axes.get_yticklabels(which="both"))
    plt.close(figure)


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


def test_two_methods_of_one_name_are_two_rows():
    """From two files, or from one that was edited; a built-in one may have the same label, too."""
    mine = [run([0.5], algorithm=f"{place}:Mine", seed=seed) for place in ("a.py", "b.py") for seed in (0, 1)]
    assert groups.labels(groups.group(mine)) == ["Mine (a.py)", "Mine (b.py)"]
    assert groups.labels(groups.group(mine[:2])) == ["Mine"]
    edited = [replace(one, code=code) for one, code in zip(mine, ("", "11111111", "22222222", "22222222"), strict=True)]
    found = groups.group([*edited, run([0.5], algorithm="fedavg")])
    assert [len(one.runs) for one in found] == [1, 1, 1, 2]
    expected = ["FedAvg", "Mine (a.py) (code not recorded)", "Mine (a.py) (code 11111111)", "Mine (b.py)"]
    assert groups.labels(found) == expected
    like_ours = [*(replace(one, method="FedAvg") for one in mine[:2]), run([0.5], algorithm="fedavg")]
    assert groups.labels(groups.group(like_ours)) == ["FedAvg (built-in)", "FedAvg (a.py)"]


def test_the_code_of_a_run_is_read_from_its_record(tmp_path):
    files = {"algorithm": {"a.py": "12"}}
    for name, code in {"old": None, "new": files, "odd": [1], "same": files}.items():
        path = write_run(tmp_path / name, {"algorithm": "fedavg"}, 1)
        record = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**record, "algorithm": "a.py:Mine", "code": code}))
    codes = {one.path.name: one.code for one in load.read_all([tmp_path])[0]}
    assert codes["old"] == codes["odd"] == ""
    assert len(codes["new"]) == 8
    assert codes["new"] == codes["same"]
