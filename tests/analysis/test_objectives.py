"""Runs whose objective is not accuracy: directions, units, names and undefined values, by hand."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from synthetic_runs import rows_of, run, write_run

from fedlada_mpi.analysis import figures, groups, load, measures, page, run_tables, series, significance, sweeps, tables
from fedlada_mpi.analysis.drawing import STYLES, plt
from fedlada_mpi.analysis.groups import group
from fedlada_mpi.report import build, main, tables_of
from fedlada_mpi.rundir.client_values import Clients, ClientValues
from fedlada_mpi.rundir.columns import ACCURACY, CLASSIFICATION, LOSS, Columns, Metric, of_task

METRICS = {"rmse": ("root mean squared error", False, False), "acc": ("share within 10 %", True, True)}
RMSE = of_task(METRICS, "rmse", larger_is_better=False)
AUC = Columns(
    (LOSS, ACCURACY, Metric("auc", "AUC", larger_is_better=True)), Metric("auc", "AUC", larger_is_better=True)
)
AS_MINE = of_task({**METRICS, "acc": ("hits", True, True)}, "rmse", larger_is_better=False)


def regression(rmse, acc=None, **changes):
    one = run(rmse, columns=RMSE, dataset="sites", **changes)
    one.series["test_acc"] = np.array(acc if acc is not None else np.linspace(0.5, 0.9, len(rmse)))
    return one


def written(directory: Path, columns: Columns, rounds: list[dict], **given) -> Path:
    """A run directory with these columns, and these metrics in its rounds."""
    write_run(directory, {"algorithm": "fedavg", "rounds": len(rounds), **given}, len(rounds))
    record = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**record, "columns": columns.record()}))
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    plain = [{n: v for n, v in json.loads(line).items() if n not in CLASSIFICATION.evaluated} for line in lines]
    content = [dict.fromkeys(columns.evaluated) | one | more for one, more in zip(plain, rounds, strict=True)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in content))
    return directory


def texts(table, row=0):
    return dict(zip([column.full for column in table.columns], (cell.text for cell in table.rows[row]), strict=True))


def test_measures_follow_the_objective():
    one = regression([3.0, 1.5, 2.0], [0.1, 0.2, 0.3])
    assert measures.best(None)(one) == 1.5
    assert measures.best(None, "round")(one) == 2
    assert measures.best(None, metric=RMSE.metrics[2])(one) == 20
    assert measures.test_at(3)(one) == 2.0
    assert measures.rounds_to("test_rmse", 2.0)(one) == 2
    assert measures.rounds_to("test_rmse", 1.0)(one) == math.inf
    assert measures.rounds_to("test_acc", 0.25)(one) == 3
    assert measures.total_to("bytes_down", 1.5)(one) == 40
    one.series["val_rmse"] = np.array([2.0, 1.0, 0.5])
    assert measures.best(None, by="val")(one) == 2.0


def test_the_overview_of_errors():
    found = group([regression([3.0, 1.5, 2.0], seed=0), regression([4.0, 2.5, 3.0], seed=1)])
    (table,) = run_tables.overview(found)
    assert (table.id, table.title) == ("overview", "Root mean squared error")
    row = texts(table)
    assert row["Best test"] == "2.0000 ± 0.7071"
    assert row["at round"] == "2"
    assert row["Final test"] == "2.5000 ± 0.7071"
    assert "Less is better." in table.notes
    assert not any("ccurac" in text or "%" in text for text in [*row, *table.notes, table.title])
    (every,) = run_tables.runs(found)
    assert (every.id, every.title, texts(every)["Best test"]) == ("runs", "All runs", "1.5000")


def test_further_metrics_are_in_a_table_of_results():
    """The best round is the second, by the error; its share is 70 %."""
    found = group([regression([3.0, 1.5, 2.0], [0.9, 0.7, 0.8])])
    (table,) = run_tables.results(found)
    row = texts(table)
    assert (table.id, table.title) == ("results", "Results")
    assert row["test share within 10 % %: best round"] == "70.00"
    assert row["test share within 10 % %: final"] == "80.00"
    assert row["test root mean squared error: best round"] == "1.5000"
    assert run_tables.results(group([run([0.5])])) == []


def test_two_objectives_have_a_table_each():
    found = group([regression([3.0, 1.5]), run([0.2, 0.4]), run([0.5, 0.7], columns=AUC, dataset="b")])
    made = {table.id: table for table in [*run_tables.overview(found), *run_tables.runs(found)]}
    assert {name: table.title for name, table in made.items()} == {
        "overview": "Accuracy",
        "overview_rmse": "Root mean squared error",
        "overview_auc": "AUC",
        "runs": "All runs: accuracy",
        "runs_rmse": "All runs: root mean squared error",
        "runs_auc": "All runs: AUC",
    }
    assert texts(made["overview"])["Final test %"] == "40.00"
    assert texts(made["overview_rmse"])["Final test"] == "1.5000"
    assert texts(made["overview_auc"])["Final test"] == "0.7000"
    assert [len(table.rows) for table in made.values()] == [1] * 6


def test_one_problem_with_two_objectives_is_two():
    found = group([run([0.5]), run([0.5], columns=AUC)])
    assert len(found) == 2
    assert list(groups.by_problem(found)) == ["CIFAR-10 (accuracy)", "CIFAR-10 (AUC)"]
    names = [name for name, _ in figures.plan(found)]
    assert len(names) == len(set(names))


def test_levels_of_an_error_are_reached_from_above():
    better = regression([3.0, 1.504, 2.0], algorithm="scaffold")
    found = group([regression([3.0, 2.504, 2.6]), better])
    (problem,) = groups.by_problem(found)
    assert run_tables.levels(found, {"sites": [0.7]}) == {problem: [2.51, 1.51]}  # of both, of one
    (table,) = run_tables.targets(found, run_tables.levels(found, {}))
    assert table.title == f"Rounds and communication to a test root mean squared error: {problem}"
    rows = {row["Method"]: row for row in (texts(table, i) for i in range(2))}
    assert (rows["FedAvg"]["2.51: rounds"], rows["FedAvg"]["1.51: rounds"]) == ("2", "> 3")
    assert rows["SCAFFOLD"]["1.51: rounds"] == "2"
    asked = group([replace(better, settings={**better.settings, "targets": [2.0, 3.5]})])
    assert run_tables.levels(asked, {}) == {problem: [3.5, 2.0]}
    seeds = group([regression([3.0, 2.0]), regression([3.0, 2.6], seed=1)])
    assert list(run_tables.levels(seeds, {}).values()) == [[2.6]]  # which both seeds reached
    assert run_tables._easier(-0.12345, AUC.objective) == -0.124
    assert run_tables._easier(0.0, RMSE.objective) == 0


def test_the_least_error_is_the_best_of_a_comparison():
    """Differences of 1, 1.1 and 1.2 from the method with the lower error."""
    errors = {"fedavg": (2.0, 2.1, 2.2), "scaffold": (1.0, 1.0, 1.0)}
    runs = [regression([3.0, e], seed=s, algorithm=m) for m, each in errors.items() for s, e in enumerate(each)]
    (table,) = significance.tables(group(runs))
    assert table.title.startswith("Differences from SCAFFOLD")
    assert texts(table)["Difference"] == "+1.1000"
    assert "Test root mean squared error less that of SCAFFOLD, which has the lowest mean" in table.notes[0]


def test_a_sweep_marks_the_least_error():
    runs = [
        regression([9.0, lr + alpha / 10], algorithm="fedcm", lr=lr, alpha=alpha)
        for lr in (0.1, 0.2)
        for alpha in (1, 2)
    ]
    found = group(runs)
    (one,) = sweeps.find(found)
    assert (one.value_name, one.best) == ("Final test root mean squared error", one.extent[0])
    (table,) = sweeps.tables(found)
    assert [[cell.tone for cell in row[1:]] for row in table.rows] == [["best", ""], ["", ""]]
    assert table.notes[0].endswith("bold: the lowest.")
    drawing = figures._heat_map(one, STYLES["screen"])
    weights = [text.get_weight() for text in drawing.axes[0].texts]
    assert weights == ["bold", "normal", "normal", "normal"]
    assert drawing.axes[0].texts[0].get_text() == "0.2"
    plt.close(drawing)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.render(found, [], [], ""), re.S).group(1))
    drawn = data["maps"][one.name]
    assert (drawn["smaller"], drawn["unit"], drawn["short"][0]) == (True, "", ["0.2", "0.3"])


def test_axes_have_the_names_and_units_of_the_task():
    shown = series.quantities(RMSE)
    assert list(shown)[:4] == ["test_rmse", "train_loss", "train_rmse", "test_loss"]
    assert shown["test_rmse"] == ("Test root mean squared error", False)
    assert shown["val_acc"] == ("Validation share within 10 % (%)", True)
    assert shown["client_train_rmse_worst_decile"].title == "Clients' train root mean squared error, worst tenth"
    by_loss = Columns((LOSS,), LOSS)
    assert list(series.quantities(by_loss))[:3] == ["test_loss", "train_loss", "consistency"]
    found = group([regression([300.0, 150.0])])
    drawing = figures._curves("sites", found, STYLES["screen"])
    assert drawing.axes[0].get_ylabel() == "Test root mean squared error"
    assert drawing.axes[0].get_ylim()[1] > 300
    plt.close(drawing)


def test_numbers_of_any_size_have_about_five_digits():
    shown = {
        value: tables.number(value, tables.decimals(value)) for value in (0.0, 0.5, 1.25, 1234.56, 1e6, 0.00123456)
    }
    assert list(shown.values()) == ["0.0000", "0.5000", "1.2500", "1,234.6", "1,000,000", "0.001235"]


@pytest.fixture
def hospitals(tmp_path):
    """Three hospitals in three silos; the second has one class in its test rows, where AUC is undefined."""
    directory = written(
        tmp_path / "runs/a",
        AUC,
        [{"train_auc": 0.6, "test_auc": 0.5, "test_loss": 0.7}, {"train_auc": 0.8, "test_auc": 0.75, "test_loss": 0.6}],
        clients=3,
    )
    clients = Clients(
        np.array([10, 20, 30]), np.array([1, 2, 3]), np.array([4, 2, 8]), ("Alster", "Bode <b>", "C$d$"), columns=AUC
    )
    values = ClientValues(directory, 0, clients)
    row = {f"{part}_{name}": np.full(3, 0.5) for part in ("train", "test") for name in ("loss", "acc")}
    spread = values.add(2, {**row, "train_auc": np.array([0.6, 0.7, 0.8]), "test_auc": np.array([0.9, math.nan, 0.7])})
    values.write()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= spread
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_hospitals_by_name_and_what_is_undefined(hospitals, tmp_path):
    build([tmp_path / "runs"], tmp_path / "report")
    (row,) = rows_of(tmp_path / "report/tables/clients.csv")
    assert float(row["test AUC: mean"]) == pytest.approx(0.8)
    assert float(row["test AUC: worst tenth"]) == pytest.approx(0.7)
    assert row["test AUC: clients with a value"] == "2"
    assert "| 2 of 3 |" in (tmp_path / "report/tables/clients.md").read_text()
    silos = rows_of(tmp_path / "report/tables/silos.csv")
    assert [each["Silo"] for each in silos] == ["Alster", "Bode <b>", "C$d$"]
    assert [each["examples: test"] for each in silos] == ["4", "2", "8"]
    assert [f"{float(each['AUC: test'] or 'nan'):.1f}" for each in silos] == ["0.9", "nan", "0.7"]
    said = "2 of 3 clients have a test AUC: it is undefined on the examples of the others."
    assert said in (tmp_path / "report/tables/silos.md").read_text()
    assert "Clients" not in silos[0]  # one each
    text = (tmp_path / "report/index.html").read_text()
    assert "Bode &lt;b&gt;" in text
    assert 'src="figures/silos_digits_clients_3.png"' in text
    assert "accuracies" not in text[text.index("<body") :].replace(page.plotly(), "")


def test_named_clients_that_share_a_silo_have_a_row_each(hospitals, tmp_path):
    with h5py.File(hospitals / "clients.h5", "r+") as file:
        file["silos"][:] = [1, 1, 2]
    one = group([load.read(hospitals)])
    made = {table.id: table for table in tables_of(one)}
    assert [row[2].text for row in made["silos"].rows] == ["1", "C$d$"]
    assert texts(made["silos"])["AUC: train"] == "0.6667"  # 10 of 0.6 and 20 of 0.7
    assert texts(made["silos"])["AUC: test"] == "0.9000"
    assert texts(made["silos"])["clients with a value: test"] == "1"
    assert [row[2].text for row in made["clients_by_name"].rows] == ["Alster", "Bode <b>", "C$d$"]
    assert texts(made["clients_by_name"], 1)["AUC: test"] == "–"


def test_an_old_file_of_clients_has_no_test_values(tmp_path):
    """They only weighted the classes' accuracies, which are the same for all clients."""
    path = write_run(tmp_path / "runs/a", {"algorithm": "fedavg", "rounds": 1, "clients": 5}, 1)
    with h5py.File(path / "clients.h5", "w") as file:
        file.update({"rounds": np.array([1]), "clients": np.arange(5), "images": np.full(5, 3)})
        file.update({f"{part}_{n}": np.full((1, 5), 0.5) for part in ("train", "test") for n in ("acc", "loss")})
    record = json.loads((path / "metrics.jsonl").read_text())
    record |= dict.fromkeys((*CLASSIFICATION.spread["test"], *CLASSIFICATION.spread["train"]), 0.5)
    (path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    one = load.read(path)
    assert {*one.clients} == {"images", "train_acc", "train_loss"}
    assert np.isnan(one.series["client_test_acc_mean"]).all()
    assert one.series["client_train_acc_mean"].tolist() == [0.5]
    build([tmp_path / "runs"], tmp_path / "report")
    (row,) = rows_of(tmp_path / "report/tables/clients.csv")
    assert [name for name in row if name.startswith("test")] == []
    assert "Clients' test accuracy" not in re.sub(
        r'id="data">.*?</script>', "", (tmp_path / "report/index.html").read_text()
    )


def test_a_packed_run_keeps_its_metrics_and_whose_tests_they_were(hospitals, tmp_path):
    assert main([str(tmp_path / "runs"), "--pack", str(tmp_path / "packed")]) == 0
    packed = load.read(tmp_path / "packed/a")
    assert packed.columns == AUC
    assert packed.own_tests
    assert packed.series["client_test_auc_mean"][1] == pytest.approx(0.8)
    assert packed.series["test_auc"].tolist() == [0.5, 0.75]


def test_targets_of_errors_may_be_any_number(tmp_path):
    path = written(tmp_path / "a", RMSE, [{"test_rmse": 12.0}])
    record = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**record, "targets": [12.5, 0.7, -1]}))
    assert load.read(path).settings["targets"] == [12.5, 0.7, -1]
    (path / "config.json").write_text(json.dumps({**record, "targets": [12.5, 0.7, -1], "columns": {}}))
    assert load.read(path).settings["targets"] == [0.7]


@pytest.mark.parametrize(
    "columns", [3, "x", [1], {"metrics": []}, {"metrics": [{"name": "loss"}], "objective": "loss"}]
)
def test_damaged_columns_are_a_damaged_run(tmp_path, columns, capsys):
    path = written(tmp_path / "runs/a", RMSE, [{"test_rmse": 12.0}])
    record = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**record, "columns": columns}))
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}/config.json cannot be read as settings: its 'columns' are not")


def test_titles_of_metrics_are_text_wherever_they_are(tmp_path):
    odd = of_task({"gain": ("a <b>$x$\n\\gain & 1 %", False, False)}, "gain", larger_is_better=True)
    written(tmp_path / "runs/a", odd, [{"test_gain": -3.0, "train_loss": 1.0}, {"test_gain": 40.0, "train_loss": 0.5}])
    build([tmp_path / "runs"], tmp_path / "report", style="paper")
    text = (tmp_path / "report/index.html").read_text().replace(page.plotly(), "")
    assert "a <b>" not in re.sub(r'id="data">.*?</script>', "", text, flags=re.S)
    assert "a &lt;b&gt;" in text


def test_a_report_of_errors_does_not_speak_of_accuracy(tmp_path):
    for seed in range(3):
        for method, more in (("fedavg", 0.5), ("fedlada", 0.0)):
            rounds = [
                {"test_rmse": 9.0 / t + more + seed / 10, "train_loss": 1.0 / t, "test_acc": 0.5} for t in (1, 2, 3)
            ]
            written(tmp_path / f"runs/{method}{seed}", AS_MINE, rounds, algorithm=method, seed=seed)
    build([tmp_path / "runs"], tmp_path / "report")
    for path in [*(tmp_path / "report/tables").iterdir(), *(tmp_path / "report/figures").glob("*.svg")]:
        assert "ccurac" not in path.read_text(), path
    text = (tmp_path / "report/index.html").read_text().replace(page.plotly(), "")
    body = re.sub(r'<script[^>]*id="data">.*?</script>', "", text[text.index("<body") :], flags=re.S)
    assert "ccurac" not in body
    assert "Test root mean squared error" in body
