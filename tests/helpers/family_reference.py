"""Nineteen further methods in float64, one client after another, straight from their equations.

Shares no code with the package: numpy vectors, a Python loop over clients and steps. Slow and obvious on purpose.
``federate`` runs these methods and those of ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import reference
from reference import Gradient, Round, Settings, clipped

Vectors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Now:
    """A round as the server sees it."""

    t: int
    rate: float  # eta_t
    K: float  # mean of K_i over the participants
    S: int
    m: int


class FedAvg:
    """What the other methods do differently is stated in their classes."""

    sends_offset = True

    def __init__(self, s: Settings, x: np.ndarray, clients: int, tensors: Sequence[int]):
        self.s, self.tensors, self.zero = s, tensors, np.zeros_like(x)
        self.vectors: Vectors = {}  # of the server, in addition to x
        self.kept: list[Vectors] = [{} for _ in range(clients)]  # of every client, across rounds
        self.start(x)

    def start(self, x: np.ndarray) -> None:
        """The vectors at t = 0."""

    def keep(self, **vectors: np.ndarray) -> None:
        for mine in self.kept:
            mine.update({name: vector.copy() for name, vector in vectors.items()})

    def l2(self, y: np.ndarray) -> np.ndarray:
        return self.s.weight_decay * self.s.decays * y if self.s.decay_mode == "l2" else self.zero

    def decoupled(self, y: np.ndarray) -> np.ndarray:
        share = {"l2": 0, "decoupled": 1, "inside": self.s.alpha}[self.s.decay_mode]
        return share * self.s.weight_decay * self.s.decays * y

    def g(self, gradient: Gradient, y: np.ndarray) -> np.ndarray:
        return clipped(gradient(y), self.s.clip) + self.l2(y)

    def walk(self, y: np.ndarray, steps: int, rate: float, direction: Gradient) -> np.ndarray:
        for _ in range(steps):
            y = y - rate * (direction(y) + self.decoupled(y))
        return y

    def client(
        self, i: int, x: np.ndarray, gradient: Gradient, K: int, rate: float
    ) -> tuple[np.ndarray, dict[str, np.ndarray | float]]:
        """x_{i,K} and what the client sends."""
        final = self.walk(x, K, rate, lambda y: self.g(gradient, y))
        return final, {"offset": x - final}

    def talks(self, t: int) -> bool:
        return True

    def server(self, x: np.ndarray, mean: Vectors, now: Now) -> np.ndarray:
        """x^{t+1}."""
        return x - self.s.server_lr * mean["offset"]


# Server momentum and server adaptivity


class FedAvgM(FedAvg):
    def start(self, x):
        self.vectors["v"] = self.zero

    def server(self, x, mean, now):
        D, b = mean["offset"], self.s.momentum
        v = self.vectors["v"] = b * self.vectors["v"] + D
        return x - self.s.server_lr * (D + b * v if self.s.nesterov else v)


class SlowMo(FedAvg):
    def start(self, x):
        self.vectors["u"] = self.zero

    def server(self, x, mean, now):
        u = self.vectors["u"] = self.s.momentum * self.vectors["u"] + mean["offset"] / now.rate
        return x - self.s.server_lr * now.rate * u


class FedYogi(FedAvg):
    def start(self, x):
        self.vectors.update(m=self.zero, v=self.zero + self.s.v0)

    def server(self, x, mean, now):
        D, m, v, s = mean["offset"], self.vectors["m"], self.vectors["v"], self.s
        m = s.beta1 * m + (1 - s.beta1) * D
        v = v - (1 - s.beta2) * D * D * np.sign(v - D * D)
        self.vectors.update(m=m, v=v)
        return x - s.server_lr * m / (np.sqrt(v) + s.eps)


class FedAdagrad(FedAvg):
    def start(self, x):
        self.vectors["v"] = self.zero + self.s.v0

    def server(self, x, mean, now):
        D = mean["offset"]
        v = self.vectors["v"] = self.vectors["v"] + D * D
        return x - self.s.server_lr * D / (np.sqrt(v) + self.s.eps)


class FedNova(FedAvg):
    sends_offset = False

    def start(self, x):
        if self.s.server_momentum:
            self.vectors["u"] = self.zero

    def client(self, i, x, gradient, K, rate):
        s, y, u, c, a = self.s, x, self.zero, 0.0, 0.0
        for _ in range(K):
            g = self.g(gradient, y)
            if s.mu:
                direction, a = g + s.mu * (y - x), a * (1 - rate * s.mu) + 1
            else:
                u = direction = s.momentum * u + g
                c = s.momentum * c + 1
                a = a + c
            y = y - rate * (direction + self.decoupled(y))
        return y, {"normalised": (x - y) / a, "a": a, "K": K}

    def server(self, x, mean, now):
        tau = mean["K"] if self.s.mu else mean["a"]
        D = tau * mean["normalised"]
        if self.s.server_momentum:
            u = self.vectors["u"] = self.s.server_momentum * self.vectors["u"] + D / now.rate
            D = now.rate * u
        return x - self.s.server_lr * D


# Momentum inside the local steps


class FedADC(FedAvg):
    def start(self, x):
        self.vectors["u"] = self.zero

    def client(self, i, x, gradient, K, rate):
        push, y = self.s.beta_local * self.vectors["u"] / K, x
        for _ in range(K):
            # Decay is that of the point before the move.
            point = y - rate * push if self.s.nesterov else y
            g = clipped(gradient(point), self.s.clip) + self.l2(y)
            y = y - rate * (g + push + self.decoupled(y))
        return y, {"offset": x - y}

    def server(self, x, mean, now):
        s = self.s
        u = self.vectors["u"] = mean["offset"] / now.rate + (s.beta_global - s.beta_local) * self.vectors["u"]
        return x - s.server_lr * now.rate * u


class LocalMomentum(FedAvg):
    def start(self, x):
        if self.s.buffer == "average":
            self.vectors["u"] = self.zero

    def client(self, i, x, gradient, K, rate):
        b, y, u = self.s.momentum, x, self.vectors["u"] if self.s.buffer == "average" else self.zero
        for _ in range(K):
            g = self.g(gradient, y)
            u = b * u + g
            y = y - rate * ((g + b * u if self.s.nesterov else u) + self.decoupled(y))
        return y, {"offset": x - y, "u": u}

    def server(self, x, mean, now):
        if self.s.buffer == "average":
            self.vectors["u"] = mean["u"]
        return super().server(x, mean, now)


class QuasiGlobalMomentum(FedAvg):
    def start(self, x):
        self.vectors["h"] = self.zero

    def client(self, i, x, gradient, K, rate):
        b, h = self.s.momentum, self.vectors["h"]

        def direction(y):
            g = self.g(gradient, y)
            return g + b * (b * h + g) if self.s.nesterov else g + b * h

        final = self.walk(x, K, rate, direction)
        return final, {"offset": x - final}

    def server(self, x, mean, now):
        mu = self.s.mu
        self.vectors["h"] = mu * self.vectors["h"] + (1 - mu) * mean["offset"] / (now.K * now.rate)
        return super().server(x, mean, now)


# Dual and splitting methods


class FedDyn(FedAvg):
    def start(self, x):
        self.vectors["h"] = self.zero
        self.keep(e=x * 0)

    def local(self, gradient, y):
        return self.g(gradient, y)

    def client(self, i, x, gradient, K, rate):
        e = self.kept[i]["e"]
        final = self.walk(x, K, rate, lambda y: self.local(gradient, y) + self.s.alpha * ((y - x) - e))
        self.kept[i]["e"] = e + (x - final)
        return final, {"offset": x - final, "e": self.kept[i]["e"]}

    def server(self, x, mean, now):
        h = self.vectors["h"] = self.vectors["h"] + now.S / now.m * mean["offset"]
        return x - (mean["offset"] + h)


class FedSpeed(FedDyn):
    def start(self, x):
        super().start(x)
        if self.s.form == "paper":
            del self.vectors["h"]

    def local(self, gradient, y):
        g1, g2 = two_gradients(gradient, y, self.s.rho)
        return clipped((1 - self.s.q) * g1 + self.s.q * g2, self.s.clip) + self.l2(y)

    def server(self, x, mean, now):
        return x - (mean["offset"] + mean["e"]) if self.s.form == "paper" else super().server(x, mean, now)


class FedPD(FedAvg):
    sends_offset = False

    def start(self, x):
        self.keep(lam=x * 0, x=x, x0=x)

    def client(self, i, x, gradient, K, rate):
        eta, (lam, own, x0) = self.s.eta, (self.kept[i][name] for name in ("lam", "x", "x0"))
        start = own if self.s.start_at == "warm" else x0
        final = self.walk(start, K, rate, lambda y: self.g(gradient, y) + lam + (y - x0) / eta)
        lam = lam + (final - x0) / eta
        sent = final + eta * lam
        # What the client continues from, unless the server answers.
        self.kept[i].update(lam=lam, x=final, x0=sent)
        return final, {"sent": sent}

    def talks(self, t):
        bits = np.random.Philox(key=[self.s.seed, 5], counter=[0, t, 0, 0]).random_raw(1)[0]
        return (int(bits) >> 11) * 2.0**-53 >= self.s.skip

    def server(self, x, mean, now):
        self.keep(x0=mean["sent"])
        return mean["sent"]


class FedDR(FedAvg):
    sends_offset = False

    def start(self, x):
        self.vectors["x0"] = self.xs = x
        self.keep(y=x, x=x, xh=x)

    def client(self, i, x, gradient, K, rate):
        mine = self.kept[i]
        y_i = mine["y"] + self.s.alpha * (x - mine["x"])
        start = mine["x"] if self.s.start_at == "warm" else x
        final = self.walk(start, K, rate, lambda y: self.g(gradient, y) + (y - y_i) / self.s.eta)
        before, after = mine["xh"], 2 * final - y_i
        mine.update(y=y_i, x=final, xh=after)
        return final, {"change": after - before}

    def server(self, x, mean, now):
        self.xs = self.xs + now.S / now.m * mean["change"]
        return self.xs


class FedSplit(FedAvg):
    sends_offset = False

    def start(self, x):
        self.keep(z=x, x=x)

    def client(self, i, x, gradient, K, rate):
        mine = self.kept[i]
        centre = 2 * x - mine["z"]
        start = mine["x"] if self.s.start_at == "warm" else x
        final = self.walk(start, K, rate, lambda y: self.g(gradient, y) + (y - centre) / self.s.eta)
        mine.update(z=mine["z"] + 2 * (final - x), x=final)
        return final, {"z": mine["z"]}

    def server(self, x, mean, now):
        return mean["z"]


# Sharpness-aware


def two_gradients(gradient: Gradient, y: np.ndarray, rho: float) -> tuple[np.ndarray, np.ndarray]:
    """The raw gradients at y and at the point up the slope of y."""
    g1 = gradient(y)
    return g1, gradient(y + rho * g1 / (np.sqrt(np.sum(g1 * g1)) + 1e-7))


class FedSAM(FedAvg):
    def client(self, i, x, gradient, K, rate):
        def direction(y):
            return clipped(two_gradients(gradient, y, self.s.rho)[1], self.s.clip) + self.l2(y)

        final = self.walk(x, K, rate, direction)
        return final, {"offset": x - final}


class MoFedSAM(FedAvg):
    def start(self, x):
        self.vectors["g_a"] = self.zero

    def client(self, i, x, gradient, K, rate):
        alpha = self.s.alpha

        def direction(y):
            mixed = alpha * two_gradients(gradient, y, self.s.rho)[1] + (1 - alpha) * self.vectors["g_a"]
            return clipped(mixed, self.s.clip) + self.l2(y)

        final = self.walk(x, K, rate, direction)
        return final, {"offset": x - final}

    def server(self, x, mean, now):
        self.vectors["g_a"] = mean["offset"] / (now.K * now.rate)
        return super().server(x, mean, now)


# Local adaptivity


class LocalAdaAlter(FedAvg):
    def start(self, x):
        self.vectors["B2"] = np.full_like(x, self.s.b0**2)

    def client(self, i, x, gradient, K, rate):
        B2, A2, y = self.vectors["B2"], self.vectors["B2"], x
        for k in range(1, K + 1):
            E = k * self.s.eps**2 if self.s.form == "paper" else self.s.eps
            g = self.g(gradient, y)
            y = y - rate * (g / np.sqrt(B2 + E) + self.decoupled(y))
            A2 = A2 + g * g
        return y, {"offset": x - y, "A2": A2}

    def server(self, x, mean, now):
        self.vectors["B2"] = mean["A2"]
        return super().server(x, mean, now)


class FedLAMB(FedAvg):
    def start(self, x):
        self.vectors["v_hat"] = np.full_like(x, self.s.v0)
        self.keep(m=x * 0, v=x * 0)

    def client(self, i, x, gradient, K, rate):
        s, y, v_hat = self.s, x, self.vectors["v_hat"]
        m = self.kept[i]["m"] if s.m_start == "client" else self.zero
        v = self.kept[i]["v"] if s.v_start == "client" else v_hat
        ends = np.cumsum(self.tensors)
        for _ in range(K):
            g = self.g(gradient, y)
            m = s.beta1 * m + (1 - s.beta1) * g
            v = s.beta2 * v + (1 - s.beta2) * g * g
            w = m / (np.sqrt(v_hat) + s.eps) + self.decoupled(y)
            y = np.concatenate(
                [
                    y_l - rate * trust_ratio(y_l, w_l) * w_l
                    for y_l, w_l in zip(np.split(y, ends[:-1]), np.split(w, ends[:-1]), strict=True)
                ]
            )
        self.kept[i].update(m=m, v=v)
        return y, {"offset": x - y, "v": v}

    def server(self, x, mean, now):
        self.vectors["v_hat"] = np.maximum(self.vectors["v_hat"], mean["v"])
        return super().server(x, mean, now)


def trust_ratio(x: np.ndarray, w: np.ndarray) -> float:
    of_x, of_w = np.sqrt(np.sum(x * x)), np.sqrt(np.sum(w * w))
    return of_x / of_w if of_x > 0 and of_w > 0 else 1.0


class LocalAdaptivity(FedAvg):
    sends_offset = False

    def start(self, x):
        if self.s.server_optimizer == "adam":
            self.vectors.update(m=self.zero, v=self.zero)

    def client(self, i, x, gradient, K, rate):
        s, y, m, q, A = self.s, x, self.zero, self.zero, self.zero
        v = np.full_like(x, s.v0)
        b1 = s.beta1 if s.optimizer in ("adam", "yogi") else 0.0
        for _ in range(K):
            g = self.g(gradient, y)
            m = b1 * m + (1 - b1) * g
            if s.optimizer == "adagrad":
                v = v + g * g
            elif s.optimizer == "adam":
                v = s.beta2 * v + (1 - s.beta2) * g * g
            elif s.optimizer == "yogi":
                v = v - (1 - s.beta2) * g * g * np.sign(v - g * g)
            P = np.ones_like(x) if s.optimizer == "sgd" else 1 / (np.sqrt(v) + s.eps)
            q = b1 * q + (1 - b1) * P
            A = A + q
            y = y - rate * (m * P + self.decoupled(y))
        return y, {"scaled": over(x - y, A), "reciprocal": over(np.ones_like(x), A)}

    def server(self, x, mean, now):
        s = self.s
        D = over(mean["scaled"], mean["reciprocal"]) if s.correction == "joint" else mean["scaled"]
        if s.server_optimizer == "adam":
            m = self.vectors["m"] = s.server_beta1 * self.vectors["m"] + (1 - s.server_beta1) * D
            v = self.vectors["v"] = s.server_beta2 * self.vectors["v"] + (1 - s.server_beta2) * D * D
            D = m / (np.sqrt(v) + s.server_eps)
        return x - s.server_lr * D


def over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


class MimeLite(FedAvg):
    def start(self, x):
        self.vectors["m"] = self.zero
        if self.s.base == "adam":
            self.vectors["v"] = self.zero + self.s.v0

    def client(self, i, x, gradient, K, rate):
        s, m = self.s, self.vectors["m"]

        def direction(y):
            d = (1 - s.beta1) * self.g(gradient, y) + s.beta1 * m
            return d / (np.sqrt(self.vectors["v"]) + s.eps) if s.base == "adam" else d

        final = self.walk(x, K, rate, direction)
        return final, {"offset": x - final, "c": gradient(x) + self.l2(x)}

    def server(self, x, mean, now):
        s, c = self.s, mean["c"]
        self.vectors["m"] = s.beta1 * self.vectors["m"] + (1 - s.beta1) * c
        if s.base == "adam":
            self.vectors["v"] = s.beta2 * self.vectors["v"] + (1 - s.beta2) * c * c
        return super().server(x, mean, now)


METHODS: dict[str, type[FedAvg]] = {
    "fedavgm": FedAvgM,
    "slowmo": SlowMo,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "fedpd": FedPD,
    "fedadc": FedADC,
    "local_momentum": LocalMomentum,
    "quasi_global_momentum": QuasiGlobalMomentum,
    "local_adaalter": LocalAdaAlter,
    "fedlamb": FedLAMB,
    "local_adaptivity": LocalAdaptivity,
    "fedsam": FedSAM,
    "mofedsam": MoFedSAM,
    "fedspeed": FedSpeed,
    "mimelite": MimeLite,
    "feddr": FedDR,
    "fedsplit": FedSplit,
}


def federate(
    method: str,
    x: np.ndarray,
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    steps: Sequence[int],
    rounds: Sequence[Sequence[int]],
    s: Settings,
    tensors: Sequence[int] = (),
) -> list[Round]:
    """One round per list of participants; ``steps[i]`` is K_i; ``tensors`` the numbers of elements of each tensor."""
    if method not in METHODS:
        return reference.federate(method, x, gradients, sizes, steps, rounds, s)
    rule = METHODS[method](s, x, len(gradients), tensors or [len(x)])
    history = []
    for t, participants in enumerate(rounds):
        rate = s.lr * s.lr_decay**t
        weights = reference.weights_of(participants, sizes, s)
        finals, sent = [], []
        for i in participants:
            final, message = rule.client(i, x, gradients[i], steps[i], rate)
            finals.append(final)
            sent.append(message)
        consistency, silent = None, not rule.talks(t)
        if not silent:
            mean = {name: sum(w * message[name] for w, message in zip(weights, sent, strict=True)) for name in sent[0]}
            K = float(np.mean([steps[i] for i in participants]))
            x = rule.server(x, mean, Now(t, rate, K, len(participants), len(gradients)))
            if rule.sends_offset:
                consistency = sum(w * np.sum((final - x) ** 2) for w, final in zip(weights, finals, strict=True))
        history.append(Round(x, consistency, dict(rule.vectors), [], [dict(mine) for mine in rule.kept], silent))
    return history
