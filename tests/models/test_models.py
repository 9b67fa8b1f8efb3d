"""Models: their sizes, the flat layout, and stacked layers against the plain module."""

from __future__ import annotations

import doctest
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiers import slow
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.models import layers, program
from fedlada_mpi.models import layout as flat_layout
from fedlada_mpi.models import network as network_module
from fedlada_mpi.models.columns import Window
from fedlada_mpi.models.layout import Layout
from fedlada_mpi.models.stack import Stack
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks.client_loss import CROSS_ENTROPY

# Nothing here depends on the ranks, and four at once would only wait for each other's cores.
KEYS = torch.zeros(2, dtype=torch.int64)  # of random numbers, which no layer here draws


def perturbed(network: models.Network, count: int = 1) -> torch.Tensor:
    """``count`` different models, [count, size], none of whose elements is exactly zero or one."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        state = {n: p.detach().double() for n, p in network.module.named_parameters()}
        noise = {n: 0.02 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in state.items()}
        rows.append(network.layout.pack({n: state[n] + noise[n] for n in state}, torch.float64))
    return torch.stack(rows)


def batch(count: int, images: int, side: int, classes: int, channels: int = 3):
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(count, images, side, side, channels, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, classes, (count, images), generator=generator)


@pytest.mark.parametrize(
    ("name", "classes", "side", "parameters"),
    [
        ("resnet18", 10, 32, 11_181_642),
        ("resnet18", 100, 32, 11_227_812),
        ("resnet18", 200, 64, 11_279_112),
        # 64*(3*25 + 1) + 64*(64*25 + 1) + 384*(1600 + 1) + 10*(384 + 1)
        ("lenet", 10, 32, 725_962),
        ("lenet3", 10, 32, 797_962),
        # 16*(1*9 + 1) + 32*(16*9 + 1) + 10*(32*4*4 + 1)
        ("cnn", 10, 8, 9930),
    ],
)
def test_number_of_parameters(name, classes, side, parameters):
    network = models.build(name, classes, (side, side, 1 if name == "cnn" else 3))
    assert network.layout.numel == sum(p.numel() for p in network.module.parameters()) == parameters


@pytest.mark.parametrize("side", [32, slow(64)])
def test_resnet18_is_torchvisions(side):
    torchvision = pytest.importorskip("torchvision")
    network = models.build("resnet18", 10, (side, side, 3))
    x = perturbed(network)[0]
    theirs = torchvision.models.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(2, channels)).double()
    theirs.load_state_dict(network.layout.unpack(x))
    images, _ = batch(1, 2, side, 10)
    with torch.no_grad():
        expected = theirs(images[0].permute(0, 3, 1, 2))
    torch.testing.assert_close(StackedEngine(network).outputs(x, images[0]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("lenet", [nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 10)]),
        ("lenet3", [nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)]),
    ],
)
def test_lenet_is_the_papers_and_lenet3_the_simulators(name, linear):
    layers = [
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    ]  # fmt: skip
    theirs = nn.Sequential(*layers, *linear).double()
    network = models.build(name, 10, (32, 32, 3))
    x = perturbed(network)[0]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), network.layout.unpack(x).values(), strict=True)))
    images, _ = batch(1, 2, 32, 10)
    with torch.no_grad():
        expected = theirs(images[0].permute(0, 3, 1, 2))
    torch.testing.assert_close(StackedEngine(network).outputs(x, images[0]), expected, rtol=1e-10, atol=1e-10)


def test_activations_by_hand():
    """gelu's tanh form and SMU with mu = 2.5 and 1, at points computed with a table of erf and tanh."""
    x = torch.tensor([-1.0, 0.0, 0.4], dtype=torch.float64)

    def activation(name, **mu):
        return models.build("cnn", 2, (8, 8, 1), name, **mu).module.act1

    # 0.5 x (1 + tanh(0.7978846 (x + 0.044715 x^3))): tanh(0.8335620) = 0.6823837, tanh(0.3214373) = 0.3108027
    torch.testing.assert_close(
        activation("gelu")(x), torch.tensor([-0.1588080, 0.0, 0.2621603]).double(), atol=1e-6, rtol=0
    )
    # (x + x erf(2.5 x)) / 2: erf(2.5) = 0.9995930, erf(1) = 0.8427008
    torch.testing.assert_close(
        activation("smu")(x), torch.tensor([-0.0002035, 0.0, 0.3685402]).double(), atol=1e-6, rtol=0
    )
    # mu = 1: erf(1) = 0.8427008, erf(0.4) = 0.4283924
    torch.testing.assert_close(
        activation("smu", smu_mu=1.0)(x), torch.tensor([-0.0786496, 0.0, 0.2856785]).double(), atol=1e-6, rtol=0
    )
    assert activation("relu")(x).tolist() == [0.0, 0.0, 0.4]


CASES = [
    ("cnn", "relu", 8),
    ("cnn", "smu", 9),
    ("lenet", "relu", 16),
    ("lenet3", "relu", 16),
    ("lenet", "gelu", 16),
    ("lenet", "smu", 19),
    ("resnet18", "relu", 16),
]


@pytest.mark.parametrize(("name", "activation", "side"), CASES)
def test_stacked_gradients_are_autograds(name, activation, side):
    """Two models, three images each, of which the second model's last is padding."""
    network = models.build(name, 5, (side, side, 3), activation)
    values, (images, labels) = perturbed(network, 2), batch(2, 3, side, 5)
    weight = torch.tensor([[1 / 3] * 3, [1 / 2, 1 / 2, 0]], dtype=torch.float64)
    grads = torch.zeros_like(values)
    losses = StackedEngine(network).gradients(values, grads, images, labels, weight, KEYS)
    module = network.module.double()
    for i, used in enumerate((3, 2)):
        module.load_state_dict(network.layout.unpack(values[i]))
        module.zero_grad()
        loss = F.cross_entropy(module(images[i, :used].permute(0, 3, 1, 2)), labels[i, :used])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-11, atol=0)
        found = network.layout.unpack(grads[i])
        for parameter, p in module.named_parameters():
            error = (found[parameter] - p.grad).norm() / p.grad.norm()
            assert error < 1e-10, f"{parameter}: {error:.1e}"


@pytest.mark.parametrize("stacked", [True, False])
def test_a_second_gradient_replaces_the_first(stacked):
    network = models.build("cnn", 3, (8, 8, 1), stacked=stacked)
    engine = StackedEngine(network) if stacked else GenericEngine(network)
    values, (images, labels) = perturbed(network, 2), batch(2, 4, 8, 3, channels=1)
    weight = torch.full((2, 4), 0.25, dtype=torch.float64)
    once, twice = torch.zeros_like(values), torch.zeros_like(values)
    engine.gradients(values, once, images, labels, weight, KEYS)
    engine.gradients(values, twice, -images, labels, weight, KEYS)
    assert not torch.equal(once, twice)
    engine.gradients(values, twice, images, labels, weight, KEYS)
    assert torch.equal(once, twice)


def test_loss_of_a_padded_batch():
    """Logits (0, ln 3): the classes have probability 1/4 and 3/4."""
    logits = torch.tensor([0.0, 3.0]).double()
    logits[1] = logits[1].log()
    logits = logits.expand(1, 3, 2)
    losses = CROSS_ENTROPY(logits, torch.tensor([[0, 1, 0]]), torch.tensor([[0.5, 0.5, 0.0]]).double())
    expected = 0.5 * torch.tensor([4.0, 4 / 3]).double().log().sum()
    torch.testing.assert_close(losses, expected.reshape(1))


@pytest.mark.parametrize(("name", "side", "channels"), [("cnn", 8, 1), ("lenet", 18, 3), ("resnet18", 16, 3)])
def test_packing_and_unpacking_is_the_identity(name, side, channels):
    network = models.build(name, 7, (side, side, channels))
    layout = network.layout
    numbers = torch.arange(1, layout.numel + 1, dtype=torch.float64)
    shapes = {n: p.shape for n, p in network.module.named_parameters()}
    pieces = numbers.split([prod(shape) for shape in shapes.values()])
    state = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
    flat = layout.pack(state, torch.float64)
    assert flat.shape == (layout.size,)
    back = layout.unpack(flat)
    assert list(back) == list(state)
    assert all(torch.equal(back[n], state[n]) for n in state)
    assert flat.count_nonzero() == layout.numel, "what is between the parameters is zero"
    assert all(view.storage_offset() % 64 == 0 for view in layout.views(flat).values())


def test_gradient_free_parameters_of_resnet18():
    """At 32x32 the fourth stage works on 1x1 maps. Its first convolution reads a 2x2 map with stride 2: the taps of the
    first row and column, 5 of 9, meet only padding. In the other three the centre alone meets data."""
    layout = models.build("resnet18", 10, (32, 32, 3)).layout
    assert layout.size - layout.live == 5 * 256 * 512 + 3 * 8 * 512 * 512
    larger = models.build("resnet18", 10, (64, 64, 3)).layout
    assert larger.size == larger.live, "at 64x64 the last maps are 2x2: every tap meets data"


def test_gradient_free_parameters_have_no_gradient_whatever_the_images():
    network = models.build("resnet18", 5, (16, 16, 3))
    layout, module = network.layout, network.module.double()
    assert layout.size - layout.live > 1_000_000
    module.load_state_dict(layout.unpack(perturbed(network)[0]))
    images, labels = batch(1, 4, 16, 5)
    F.cross_entropy(module(images[0].permute(0, 3, 1, 2)), labels[0]).backward()
    gradient = layout.pack({n: p.grad for n, p in module.named_parameters()}, torch.float64)
    assert not gradient[layout.live :].any()
    # All other taps do have one, in some channel.
    for entry in layout.entries:
        if entry.kernel:
            out, channels, *_ = entry.kernel
            rows = channels * len(entry.taps) - entry.gradient_free_rows
            assert entry.live(gradient)[:rows].view(-1, channels * out).any(1).all(), entry.name


@pytest.mark.parametrize(
    ("window", "out", "taps", "dead"),
    [
        (Window(1, 1, (3, 3), (1, 1), (1, 1)), (1, 1), ((1, 2), (1, 2)), [0, 1, 2, 3, 5, 6, 7, 8]),
        (Window(2, 2, (3, 3), (2, 2), (1, 1)), (1, 1), ((1, 3), (1, 3)), [0, 1, 2, 3, 6]),
        (Window(1, 4, (3, 3), (1, 1), (1, 1)), (1, 4), ((1, 2), (0, 3)), [0, 1, 2, 6, 7, 8]),
        (Window(8, 8, (3, 3), (1, 1), (1, 1)), (8, 8), ((0, 3), (0, 3)), []),
        (Window(2, 2, (1, 1), (2, 2), (0, 0)), (1, 1), ((0, 1), (0, 1)), []),
    ],
)
def test_taps_that_meet_data(window, out, taps, dead):
    assert (window.out, window.taps, window.dead) == (out, taps, dead)


def test_a_layout_by_hand():
    """A 2x2x3x3 kernel with 5 dead taps: 4 taps x 2 channels = 8 rows, padded to 16, of 2 columns; then a bias of 2 on
    the next multiple of 64, and 10 gradient-free rows of 2 columns behind the live part."""
    layout = Layout([("w", (2, 2, 3, 3)), ("b", (2,))], {"w": (2, 2, 3, 3)}, {"w": [0, 1, 2, 3, 6]})
    assert (layout.live, layout.size, layout.numel) == (128, 192, 38)
    weight = torch.arange(36.0).view(2, 2, 3, 3)
    flat = layout.pack({"w": weight, "b": torch.tensor([50.0, 51.0])})
    # Tap 4 is the centre: input channel 0 of both outputs, then input channel 1.
    assert flat[:4].tolist() == [weight[0, 0, 1, 1], weight[1, 0, 1, 1], weight[0, 1, 1, 1], weight[1, 1, 1, 1]]
    assert flat[64:66].tolist() == [50, 51]
    assert flat[128:130].tolist() == [weight[0, 0, 0, 0], weight[1, 0, 0, 0]]


@pytest.mark.parametrize("module", [network_module, flat_layout, program])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 < tried


def test_initialisation_is_a_function_of_the_seed_alone():
    before = torch.get_rng_state()
    a, b, other = (models.build("cnn", 3, (8, 8, 1), seed=seed).initial() for seed in (4, 4, 5))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert torch.equal(torch.get_rng_state(), before)
    stacked, generic = (models.build("cnn", 3, (8, 8, 1), seed=4, stacked=s) for s in (True, False))
    first, second = (network.layout.unpack(network.initial()) for network in (stacked, generic))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "resnet8",
            "causal_cnn, gpt, lstm, torchvision:NAME, hf:FOLDER, package.module:function or path/file.py:function",
        ),
        ("lenet", "lenet needs images of at least 16x16, got 8x8"),
    ],
)
def test_models_that_are_refused(name, words):
    with pytest.raises(UserError, match="--model") as found:
        models.build(name, 3, (8, 8, 2))
    assert words in str(found.value)


def test_large_convolutions_of_the_cpu_are_the_librarys_own():
    """Float32 maps whose columns would be large take another way; value and gradients are those of the plain module."""
    network = models.build("lenet", 10, (32, 32, 3))
    layout = network.layout
    x, labels = torch.randn(2, 20, 32, 32, 3), torch.randint(10, (2, 20))
    assert layers.use_library(x, Window(32, 32, (5, 5), (1, 1), (0, 0)))
    values, grads = torch.stack([layout.pack(network.module.state_dict())] * 2), torch.zeros(2, layout.live)
    logits = network.forward(Stack(layout, values, grads), x)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for c in range(2):
        network.module.zero_grad()
        expected = network.module(x[c].permute(0, 3, 1, 2))
        F.cross_entropy(expected, labels[c], reduction="sum").backward()
        torch.testing.assert_close(logits[c], expected)
        gradient = layout.pack({name: p.grad for name, p in network.module.named_parameters()})
        assert (grads[c] - gradient).norm() < 1e-5 * gradient.norm()


def test_memory_is_unknown_where_torch_cannot_follow_what_is_saved(monkeypatch):
    network = models.build("cnn", 10, (8, 8, 1))
    assert network.activation_bytes(4, torch.float32) > 0

    def raising(stack, images):
        raise RuntimeError("torch.func transforms don't yet support saved tensor hooks.")

    monkeypatch.setattr(network, "forward", raising)
    monkeypatch.setattr(network, "stack", lambda values, grads: SimpleNamespace(value={}))
    assert network.activation_bytes(4, torch.float32) == 0
