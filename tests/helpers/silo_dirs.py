"""Silos with a directory each, and the same data prepared together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from training_runs import CLASSES, structured_images

from data_prep import PrepareSettings, prepare
from fedlada_mpi.data.silos.prepare import prepare_silo

NAMES = ("ankara", "berlin", "cairo")
CLASS_NAMES = ["left", "middle", "right"]


def make_silos(root: Path, clients: Sequence[Sequence[int]], tests: int = 6, seed: int = 3) -> Path:
    """Under ``root``: NAME.npz of each silo, ``secure/NAME`` prepared from it, and ``joint`` with the data of all.

    ``clients``: images of each client, by silo. A silo's clients are called after it.
    """
    random, parts = np.random.default_rng(seed), []
    root.mkdir(parents=True, exist_ok=True)
    for name, sizes in zip(NAMES, clients, strict=False):
        labels = random.integers(0, CLASSES, sum(sizes))
        labels[:CLASSES] = np.arange(CLASSES)  # in all, every class has images
        test_labels = random.integers(0, CLASSES, tests)
        part = {
            "train_images": structured_images(random, labels),
            "train_labels": labels,
            "test_images": structured_images(random, test_labels),
            "test_labels": test_labels,
            "train_clients": np.repeat([f"{name}-{i}" for i in range(len(sizes))], sizes),
        }
        np.savez(root / f"{name}.npz", **part)
        parts.append(part)
        settings = PrepareSettings("npz", out=root / "secure" / name, raw=root / f"{name}.npz")
        prepare_silo(settings, name, CLASS_NAMES)
    joint = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    np.savez(root / "joint.npz", class_names=CLASS_NAMES, **joint)
    prepare(PrepareSettings("npz", out=root / "joint", raw=root / "joint.npz", silos=len(parts)))
    return root
