"""The order of tests in several processes."""

from __future__ import annotations

from scheduling import long_first


def test_long_tests_begin_every_part():
    names = ["tests/a.py::1", "tests/a.py::2", "tests/suite/p.py::1", "tests/suite/p.py::2", "tests/slurm/s.py::1"]
    names += ["tests/z.py::1"]
    order = [names[place] for place in long_first(names, 2)]
    assert order == [
        *("tests/suite/p.py::1", "tests/slurm/s.py::1", "tests/a.py::1"),
        *("tests/suite/p.py::2", "tests/a.py::2", "tests/z.py::1"),
    ]
    assert long_first(names[:2], 4) == [0, 1]
