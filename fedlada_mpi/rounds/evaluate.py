"""The task's metrics of one model: on some examples, and on all parts of the data that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..gpu.graphs import Capture
from ..models.form import each
from ..mpi import World
from ..rundir.columns import CLASSIFICATION, PARTS, Columns
from ..settings import Config
from ..support.errors import UserError
from ..tasks.client_loss import wide
from ..tasks.scores import ClassScores, Scores
from .batches import LocalData, Normalise
from .examples import Examples
from .gradients import Engine

# Large enough to fill a GPU; small enough that a CPU's caches still help.
BATCH = {"cuda": 5000, "cpu": 250}
MIN_BATCH = 100  # examples: on a full GPU, a batch of fewer is not halved again
Result = TypeVar("Result")
GATHERED = 64 * 2**20  # bytes of outputs of a part of the data, up to which metrics of all of them are computed


class InBatches(Protocol):
    batch: int  # examples at once


def fitting(work: InBatches, action: Callable[[], Result]) -> Result:
    """What ``action`` gives, with batches that fit next to what is already on the GPU."""
    while True:
        try:
            return action()
        except torch.cuda.OutOfMemoryError:
            if work.batch < MIN_BATCH:
                raise
            work.batch //= 2


@dataclass
class Evaluator:
    """How models are evaluated: engine, precision, scores, and a capture where there is a GPU."""

    engine: Engine
    normalise: Normalise
    dtype: torch.dtype
    capture: Capture | None
    scores: Scores = ClassScores()

    def of(self, x: Tensor, examples: Examples, **how: Any) -> Evaluation:
        """The evaluation of the model that ``x`` holds when it is called."""
        return Evaluation(self, x, examples, **how)


class Evaluation:
    """The sums of the scores of model ``x`` over examples; on a GPU captured once and replayed, unless streamed."""

    def __init__(
        self,
        evaluator: Evaluator,
        x: Tensor,
        examples: Examples,
        single: bool = False,
        starts: Sequence[int] = (0,),
        outputs: bool = False,
    ):
        """``single``: also of single examples; ``outputs``: keep them.

        No batch reaches across ``starts``, so that its shape depends on the examples from one start to the next only.
        """
        device, scores, count = x.device, evaluator.scores, len(examples)
        self.bounds = [*starts, count]
        self.evaluator, self.x, self.examples = evaluator, x, examples
        self.totals = torch.zeros(len(scores.columns), dtype=torch.float64, device=device)
        # The numbers of every example.
        self.each = torch.zeros(len(scores.columns), count, dtype=torch.float64, device=device) if single else None
        kind = torch.float64 if evaluator.dtype == torch.float64 else torch.float32
        self.outputs = torch.zeros(count, *scores.output_shape, dtype=kind, device=device) if outputs else None
        self.batch = batch_size(scores, device)
        capture = evaluator.capture if examples.resident else None
        self.replay = self._fitting(lambda: capture(self._run).replay) if capture else None

    def _fitting(self, action: Callable[[], Result]) -> Result:
        return action() if self.evaluator.scores.of_batches else fitting(self, action)

    def __call__(self) -> list[float]:
        """The sums of the scores' columns, and the number of examples."""
        if self.replay is None:
            self._fitting(self._run)
        else:
            self.replay()
        return [*self.totals.tolist(), len(self.examples)]

    def by_group(self, groups: np.ndarray, least: int = 0) -> np.ndarray:
        """As the last call gave them, by group of examples.

        ``groups``: the number of every example's group; there are ``least`` groups or more.
        """
        if self.each is None:
            raise ValueError("single examples were not asked for")
        # Added up on the host in the order of the examples: atomic additions on a GPU would differ from run to run.
        weights = (*self.each.cpu().numpy(), None)
        return np.stack([np.bincount(groups, each, minlength=least) for each in weights])

    @torch.no_grad()
    def _run(self) -> None:
        engine, normalise, dtype = self.evaluator.engine, self.evaluator.normalise, self.evaluator.dtype
        scores = self.evaluator.scores
        self.totals.zero_()
        for part in batches(self.bounds, self.batch):
            taken, targets = self.examples.take(part)
            inputs = each(taken, lambda values: normalise(values, dtype))
            outputs = engine.outputs(self.x, inputs, dtype)
            if self.outputs is not None:
                self.outputs[part] = wide(outputs)
            self.totals += scores.totals(outputs, targets)
            if self.each is not None:
                self.each[:, part] = scores.each(outputs, targets)


def batch_size(scores: Scores, device: torch.device) -> int:
    """Examples at once. A loss of batches is that of the same ones on every device, however full it is."""
    return BATCH["cpu"] if scores.of_batches else BATCH.get(device.type, BATCH["cpu"])


def batches(bounds: Sequence[int], most: int) -> Iterator[slice]:
    """Of at most so many examples each; none reaches across one of the bounds."""
    for first, last in pairwise(bounds):
        yield from (slice(at, min(at + most, last)) for at in range(first, last, most))


def parts_due(config: Config, number: int, validation: bool) -> list[str]:
    """What the model is evaluated on after round ``number``: after the last one on everything."""
    every = {"test": config.eval_every, "train": config.eval_train_every}
    if config.dp != "none":
        del every["train"]  # its values are not among those that get noise
    elif config.eval_train_every < 0:
        every["train"] = config.eval_every
    due = [part for part, n in every.items() if number == config.rounds or (n and number % n == 0)]
    if clients_due(config, number):
        due = ["test", "train"]  # clients' values are those of these images
    due = [*due, "val"] if validation and "test" in due else due
    tested = config.eval_test == "always" or (config.eval_test == "end" and number == config.rounds)
    return due if tested else [part for part in due if part != "test"]


def clients_due(config: Config, number: int) -> bool:
    """Whether the clients are evaluated one by one after round ``number``."""
    return bool(config.eval_clients) and (number == config.rounds or number % config.eval_clients == 0)


OWN = "own"  # test examples of clients, next to the parts of the data; records count them as test


class Evaluations:
    """The model ``x`` on what a rank has of each part of the data: its clients' examples, and on the root the held-out.

    Evaluations are made when they are first asked for: on a GPU that takes time and memory.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        evaluator: Evaluator,
        x: Tensor,
        data: LocalData,
        held_out: Mapping[str, Examples],
        columns: Columns = CLASSIFICATION,
        sizes: Mapping[str, np.ndarray] | None = None,
        concealed: Callable[[np.ndarray], np.ndarray] | None = None,
        in_silos: bool = False,
    ):
        """``sizes``: training and, where clients have them, test examples of all clients, by part.

        ``concealed``: adds up the columns of all ranks' clients on the root, which sees nothing else of them.
        ``in_silos``: ranks have their own test sets, and only sums leave them.
        """
        self.concealed, self.in_silos = concealed, in_silos
        self.own: dict[str, list[float]] = {}  # of the last evaluation, this rank's sums by part
        self.columns, self.sizes = columns, sizes or {}
        self.world, self.config, self.evaluator, self.x, self.data = world, config, evaluator, x, data
        self.scores, self.own_tests = evaluator.scores, OWN in self.sizes
        # By part of the data; the root has those that belong to no client.
        self.examples: dict[str, Examples] = dict(held_out)
        if len(data.sizes):
            self.examples["train"] = data.examples
        if data.test is not None and len(data.test.examples):
            self.examples[OWN] = data.test.examples
        self.made: dict[str, Evaluation] = {}
        self.of_all: dict[str, dict[str, float | None]] = {}  # on the root: by part, metrics of all predictions
        # With exact sums, clients' examples are added up client by client: their order is the same on any ranks.
        self.by_client = config.sums == "exact" and not in_silos
        self.nothing = [0.0] * (len(self.scores.columns) + 1)

    @property
    def nbytes(self) -> int:
        """Of what belongs to no client."""
        return sum(examples.nbytes for part, examples in self.examples.items() if part not in ("train", OWN))

    def __call__(self, due: Sequence[str]) -> list[list[float]]:
        """For each of PARTS the sums and the number of examples, zero where it is not due or this rank has nothing of
        it; collective."""
        parts = [part for part in PARTS if part in due] + [OWN] * (self.own_tests and "test" in due)
        # A metric of a user's own may fail on one rank alone.
        together = self.world.collectively if self.scores.own_code else lambda action: action()
        sums = together(lambda: {part: self._evaluate(part) for part in parts})
        self.own = dict(sums)
        if self.in_silos and self.config.dp != "none":  # which has noise for what clients send, and for nothing else
            return [self.nothing for _ in PARTS]
        if self.by_client:
            for part in (part for part in ("train", OWN) if part in sums):  # in one order on all ranks
                total = self.concealed(self._own_sums(part)) if self.concealed else self._clients_sums(part).sum(1)
                sums[part] = (total if self.world.rank == 0 else np.zeros_like(total)).tolist()
        elif self.in_silos and self.concealed:
            for part in sums:
                total = self.concealed(np.array(sums[part])[:, None] if part in self.examples else self._no_columns)
                sums[part] = (total if self.world.rank == 0 else np.zeros_like(total)).tolist()
        if self.scores.whole and not self.in_silos:
            self.of_all = {part: self._of_all(part) for part in PARTS if part in due}
        if OWN in sums:
            sums["test"] = [a + b for a, b in zip(sums["test"], sums[OWN], strict=True)]
        return [sums.get(part, self.nothing) for part in PARTS]

    def _evaluate(self, part: str) -> list[float]:
        if part not in self.examples:
            return self.nothing
        if part not in self.made:
            of_clients = part in ("train", OWN)
            single = of_clients and (self.by_client or self.config.eval_clients > 0)
            # A loss of a batch would otherwise depend on who else is on a rank.
            apart = of_clients and (self.by_client or self.scores.of_batches)
            starts = self._clients(part).starts.tolist() if apart else [0]
            how: dict[str, Any] = dict(single=single, starts=starts, outputs=self._keeps(part))
            self.made[part] = self.evaluator.of(self.x, self.examples[part], **how)
        return self.made[part]()

    def _clients(self, part: str) -> LocalData:
        """The clients' examples of a part."""
        data = self.data if part == "train" else self.data.test
        assert data is not None
        return data

    def recorded(self, part: str, sums: Mapping[str, float]) -> dict[str, float | None]:
        """On the root, the columns of a part of the data, from the sums of all ranks; null where undefined."""
        values = self.scores.values([sums[name] for name in self.names(part)]) | self.of_all.get(part, {})
        defined = {name: value for name, value in values.items() if name == "loss" or value == value}
        return {metric.of(part): defined.get(metric.name) for metric in self.columns.metrics}

    def of_this_rank(self) -> dict[str, float | None]:
        """The columns of the last evaluation, of this rank's examples alone, and how many there are."""
        found: dict[str, float | None] = {}
        for part in (part for part in PARTS if part in self.own and part in self.examples):
            values = dict(self.scores.values(self.own[part]))
            if (predicted := self._predicted(part)) is not None:
                values |= self.scores.of_all(*predicted)
            found |= {metric.of(part): values.get(metric.name) for metric in self.columns.metrics}
            found[f"{part}_examples"] = self.own[part][-1]
        return found

    def names(self, part: str) -> list[str]:
        """Of the sums of a part of the data, and of the number of its examples."""
        return [f"{part}_{name}" for name in (*self.scores.columns, "count")]

    def clients_values(self) -> dict[str, np.ndarray]:
        """Of the last evaluation, on the root: the metrics of every client by their columns, NaN where undefined;
        collective."""
        parts = {"train": "train", **({"test": OWN} if self.own_tests else {})}
        sums = {part: self._clients_sums(of) for part, of in parts.items()}
        of_all = {part: self._clients_of_all(of) if self.scores.whole else () for part, of in parts.items()}

        def values() -> dict[str, np.ndarray]:
            found: dict[str, np.ndarray] = {}
            for part in parts:
                each = self.scores.values_by_column(sums[part])
                each |= dict(zip(self.scores.whole, of_all[part], strict=True))
                found |= {f"{part}_{name}": value for name, value in each.items()}
            return found

        return self.world.on_root(values) or {}

    @property
    def _no_columns(self) -> np.ndarray:
        return np.zeros((len(self.scores.columns) + 1, 0))

    def _own_sums(self, part: str) -> np.ndarray:
        """Of this rank's clients."""
        if part not in self.examples:
            return self._no_columns
        data = self._clients(part)
        groups = np.repeat(np.arange(len(data.sizes)), data.sizes)
        return self.made[part].by_group(groups, len(data.sizes))

    def _clients_sums(self, part: str) -> np.ndarray:
        by_client = np.zeros((len(self.scores.columns) + 1, self.config.clients))
        if part in self.examples:
            by_client[:, self._clients(part).client_ids] = self._own_sums(part)
        return self.world.reduce_sum(by_client)

    def _clients_of_all(self, part: str) -> np.ndarray:
        """On the root, metrics of all predictions of each client, [metrics, clients]; computed where they are."""
        values = self.world.collectively(lambda: self._values_of_clients(part))
        known = self.world.reduce_sum(np.isfinite(values))
        total = self.world.reduce_sum(np.nan_to_num(values, nan=0.0))
        return np.where(known > 0, total, np.nan)

    def _values_of_clients(self, part: str) -> np.ndarray:
        values = np.full((len(self.scores.whole), self.config.clients), np.nan)
        predicted = self._predicted(part)
        if predicted is None:
            return values
        data, (outputs, targets) = self._clients(part), predicted
        for client, start, size in zip(data.client_ids, data.starts, data.sizes, strict=True):
            rows = slice(start, start + size)
            found = self.scores.of_all(outputs[rows], targets[rows])
            values[:, client] = [np.nan if value is None else value for value in found.values()]
        return values

    def _predicted(self, part: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Outputs and targets of this rank's examples, as the last call has left them; None where it has none."""
        made = self.made.get(part)
        if made is None or made.outputs is None:
            return None
        return made.outputs.cpu().numpy(), made.examples.targets(slice(None)).cpu().numpy()

    def _keeps(self, part: str) -> bool:
        """Whether outputs are kept, for metrics of all of them."""
        if self.in_silos:  # for the silo's own results
            return bool(self.scores.whole) and part in self.examples and self._fits(len(self.examples[part]))
        if self.concealed and part in ("train", OWN):
            return False
        count = int(self.sizes[part].sum()) if part in self.sizes else len(self.examples[part])
        return bool(self.scores.whole) and self._fits(count)

    def _fits(self, count: int) -> bool:
        """Whether the outputs of so many examples take little memory."""
        return count * prod(self.scores.output_shape) * 4 <= GATHERED

    def without_outputs(self) -> list[str]:
        """On the root, the parts of the data whose outputs are too many to be kept; refused where they decide."""
        if self.in_silos:
            if self.columns.objective.name in self.scores.whole:
                raise self._undecided("which stay in the silos with --silo-dir", "choose --objective -loss")
            return ["train", "test"] if self.scores.whole else []
        parts = {"train": ["train"], "test": ["test", OWN], "val": ["val"]}
        known = {*self.examples, *self.sizes}
        found = [part for part, of in parts.items() if any(each in known and not self._keeps(each) for each in of)]
        found = found if self.scores.whole else []
        if self.columns.objective.name in self.scores.whole and {"test", "val"} & {*found}:
            if self.concealed and OWN in known:
                raise self._undecided("which stay in the silos with --secure", "choose --objective -loss")
            raise self._undecided(f"and these take more than {GATHERED >> 20} MB", "choose another")
        return found

    def _undecided(self, why: str, choice: str) -> UserError:
        """The objective cannot be computed."""
        return UserError(
            f"--objective {self.columns.objective.name} is a metric of all outputs at once, {why}: {choice}, or one of "
            "sums by fedlada_mpi.summed(function, value)"
        )

    def _of_all(self, part: str) -> dict[str, float | None]:
        """On the root, the metrics of all predictions of a part, in the order of the clients; collective."""
        found = [self._predicted(part)] if part != "train" else []
        for of in {"train": ["train"], "test": [OWN] * self.own_tests}.get(part, []):
            if self._keeps(of):
                found.append(self._gathered(of))
        known = [each for each in found if each is not None]
        if self.world.rank == 0 and known:
            outputs, targets = (np.concatenate(several) for several in zip(*known, strict=True))
        return self.world.on_root(lambda: self.scores.of_all(outputs, targets) if known else {}) or {}

    def _gathered(self, part: str) -> tuple[np.ndarray, np.ndarray] | None:
        """On the root, outputs and targets of all clients that ranks have, client by client; collective."""
        sizes, outputs = self.sizes[part], prod(self.scores.output_shape)
        starts = np.cumsum(sizes) - sizes
        targets = self.data.examples.targets(slice(0, 0))  # their type and shape
        table = np.zeros((int(sizes.sum()), 1 + outputs + prod(targets.shape[1:])))
        if (predicted := self._predicted(part)) is not None:
            data = self._clients(part)
            rows = np.concatenate([starts[c] + np.arange(n) for c, n in zip(data.client_ids, data.sizes, strict=True)])
            table[rows, 0] = 1  # examples of clients that have left are nowhere
            table[rows, 1 : 1 + outputs] = predicted[0].reshape(len(rows), -1)
            table[rows, 1 + outputs :] = predicted[1].reshape(len(rows), -1)
        table = self.world.reduce_sum(table)
        if self.world.rank != 0:
            return None
        table = table[table[:, 0] > 0]
        kind = np.float64 if self.evaluator.dtype == torch.float64 else np.float32
        return (
            table[:, 1 : 1 + outputs].reshape(-1, *self.scores.output_shape).astype(kind),
            table[:, 1 + outputs :].reshape(-1, *targets.shape[1:]).astype(_numpy_type(targets.dtype)),
        )


def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))
