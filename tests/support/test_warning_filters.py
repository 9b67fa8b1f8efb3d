import threading
import warnings

import pytest

from fedlada_mpi.support.warning_filters import warning_filter


class Mine(Warning):
    pass


def test_within_the_block_only():
    before = list(warnings.filters)
    with pytest.raises(FutureWarning), warning_filter("error", FutureWarning, "two"):
        warnings.warn("two parts", FutureWarning, stacklevel=1)
    with warning_filter("ignore"):
        warnings.warn("nobody sees this", stacklevel=1)
        with warning_filter("error", FutureWarning), pytest.raises(FutureWarning):
            warnings.warn("seen", FutureWarning, stacklevel=1)
    assert warnings.filters == before


def test_two_threads_at_once():
    """The second begins while the first is within, and would end after it."""
    before = list(warnings.filters)
    begins, entered = threading.Event(), threading.Event()
    found = []

    def second():
        begins.set()
        with warning_filter("ignore", Mine):
            entered.set()
            found.append(list(warnings.filters))

    thread = threading.Thread(target=second)
    with warning_filter("error", Mine):
        thread.start()
        assert begins.wait(60)
        assert not entered.wait(0.2)
        assert warnings.filters[1:] == before
    thread.join(60)
    assert found[0][1:] == before
    assert warnings.filters == before
