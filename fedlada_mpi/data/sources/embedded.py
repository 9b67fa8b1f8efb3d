"""Data sets that ship with this package, one for every task; docs/data.md describes them and how their files were made.

The terms of the files are in NAME.LICENSE.txt beside them. Masks and mosaics are made of the embedded digits. All
draws are whole numbers from ``numpy.random.RandomState(0)``: the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from .base import ArraySet
from .npz import load_digits

FOLDER = Path(__file__).parent
LENGTH = 80  # tokens in a row of text
TEXT_TEST_SHARE = 0.1
CANVAS, DIGIT = 16, 8  # pixels
MADE_CLIENTS = 10


def _read(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def _rows(
    arrays: dict[str, np.ndarray], targets: np.ndarray, owners: np.ndarray, task: str, loss: str = ""
) -> ArraySet:
    """A table whose rows are for testing where ``test`` says so."""
    inputs, test = np.ascontiguousarray(arrays["columns"].T), arrays["test"]
    return ArraySet(
        inputs[~test],
        targets[~test],
        inputs[test],
        targets[test],
        owners[~test],
        owners[test],
        task=task,
        loss=loss,
        feature_names=arrays["names"].tolist(),
    )


def load_randhie() -> ArraySet:
    """RAND Health Insurance Experiment: visits to a physician in a year, by site; a person is in one split only."""
    arrays = _read("randhie")
    owners = np.array([f"site {number}" for number in arrays["site"]])
    return _rows(arrays, arrays["visits"].astype(np.float32), owners, "regression", "poisson")


def load_dd() -> ArraySet:
    """Democracy and Dictatorship: how many years governments of 1946 to 2008 lasted, by region of the UN."""
    arrays = _read("dd")
    targets = np.stack([arrays["event"].astype(np.float32), arrays["time"]], 1)
    return _rows(arrays, targets, arrays["region"], "survival")


def load_shakespeare() -> ArraySet:
    """Ten plays as rows of 80 characters, and those that follow; the last tenth of each play is for testing."""
    arrays = _read("shakespeare")
    symbols, tokens = np.unique(arrays["text"], return_inverse=True)
    starts, plays = arrays["starts"], arrays["plays"]
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"train": [], "test": []}
    for start, end in pairwise(starts.tolist()):
        middle = end - round(TEXT_TEST_SHARE * (end - start))
        rows["train"].append(_text_rows(tokens[start:middle]))
        rows["test"].append(_text_rows(tokens[middle:end]))
    (inputs, targets), (test_inputs, test_targets) = (
        tuple(np.concatenate(part) for part in zip(*rows[split], strict=True)) for split in ("train", "test")
    )
    owners, test_owners = (np.repeat(plays, [len(part) for part, _ in rows[split]]) for split in ("train", "test"))
    names = [repr(chr(symbol))[1:-1] for symbol in symbols]
    return ArraySet(inputs, targets, test_inputs, test_targets, owners, test_owners, names, task="next-token")


def _text_rows(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [n, 80], the last row filled up with 0, and the next tokens, -1 where there is none."""
    count = -(-len(tokens) // LENGTH) * LENGTH
    inputs, targets = np.zeros(count, np.int16), np.full(count, -1, np.int16)
    inputs[: len(tokens)], targets[: len(tokens) - 1] = tokens, tokens[1:]
    return inputs.reshape(-1, LENGTH), targets.reshape(-1, LENGTH)


def load_masks() -> ArraySet:
    """A digit somewhere on 16x16 pixels of noise, and which pixels are its own; clients have other digits."""
    digits, rng = load_digits(), np.random.RandomState(0)
    inputs, targets = _hidden(digits.train_images, rng)
    test_inputs, test_targets = _hidden(digits.test_images, rng)
    # Six of ten go to two clients that are the digit's own, the others to anyone.
    count = len(digits.train_labels)
    own = (digits.train_labels + rng.randint(0, 2, count)) % MADE_CLIENTS
    owners = np.where(rng.randint(0, 10, count) < 6, own, rng.randint(0, MADE_CLIENTS, count))
    return ArraySet(
        inputs,
        targets,
        test_inputs,
        test_targets,
        owners,
        class_names=["background", "digit"],
        task="segmentation",
    )


def _hidden(images: np.ndarray, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 8, 8, 1] on noise, float32 [n, 1, 16, 16], and masks [n, 16, 16].

    Noise is as bright as much of a digit: a pixel by itself does not show whose it is.
    """
    count = len(images)
    canvas = rng.randint(0, 192, (count, CANVAS, CANVAS)).astype(np.uint8)
    mask = np.zeros((count, CANVAS, CANVAS), np.uint8)
    places = rng.randint(0, CANVAS - DIGIT + 1, (count, 2))
    for picture, marked, image, (row, column) in zip(canvas, mask, images[..., 0], places, strict=True):
        window = (slice(row, row + DIGIT), slice(column, column + DIGIT))
        picture[window] = np.maximum(picture[window], image)
        marked[window] = image >= 96
    return _scaled(canvas), mask


def load_mosaics() -> ArraySet:
    """Four digits in 16x16 pixels, and which of the ten digits are among them; clients have other digits."""
    digits, rng = load_digits(), np.random.RandomState(0)
    pools = np.stack([np.flatnonzero(digits.train_labels == digit) for digit in range(10)])
    owners = np.repeat(np.arange(MADE_CLIENTS), len(digits.train_labels) // MADE_CLIENTS)
    # Six of ten are one of three digits that are the client's own.
    own = (owners[:, None] + rng.randint(0, 3, (len(owners), 4))) % 10
    labels = np.where(rng.randint(0, 10, own.shape) < 6, own, rng.randint(0, 10, own.shape))
    chosen = pools[labels, rng.randint(0, pools.shape[1], own.shape)]
    test_chosen = rng.randint(0, len(digits.test_labels), (len(digits.test_labels), 4))
    return ArraySet(
        _mosaics(digits.train_images[chosen]),
        _labels(labels),
        _mosaics(digits.test_images[test_chosen]),
        _labels(digits.test_labels[test_chosen]),
        owners,
        task="multilabel",
    )


def _mosaics(images: np.ndarray) -> np.ndarray:
    """[n, 4, 8, 8, 1] to float32 [n, 1, 16, 16]."""
    tiles = images.reshape(len(images), 2, 2, DIGIT, DIGIT).transpose(0, 1, 3, 2, 4)
    return _scaled(tiles.reshape(len(images), CANVAS, CANVAS))


def _labels(digits: np.ndarray) -> np.ndarray:
    """Which digits are among those of each row: [n, 4] to bool [n, 10]."""
    return (digits[:, :, None] == np.arange(10)).any(1)


def _scaled(pictures: np.ndarray) -> np.ndarray:
    """uint8 [n, rows, columns] to float32 [n, 1, rows, columns] of 0 to 1."""
    return pictures[:, None].astype(np.float32) / np.float32(255)


EMBEDDED: dict[str, Callable[[], ArraySet]] = {
    "randhie": load_randhie,
    "dd": load_dd,
    "shakespeare": load_shakespeare,
    "digit-masks": load_masks,
    "digit-mosaics": load_mosaics,
}
