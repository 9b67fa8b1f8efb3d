"""A round's plan and augmentation, which depend on (seed, round, client) alone."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from fedlada_mpi.rounds.batches import Normaliser, Plan, PlanBuffer, all_batches, gather, local_steps, plan
from fedlada_mpi.settings import Config


def planned(config: Config, sizes: list[int], t: int = 0, clients=None, width: int | None = None) -> Plan:
    """The plan of clients whose images are stored one after another, from 100 on."""
    sizes = np.array(sizes)
    clients = np.arange(len(sizes)) if clients is None else np.array(clients)
    starts = 100 + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    width = width or int(min(config.batch_size or 2**62, sizes.max()))
    return plan(config, t, clients, starts, sizes, width, torch.float64)


def test_local_steps_by_hand():
    sizes = np.array([1, 4, 5, 9])
    for settings, steps in (
        (dict(local_epochs=2, batch_size=4), [2, 2, 4, 6]),
        (dict(local_epochs=3, batch_size=0), [3, 3, 3, 3]),
        (dict(local_epochs=5, batch_size=4, local_steps=7), [7, 7, 7, 7]),
        (dict(local_epochs=1, batch_size=100), [1, 1, 1, 1]),
    ):
        assert local_steps(Config(**settings), sizes).tolist() == steps


def test_a_plan_by_hand():
    """Five images in batches of two, two epochs: 2 + 2 + 1 and again; next to a client of three images."""
    found = planned(Config(local_epochs=2, batch_size=2, augment="none"), [5, 3])
    assert found.index.shape == (6, 2, 2)
    assert found.weight[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0]] * 2
    assert found.weight[:, 1].tolist() == [[0.5, 0.5], [1, 0]] * 2 + [[0, 0]] * 2
    for client, (own, steps) in enumerate(((range(100, 105), 3), (range(105, 108), 2))):
        for epoch in range(2):
            rows = slice(epoch * steps, (epoch + 1) * steps)
            seen = found.index[rows, client][found.weight[rows, client] > 0]
            assert sorted(seen.tolist()) == list(own), "every image once in an epoch"
    assert not found.flip.any()
    assert not found.down.any()


def test_batches_are_padded_with_the_clients_own_first_example():
    """A loss that overflows on another client's example would otherwise be NaN, although its weight is zero."""
    sizes, starts = np.array([5, 3, 1]), np.array([100, 105, 108])
    arguments = Config(local_epochs=1, batch_size=4, augment="none"), 0, np.arange(3), starts, sizes, 4, torch.float64
    for found in (plan(*arguments), all_batches(*arguments)):
        for client, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            index, padding = found.index[:, client], found.weight[:, client] == 0
            assert padding.any()
            assert set(index[padding].tolist()) == {start}
            assert sorted(index[~padding].tolist()) == [*range(start, start + size)]


def test_every_epoch_is_shuffled_again():
    found = planned(Config(local_epochs=3, batch_size=0, augment="none"), [20])
    orders = {tuple(row.tolist()) for row in found.index[:, 0]}
    assert len(orders) == 3
    assert tuple(range(100, 120)) not in orders


def test_fixed_steps_start_new_epochs_as_needed():
    found = planned(Config(local_steps=5, batch_size=2, augment="none"), [4])
    assert found.weight.shape == (5, 1, 2)
    for epoch in (slice(0, 2), slice(2, 4)):
        assert sorted(found.index[epoch].flatten().tolist()) == [100, 101, 102, 103]
    assert torch.all(found.weight == 0.5)


def test_a_batch_larger_than_the_client_is_all_of_it():
    whole, larger = (planned(Config(local_epochs=2, batch_size=b), [3]) for b in (0, 50))
    assert all(torch.equal(getattr(whole, f.name), getattr(larger, f.name)) for f in fields(Plan))
    torch.testing.assert_close(whole.weight, torch.full((2, 1, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("batch_size", [0, 3, 50])
def test_a_clients_plan_depends_on_no_other_client(batch_size):
    """Alone on a rank, or next to larger and smaller clients: the same images, flips and crops."""
    config = Config(local_epochs=2, batch_size=batch_size, augment="paper", crop_padding=2, seed=9)
    sizes = [4, 11, 7]
    everyone = planned(config, sizes, t=6, clients=[40, 41, 42])
    for c, n in enumerate(sizes):
        alone = planned(config, [n], t=6, clients=[40 + c])
        steps, _, width = alone.index.shape
        used = alone.weight[:, 0] > 0
        alone.index += sum(sizes[:c])
        assert torch.equal(everyone.keys[:steps, c], alone.keys[:, 0])
        assert len(set(everyone.keys.flatten().tolist()) - {0}) == (everyone.keys != 0).sum()
        for f in [f for f in fields(Plan) if f.name != "keys"]:
            together, mine = getattr(everyone, f.name)[:steps, c, :width], getattr(alone, f.name)[:, 0]
            assert torch.equal(together[used], mine[used]), f.name


def test_plans_differ_by_seed_round_and_client():
    def key(seed=0, t=0, client=0):
        found = planned(Config(seed=seed, batch_size=0, augment="paper"), [30], t=t, clients=[client])
        return tuple(found.index.flatten().tolist()), tuple(found.flip.flatten().tolist())

    keys = [key(), key(seed=1), key(t=1), key(client=1)]
    assert key() == keys[0]
    assert len({order for order, _ in keys}) == 4
    assert len({flips for _, flips in keys}) == 4


def test_how_often_images_are_flipped_and_moved():
    """Flip with 1/2; with 1/2 a crop, uniform over the (2p+1)^2 = 25 places, of which one does not move."""
    found = planned(Config(local_epochs=40, batch_size=0, augment="paper", crop_padding=2), [500])
    n = found.flip.numel()
    error = 5 * 0.5 / n**0.5
    assert abs(found.flip.double().mean() - 0.5) < error
    moved = (found.down != 0) | (found.right != 0)
    assert abs(moved.double().mean() - 0.5 * 24 / 25) < error
    assert abs((moved & found.flip).double().mean() - 0.25 * 24 / 25) < error, "flip and crop are independent"
    places = torch.bincount(((found.down + 2) * 5 + found.right + 2).flatten(), minlength=25).double() / n
    places[12] -= 0.5
    assert (places - 0.5 / 25).abs().max() < 5 * (0.02 / n) ** 0.5


def test_other_augmentations_than_the_papers():
    settings = dict(local_epochs=40, batch_size=0, augment="paper", crop_padding=2)
    paper, still, always = (
        planned(Config(**settings, **more), [500])
        for more in ({}, {"flip": False, "crop": "never"}, {"crop": "always"})
    )
    assert not torch.stack((still.flip, still.down, still.right)).any()
    assert torch.equal(always.flip, paper.flip)
    moved = (paper.down != 0) | (paper.right != 0)
    assert torch.equal(always.down[moved], paper.down[moved])  # the same places, drawn for more images
    assert ((always.down != 0) | (always.right != 0)).double().mean() == pytest.approx(24 / 25, abs=0.01)


def by_image(image, flip, down, right, mean, std):
    """The augmentation in words: normalise, flip, pad with zeros, cut out."""
    rows, columns, _ = image.shape
    normal = (image / 255.0 - mean) / std
    if flip:
        normal = normal[:, ::-1]
    pad = 3
    padded = np.zeros((rows + 2 * pad, columns + 2 * pad, image.shape[2]))
    padded[pad : pad + rows, pad : pad + columns] = normal
    return padded[pad + down : pad + down + rows, pad + right : pad + right + columns]


def test_gather_against_one_image_at_a_time():
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (9, 5, 7, 2), dtype=np.uint8)
    shape = (3, 8)
    batch = Plan(
        torch.from_numpy(random.integers(0, 9, shape)),
        torch.ones(shape),
        torch.from_numpy(random.integers(0, 2, shape).astype(bool)),
        *(torch.from_numpy(random.integers(-3, 4, shape).astype(np.int32)) for _ in range(2)),
        torch.zeros(shape[0], dtype=torch.int64),
    )
    mean, std = np.array([0.3, 0.6]), np.array([0.2, 0.5])
    normalise = Normaliser(torch.from_numpy(mean), torch.from_numpy(std))
    found = gather(torch.from_numpy(images), batch, normalise, torch.float64, augment=True)
    plain = gather(torch.from_numpy(images), batch, normalise, torch.float64, augment=False)
    assert found.shape == (3, 8, 5, 7, 2)
    for place in np.ndindex(shape):
        image = images[batch.index[place]]
        moves = (bool(batch.flip[place]), int(batch.down[place]), int(batch.right[place]))
        np.testing.assert_allclose(found[place], by_image(image, *moves, mean, std), atol=1e-12)
        np.testing.assert_allclose(plain[place], (image / 255.0 - mean) / std, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_of_a_plan_by_number_and_by_tensor(dtype):
    found = planned(Config(local_epochs=2, batch_size=2, augment="paper"), [5, 5, 5])
    found.weight = found.weight.to(dtype)
    labels = torch.arange(200) * 7 % 11
    buffer = PlanBuffer(9, 4, 2, dtype, torch.device("cpu"))
    buffer.load(planned(Config(local_epochs=3, batch_size=2), [5, 5, 5, 5]), labels)  # of which nothing may be left
    buffer.load(found, labels)
    by_number, by_tensor = buffer.at(3, 2), buffer.at(torch.tensor([3]), 2)
    for step in (by_number, by_tensor):
        assert torch.equal(step.labels, labels[found.index[3, :2]])
        for f in fields(Plan):
            assert torch.equal(getattr(step, f.name), getattr(found, f.name)[3, :2])
