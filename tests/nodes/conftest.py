"""Pretend nodes for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pretend import Nodes, missing
from ranks import SIZE
from repository import ROOT


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    if SIZE > 1:
        pytest.skip("starts processes of its own: runs in a world of one rank")
    if reason := missing():
        pytest.skip(reason)
    with Nodes(3) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def mpi_env() -> dict[str, str]:
    """The settings of jobs/mpi.env."""
    lines = (ROOT / "jobs" / "mpi.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="session")
def passed_on() -> dict[str, str]:
    """The environment for mpirun: that of a user, who has set where the package is."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
