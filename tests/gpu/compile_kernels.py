"""Compiles the kernels for a GPU on a machine without one: a round of training in which they are built, not launched.

Run as a program by test_kernels.py, as it turns Triton inside out; it prints the name of every kernel it met.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fedlada_mpi import algorithms, bench
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.gpu import chacha_kernels, digest_kernels, layer_kernels
from fedlada_mpi.models import layers
from fedlada_mpi.rounds.gradients import StackedEngine

HOPPER = GPUTarget("cuda", 90, 32)


class NoDevice:
    """What Triton asks of a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches() -> set[str]:
    """From now on a launch only compiles; the names of what was launched."""
    driver.set_active(NoDevice())
    met, run = set(), JITFunction.run

    def build(self, *arguments, grid, warmup, **options):
        met.add(self.__name__)
        built = run(self, *arguments, grid=grid, warmup=True, **options)
        assert built.asm["cubin"], self.__name__
        return built

    JITFunction.run = build
    return met


def main() -> None:
    met = compile_launches()
    bench.create_engine = lambda network, config, device, loss: StackedEngine(network, layer_kernels)
    layers.use_library = lambda x, window, groups=1: False  # as on a GPU
    cases = [("cifar10", "bf16", "fedlada", "resnet18"), ("cifar10", "fp32", "fedavg", "model_zoo:ConvNeXt")]
    cases += [("digits", "fp32", name, "cnn") for name in algorithms.names()]
    for dataset, precision, method, model in cases:
        settings = {"dataset": dataset, "precision": precision, "algorithm": method, "model": model, "batch_size": 2}
        config = resolve(settings).config
        bench.Bench(bench.Workload.of_images(replace(config, local_steps=1, clip=1.0)), 2, torch.device("cpu")).round()
    chacha_kernels.add_streams(torch.zeros(9, dtype=torch.int64), [bytes(32)], [1])
    digest_kernels.leaf_digests(torch.zeros(512), 2048)
    print(*met)


if __name__ == "__main__":
    main()
