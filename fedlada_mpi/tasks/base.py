"""What a run learns: a loss of every example, metrics, and the objective that decides which round is the best.

class Visits(Task):
    objective = "-deviance"                       # the smaller, the better
    metrics = {"deviance": deviance, "auc": whole(auc)}

    def loss(self, outputs, targets):
        return F.poisson_nll_loss(outputs[:, 0], targets, reduction="none")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Array:
    """One example of an array: its type, by numpy's name, and its shape.

    Integers reach a module as they are, for instance as tokens; ``values`` is how many different ones there are, from
    0. Integers that are normalised are described as what they become, floating-point numbers.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    values: int = 0


@dataclass(frozen=True)
class About:
    """What a task and a model may know of the data.

    ``image``: inputs are uint8 [rows, columns, channels], which modules get normalised as [channels, rows, columns].
    ``edges``: the ends of the bins of time of a discrete survival model, ascending; the same on every rank.
    """

    inputs: Array | Mapping[str, Array]
    targets: Array | None = None
    classes: int = 0  # where targets are the numbers of classes
    image: bool = False
    edges: tuple[float, ...] = ()
    outputs: tuple[int, ...] | None = None  # of a model for one example, as the task asks for them; None: any


@dataclass(frozen=True)
class Metric:
    """A function of outputs and targets: by example, or ``whole``.

    By example it gives [N], whose mean counts; ``(sums, counts)``, both [N], whose quotient of totals counts; or
    [N, k], of whose totals [k] ``value`` makes a number. A ``whole`` one is called with all outputs and targets, as
    numpy arrays, and gives a number. NaN: undefined.
    """

    function: Callable[..., Any]
    value: Callable[[np.ndarray], float] | None = None
    whole: bool = False
    title: str = ""
    percent: bool = False
    larger_is_better: bool | None = None  # None: the objective says it, by "-" before the name


def whole(
    function: Callable[[np.ndarray, np.ndarray], float],
    title: str = "",
    percent: bool = False,
    larger_is_better: bool | None = None,
) -> Metric:
    """A metric of all predictions at once, such as the area under a curve."""
    return Metric(function, None, True, title, percent, larger_is_better)


def summed(
    function: Callable[[Tensor, Tensor], Tensor],
    value: Callable[[np.ndarray], float],
    title: str = "",
    percent: bool = False,
    larger_is_better: bool | None = None,
) -> Metric:
    """A metric that is a function ``value`` of sums over examples: ``function`` gives [N, k], ``value`` takes [k]."""
    return Metric(function, value, False, title, percent, larger_is_better)


Loss: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


def is_built_in(kind: type[Task]) -> bool:
    """By its own name: a user's subclass of a built-in task inherits one."""
    return bool(vars(kind).get("name"))


class Task:
    """A kind of learning problem. Subclasses have ``loss``, or ``batch_loss`` where examples do not stand alone."""

    name = ""  # of a built-in task
    objective = "-loss"  # the name of a metric, or of the loss; "-" before it: the smaller, the better
    metrics: Mapping[str, Metric | Callable[..., Any]] = {}
    optional: Mapping[str, Metric] = {}  # metrics that are computed where they are asked for
    losses: Mapping[str, str] = {}  # the choices of --loss, and what they are; the first is the default

    def __init__(self, about: About, loss: str = ""):
        """For data as ``about`` describes it; ``loss`` is one of ``losses``, or "" for the first."""
        self.about, self.loss_name = about, loss or next(iter(self.losses), "")

    def loss(self, outputs: Tensor, targets: Tensor) -> Loss:
        """Of each example: [N], [N, ...] whose mean over the rest counts, or the sums and the counts of a mean."""
        raise NotImplementedError

    # For losses that look across a batch, instead of ``loss``: a number; ``present`` [N] is False for padding.
    batch_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def outputs(self) -> tuple[int, ...] | None:
        """The shape of a model's outputs for one example; None: any."""
        return None

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        """Raise UserError where targets are not those of this task; ``where`` says what they are."""
