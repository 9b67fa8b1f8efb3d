"""The examples in docstrings are true, in a world of 1, 2 or 4 ranks."""

from __future__ import annotations

import doctest

import pytest

from fedlada_mpi.mpi import messages, transport, world

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("module", [world, messages, transport], ids=lambda module: module.__name__)
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
