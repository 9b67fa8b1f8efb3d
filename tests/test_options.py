"""Command lines that cannot be read: one line, with the nearest option."""

import errno

import pytest

from data_prep.__main__ import main as prep
from fedlada_mpi import grid, predict
from fedlada_mpi.report import __main__ as report

pytestmark = pytest.mark.serial  # nothing of it depends on ranks


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (report.main, ["runs", "--outt", "x"], "got '--outt' (did you mean '--out'?): --help lists the options"),
        (report.main, [], "the following arguments are required: RUNS"),
        (grid.main, ["digits", "--al"], "got '--al' (did you mean '--all'?): --help lists the options"),
        (grid.main, ["digits", "--statu=1"], "got '--statu' (did you mean '--status'?): --help lists the options"),
        (predict.main, ["run", "new.jpg", "--x"], "got '--x': --help lists the options"),
        (prep, ["--dataset", "npz", "--raww", "x"], "got '--raww' (did you mean '--raw'?): --help lists the options"),
    ],
)
def test_a_mistake_is_one_line(main, words, said, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: cannot write report: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_report_that_cannot_end(error, status, said, monkeypatch, capsys):
    def build(*_):
        raise error

    monkeypatch.setattr(report, "build", build)
    assert report.main(["runs"]) == status
    assert capsys.readouterr().err.startswith(said)
