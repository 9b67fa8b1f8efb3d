"""Who trains which clients once ranks are lost."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import make_data

from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.data.owners import owned_clients
from fedlada_mpi.session.recovery.departures import owners_left


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "departures", [4, 3, 5, 4, 6, 2, 3], silos=3)


def test_clients_of_lost_ranks_belong_to_nobody_or_are_shared_out(data):
    manifest = read_manifest(data.shards)
    server, *silos = owners_left(manifest, range(4), 4, servers=1).clients_of
    assert [server.tolist(), *map(list, silos)] == [[], *map(list, owned_clients(manifest, 3))]
    left = owners_left(manifest, [0, 2, 3], 4, servers=1).clients_of
    assert [*map(list, left)] == [[], list(silos[1]), list(silos[2])]
    adopted = owners_left(manifest, [0, 2, 3], 4, servers=1, adopt=True).clients_of
    assert [*map(list, adopted)] == [[], *map(list, owned_clients(manifest, 2))]
    (alone,) = owners_left(manifest, [0], 4, servers=1, adopt=True).clients_of
    assert len(alone) == manifest.clients, "the server trains where nobody else is left"
    taken_over = owners_left(manifest, [1, 2, 3], 4, servers=1, adopt=True).clients_of
    assert [*map(list, taken_over)] == [*map(list, silos)], "the new server goes on training"
    owned = owners_left(manifest, [0, 2, 3], 4, servers=1).mask(manifest.clients)
    assert np.flatnonzero(~owned).tolist() == sorted(silos[0].tolist())
