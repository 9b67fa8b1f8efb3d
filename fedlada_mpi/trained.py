"""A run that has ended, as Python sees it: its settings, results and model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from . import models, tasks
from .analysis.load import read
from .data.datasets import directory_of
from .data.given import like, rows_of
from .data.manifest import Manifest, Stored, about_of, read_manifest
from .data.rows import count, joined_inputs, take
from .data.shards import padded_inputs, read_clients, read_test
from .data.sources.base import check_shapes
from .data.sources.imagefolder import read_photos
from .data.sources.npz import channels_last
from .models.form import Form
from .models.initial import load_initial, load_trained
from .models.lora import Lora, merged
from .models.parameters import in_type
from .rounds.batches import on_device, tensor_of
from .rounds.evaluate import BATCH, batch_size, batches
from .rundir import data_digest, results
from .rundir.results import BEST, MODEL, SUMMARY
from .settings import SETTINGS, Config, recorded_code
from .support import code_digest, trust
from .support.errors import UserError, shortened
from .support.inputs import check_path, read_json, reason
from .support.user_code import Given

if TYPE_CHECKING:
    from .session.assemble import Session


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


class ArrayModel(nn.Module):
    """A trained network with its normalisation: arrays as the data has them, to outputs.

    Several arrays are given by their names. ``module`` is the network alone, which takes normalised arrays.
    """

    def __init__(self, module: nn.Module, arrays: Mapping[str, Stored], dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = module, dtype
        self.normalised = [name for name, stored in arrays.items() if stored.mean]
        for name in self.normalised:
            for what in ("mean", "std"):
                values = torch.tensor(getattr(arrays[name], what), dtype=torch.float64)
                self.register_buffer(f"{what}_{name}", values)
        self.eval()

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        arguments = [self._seen("", value) for value in inputs]
        return self.module(*arguments, **{name: self._seen(name, value) for name, value in named.items()})

    def _seen(self, name: str, values: Tensor) -> Tensor:
        if name in self.normalised:
            mean, std = self.get_buffer(f"mean_{name}"), self.get_buffer(f"std_{name}")
            return ((values.double() - mean) / std).to(self.dtype)
        if values.dtype == torch.bool:
            return values
        return values.to(self.dtype if values.is_floating_point() else torch.int64)


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
        model: Model | ArrayModel | str | None = None,
        trust: bool = False,
        accept_changed_code: bool = False,
        best: bool = False,
        task: str | None = None,
    ):
        """``trust``, ``accept_changed_code``, ``best``, ``task``: as in ``load``."""
        self._given_task = task
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
    def model(self) -> Model | ArrayModel:
        """The model with its normalisation, in evaluation mode, on the CPU: after the last round, or the best one."""
        return self._given if isinstance(self._given, (Model, ArrayModel)) else self._from_disk(self._given)

    def _from_disk(self, given: str | None) -> Model | ArrayModel:
        if not (self.dir / self._file).is_file():
            raise UserError(f"{self.dir} has no {self._file}, {self._why_missing}")
        config, lora = self.config, Lora.of(self.config)
        if given is None:
            self._check_code("model")
        else:
            trust.check({"model": given}, (), self.dir, True)
        try:
            network = models.build(
                given or config["model"],
                self.task.outputs(),
                self._about,
                config["activation"],
                config.get("seed", 0) if lora else 0,  # of which a base without a file is made
                stacked=False,
                norm=config.get("norm", ""),
                smu_mu=config.get("smu_mu", Config.smu_mu),
                lora=lora,
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
            if lora and config["init"]:
                self._load_base(network, dtype)
            load_trained(self.dir / self._file, network, dtype)
        except UserError as error:
            raise UserError(str(error).removeprefix("--init: ")) from None
        module = merged(in_type(network.module, dtype))
        if not self._about.image:
            return ArrayModel(module, self._arrays, dtype)
        return Model(module, self._images["mean"], self._images["std"], dtype)

    def _load_base(self, network: models.Network, dtype: torch.dtype) -> None:
        try:
            load_initial(Path(self.config["init"]), network, dtype, self.config["init_partial"])
        except UserError as error:
            file = self.config["init"]
            raise UserError(
                f"{self.dir}: its model is made of adapters and of --init {file}, which is to be there again ({error})"
            ) from None

    @cached_property
    def task(self) -> tasks.Task:
        """What the run has learned."""
        name = self._given_task or self.config.get("task", "classification")
        if self._given_task is None and ":" in name:
            self._check_code("task")
        return tasks.create(name, self._about, self.config.get("loss", ""), self.config.get("metrics", ""))

    @property
    def _why_missing(self) -> str:
        if self._file == BEST and not self.config.get("validation"):
            return (
                "as it had no validation examples to choose the best round by: train with validation=0.1, for instance"
            )
        if self.summary.get("status") == "finished":
            return "which was there when the run ended: copy it again, or go on with resume=True"
        if results.diverged_after(self.dir) is not None:
            return "as the run diverged: train again, with a smaller lr for instance"
        return "as the run has not ended: go on with resume=True"

    def _check_code(self, setting: str) -> None:
        """Refuse a user's model or task that others may have written, or that has changed since the training."""
        named = {setting: self.config[setting]}
        before = {setting: recorded_code(self.dir / "config.json").get(setting, {})}
        if code_digest.only_given(named[setting], before[setting]):
            what = "module or function that it was trained with" if setting == "model" else "class of its task"
            raise UserError(
                f"{self.dir}: its {setting} {named[setting]} cannot be made again by its name: give the {what}, "
                f"load(DIR, {setting}=...)"
            )
        try:
            trust.check(named, named, self.dir / "config.json", self._trust)
        except UserError as error:
            raise UserError(f"{error}, in Python load(DIR, trust=True)") from None
        changed = code_digest.changed(before, code_digest.of_settings(named)) if before[setting] else []
        if changed and not self._accept:
            raise UserError(
                f"{self.dir}: {', '.join(changed)} changed since this model was trained: restore the code, or take it "
                "as it is by --accept-changed-code, in Python load(DIR, accept_changed_code=True)"
            )

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their numbers."""
        return list(self._data.get("class_names") or [])

    @property
    def takes_images(self) -> bool:
        """Whether its model classifies images."""
        return self._about.image and self.task.name == "classification"

    @property
    def _data(self) -> dict[str, Any]:
        """What the summary says of the data; runs of version 0.1 have it only in their data."""
        about = self.summary.get("data")
        if about is None:
            try:
                about = self._manifest().described
            except UserError as error:
                raise UserError(
                    f"{self.dir / SUMMARY} does not say what its data was, and the data is not there ({error}): "
                    "copy the file again"
                ) from None
        return about if isinstance(about, dict) else {}

    @cached_property
    def _arrays(self) -> dict[str, Stored]:
        """The arrays of the inputs, where they are no images."""
        return Stored.parsed(self._data["inputs"])

    @cached_property
    def _about(self) -> tasks.About:
        """What a task and a model may know of the data."""
        data = self._data
        if "inputs" not in data:
            shape, classes = self._images["image_shape"], len(self._images["classes"])
            return tasks.About(tasks.Array("uint8", shape), tasks.Array("int64"), classes, image=True)
        try:
            targets = Stored.parsed({"": data["targets"]})[""]
            image = "image_shape" in data
            return about_of(self._arrays, targets, int(data["classes"]), image, data["edges"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self.dir / SUMMARY}: got {shortened(data)} as 'data', expected arrays") from None

    @property
    def _images(self) -> dict[str, Any]:
        """Shape, normalisation and classes of the images."""
        about = self._data
        try:
            rows, columns, channels = map(int, about["image_shape"])
            mean, std = ([float(value) for value in about[name]] for name in ("mean", "std"))
            named = about["class_names"] or "inputs" in about  # labels without names are numbered
            if not len(mean) == len(std) == channels > 0 or not named:
                raise ValueError
            return {
                "image_shape": (rows, columns, channels),
                "mean": mean,
                "std": std,
                "classes": list(about["class_names"]),
            }
        except (TypeError, ValueError, LookupError):
            raise UserError(
                f"{self.dir / SUMMARY}: got {shortened(about)} as 'data', expected shape, mean, std and classes"
            ) from None

    def _manifest(self) -> Manifest:
        """Of the run's shards; refused if they are others than those that it was trained on."""
        known = {name: self.config[name] for name in SETTINGS if name in self.config}
        if known.get("silo_dir"):
            raise UserError(f"the test examples of {self.dir} are in its silos: give evaluate inputs and targets")
        manifest = read_manifest(directory_of(Config(**known)))
        expected = data_digest.of_run(self.dir, self.summary)
        if expected and expected != manifest.digest:
            raise UserError(
                f"{self.dir} was trained on other data: got {manifest.digest[:12]} in {manifest.root}, expected "
                f"{expected[:12]}: put those shards there again, or give evaluate inputs and targets"
            )
        return manifest

    def evaluate(self, inputs: Any = None, targets: Any = None) -> dict[str, float]:
        """``loss`` and the metrics of the task on these examples, by default on all test examples of the run.

        For classification the mean cross-entropy, and ``accuracy``.
        """
        starts = [0]
        if inputs is None and targets is None:
            inputs, targets, starts = self._test_examples()
        elif inputs is None or targets is None:
            raise UserError("evaluate: got inputs or targets alone, expected both, or none for the run's test examples")
        else:
            self._refuse_raw_arrays()
        truth, stored = rows_of(targets, "targets"), self._about.targets
        if truth.dtype == bool and stored is not None:  # which ``Data`` takes for numbers of classes, too
            truth = truth.astype(stored.dtype)
        if self._about.image and truth.ndim == 1:
            check_shapes(self._pixels(inputs), truth, "evaluate:")
            classes = len(self._images["classes"])
            if truth.min() < 0 or truth.max() >= classes:
                raise UserError(f"evaluate: got labels {truth.min()} to {truth.max()}, expected 0 to {classes - 1}")
        tasks.check_targets(self.task, truth, "evaluate")
        outputs = torch.cat(list(self._outputs(inputs)))
        if len(outputs) != len(truth):
            raise UserError(f"evaluate: got {len(outputs)} inputs and {len(truth)} targets, expected as many")
        scores = tasks.scores(self.task, tuple(outputs.shape[1:]))
        known = tensor_of(truth, outputs.device, outputs.dtype)
        sums = [*self._totals(scores, outputs, known, starts), len(outputs)]
        found = scores.values(sums) | scores.of_all(outputs.cpu().numpy(), truth)
        titles = {"acc": "accuracy"}
        return {titles.get(name, name): float("nan") if value is None else value for name, value in found.items()}

    def _totals(self, scores: tasks.Scores, outputs: Tensor, targets: Tensor, starts: list[int]) -> list[float]:
        """The sums of the scores; a loss of a batch is that of the batches that a run evaluates."""
        if not scores.of_batches:
            return scores.totals(outputs, targets).tolist()
        parts = batches([*starts, len(outputs)], batch_size(scores, outputs.device))
        return torch.stack([scores.totals(outputs[part], targets[part]) for part in parts]).sum(0).tolist()

    def _test_examples(self) -> tuple[Any, np.ndarray, list[int]]:
        """Nobody's, then those of the clients; and where those of each begin."""
        manifest, starts = self._manifest(), [0]
        parts = [read_test(manifest)]
        if manifest.own_tests:
            own = read_clients(manifest, np.arange(manifest.clients)).test
            assert own is not None
            nobodys = 0 if parts[0] is None else len(parts[0][1])
            starts = [0, *(nobodys + own.offsets[:-1]).tolist()]
            parts.append((own.inputs, own.targets))
        known = [part for part in parts if part is not None]
        joined = joined_inputs([inputs for inputs, _ in known])
        return joined, np.concatenate([targets for _, targets in known]), starts

    def predict(self, inputs: Any, probabilities: bool = False) -> np.ndarray:
        """Of classification the class of each example, ``[n]``, or the probability of each class, ``[n, classes]``; of
        other tasks the model's outputs, with ``probabilities`` those of multilabel and segmentation.

        Images are as in ``Data``: uint8 ``[n, rows, columns, channels]``, or ``[n, rows, columns]``; or the path of an
        image file, or a list of paths. Files are turned upright, and their middle is resized, as ``--resize`` does.
        Other inputs are the arrays that the run was trained on, before any normalisation.
        """
        files = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
        if isinstance(files, (list, tuple)) and files and all(isinstance(f, (str, os.PathLike)) for f in files):
            if not self._about.image:
                raise UserError(f"predict: got files, and {self.dir} was trained on arrays: expected arrays")
            inputs = read_photos([os.fspath(file) for file in files], self._images["image_shape"])
        self._refuse_raw_arrays()
        if self._about.image:
            pixels = self._pixels(inputs)
            check_shapes(pixels, np.zeros(len(pixels), np.int64), "predict:")
        outputs = torch.cat(list(self._outputs(inputs)))
        if (undefined := outputs.isnan().flatten(1).any(1) if outputs.ndim > 1 else outputs.isnan()).any():
            row = int(undefined.nonzero()[0])
            raise UserError(
                f"predict: the model's outputs for example {row} are NaN: expected inputs as large as in training"
            )
        if self.task.name == "classification":
            outputs = outputs.softmax(1) if probabilities else outputs.argmax(1)
        elif probabilities and self.task.name in ("multilabel", "segmentation"):
            outputs = outputs.sigmoid() if self.task.name == "multilabel" else outputs.softmax(1)
        elif probabilities:
            raise UserError(f"predict: probabilities are those of classes, and the task is {self.task.name or 'yours'}")
        return outputs.cpu().numpy()

    def _pixels(self, images: Any) -> np.ndarray:
        pixels, expected = channels_last(rows_of(images, "images")), list(self._images["image_shape"])
        if pixels.ndim != 4 or list(pixels.shape[1:]) != expected:
            raise UserError(f"images: got shape {list(pixels.shape)}, expected [n, {', '.join(map(str, expected))}]")
        if pixels.dtype != np.uint8:
            raise UserError(
                f"images: got {pixels.dtype}, expected uint8 with values 0 to 255 (run.model takes floats from 0 to 1)"
            )
        return pixels

    def _refuse_raw_arrays(self) -> None:
        """Nobody but a client knows the mean and the deviation of its own data."""
        if self._data.get("normalise") == "client":
            raise UserError(
                f"{self.dir}: every client's data was normalised by its own mean and standard deviation, which the run "
                "does not have: normalise the arrays so, and give them to run.model"
            )

    def _given_arrays(self, inputs: Any) -> Any:
        """Inputs that are no images, checked, and rows of any length filled up."""
        names = [*self._arrays]
        if isinstance(inputs, Mapping) != (names != [""]):
            expected = "one array" if names == [""] else f"arrays by name: {', '.join(names)}"
            raise UserError(f"inputs: got {shortened(inputs)}, expected {expected}")
        given = inputs if isinstance(inputs, Mapping) else {"": inputs}
        if missing := [name for name in names if name not in given]:
            raise UserError(f"inputs: got {', '.join(given)}, expected also {missing[0]}")
        found: dict[str, Any] = {}
        for name, stored in self._arrays.items():
            found[name] = like(stored, given[name], f"inputs {name}".strip())
        return found if names != [""] else found[""]

    @torch.no_grad()
    def _outputs(self, inputs: Any) -> Iterator[Tensor]:
        """Batch by batch, on the device and in the mode of the model."""
        model = self.model
        device = next(iter(model.parameters())).device
        batch = BATCH.get(device.type, BATCH["cpu"])
        if isinstance(model, Model):
            pixels = self._pixels(inputs)
            for start in range(0, len(pixels), batch):
                images = torch.from_numpy(pixels[start : start + batch]).to(device)
                wide = images.permute(0, 3, 1, 2).to(model.mean.dtype)
                yield model(wide / torch.full_like(model.mean, 255))
            return
        arrays = self._given_arrays(inputs)
        if not count(arrays):
            raise UserError("inputs: got no rows, expected at least one")
        form = Form(self._about.inputs)
        for start in range(0, count(arrays), batch):
            part = take(arrays, np.arange(start, min(start + batch, count(arrays))))
            stored = on_device(padded_inputs(self._arrays, part, normalise=False), device, None)
            arguments, named = form.seen(stored)
            yield model(*arguments, **named)


def load(
    directory: str | os.PathLike[str],
    model: Any = None,
    trust: bool = False,
    accept_changed_code: bool = False,
    best: bool = False,
    task: Any = None,
) -> Run:
    """The run in a directory; ``model`` is the module or function it was trained with, where that cannot be imported,
    and ``task`` the class of its task.

    ``best``: with the model of the round that was best on the validation examples, not that of the last round.

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
    own = task if task is None or isinstance(task, str) else Given(task)
    return Run(path, found.settings, summary, metrics, named, trust, accept_changed_code, best, own)


def of_session(session: Session) -> Model | ArrayModel:
    """The model that a run has just trained."""
    manifest, module = session.manifest, session.trained_module()
    if manifest.image:
        return Model(module, manifest.mean, manifest.std, session.dtype)
    return ArrayModel(module, manifest.arrays, session.dtype)
