"""One local step of any method: where clipping and decay act, and which hook of the method is called when.

g = before_clip(gradient)
g = g * min(1, clip / |g|)       the norm is that of all of a client's parameters
g = g + lambda * x               --decay-mode l2
d = direction(g)
d = d + lambda * x               --decay-mode decoupled; inside: alpha * lambda * x
d = after_decay(d)
x = x - eta_t * d

Under --decay-on weights, biases and the parameters of norms have no lambda * x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Algorithm, ClientVectors, Vectors


def local_step(
    algorithm: Algorithm, c: ClientVectors, s: Vectors, lr: Tensor, gradient_free: bool, preserve_g: bool
) -> None:  # fmt: skip
    """Step from the gradients ``c.g``, in place; ``c.g`` is overwritten unless ``preserve_g``.

    ``gradient_free`` parameters have no ``c.g`` and nothing to clip.
    """
    g = gradient(algorithm, c, s, gradient_free, preserve_g)
    clips = bool(algorithm.config.clip) and not gradient_free
    move(algorithm, c, s, g, clip_factor(algorithm, g) if clips else None, lr)


def gradient(algorithm: Algorithm, c: ClientVectors, s: Vectors, gradient_free: bool, preserve_g: bool) -> Tensor:
    """What is clipped."""
    g = torch.zeros_like(c.x) if gradient_free else c.g.to(c.x.dtype, copy=preserve_g)
    return algorithm.before_clip(c, s, g)


def clip_factor(algorithm: Algorithm, g: Tensor) -> Tensor:
    """Of each client, [C, 1]."""
    norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
    return (algorithm.config.clip / norm).clamp_(max=1)


def move(
    algorithm: Algorithm, c: ClientVectors, s: Vectors, g: Tensor, factor: Tensor | None, lr: Tensor
) -> None:  # fmt: skip
    """The step from the gradients ``g``, which it overwrites, times ``factor``."""
    config = algorithm.config
    if factor is not None:
        g = g.mul_(factor)
    if algorithm.decay and config.decay_mode == "l2":
        g = g.add_(algorithm.decaying(c.x, s), alpha=algorithm.decay)
    d = algorithm.direction(c, s, g)
    if algorithm.decay and config.decay_mode != "l2":
        d = d.add_(algorithm.decaying(c.x, s), alpha=algorithm.decay)
    d = algorithm.after_decay(c, s, d)
    c.x.sub_(d.mul_(lr))
    if c.compute_copy is not None:
        c.compute_copy.copy_(c.x)
