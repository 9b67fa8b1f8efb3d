"""Tables and pictures of the report in pages: those of this repository, and what a page can ask for."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from PIL import Image
from synthetic_runs import write_run

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.analysis import groups, load, significance
from fedlada_mpi.analysis.tables import Cell, Column, Table
from fedlada_mpi.report import main, tables_of
from fedlada_mpi.reproduction import figures, markdown, paper, readings, tuning
from fedlada_mpi.support.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
READINGS = "docs/reproduction/runs docs/reproduction/tuning docs/reproduction/readings"
PAGES = {
    READINGS: ("docs/reproduction/readings.md",),
    "docs/reproduction/theory": ("docs/theory.md",),
    "docs/reproduction/runs": ("docs/reproduction.md",),
    "docs/reproduction/runs docs/reproduction/tuning": ("docs/experiments.md",),
}
HEADLINES = ("headline", "headline_tuned")
FOLDERS = (*(f"reproduction/{name}" for name in ("runs", "tuning", "readings", "theory")), "methods/runs")


@cache
def runs_in(folder: str) -> list[load.RecordedRun]:
    return load.read_all([ROOT / folder])[0]


@cache
def recorded(folders: str) -> list[groups.Group]:
    return groups.group(run for folder in folders.split() for run in runs_in(folder))


@pytest.mark.slow
@pytest.mark.parametrize("folders", PAGES)
def test_the_pages_agree_with_the_records(folders):
    found = recorded(folders)
    tables, drawn = tables_of(found), figures.figures(found)
    command = f"python -m fedlada_mpi.report {folders} --out report --update {' '.join(PAGES[folders])}"
    for name in PAGES[folders]:
        text = (ROOT / name).read_text()
        assert markdown.filled(text, tables, drawn) == text, f"{name} is not that of the records: run {command}"
        for folder, picture in markdown._PICTURE.findall(text):
            assert (ROOT / name).parent.joinpath(folder, f"{picture}.png").is_file()
    text = (ROOT / "docs/reproduction.md").read_text()
    assert command in text
    for spec in paper.contents()["tables"]:
        assert f"<!-- report: {spec['id']} -->" in text


def test_the_readme_says_what_the_table_says():
    """How far from the paper's accuracies the methods end, from the table that the records make."""
    page = (ROOT / "docs/reproduction.md").read_text()
    table, tuned = (page.split(f"<!-- report: {name} -->")[1].split("<!-- end -->")[0] for name in HEADLINES)

    def points_below(text: str, method: str, column: int) -> float:
        (row,) = (line.split("|") for line in text.splitlines() if line.startswith(f"| {method} |"))
        ours, paper = re.match(r"\**([\d.]+)[^(]*\(([\d.]+)\)", row[column].strip()).groups()
        return round(float(paper) - float(ours), 1)

    baselines = [[points_below(table, method, at) for method in ("FedAvg", "FedCM", "FedAdam")] for at in (4, 8)]
    readme = " ".join((ROOT / "README.md").read_text().split())
    on_10, on_100 = baselines
    assert f"end {min(on_10)} to {max(on_10)} points below them on CIFAR-10" in readme
    assert f"and {-max(on_100)} to {-min(on_100)} above on CIFAR-100" in readme
    lada = [points_below(table, "FedLADA", at) for at in (4, 8)]
    assert f"it ends {lada[0]} points lower on CIFAR-10 and {lada[1]} on CIFAR-100" in readme
    ends = [re.search(r"[\d.]+", line.split("|")[at])[0] for line in tuned.splitlines() for at in (4, 8)
            if line.startswith("| FedLADA |")]  # fmt: skip
    assert f"(`--preset tuned`) it ends at {ends[0]} and {ends[1]} %" in readme


def test_the_order_at_the_end_is_that_of_the_records():
    """The paired differences of the page, with their intervals and seeds."""
    page = (ROOT / "docs/reproduction.md").read_text()
    rows = re.findall(r"^\| (\w+) less (\w+) \| (.+) \|$", page, re.MULTILINE)
    names = "|".join({name.lower() for row in rows for name in row[:2]})
    assert len(rows) == 5
    plain = re.compile(f"cifar100?_({names})_precision=bf16_seed=.")
    runs = [run for run in runs_in("docs/reproduction/runs") if plain.fullmatch(run.path.name)]
    found = {(one.dataset, one.method_name): one for one in groups.group(runs)}
    for ours, other, rest in rows:
        cells = []
        for data in ("cifar10", "cifar100"):
            one = significance.compare(found[data, ours], found[data, other])
            assert one.last == 1500
            low, mean, high = (
                f"{value:+.2f}".replace("-", "−") for value in (one.mean - one.half, one.mean, one.mean + one.half)
            )
            cells += [f"{mean} ({low} to {high})", f"{one.seeds}"]
        assert rest.split(" | ") == cells, (ours, other)


def test_the_tuned_presets_are_those_of_the_rule():
    chosen = tuning.chosen(recorded("docs/reproduction/runs docs/reproduction/tuning"))
    assert len(chosen) == 7
    for method in algorithms.names():
        tuned = {"": {"weight_decay": chosen[method]}} if method in chosen else {}
        preset = resolve({"dataset": "cifar10", "algorithm": method}).config.weight_decay
        assert algorithms.find(method).tuned == (tuned if chosen.get(method, preset) != preset else {}), method


def test_the_readings_are_those_of_their_records():
    """The tables of the page, made anew; and every record of a reading is in them."""
    found = recorded(READINGS)
    page = (ROOT / "docs/reproduction/readings.md").read_text()
    tables = readings.tables(found)
    assert all(markdown.compact(replace(table, notes=[])) in page for table in tables)
    assert readings.NOTE in page  # once, under the first
    rows = (row for table in tables for row in table.rows)
    counted = sum(int(row[-2].text) for row in rows if "readings" in row[-1].text)
    assert counted == len(list((ROOT / "docs/reproduction/readings").iterdir()))


def test_a_single_reading_of_few_rounds_has_its_table():
    found = [one for one in recorded(READINGS) if (one.dataset, one.method) == ("cifar10", "fedlada")]
    long, short = (next(one for one in found if (one.done < readings.SHORT) == few) for few in (False, True))
    tables = {table.id: table.rows for table in readings.tables([long, short])}
    assert {name: len(rows) for name, rows in tables.items()} == {"readings": 2, "readings_short": 1}  # and the paper's
    assert readings.tables([short]) == []


def test_records_are_small_and_name_no_machine():
    for folder in FOLDERS:
        for record in filter(Path.is_dir, (ROOT / "docs" / folder).iterdir()):
            files = list(record.iterdir())
            assert sum(file.stat().st_size for file in files) < 150_000, record
            text = "".join(file.read_text() for file in files if file.suffix == ".json")
            assert not any(word in text for word in ("/home", "/root", "/tmp", "/work")), record


def test_ours_and_the_papers_value_share_a_cell():
    columns = [Column("Method", numeric=False), *(Column(n, "70 %") for n in ("ours", "paper", "difference"))]
    columns.append(Column("ours", "Bytes"))
    rows = [
        [Cell("A(*)"), Cell("50"), Cell("44.6"), Cell("+5.4", tone="worse"), Cell("1.0")],
        [Cell("B"), Cell("> 1,500"), Cell("∞"), Cell("agree"), Cell()],
        [Cell("C"), Cell("not run"), Cell(), Cell(), Cell("2.0")],
    ]
    assert markdown.compact(Table("a", "A", columns, rows, notes=["A note."], paper=True)) == (
        "| Method | 70 % | Bytes |\n| --- | ---: | ---: |\n"
        "| A(\\*) | **50 (44.6)** | 1.0 |\n| B | > 1,500 (never) | – |\n| C | not run | 2.0 |\n\nA note.\n"
    )


def test_a_note_is_under_the_first_table_that_has_it():
    first = Table("a", "A", [Column("x")], [[Cell("1")]], notes=["In bf16.", "Of a."])
    second = Table("b", "B", [Column("x")], [[Cell("2")]], notes=["Of b.", "In bf16."])
    page = "".join(f"<!-- report: {name} -->\n<!-- end -->\n" for name in "ab")
    text = markdown.filled(page, [first, second], [])
    assert text.count("In bf16.") == 1
    assert text.index("In bf16.") < text.index("report: b")
    assert "| 2 |\n\nOf b.\n\n<!-- end -->" in text
    assert markdown.filled(text, [first, second], []) == text


def test_a_page_gets_tables_and_pictures(tmp_path):
    for method in ("fedavg", "scaffold", "localadam"):
        write_run(tmp_path / "runs" / method, {"dataset": "cifar10", "algorithm": method, "rounds": 3}, 3)
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n<!-- report: cost -->\nold\n<!-- end -->\n<!-- report: headline_tuned -->\n<!-- end -->\n"
        "![all](pictures/paper_all_methods.png) ![other](elsewhere/mine.png)\n"
        "<!-- report: figures pictures -->\n<!-- end -->\nAfter.\n"
    )
    for folder in ("pictures", "report"):
        (tmp_path / folder).mkdir()
    for name in ("all_methods", "consistency", "participation"):
        Image.new("RGB", (8, 8)).save(tmp_path / "report" / f"paper_{name}.png")
    found = groups.group(load.read_all([tmp_path / "runs"])[0])
    markdown.update([page], tables_of(found), figures.figures(found), tmp_path / "report")
    text = page.read_text()
    assert "old" not in text
    assert "| CIFAR-10 | SCAFFOLD | 1 | 3 |" in text
    assert "<!-- report: headline_tuned -->\n\nNot run.\n\n<!-- end -->" in text
    assert text.count("paper_all_methods.png") == 1
    assert "- FedLADA with 5, 10, 20 and 50 % of the clients, CIFAR-10 (Figure 2extraexp)\n" in text
    assert "Missing: CIFAR-10 FedLADA α=0.05;" in text
    assert "![Test accuracy and consistency" in text
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"paper_all_methods.png", "paper_consistency.png"}
    with Image.open(tmp_path / "pictures/paper_all_methods.png") as picture:
        assert picture.mode == "P"
    assert markdown.filled(text, tables_of(found), figures.figures(found)) == text


def test_what_a_page_cannot_ask_for(tmp_path, capsys):
    with pytest.raises(UserError, match="got the table 'headlin' \\(did you mean 'headline'\\?\\), expected one of "):
        markdown.filled("<!-- report: headlin -->\n<!-- end -->", tables_of([]), [])
    write_run(tmp_path / "run", {"rounds": 2}, 2)
    arguments = [str(tmp_path / "run"), "--out", str(tmp_path / "report"), "--update", str(tmp_path / "none.md")]
    assert main(arguments) == 2
    assert (
        capsys.readouterr().err
        == f"error: --update: {tmp_path / 'none.md'} cannot be read: No such file or directory\n"
    )
