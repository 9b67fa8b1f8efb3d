"""The time until an event, which for some examples is only known to be later than their last observation."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.errors import UserError
from .base import About, Task, whole
from .checks import check_finite, check_kind, check_range, found
from .curves import concordance

FAR_BELOW = -1e30  # the log of next to nothing; with -inf, a batch without anyone would have NaN as its gradient


def risk_by_hazards(outputs: np.ndarray) -> np.ndarray:
    """Minus the expected number of bins that an example outlives, of the logits of the hazards [n, bins]."""
    log_survival = -np.cumsum(np.logaddexp(0.0, outputs.astype(np.float64)), axis=1)
    return -np.exp(log_survival).sum(1)


def cindex_by_hazards(outputs: np.ndarray, targets: np.ndarray) -> float:
    return concordance(targets[:, 1], targets[:, 0] > 0, risk_by_hazards(outputs))


def cindex_by_risk(outputs: np.ndarray, targets: np.ndarray) -> float:
    return concordance(targets[:, 1], targets[:, 0] > 0, outputs.reshape(len(targets)))


class Survival(Task):
    """Targets: float [n, 2], event (1, or 0: censored) and time; outputs: [N, bins], or [N, 1] for ``cox``."""

    name = "survival"
    objective = "cindex"
    metrics = {"cindex": whole(cindex_by_hazards, "concordance index", percent=True, larger_is_better=True)}
    losses = {
        "discrete": "minus the log-likelihood of a hazard for each bin of time; outputs are their logits",
        "cox": "minus the log partial likelihood of a batch, per event; outputs are the logs of the risks",
    }

    def __init__(self, about: About, loss: str = ""):
        super().__init__(about, loss)
        if self.loss_name == "cox":
            self.metrics = {"cindex": whole(cindex_by_risk, "concordance index", percent=True, larger_is_better=True)}
            self.batch_loss = partial_likelihood
        else:
            if not about.edges or any(b <= a for a, b in zip(about.edges, about.edges[1:], strict=False)):
                raise UserError(
                    f"task survival, loss discrete: got edges {list(about.edges)}, expected the ascending ends of the"
                    " bins of time: prepare the data with task survival, or use --loss cox"
                )
            # Starts and ends; the first bin holds a time of 0, too.
            self._bins = torch.tensor([(float("-inf"), *about.edges[:-1]), about.edges], dtype=torch.float32)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Bins (start, end]: an example survives those that end before its time, and at it if it is censored then."""
        if self.loss_name == "cox":
            raise NotImplementedError("the partial likelihood is one of a batch: batch_loss")
        if self._bins.device != outputs.device:
            self._bins = self._bins.to(outputs.device)
        start, end = self._bins
        event, time = (targets[:, :1] > 0), targets[:, 1:].to(torch.float32)
        survived = (end < time) | (~event & (end == time))
        died = event & (start < time) & (time <= end)
        alive, dead = F.logsigmoid(-outputs), F.logsigmoid(outputs)
        return -(alive.masked_fill(~survived, 0.0) + dead.masked_fill(~died, 0.0)).sum(1)

    def outputs(self) -> tuple[int, ...] | None:
        return (1,) if self.loss_name == "cox" else (len(self.about.edges),)

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        check_kind(targets, "iuf", (2,), where, "event (1, or 0: censored) and time of every example, [n, 2]")
        if targets.shape[1] != 2:
            raise UserError(f"{where}: got targets of {found(targets)}, expected two columns: event (0 or 1) and time")
        check_finite(targets, where)
        events, times = targets[:, :1], targets[:, 1:]
        check_range(events, (events == 0) | (events == 1), where, "0 (censored) or 1 (event) first, then the time")
        check_range(times, times >= 0, where, "a time of 0 or more in the second column: count from the start")


def partial_likelihood(outputs: Tensor, targets: Tensor, present: Tensor) -> Tensor:
    """Cox: the mean over events of log(sum of the risks of all who live until then) - log(own risk).

    With Breslow's rule for ties: those with the same time are all at risk. 0 for a batch without events.
    """
    event = present & (targets[:, 0] > 0)
    # The latest first, padding last: the risk set of an event is a prefix.
    time = targets[:, 1].to(outputs.dtype).masked_fill(~present, float("-inf"))
    order = time.argsort(descending=True, stable=True)
    time, event = time[order], event[order]
    risk = outputs[:, 0].masked_fill(~present, FAR_BELOW)[order]
    last = torch.searchsorted(-time, -time, right=True) - 1
    at_risk = risk.logcumsumexp(0)[last]
    return (at_risk - risk).masked_fill(~event, 0.0).sum() / event.sum().clamp(min=1)
