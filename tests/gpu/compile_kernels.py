"""Compiles the kernels for a GPU on a machine without one: a round of training in which they are built, not launched.

Run as a program by test_kernels.py, as it turns Triton inside out; it prints the name of every kernel it met.
Sizes that change nothing in a kernel's code are compiled once.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fedlada_mpi import algorithms, bench, models
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.gpu import (
    chacha_kernels,
    digest_kernels,
    dropout_kernels,
    layer_kernels,
    product_kernels,
    triton_support,
)
from fedlada_mpi.models import Lora, by_autograd, layers
from fedlada_mpi.models.columns import Window
from fedlada_mpi.models.recurrent import recurrent
from fedlada_mpi.models.sequences import GPT
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.base import About, Array
from fedlada_mpi.tasks.client_loss import ClientLoss
from fedlada_mpi.tasks.next_token import NextToken

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
    met, paths, run = set(), set(), JITFunction.run

    def build(self, *arguments, grid, warmup, **options):
        met.add(self.__name__)
        path = code_path(self, {**dict(zip(self.arg_names, arguments, strict=False)), **options})
        if path not in paths:
            paths.add(path)
            built = run(self, *arguments, grid=grid, warmup=True, **options)
            assert built.asm["cubin"], self.__name__
            waits = "griddepcontrol.wait" in built.asm["ptx"]
            assert waits == triton_support.CAN_AWAIT, f"{self.__name__} does not begin with await_inputs()"

    JITFunction.run = build
    return met


def code_path(kernel: JITFunction, arguments: dict[str, Any]) -> Hashable:
    """What a kernel's code depends on but for sizes: types, what is left out, names, and which way each ``if`` goes."""
    kinds = tuple(kind(a) for a in arguments.values() if not is_number(a))
    return kernel.src, kinds, tuple(outcome(test, arguments) for test in tests_in(kernel.src))


def kind(argument: Any) -> Hashable:
    if isinstance(argument, tuple):
        return tuple(kind(one) for one in argument if not is_number(one))
    return argument.dtype if isinstance(argument, torch.Tensor) else argument


def is_number(argument: Any) -> bool:
    return type(argument) in (int, float)


@cache
def tests_in(source: str) -> tuple[CodeType, ...]:
    nodes = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    return tuple(compile(ast.Expression(test), "<kernel>", "eval") for test in nodes)


def outcome(test: CodeType, arguments: dict[str, Any]) -> bool | None:
    """None where a test is the GPU's."""
    try:
        return bool(eval(test, {}, arguments))
    except NameError:
        return None


def sequences(dtype: torch.dtype) -> None:
    """Recurrent layers on tokens, forward and backward."""
    tokens = torch.zeros(2, 3, 4, dtype=torch.int64)
    for layer in (nn.LSTM(8, 6), nn.GRU(8, 6)):
        table = torch.zeros(2, 5, 8, dtype=dtype, requires_grad=True)
        x = by_autograd.embedding(tokens, table, kernels=layer_kernels)
        parameters = {name: value.detach().to(dtype).unsqueeze(0) for name, value in layer.named_parameters()}
        out, _ = recurrent(layer, parameters, x, None, lambda value: value, True, layer_kernels)
        out.sum().backward()


def main() -> None:
    met = compile_launches()
    bench.create_engine = lambda network, config, device, loss: StackedEngine(network, layer_kernels)
    layers.use_library = lambda x, window, groups=1: False  # as on a GPU
    cases = [("cifar10", "bf16", "fedlada", "resnet18")]
    cases += [("cifar10", "fp32", "fedavg", f"model_zoo:{name}") for name in ("ConvNeXt", "separable")]
    cases += [("cifar10", "bf16", "fedavg", "vit_tiny")]
    cases += [("digits", "fp32", name, "cnn") for name in algorithms.names()]
    for dataset, precision, method, model in cases:
        settings = {"dataset": dataset, "precision": precision, "algorithm": method, "model": model, "batch_size": 2}
        config = resolve(settings).config
        bench.Bench(bench.Workload.of_images(replace(config, local_steps=1, clip=1.0)), 2, torch.device("cpu")).round()
    for dtype in (torch.float32, torch.bfloat16):
        sequences(dtype)
        dropout_kernels.dropout(torch.zeros(2, 9, dtype=dtype), torch.arange(2), 1 << 40, 0.1)
    adapted_language_model()
    products_in_tf32()
    chacha_kernels.add_streams(torch.zeros(9, dtype=torch.int64), [bytes(32)], [1])
    digest_kernels.leaf_digests(torch.zeros(512), 2048)
    print(*met)


def products_in_tf32() -> None:
    """By both kinds of tiles, of whole sums and of shares, and a convolution each way."""
    torch.backends.cuda.matmul.allow_tf32 = True
    for m, length, n in ((800, 64, 128), (50, 1024, 512)):
        for a in (torch.zeros(1, m, length), torch.zeros(1, length, m).mT):
            for b in (torch.zeros(1, length, n), torch.zeros(1, n, length).mT):
                assert product_kernels.tiling_of(m, n, length, 1, 4, not a.is_contiguous(), not b.is_contiguous())
                layer_kernels.product(a, b)
    x, weight, window = torch.zeros(2, 2, 4, 4, 32), torch.zeros(2, 288, 32), Window(4, 4, (3, 3), (1, 1), (1, 1))
    assert layer_kernels.convolves(x, window, weight)
    layer_kernels.convolution(x, weight, window)
    layer_kernels.convolution_input_gradient(x, weight, window)


def adapted_language_model() -> None:
    """A step of a transformer with a large vocabulary, of whose layers only adapters are trained."""
    words, length = 5000, 16
    text = About(Array("int64", (length,), words), Array("int64", (length,)), classes=words)
    network = models.build(Given(GPT(words, length, 64, 1, 4)), (length, words), text, lora=Lora(8))
    engine = StackedEngine(network, layer_kernels, loss=ClientLoss(NextToken(text)))
    layer_kernels.takes_gradients = lambda dout, rank: dout.dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):
        values, tokens = network.initial(dtype).expand(2, -1).contiguous(), torch.zeros(2, 2, length, dtype=torch.int64)
        weight, keys = torch.full((2, 2), 0.5), torch.arange(2)
        engine.gradients(values, torch.zeros_like(values), tokens, tokens, weight, keys)


if __name__ == "__main__":
    main()
