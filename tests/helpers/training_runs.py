"""Runs of the package for the tests: tiny data sets, a run inside this process, and the reference on the same data."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from family_reference import federate
from ranks import barrier, from_root, is_root
from reference import Round, Settings, flat, image_gradient

CLASSES, SHAPE = 3, (8, 8, 3)
TIMES = ("seconds", "seconds_by_rank", "start", "end", "environment", "segments")
SETTINGS = {f.name for f in fields(Settings)}


@dataclass(eq=False)
class Data:
    """Shards on disk, the same images in memory by client, and a first model (its values exact in float32)."""

    shards: Path
    init: Path
    images: list[np.ndarray]
    labels: list[np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model: str = "cnn"

    @cached_property
    def network(self):
        from fedlada_mpi import models

        return models.build(self.model, outputs=CLASSES, inputs=SHAPE, activation="gelu")

    @cached_property
    def module(self) -> torch.nn.Module:
        return self.network.module.double()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()]

    @property
    def tensors(self) -> list[int]:
        """The number of elements of every parameter."""
        return [parameter.numel() for parameter in self.module.parameters()]

    @cached_property
    def start(self) -> np.ndarray:
        return flat(torch.load(self.init, weights_only=True), self.names)

    @property
    def sizes(self) -> list[int]:
        return [len(labels) for labels in self.labels]

    @cached_property
    def gradients(self):
        pairs = zip(self.images, self.labels, strict=True)
        return [image_gradient(self.module, images, labels, self.mean, self.std) for images, labels in pairs]


@dataclass
class Run:
    """What a run left behind."""

    out: Path
    data: Data

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def participants(self) -> list[list[int]]:
        return [record["participants"] for record in self.metrics]

    @cached_property
    def model(self) -> dict[str, torch.Tensor]:
        return torch.load(self.out / "model.pt", weights_only=True)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def x(self) -> np.ndarray:
        return flat(self.model, self.data.names)

    @cached_property
    def server(self) -> dict[str, np.ndarray]:
        """The server's vectors in the newest checkpoint, in the order of the module's parameters."""
        with h5py.File(self._checkpoint / "server.h5") as file:
            return self._vectors(file)

    @cached_property
    def clients(self) -> dict[int, dict[str, np.ndarray]]:
        """What the clients keep, in the newest checkpoint; a client that never took part is not there."""
        found = {}
        for path in self._checkpoint.glob("clients_*.h5"):
            with h5py.File(path) as file:
                found |= {int(client): self._vectors(vectors) for client, vectors in file.items()}
        return found

    @property
    def _checkpoint(self) -> Path:
        return max(path for path in (self.out / "checkpoint").iterdir() if path.name[-1].isdigit())

    def _vectors(self, group: h5py.Group) -> dict[str, np.ndarray]:
        unpack = self.data.network.layout.unpack
        vectors = [name for name in group if isinstance(group[name], h5py.Dataset)]
        return {name: flat(unpack(torch.from_numpy(group[name][:])), self.data.names) for name in vectors}


def structured_images(random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """A stripe whose place shows the class, under noise."""
    images = random.integers(0, 90, (len(labels), *SHAPE), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 3, :, label] += 120
    return images


def make_data(
    root: Path,
    sizes: list[int],
    silos: int = 1,
    one_image_per_client: bool = False,
    seed: int = 5,
    model: str = "cnn",
) -> Data:
    """Clients of the given sizes; with ``one_image_per_client`` each holds copies of a single image, so that any
    mini-batch of a client has the same gradient and the order of the batches cannot matter."""
    import data_prep
    from data_prep import PrepareSettings
    from fedlada_mpi import models

    random = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    labels = random.integers(0, CLASSES, len(owner))
    images = structured_images(random, labels)
    if one_image_per_client:
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])[owner]
        labels, images = labels[first], images[first]
    test_labels = np.arange(4 * CLASSES) % CLASSES
    test = structured_images(random, test_labels), test_labels
    if is_root():
        root.mkdir(parents=True, exist_ok=True)
        raw = root / "raw.npz"
        np.savez(
            raw, train_images=images, train_labels=labels, train_clients=owner, test_images=test[0], test_labels=test[1]
        )
        data_prep.prepare(
            PrepareSettings(
                dataset="npz",
                raw=str(raw),
                out=str(root / "shards"),
                clients=len(sizes),
                silos=silos,
                partition="natural",
            )
        )
        module = models.build(model, outputs=CLASSES, inputs=SHAPE, activation="gelu", seed=seed).module
        torch.save(module.double().state_dict(), root / "init.pt")
    barrier()
    manifest = json.loads((root / "shards" / "manifest.json").read_text())
    by_client = [owner == i for i in range(len(sizes))]
    return Data(
        root / "shards", root / "init.pt", [images[i] for i in by_client], [labels[i] for i in by_client], test,
        tuple(manifest["mean"]), tuple(manifest["std"]), model,
    )  # fmt: skip


def arguments(data: Data, out: Path, settings: dict[str, Any]) -> list[str]:
    """The command line; the defaults make a deterministic double-precision run with full batches."""
    values = dict(
        dataset=data.shards, init=data.init, out=out, model=data.model, activation="gelu", clients=len(data.sizes),
        partition="natural", precision="fp64", batch_size=0, augment="none", participation=1.0, sampling="fixed",
        device="cpu", eval_every=0, checkpoint_every=0,
    )  # fmt: skip
    values.update(settings)
    words = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def run_here(data: Data, out: Path, **settings: Any) -> Run:
    """A run inside this process, on all ranks of the world that the tests have."""
    from fedlada_mpi.run import main

    code = main(arguments(data, out, settings))
    barrier()
    assert code == 0
    return Run(out, data)


def run_reference(
    data: Data, algorithm: str, participants: list[list[int]], steps: list[int], settings: dict[str, Any]
) -> list[Round]:
    """The reference on the same data and settings as a run, with the participants that the run drew."""
    known = Settings(**{name: value for name, value in settings.items() if name in SETTINGS})
    if settings.get("decay_on") == "weights":
        weights = [float(p.ndim > 1) for p in data.module.parameters()]
        known = replace(known, decays=np.repeat(weights, data.tensors))
    given = (algorithm, data.start, data.gradients, data.sizes, steps, participants, known, data.tensors)
    return from_root(lambda: federate(*given))


def disagreement(x: np.ndarray, expected: np.ndarray, start: np.ndarray) -> float:
    """Distance between two results, in units of the distance travelled."""
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected - start))


def same(resumed: Run, whole: Run) -> None:
    """The same rounds, parameters and results, to the bit; only times may differ."""
    assert [record["round"] for record in resumed.metrics] == list(range(1, len(whole.metrics) + 1))
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        assert without_times(ours) == without_times(theirs)
    assert list(resumed.model) == list(whole.model)
    assert all(torch.equal(resumed.model[name], whole.model[name]) for name in whole.model)
    assert without_times(resumed.summary) == without_times(whole.summary)


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in TIMES}
