"""Augmentation by a user's own function: what it draws is the same on any ranks, and what it may not give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import from_root

from fedlada_mpi import Data, UserError, train
from fedlada_mpi.models.form import Form
from fedlada_mpi.rounds.augmentation import Augmentation
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import Array

IMAGES = Form(Array("uint8", (2, 3, 1)), image=True)
TABLE = Form(Array("float32", (3,)))
PLAIN = dict(algorithm="fedavg", precision="fp64", sums="exact", batch_size=2, local_steps=3, lr=0.05, rounds=2,
             participation=1.0, quiet=True)  # fmt: skip


def noisy(batch):
    return batch + torch.randn_like(batch)


def mirrored(images):
    assert images.shape[1:] == (1, 2, 3)
    return images.flip(3)


def test_images_are_given_as_models_get_them():
    batches = torch.arange(2 * 3 * 6.0).reshape(2, 3, 2, 3, 1)
    found = Augmentation(Given(mirrored), IMAGES)(batches, torch.arange(2))
    assert torch.equal(found, batches.flip(3))


def test_draws_depend_on_the_key_alone():
    augment, batches = Augmentation(Given(noisy), TABLE), torch.zeros(3, 4, 3)
    together = augment(batches, torch.tensor([7, 8, 9]))
    alone = augment(batches[1:2], torch.tensor([8]))
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert together.std() == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch: batch[:1], r"got torch.float32 \[1, 3\], expected torch.float32 \[3, 3\]"),
        (lambda batch: batch.double(), r"got torch.float64 \[3, 3\], expected torch.float32"),
        (lambda batch: None, r"got NoneType, expected torch.float32 \[3, 3\]"),
        (lambda batch: batch + float(np.random.rand()), "two calls on the same batch differ"),  # noqa: NPY002
        (lambda batch: batch / 0, "not finite"),
        (lambda batch: batch.missing, "AttributeError"),
    ],
)
def test_what_is_refused(function, words):
    with pytest.raises(UserError, match=words):
        Augmentation(Given(function), TABLE)


@pytest.mark.ranks
def test_runs_are_the_same_on_any_ranks_and_resumed(tmp_path_factory):
    there = from_root(lambda: str(tmp_path_factory.mktemp("runs")))
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(12, 3)), draw.normal(size=12)
    data = Data(inputs=x, targets=y, clients=np.arange(12) % 4, test=(x, y), task="regression")
    given = dict(data=data, model="linear", augment=noisy, data_dir=f"{there}/data", **PLAIN)
    whole = train(**given, out=f"{there}/whole")
    train(**{**given, "rounds": 1}, out=f"{there}/parts")
    resumed = train(**given, out=f"{there}/parts", resume=True)
    plain = train(**{**given, "augment": None}, out=f"{there}/plain")
    weight = whole.model.module.fc.weight
    assert torch.equal(resumed.model.module.fc.weight, weight)
    assert not torch.equal(plain.model.module.fc.weight, weight)
    together = train(**{**given, "sums": "fast"}, out=f"{there}/together")  # all clients of a rank at once
    torch.testing.assert_close(together.model.module.fc.weight, weight, rtol=1e-12, atol=1e-12)
