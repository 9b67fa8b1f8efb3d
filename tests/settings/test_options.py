"""Command lines that cannot be read: one line, with the nearest option."""

import errno

import pytest

from data_prep import bench as prep_bench
from data_prep import inspect
from data_prep.__main__ import main as prep
from fedlada_mpi import bench, grid, predict, report, scaling
from fedlada_mpi.doctor import __main__ as doctor


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (report.main, ["runs", "--outt", "x"], "got '--outt' (did you mean '--out'?): --help lists the options"),
        (report.main, [], "the following arguments are required: RUNS"),
        (grid.main, ["digits", "--al"], "got '--al' (did you mean '--all'?): --help lists the options"),
        (grid.main, ["digits", "--statu=1"], "got '--statu' (did you mean '--status'?): --help lists the options"),
        (predict.main, ["run", "new.jpg", "--x"], "got '--x': --help lists the options"),
        (prep, ["--dataset", "npz", "--raww", "x"], "got '--raww' (did you mean '--raw'?): --help lists the options"),
        (prep_bench.main, [], "the following arguments are required: directory"),
        (inspect.main, ["x", "--pic"], "got '--pic' (did you mean '--picture'?): --help lists the options"),
        (doctor.main, ["--jsno", "x"], "got '--jsno' (did you mean '--json'?): --help lists the options"),
        (scaling.main, ["--bandwidth", "x"], "argument --bandwidth: invalid float value: 'x'"),
        (bench.main, ["--algoritm", "x"], "got '--algoritm' (did you mean '--algorithm'?): --help lists the options"),
        (bench.main, ["--json", "no/such/file"], "--json: there is no directory no/such"),
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
