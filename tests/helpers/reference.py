"""The eight methods of the paper in float64, one client after another, straight from the paper's equations.

Shares no code with the package: numpy vectors, a Python loop over clients and steps, and for every client a function
that returns the gradient of its own loss. Slow and obvious on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

Gradient = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    server_lr: float = 1.0
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    decay_mode: str = "l2"
    decays: np.ndarray | float = 1.0  # 0 at elements that do not decay
    clip: float = 0.0
    alpha: float = 1.0
    mu: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 0.0
    eps_v: float = 1e-8
    v_init: str = "zero"
    v_max: bool = True
    bias_correction: bool = False
    correct_after_max: bool = False
    weighting: str = "uniform"
    # Of the methods of family_reference.py.
    seed: int = 0
    momentum: float = 0.0
    server_momentum: float = 0.0
    nesterov: bool = False
    beta_local: float = 0.0
    beta_global: float = 0.0
    buffer: str = "average"
    eta: float = 1.0
    skip: float = 0.0
    start_at: str = "warm"
    form: str = ""
    rho: float = 0.0
    q: float = 1.0
    b0: float = 0.0
    v0: float = 0.0
    v_start: str = "server"
    m_start: str = "zero"
    base: str = "momentum"
    optimizer: str = "sgd"
    correction: str = "joint"
    server_optimizer: str = "sgd"
    server_beta1: float = 0.0
    server_beta2: float = 0.0
    server_eps: float = 0.0


@dataclass
class Round:
    """What is known after a round: x^{t+1}, the server's other vectors, and how far the clients ended from x^{t+1}."""

    x: np.ndarray
    consistency: float | None
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    directions: list[np.ndarray] = field(default_factory=list)
    kept: list[dict[str, np.ndarray]] = field(default_factory=list)  # every client's vectors
    silent: bool = False  # whether nobody communicated


def clipped(gradient: np.ndarray, bound: float) -> np.ndarray:
    norm = np.sqrt(np.sum(gradient * gradient))
    return gradient * (bound / norm) if bound and norm > bound else gradient


def sgd(x: np.ndarray, steps: int, rate: float, direction: Gradient) -> np.ndarray:
    for _ in range(steps):
        x = x - rate * direction(x)
    return x


def local_adaptive(
    x: np.ndarray, gradient: Gradient, steps: int, rate: float, s: Settings, v_server: np.ndarray, g_a: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Algorithm 3, lines 4 to 13: x_{i,K}, v_hat_{i,K} and every m / sqrt(v_hat) on the way."""
    m, directions = np.zeros_like(x), []
    v_hat = np.zeros_like(x) if s.v_init == "fresh" else v_server.copy()
    v = v_server.copy() if s.v_init == "server" else np.zeros_like(x)
    for k in range(1, steps + 1):
        g = clipped(gradient(x), s.clip)
        decay = s.weight_decay * s.decays * x
        if s.decay_mode == "l2":
            g = g + decay
        m = s.beta1 * m + (1 - s.beta1) * g
        v = s.beta2 * v + (1 - s.beta2) * g**2
        m_now, v_now = m, v
        correction = 1 - s.beta2**k if s.bias_correction and s.v_init != "server" else 1.0
        if s.bias_correction:
            m_now = m / (1 - s.beta1**k)
        if not s.correct_after_max:
            v_now, correction = v / correction, 1.0
        v_hat = np.maximum(v_now, v_hat) if s.v_max else v_now
        directions.append(m_now / (np.sqrt(v_hat / correction) + s.eps))
        own = directions[-1] + (decay if s.decay_mode == "inside" else 0)
        step = s.alpha * own + (1 - s.alpha) * g_a
        if s.decay_mode == "decoupled":
            step = step + decay
        x = x - rate * step
    return x, v_hat, directions


def weights_of(participants: Sequence[int], sizes: Sequence[int], s: Settings) -> np.ndarray:
    """Of the mean over the participants; they add up to one."""
    weights = np.array([sizes[i] if s.weighting == "size" else 1 for i in participants], float)
    return weights / weights.sum()


def federate(
    method: str,
    x: np.ndarray,
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    steps: Sequence[int],
    rounds: Sequence[Sequence[int]],
    s: Settings,
    start: dict[str, np.ndarray] | None = None,
) -> list[Round]:
    """One round per list of participants; ``steps[i]`` is K_i; ``start`` holds server vectors to begin from."""
    zero = np.zeros_like(x)
    state = dict(g_a=zero, c=zero, m=zero, v=np.full_like(x, s.eps_v**2))
    if method in ("fedadam", "fedadam_amended"):
        state["v"] = np.full_like(x, s.v0)
    state.update(start or {})
    c_i = [zero.copy() for _ in gradients]
    if method == "localadam":
        s = Settings(**{**vars(s), "alpha": 1.0})
    history = []
    for t, participants in enumerate(rounds):
        rate = s.lr * s.lr_decay**t
        weights = weights_of(participants, sizes, s)
        finals, extras, directions = [], [], []
        for i in participants:
            grad, g_a, c, mine = gradients[i], state["g_a"], state["c"], c_i[i]

            def plain(y, grad=grad):
                return clipped(grad(y), s.clip) + s.weight_decay * s.decays * y

            if method in ("fedavg", "fedadam"):
                final = sgd(x, steps[i], rate, plain)
            elif method == "fedprox":
                final = sgd(x, steps[i], rate, lambda y, f=plain, x_t=x: f(y) + s.mu * (y - x_t))
            elif method == "scaffold":
                final = sgd(x, steps[i], rate, lambda y, f=plain, d=c - mine: f(y) + s.alpha * d)
                c_i[i] = (x - final) / (steps[i] * rate) - s.alpha * (c - mine)
                extras.append(c_i[i] - mine)
            elif method in ("fedcm", "fedadam_amended"):

                def amended(y, grad=grad, g_a=g_a):
                    decay = s.weight_decay * s.decays * y * (s.alpha if s.decay_mode == "inside" else 1)
                    return clipped(s.alpha * grad(y) + (1 - s.alpha) * g_a, s.clip) + decay

                final = sgd(x, steps[i], rate, amended)
            elif method in ("localadam", "fedlada"):
                final, v_hat, seen = local_adaptive(x, grad, steps[i], rate, s, state["v"], g_a)
                extras.append(v_hat)
                directions += seen
            else:
                raise ValueError(method)
            finals.append(final)
        offset = sum(w * (x - final) for w, final in zip(weights, finals, strict=True))
        extra = sum(w * e for w, e in zip(weights, extras, strict=True)) if extras else None

        if method in ("fedadam", "fedadam_amended"):
            state["m"] = s.beta1 * state["m"] + (1 - s.beta1) * offset
            state["v"] = s.beta2 * state["v"] + (1 - s.beta2) * offset**2
            x = x - s.server_lr * state["m"] / (np.sqrt(state["v"]) + s.eps)
        else:
            x = x - s.server_lr * offset
        if method == "scaffold":
            state["c"] = state["c"] + len(participants) / len(gradients) * extra
        if method in ("localadam", "fedlada"):
            state["v"] = extra
        state["g_a"] = offset / (np.mean([steps[i] for i in participants]) * rate)
        consistency = sum(w * np.sum((final - x) ** 2) for w, final in zip(weights, finals, strict=True))
        history.append(Round(x, float(consistency), dict(state), directions))
    return history


def flat(source: torch.nn.Module | dict[str, torch.Tensor], names: Sequence[str]) -> np.ndarray:
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    return np.concatenate([state[name].detach().double().numpy().ravel() for name in names])


def image_gradient(module: torch.nn.Module, images: np.ndarray, labels: np.ndarray, mean, std) -> Gradient:
    """Gradient of the mean cross-entropy over all given images (uint8 [n, H, W, C]) at a flat parameter vector."""
    inputs = torch.from_numpy((images / 255.0 - np.asarray(mean)) / np.asarray(std)).permute(0, 3, 1, 2).contiguous()
    targets = torch.from_numpy(np.asarray(labels, np.int64))
    parameters = list(module.parameters())

    def gradient(x: np.ndarray) -> np.ndarray:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), parameters)
        loss = torch.nn.functional.cross_entropy(module(inputs), targets)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]).numpy()

    return gradient
