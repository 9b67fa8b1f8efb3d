"""Users' models on stacked layers: traced, and equal to the plain module in float64."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from limits import LIMIT
from model_zoo import MODELS
from ranks import python
from tiers import slow
from torch import Tensor, nn

from fedlada_mpi import models
from fedlada_mpi.models.agreement import disagreement
from fedlada_mpi.models.form import Form
from fedlada_mpi.models.tracing import Graph, _own_gradients_refused, described, operation
from fedlada_mpi.rounds import gradients as of_engines
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine, different_gradient
from fedlada_mpi.support.user_code import Given

# Nothing here depends on the ranks, and four at once would only wait for each other's cores.


@pytest.fixture
def build(monkeypatch):
    """Networks of the functions above, as ``--model`` gives them."""
    module = type(sys)("own_models")
    vars(module).update(MODELS)
    monkeypatch.setitem(sys.modules, "own_models", module)

    def built(name: str, stacked: bool = True) -> models.Network:
        return models.build(f"own_models:{name}", 5, (32, 32, 3), stacked=stacked)

    return built


def gradients(engine, network: models.Network, state: list[dict[str, Tensor]]) -> tuple[Tensor, list, Tensor]:
    """Losses, gradients by name and logits of two clients, in float64."""
    values = torch.stack([network.layout.pack(s, torch.float64) for s in state])
    draw = torch.Generator().manual_seed(5)
    images = torch.randn(2, 3, 32, 32, 3, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 3), generator=draw)
    weight = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    grads = torch.full_like(values[:, : network.layout.live], 7.0)  # must be overwritten
    grads_whole = torch.zeros_like(values)
    losses = engine.gradients(values[:, : network.layout.live].clone(), grads, images, labels, weight, torch.arange(2))
    grads_whole[:, : network.layout.live] = grads
    by_name = [network.layout.unpack(row) for row in grads_whole]
    return losses, by_name, engine.outputs(values[1], images[0])


@pytest.mark.parametrize("name", [slow(name) if name == "resnet18" else name for name in MODELS])
def test_a_users_model_on_stacked_layers_is_the_plain_module(build, name):
    network, plain = build(name), build(name, stacked=False)
    assert network.untraceable_because == ""
    draw = torch.Generator().manual_seed(3)
    state = [
        {
            n: p.detach().double() + 0.02 * torch.randn(p.shape, generator=draw)
            for n, p in plain.module.named_parameters()
        }
        for _ in range(2)
    ]
    losses, grads, logits = gradients(StackedEngine(network), network, state)
    expected_losses, expected_grads, expected_logits = gradients(GenericEngine(plain), plain, state)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert mine.keys() == theirs.keys()
        for parameter in mine:
            torch.testing.assert_close(mine[parameter], theirs[parameter], rtol=1e-9, atol=1e-10)


class Branching(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.body = nn.Conv2d(image_shape[2], 4, 3)
        self.gate = nn.Linear(4, classes)

    def forward(self, x):
        x = self.body(x).mean((2, 3))
        return self.gate(x) if x.abs().sum() > 0 else self.gate(-x)


def test_the_untraceable_layer_is_named(monkeypatch):
    module = type(sys)("own_untraceable")
    module.outer = lambda classes, shape: nn.Sequential(nn.Identity(), Branching(classes, shape))
    monkeypatch.setitem(sys.modules, "own_untraceable", module)
    network = models.build("own_untraceable:outer", 5, (8, 8, 3))
    assert network.forward is None
    assert all(word in network.untraceable_because for word in ("1 (Branching) cannot be traced", "control flow"))


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


class InParts(nn.Module):
    """Of as many parts as batches of eight examples would be."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.out = nn.Linear(12, classes)

    def forward(self, x):
        return self.out(x.flatten(1)) * (x.shape[0] // 8 + 1)


def test_a_number_from_the_size_of_a_batch_is_not_that_of_the_trial():
    network = models.build(Given(InParts), 5, (2, 2, 3))
    images, x = network.form.random(17, draw=torch.Generator().manual_seed(0)), network.initial()
    expected = network.module(images.permute(0, 3, 1, 2)).detach()
    torch.testing.assert_close(StackedEngine(network).outputs(x, images), expected)


@pytest.mark.parametrize(
    ("layer", "recorded"),
    [
        (nn.Conv2d(3, 4, 3), F.conv2d),
        (nn.GroupNorm(1, 3), F.group_norm),
        (nn.MaxPool2d(2), F.max_pool2d),
        (nn.ReLU6(), F.hardtanh),
        (nn.Flatten(), "flatten"),
        (nn.Softmax(1), F.softmax),
        # More or less than one operation.
        (nn.Identity(), None),
        (nn.InstanceNorm2d(3), None),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), None),
        (hooked(nn.ReLU()), None),
    ],
)
def test_a_layer_of_torch_is_recorded_as_its_operation(layer, recorded):
    graph = Graph(nn.Sequential(layer), Form.of((8, 8, 3)))
    (node,) = (n for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
    assert (operation(node), described(node)) == (recorded, f"0 ({type(layer).__name__})")
    assert graph.layer(node) is (layer if recorded is None else None)


def test_tracing_leaves_the_weights_of_an_rnn():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(24, 5, batch_first=True)

        def forward(self, x):
            return self.rnn(x.permute(0, 2, 3, 1).flatten(2))[0][:, -1]

    module = Rows()
    before, images = list(module.rnn._flat_weights), torch.randn(2, 3, 8, 8)
    expected = module(images)
    Graph(module, Form.of((8, 8, 3)))
    assert all(a is b for a, b in zip(module.rnn._flat_weights, before, strict=True))
    assert torch.equal(module(images), expected)


def test_a_wrong_translation_is_found(build):
    """The comparison before a run sees a difference in one layer."""
    network = build("convnext")
    assert disagreement(network) == ""
    step = next(s for s in network.forward.training.steps if s.reads)
    right = step.run
    step.run = lambda p, *values: right(p, *values) * (1 + 1e-6)
    assert "not that of the module" in disagreement(network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [False, True])
def test_other_gradients_of_kernels_are_found(build, wrong, dtype):
    """Before a run, those of compiled kernels are compared; here by an engine with an error put in."""
    network = build("vgg11")
    engine, reference = StackedEngine(network), StackedEngine(network)
    if wrong:
        engine._stack = lambda values, grads: faulty(StackedEngine._stack(engine, values, grads))
    assert different_gradient(engine, reference, dtype) == ("0.bias" if wrong else "")


@pytest.mark.parametrize(("rounded", "types"), [("", 1), ("0.bias", 2), (RuntimeError("no such operation"), 2)])
@pytest.mark.parametrize("right", ["", "0.bias"])
def test_float32_decides_where_a_narrower_type_does_not(monkeypatch, rounded, types, right):
    tried = []

    def stand_in(engine, reference, dtype=torch.float32):
        tried.append(dtype)
        if dtype == torch.bfloat16 and isinstance(rounded, Exception):
            raise rounded
        return rounded if dtype == torch.bfloat16 else right

    monkeypatch.setattr(of_engines, "different_gradient", stand_in)
    assert of_engines._tried(None, None, torch.bfloat16) == ("" if rounded == "" else right)
    assert tried == [torch.bfloat16, torch.float32][:types]


def faulty(stack):
    """Adds up the columns of narrow gradients twice."""
    sums = stack.steps.column_sums
    stack.steps.column_sums = lambda target, rows, times=None: sums(target, rows * (1 + (rows.shape[-1] < 8)), times)
    return stack


def test_a_users_model_waits_for_no_compiler():
    """Importing torch's compiler takes longer than all else before the first step."""
    if "torch._dynamo" in inspect.getsource(torch.vmap):
        pytest.skip("this torch's own vmap imports it")
    code = (
        "import sys; from fedlada_mpi import models; models.build('model_zoo:Dropping', 5, (32, 32, 3)).work; "
        "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_functions_with_gradients_of_their_own_go_on_while_another_model_is_traced():
    """In another thread, say: only a traced tensor is refused."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    with _own_gradients_refused():
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
