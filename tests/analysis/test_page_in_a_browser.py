"""The page in Chromium: how soon it opens, with the keyboard, and what it says to those who do not see it."""

import pytest
from browser import Browser, chromium
from synthetic_runs import run, write_run

from fedlada_mpi.analysis import page
from fedlada_mpi.analysis.groups import group
from fedlada_mpi.analysis.tables import HEAD, Cell, Column, Table
from fedlada_mpi.report import build, tables_of
from fedlada_mpi.reproduction.figures import figures
from fedlada_mpi.reproduction.section import sections

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not chromium(), reason="no browser: apt-get install chromium"),
]


@pytest.mark.slow
def test_500_runs_open_without_what_is_not_in_sight(tmp_path):
    """What the page opens with, whatever the machine: the rows, but neither charts nor their library before they are
    scrolled to."""
    runs = [
        run([0.1, 0.2, 0.3 + 0.01 * seed], algorithm=method, seed=seed, participation=share / 100)
        for method in ("fedavg", "fedcm", "scaffold", "fedlada", "fedadam")
        for share in range(1, 21)
        for seed in range(5)
    ]
    found = group(runs)
    tables, described = tables_of(found), figures(found)
    more = sections(tables, described, ["png"], interactive=True)
    panels = {figure.id: figure.panels for figure in described if not figure.empty}
    text = page.render(found, tables, [], "runs", sections=more, panels=panels)
    (tmp_path / "index.html").write_text(text, "utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "index.html")
        assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 500
        frame = "new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 100)))"
        browser.run(frame)
        assert browser.run("[typeof Plotly, document.body.dataset.drawn]") == ["undefined", None]
        browser.run("document.querySelector('.chart').scrollIntoView()")
        browser.wait("document.body.dataset.drawn >= 1 && typeof Plotly !== 'undefined'")


def test_keyboard_and_texts(tmp_path):
    for method in ("fedavg", "fedlada"):
        write_run(tmp_path / "runs" / method, {"algorithm": method, "rounds": 4}, 4)
    build([tmp_path / "runs"], tmp_path / "report")
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "report/index.html")
        browser.press("Tab")
        assert browser.run("document.activeElement.className") == "skip"
        sort = "document.querySelector('#results thead button')"
        browser.run(f"{sort}.focus()")
        browser.press("Enter")
        assert browser.run(f"{sort}.closest('th').getAttribute('aria-sort')") == "ascending"
        assert browser.run(f"getComputedStyle({sort}).outlineStyle") == "solid"
        nameless = "[...document.querySelectorAll('.chart, figure img')].filter(e => !(e.ariaLabel || e.alt)).length"
        assert browser.run(nameless) == 0
        assert browser.run("[...document.querySelectorAll('select, input')].every(e => e.labels.length)")


def test_a_wide_table_goes_on_in_sight_and_accuracies_end_at_100(tmp_path):
    name = f"FedAvg {'long ' * 12}name"
    columns = [*HEAD, *(Column(f"Column {i}") for i in range(20))]
    wide = Table("wide", "Wide", columns, [[Cell("Digits"), Cell(name), *[Cell("1,234.56")] * 20]], section="results")
    text = page.render(group([run([0.0, 1.0])]), [wide], [], "runs")
    (tmp_path / "index.html").write_text(text, "utf-8")
    for width, covered in ((1280, False), (390, True)):
        with Browser(tmp_path / f"profile{width}", width, 2000) as browser:
            browser.open(tmp_path / "index.html", "document.querySelector('.wide').classList.contains('right')")
            assert browser.run("[...document.querySelectorAll('.name span')].every(e => e.offsetWidth < 400)")
            browser.wait("document.body.dataset.drawn >= 1")
            assert browser.run("document.querySelector('.chart').layout.yaxis.range") == [0, 100]  # not to 105 %
            browser.run("document.querySelector('.scroll').scrollLeft = 1e6")
            browser.wait("document.querySelector('.wide').className === 'wide left'")
            lefts = browser.run("[...document.querySelectorAll('tbody th')].map(e => e.getBoundingClientRect().left)")
            box = browser.run("document.querySelector('.scroll').getBoundingClientRect().left")
            assert lefts[0] == box + 1  # its border
            assert (lefts[1] == lefts[0]) == covered
            assert browser.run("document.querySelector('tbody th.last').offsetWidth < window.innerWidth / 2")


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path):
    for share in (0.1, 0.2):
        settings = {"algorithm": "fedlada", "rounds": 4, "participation": share, "lr": share / 1000, "alpha": share}
        write_run(tmp_path / "runs" / str(share), settings, 4)
    build([tmp_path / "runs"], tmp_path / "report")
    with Browser(tmp_path / "profile", 390, 5000) as browser:
        browser.open(tmp_path / "report/index.html", "document.body.dataset.drawn > 1")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert browser.run("[...document.querySelectorAll('.legend li')].map(e => e.innerText)") == [
            "FedLADA participation=0.1 η_l=0.0001 α=0.1",
            "FedLADA η_l=0.0002 α=0.2",
        ]
        assert browser.run("[...document.querySelectorAll('.chart')].every(e => e.scrollHeight <= e.clientHeight + 1)")
