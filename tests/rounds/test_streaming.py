"""Examples that are streamed to the device, from the host's memory or from files, train to the same bits."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from training_runs import make_data, run_here, same

from fedlada_mpi import Data, train
from fedlada_mpi.data.manifest import Manifest, read_manifest, silo_file
from fedlada_mpi.data.shards import map_clients, read_clients
from fedlada_mpi.rounds import examples
from fedlada_mpi.rounds.examples import Streamed
from fedlada_mpi.session import loading
from fedlada_mpi.session.loading import Loading
from fedlada_mpi.support.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def short_blocks(monkeypatch):
    """Windows of two steps, so that tests have several blocks."""
    monkeypatch.setattr(examples, "SLOT_STEPS", 2)


class Numbers:
    """Example i has the input (i, -i) and the target (10 i)."""

    def __init__(self, count: int):
        self.count, self.taken = count, []

    def __len__(self):
        return self.count

    def take(self, rows):
        self.taken.append(len(rows))
        values = torch.from_numpy(rows)
        return torch.stack([values, -values], 1), self.targets(rows)

    def targets(self, rows):
        return 10.0 * torch.from_numpy(rows)[:, None]


@pytest.mark.parametrize("lengths", [[7], [3, 7], [1, 4, 5, 7], [2, 4, 6], [1]])
@pytest.mark.parametrize("clients", [1, 2])
def test_steps_find_their_batches_in_the_window(short_blocks, lengths, clients):
    source = Numbers(100)
    window = Streamed(source, CPU).window(clients=2, width=3)
    wanted = torch.randint(100, (lengths[-1], clients, 3), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # a round and another
        index, done, seen = window.index(*wanted.shape[:2]), 0, []
        for length in lengths:
            for first, last in window.blocks(wanted, done, length):
                for step in range(first, last):
                    assert torch.equal(window.inputs[index[step]][..., 0], wanted[step])
                    assert torch.equal(window.targets[index[step]][..., 0], 10.0 * wanted[step])
                    seen.append(step)
            done = length
        assert seen == list(range(lengths[-1]))
    assert max(source.taken) <= 2 * clients * 3


def test_a_window_is_no_larger_than_its_slots(monkeypatch):
    monkeypatch.setattr(examples, "SLOT_BYTES", 500)
    streamed = Streamed(Numbers(100), CPU)
    assert streamed.row_bytes == 24 - 4
    window = streamed.window(clients=2, width=3)  # 120 bytes a step
    assert len(window.targets) == 2 * 4 * 6
    assert streamed.window(clients=100, width=3).steps == 1
    assert streamed.window_bytes(3) == 2 * 480


def test_resident_and_streamed_examples_give_the_same_rows():
    streamed = Streamed(Numbers(9), CPU)
    for which in (slice(None), slice(2, 5), slice(0, 0), np.array([8, 0, 0])):
        inputs, targets = streamed.take(which)
        expected = np.arange(9)[which]
        assert inputs[:, 1].tolist() == (-expected).tolist()
        assert targets[:, 0].tolist() == streamed.targets(which)[:, 0].tolist() == (10 * expected).tolist()


CASES = {
    "fedlada": dict(algorithm="fedlada", batch_size=3, local_epochs=2, augment="paper"),  # uneven steps
    "full gradients": dict(algorithm="mimelite", batch_size=2, local_steps=5),
    "diagnosed": dict(algorithm="scaffold", batch_size=4, local_steps=3, diagnose=1, eval_clients=1, eval_every=1),
    "exact": dict(algorithm="fedavg", batch_size=4, local_steps=5, sums="exact", eval_every=1),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_from_files_as_on_the_device(shared_tmp, out, case, short_blocks):
    data = make_data(shared_tmp / "streamed", [5, 9, 4, 7, 12], silos=2)
    settings = dict(rounds=2, **CASES[case])
    device, disk = (run_here(data, out / on, data_on=on, **settings) for on in ("device", "disk"))
    same(disk, device)


def task_data(task: str, normalise: str) -> Data:
    draw = np.random.default_rng(0)
    owners = draw.permutation(np.arange(24) % 3)
    if task == "next-token":  # of any length
        rows = [draw.integers(0, 6, n) for n in draw.integers(2, 8, 24)]
        return Data(inputs=rows, clients=owners, test=(rows[:5],), task=task)
    inputs = draw.normal(size=(24, 1, 5, 5)).astype(np.float32)
    targets = {
        "multilabel": draw.random((24, 2)) < 0.5,
        "regression": draw.poisson(2.0, 24).astype(float),
        "segmentation": draw.integers(0, 2, (24, 5, 5)).astype(np.uint8),
    }[task]
    return Data(inputs=inputs, targets=targets, clients=owners, test=(inputs, targets, owners), task=task,
                normalise=normalise)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "normalise"),
    [("multilabel", "none"), ("regression", "pooled"), ("segmentation", "client"), ("next-token", "none")],
)
def test_every_kind_of_array_from_files(tmp_path, task, normalise, short_blocks):
    data = task_data(task, normalise)
    runs = [
        train(data=data, data_dir=tmp_path / "data", out=tmp_path / on, data_on=on, rounds=2, batch_size=3,
              local_steps=5, eval_clients=1, quiet=True)
        for on in ("device", "disk")
    ]  # fmt: skip
    ours, theirs = ({n: v for n, v in run.metrics.items() if "seconds" not in n} for run in runs)
    np.testing.assert_equal(ours, theirs)
    states = [run.model.module.state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_rows_of_several_files_come_in_order(tmp_path):
    data = make_data(tmp_path, [3, 2, 4, 1], silos=3)
    manifest = read_manifest(data.shards)
    whole = read_clients(manifest, [3, 0, 2])
    parts = map_clients(manifest, [3, 0, 2])
    assert len(parts) == 3
    assert np.array_equal(np.concatenate([part.inputs for part in parts]), whole.inputs)
    assert not any(part.inputs.flags.owndata for part in parts)
    stored = loading.StoredRows(_loading(manifest), [(part.inputs, part.targets) for part in parts])
    rows = np.array([7, 0, 2, 2, 5, 1])
    inputs, targets = stored.take(rows)
    assert np.array_equal(inputs, whole.inputs[rows])
    assert np.array_equal(targets, whole.targets[rows])
    assert np.array_equal(stored.targets(rows), whole.targets[rows])
    assert map_clients(manifest, [])[0].inputs.shape == (0, 8, 8, 3)


class Anything:
    def check_targets(self, targets, where):
        pass


def _loading(manifest, **more) -> Loading:
    return Loading(manifest, Anything(), CPU, torch.float32, **more)


def test_auto_leaves_in_the_files_what_has_no_room(tmp_path, monkeypatch):
    manifest = read_manifest(make_data(tmp_path, [30, 10]).shards)
    image = 8 * 8 * 3 + 8  # with its label
    for free, ranks, place in ((2 * 40 * image, 1, "device"), (2 * 40 * image - 2, 1, "disk"), (80 * image, 2, "disk")):
        monkeypatch.setattr(loading, "available_memory", lambda free=free: free)
        here = _loading(manifest, ranks_on_node=ranks)
        data = here.of_clients([0, 1])
        assert here.places == {place}
        assert data.examples.resident == (place == "device")
    everything = manifest.files[silo_file(0)]["bytes"]
    assert here._stored_bytes(np.array([0])) == pytest.approx(0.75 * everything)


def test_files_in_pieces_are_refused(tmp_path, monkeypatch):
    data = make_data(tmp_path, [3, 2])
    copied = _in_pieces(data.shards)
    manifest = read_manifest(data.shards)
    monkeypatch.setattr("fedlada_mpi.data.shards.check_files", lambda *_: None)
    monkeypatch.setattr(Manifest, "file", staticmethod(lambda silo: copied))
    with pytest.raises(UserError, match="'images' is not stored in one piece, as --data-on disk needs it"):
        map_clients(manifest, [0])


def _in_pieces(shards) -> str:
    with h5py.File(shards / silo_file(0)) as whole, h5py.File(shards / "pieces.h5", "w") as pieces:
        pieces.attrs.update(whole.attrs)
        for name, dataset in whole.items():
            pieces.create_dataset(name, data=dataset[:], chunks=dataset.shape)
    return "pieces.h5"
