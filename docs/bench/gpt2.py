"""A network of GPT-2's shape (124 million weights, random ones) for the benchmark: nothing is downloaded."""

from __future__ import annotations

from torch import nn

from fedlada_mpi.models.sequences import GPT


def gpt2(outputs: tuple[int, int], shape: tuple[int, ...]) -> nn.Module:
    return GPT(tokens=outputs[1], length=outputs[0], width=768, depth=12, heads=12)
