"""The package's own view of the ranks."""

import pytest

from fedlada_mpi.mpi import World


@pytest.fixture
def ranks():
    world = World()
    yield world
    world.close()
