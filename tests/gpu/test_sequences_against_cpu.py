"""Transformers, U-Nets and recurrent layers on a GPU against the CPU; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sequence_zoo import GPT, TEXT, ZOO, DistilBERT, UNet, ViT
from torch import Tensor, nn

from fedlada_mpi import models
from fedlada_mpi.models import Lora, by_autograd
from fedlada_mpi.models.attention import attention
from fedlada_mpi.models.form import as_stored, each
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
CLIENTS, EXAMPLES = 3, 4


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, size=5):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(2 * size, 11)
        self.layer = kind(8, size, 2, dropout=0.2, batch_first=True, bidirectional=True)

    def forward(self, tokens):
        return self.head(self.layer(self.words(tokens))[0])


CASES = {
    **{name: (lambda model=model: model(), about) for name, (model, about) in ZOO.items()},
    "vit with dropout": (lambda: ViT(dropout=0.3), ZOO["vit"][1]),
    "gpt with dropout": (lambda: GPT(dropout=0.3), TEXT),
    "distilbert with dropout": (lambda: DistilBERT(dropout=0.3), ZOO["distilbert"][1]),
    "unet of volumes": (lambda: UNet(sides=3), About(Array("float32", (2, 4, 4, 8)))),
    "lstm": (Recurrent, TEXT),
    "gru": (lambda: Recurrent(nn.GRU), TEXT),
    "wide lstm": (lambda: Recurrent(size=128), TEXT),
    "wide gru": (lambda: Recurrent(nn.GRU, 128), TEXT),
    "rnn": (lambda: Recurrent(nn.RNN), TEXT),
}
ADAPTED = {"gpt with adapters": Lora(2), "gpt with adapters, A fixed": Lora(2, fixed_a=True)}
CASES |= dict.fromkeys(ADAPTED, (GPT, TEXT))


class Squares:
    """A loss of any outputs."""

    def backward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        losses = torch.tanh(outputs.float() if outputs.dtype != torch.float64 else outputs).square().flatten(2).mean(2)
        torch.autograd.backward(losses, weight.to(losses.dtype))
        return (losses.detach() * weight).sum(-1)


def built(name: str) -> models.Network:
    torch.manual_seed(0)
    make, about = CASES[name]
    network = models.build(Given(make()), None, about, lora=ADAPTED.get(name))
    assert network.forward is not None, network.untraceable_because
    return network


def gradients(network: models.Network, device: str, dtype: torch.dtype, kernels=None):
    """A function that computes gradients [C, d] on a device into the same memory each time."""
    draw = torch.Generator().manual_seed(1)
    inputs = network.form.random(CLIENTS, EXAMPLES, draw=draw, dtype=torch.float64)
    inputs = each(inputs, lambda value: as_stored(value, dtype).to(device))
    start = network.initial(torch.float64)
    values = start + 0.05 * torch.randn(CLIENTS, len(start), generator=draw, dtype=torch.float64) * (start != 0)
    values, weight = values.to(device, dtype), torch.full((CLIENTS, EXAMPLES), 0.25, dtype=dtype, device=device)
    weight[:, -1] = 0  # padding
    targets, keys = torch.zeros(CLIENTS, EXAMPLES, device=device), torch.arange(CLIENTS, device=device)
    engine, grads = StackedEngine(network, kernels, device, Squares()), torch.zeros_like(values)

    def run() -> Tensor:
        engine.gradients(values, grads, inputs, targets, weight, keys)
        return grads

    return run


@pytest.mark.parametrize("name", CASES)
def test_gradients_as_on_the_cpu(name):
    from fedlada_mpi.gpu import layer_kernels

    network = built(name)
    reference = gradients(network, "cpu", torch.float64)()
    double = gradients(network, "cuda", torch.float64)().cpu()
    assert (double - reference).norm() < 1e-9 * reference.norm()
    single = gradients(network, "cuda", torch.float32, layer_kernels)().cpu()
    assert (single - reference).norm() < 1e-3 * reference.norm()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time_and_from_a_graph(name, dtype):
    from fedlada_mpi.gpu import layer_kernels

    run = gradients(built(name), "cuda", dtype, layer_kernels)
    first = run().clone()
    assert all(torch.equal(run(), first) for _ in range(5))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    grads.zero_()
    graph.replay()
    assert torch.equal(grads, first)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("by_frequency", [True, False])
def test_many_repeated_tokens_have_the_same_gradient_every_time(compiled, by_frequency):
    from fedlada_mpi.gpu import layer_kernels

    kernels = layer_kernels if compiled else None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (4, 5000), generator=draw).cuda()
    dout = torch.randn(4, 5000, 32, generator=draw).cuda()

    def gradient() -> Tensor:
        table = torch.zeros(4, 50, 32, device="cuda", requires_grad=True)
        by_autograd.embedding(ids, table, scale_grad_by_freq=by_frequency, kernels=kernels).backward(dout)
        return table.grad

    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient()
    graph.replay()
    assert torch.equal(captured, first)
    one_hot = F.one_hot(ids, 50).double()
    counts = one_hot.sum(1).clamp(min=1).unsqueeze(-1) if by_frequency else 1
    torch.testing.assert_close(first.double(), one_hot.mT @ dout.double() / counts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_as_torch_computes_it(causal):
    network = built("gpt")
    q, k, v = (torch.randn(CLIENTS, 2, 2, 6, 4, device="cuda") for _ in range(3))
    stack = network.stack(network.initial().expand(CLIENTS, -1).cuda())
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    found = attention(stack, q, k, v, is_causal=causal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
