"""What every test on a GPU starts from."""

from __future__ import annotations

import pytest

from fedlada_mpi.rounds import gradients


@pytest.fixture(autouse=True)
def full_float32():
    """Whatever precision a run in the same process has set."""
    with gradients.full_float32():
        yield
