"""The warning filters of the suite."""

import pytest

WARN = "import warnings; warnings.warn('look here')"


@pytest.mark.parametrize("module", ["fedlada_mpi.rounds.trainer", "data_prep.inspect"])
def test_warnings_of_our_own_lines_are_errors(module):
    with pytest.raises(UserWarning, match="look here"):
        exec(WARN, {"__name__": module})


def test_warnings_of_other_packages_are_not():
    exec(WARN, {"__name__": "numpy.lib"})
