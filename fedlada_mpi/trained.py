"""A run that has ended, as Python sees it: its settings, results and model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import models
from .analysis.load import read
from .data.arrays import array
from .data.datasets import directory_of
from .data.manifest import Manifest, read_manifest
from .data.shards import read_test
from .data.sources.base import check_shapes
from .data.sources.imagefolder import read_photos
from .data.sources.npz import channels_last
from .models.initial import load_initial
from .rounds.evaluate import BATCH
from .rundir import checkpoint
from .rundir.results import BEST, MODEL, SUMMARY
from .settings import SETTINGS, Config, recorded_code
from .support import code_digest, trust
from .support.errors import UserError, shortened
from .support.inputs import check_path, read_json, reason
from .support.user_code import Given


class Model(nn.Module):
    """A trained network with its normalisation: images ``[n, channels, rows, columns]`` from 0 to 1, to logits.

    ``module`` is the network alone, which takes normalised images.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype):
        super().__init__()
        self.module = module
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.module((images.to(self.mean.dtype) - self.mean) / self.std)


class Run:
    """A run that has ended or stopped, as ``train`` and ``load`` return it; on every rank the same.

    ``dir``: its directory. ``config``: its settings by name. ``summary``: the content of ``summary.json``.
    ``metrics``: columns of equal length, one row per round, as ``pandas.DataFrame`` takes them; NaN where a round was
    not evaluated.
    """

    dir: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: dict[str, np.ndarray]

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        summary: dict[str, Any],
        metrics: Mapping[str, Any],
        model: Model | str | None = None,
        trust: bool = False,
        accept_changed_code: bool = False,
        best: bool = False,
    ):
        """``trust``, ``accept_changed_code``, ``best``: as in ``load``."""
        self.dir, self.config, self.summary = directory, config, summary
        self._file = BEST if best else MODEL
        self._trust, self._accept = trust, accept_changed_code
        self.metrics = {name: np.asarray(values) for name, values in metrics.items()}
        self._given = model

    def __repr__(self) -> str:
        rounds = len(self.metrics["round"])
        what = f"{self.config['algorithm']} on {self.config['dataset']}, {rounds} rounds"
        return f"<fedlada_mpi.Run {self.dir}: {what}, {self.summary.get('status', 'unfinished')}>"

    @cached_property
    def model(self) -> Model:
        """The model with its normalisation, in evaluation mode, on the CPU: after the last round, or the best one."""
        return self._given if isinstance(self._given, Model) else self._from_disk(self._given)

    def _from_disk(self, given: str | None) -> Model:
        if not (self.dir / self._file).is_file():
            raise UserError(f"{self.dir} has no {self._file}, {self._why_missing}")
        about, config = self._images, self.config
        if given is None:
            self._check_code()
        else:
            trust.check({"model": given}, (), self.dir, True)
        try:
            network = models.build(
                given or config["model"],
                len(about["classes"]),
                about["image_shape"],
                config["activation"],
                stacked=False,
                norm=config.get("norm", ""),
                smu_mu=config.get("smu_mu", Config.smu_mu),
            )
        except UserError as error:
            if given is not None or ":" not in config["model"]:
                raise
            raise UserError(
                f"{self.dir}: its model {config['model']} cannot be made again ({error}): give the module or function "
                "that it was trained with, load(DIR, model=...)"
            ) from None
        dtype = torch.float64 if config["precision"] == "fp64" else torch.float32
        try:
            load_initial(self.dir / self._file, network, dtype)
        except UserError as error:
            raise UserError(str(error).removeprefix("--init: ")) from None
        return Model(network.module, about["mean"], about["std"], dtype)

    @property
    def _why_missing(self) -> str:
        if self._file == BEST and not self.config.get("validation"):
            return "as it had no validation images to choose the best round by: train with validation=0.1, for instance"
        return "as the run has not ended: go on with resume=True"

    def _check_code(self) -> None:
        """Refuse a user's model that others may have written, or that has changed since the training."""
        named = {"model": self.config["model"]}
        before = {"model": recorded_code(self.dir / "config.json").get("model", {})}
        if code_digest.only_given(named["model"], before["model"]):
            raise UserError(
                f"{self.dir}: its model {named['model']} cannot be made again by its name: give the module or function "
                "that it was trained with, load(DIR, model=...)"
            )
        try:
            trust.check(named, named, self.dir / "config.json", self._trust)
        except UserError as error:
            raise UserError(f"{error}, in Python load(DIR, trust=True)") from None
        changed = code_digest.changed(before, code_digest.of_settings(named)) if before["model"] else []
        if changed and not self._accept:
            raise UserError(
                f"{self.dir}: {', '.join(changed)} changed since this model was trained: restore the code, or take it "
                "as it is by --accept-changed-code, in Python load(DIR, accept_changed_code=True)"
            )

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their numbers."""
        return self._images["classes"]

    @property
    def _images(self) -> dict[str, Any]:
        """Shape, normalisation and classes of the images; runs of version 0.1 have them only in their data."""
        about = self.summary.get("data")
        if about is None:
            about = self._manifest().about_images
        try:
            rows, columns, channels = map(int, about["image_shape"])
            mean, std = ([float(value) for value in about[name]] for name in ("mean", "std"))
            if not len(mean) == len(std) == channels > 0:
                raise ValueError
            return {
                "image_shape": (rows, columns, channels),
                "mean": mean,
                "std": std,
                "classes": list(about["class_names"]),
            }
        except (TypeError, ValueError, LookupError):
            raise UserError(
                f"{self.dir / SUMMARY}: got {shortened(about)} as 'data', expected shape and mean"
            ) from None

    def _manifest(self) -> Manifest:
        """Of the run's shards; refused if they are others than those that it was trained on."""
        known = {name: self.config[name] for name in SETTINGS if name in self.config}
        manifest = read_manifest(directory_of(Config(**known)))
        about = self.summary.get("data")
        recorded = str(about.get("digest", "")) if isinstance(about, dict) else ""
        expected = recorded or checkpoint.data_digest(self.dir)
        if expected and expected != manifest.digest:
            raise UserError(
                f"{self.dir} was trained on other data: got {manifest.digest[:12]} in {manifest.root}, expected "
                f"{expected[:12]}: put those shards there again, or give evaluate images and labels"
            )
        return manifest

    def evaluate(self, images: Any = None, labels: Any = None) -> dict[str, float]:
        """``loss`` (mean cross-entropy) and ``accuracy`` on these images, by default on the run's test images."""
        if images is None and labels is None:
            if (found := read_test(self._manifest())) is None:
                raise UserError("evaluate: the run's clients have test rows of their own, expected images and labels")
            images, labels = found
        elif images is None or labels is None:
            raise UserError("evaluate: got images or labels alone, expected both, or none for the run's test images")
        pixels, targets = self._pixels(images), array(labels, "labels")
        check_shapes(pixels, targets, "evaluate:")
        classes = len(self._images["classes"])
        if targets.min() < 0 or targets.max() >= classes:
            raise UserError(f"evaluate: got labels {targets.min()} to {targets.max()}, expected 0 to {classes - 1}")
        loss, correct, start = 0.0, 0, 0
        for logits in self._logits(pixels):
            truth = torch.from_numpy(targets[start : start + len(logits)].astype(np.int64)).to(logits.device)
            loss += float(F.cross_entropy(logits, truth, reduction="sum"))
            correct += int((logits.argmax(1) == truth).sum())
            start += len(logits)
        return {"loss": loss / len(targets), "accuracy": correct / len(targets)}

    def predict(self, images: Any, probabilities: bool = False) -> np.ndarray:
        """The class of each image, ``[n]``, or the probability of each class, ``[n, classes]``.

        Images are as in ``Data``: uint8 ``[n, rows, columns, channels]``, or ``[n, rows, columns]``; or the path of an
        image file, or a list of paths. Files are turned upright, and their middle is resized, as ``--resize`` does.
        """
        files = [images] if isinstance(images, (str, os.PathLike)) else images
        if isinstance(files, (list, tuple)) and files and all(isinstance(f, (str, os.PathLike)) for f in files):
            images = read_photos([os.fspath(file) for file in files], self._images["image_shape"])
        pixels = self._pixels(images)
        check_shapes(pixels, np.zeros(len(pixels), np.int64), "predict:")
        logits = torch.cat(list(self._logits(pixels)))
        return (logits.softmax(1) if probabilities else logits.argmax(1)).cpu().numpy()

    def _pixels(self, images: Any) -> np.ndarray:
        pixels, expected = channels_last(array(images, "images")), list(self._images["image_shape"])
        if pixels.ndim != 4 or list(pixels.shape[1:]) != expected:
            raise UserError(f"images: got shape {list(pixels.shape)}, expected [n, {', '.join(map(str, expected))}]")
        if pixels.dtype != np.uint8:
            raise UserError(
                f"images: got {pixels.dtype}, expected uint8 with values 0 to 255 (run.model takes floats from 0 to 1)"
            )
        return pixels

    @torch.no_grad()
    def _logits(self, pixels: np.ndarray) -> Iterator[Tensor]:
        """Batch by batch, on the device and in the mode of the model."""
        model = self.model
        batch = BATCH.get(model.mean.device.type, BATCH["cpu"])
        for start in range(0, len(pixels), batch):
            images = torch.from_numpy(pixels[start : start + batch]).to(model.mean.device)
            wide = images.permute(0, 3, 1, 2).to(model.mean.dtype)
            yield model(wide / torch.full_like(model.mean, 255))


def load(
    directory: str | os.PathLike[str],
    model: Any = None,
    trust: bool = False,
    accept_changed_code: bool = False,
    best: bool = False,
) -> Run:
    """The run in a directory; ``model`` is the module or function it was trained with, where that cannot be imported.

    ``best``: with the model of the round that was best on the validation images, not that of the last round.

    A model of a user's own is made by its code: what this user has not run by name on this machine is refused without
    ``trust``, what has changed since the training without ``accept_changed_code``.
    The run may still be going on, or have been killed: it then has the rounds so far, and no model.
    """
    path = Path(directory)
    check_path(os.fspath(directory), "load")
    if not path.is_dir():
        raise UserError(f"load: there is no directory {path}: expected one that a run has written")
    found = read(path)
    try:
        summary = read_json(path / SUMMARY)
    except FileNotFoundError:
        summary = {}
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise UserError(f"{path / SUMMARY} cannot be read: {why}") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path / SUMMARY} holds {type(summary).__name__}, expected results by name")
    metrics = {"round": found.rounds, **found.series}
    named = model if model is None or isinstance(model, str) else Given(model)
    return Run(path, found.settings, summary, metrics, named, trust, accept_changed_code, best)
