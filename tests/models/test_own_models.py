"""Users' own models: what stays frozen, what is random and what is refused before anything is written."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.models.initial import load_initial
from fedlada_mpi.models.parameters import in_type
from fedlada_mpi.rounds.gradients import GenericEngine, create_engine
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.randomness import Draws
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array

OWN = """
import random
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

def small(classes, image_shape):
    rows, columns, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns * channels, classes))

def lazy(classes, image_shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def frozen(classes, image_shape):
    net = nn.Sequential(nn.Conv2d(image_shape[2], 4, 3), nn.Flatten(), nn.LazyLinear(classes))
    net[0].requires_grad_(False)
    return net

class Scaled(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.net = small(classes, image_shape)
        self.register_buffer("scale", torch.tensor(2.5))
        self.register_buffer("order", torch.arange(classes).flip(0))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)

    def forward(self, x):
        return self.net(x * self.scale + self.shift)[:, self.order]

class Tied(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.one, self.two, self.out = nn.LazyLinear(6), nn.Linear(6, 6), nn.Linear(6, classes)
        self.three = self.two

    def forward(self, x):
        return self.out(torch.tanh(self.three(torch.tanh(self.two(self.one(x.flatten(1)))))))

class Shared(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.one, self.two, self.three, self.out = (nn.Linear(n, 8) for n in (128, 8, 8, 8))
        self.three.weight = self.two.weight
        self.out = nn.Linear(8, classes)

    forward = Tied.forward

class Wrapped(nn.Module):
    def __init__(self, classes, image_shape, change):
        super().__init__()
        self.net, self.change, self.seen = small(classes, image_shape), change, 0

    def forward(self, x):
        return self.change(self, self.net, x)

def wrapped(change):
    return lambda classes, image_shape: Wrapped(classes, image_shape, change)

def counting(self, net, x):
    self.seen += 1
    return net(x) * self.seen

def where(self, net, x):
    return net(x) if net[1].weight.sum() > 0 else 2 * net(x)

def stochastic_depth(self, net, x):
    keep = torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device)
    return net(x * keep.bernoulli_(0.5)) if self.training else net(x)

def missing(self, net, x):
    return net(x) + self.nothing

batch_norm = lambda classes, image_shape: nn.Sequential(nn.BatchNorm2d(image_shape[2]), *small(classes, image_shape))
batch_only = lambda classes, image_shape: nn.Sequential(
    nn.BatchNorm2d(image_shape[2], track_running_stats=False), *small(classes, image_shape))
spectral = lambda classes, image_shape: nn.Sequential(
    nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(128, classes)))
eleven = lambda classes, image_shape: small(classes + 8, image_shape)
pair = wrapped(lambda self, net, x: (net(x), x))
two_arguments = lambda classes, image_shape: nn.Bilinear(3, 3, classes)
not_finite = wrapped(lambda self, net, x: net(x) / 0)
integer = wrapped(lambda self, net, x: net(x).argmax(1, keepdim=True).expand(-1, 3))
no_module = lambda classes, image_shape: [1, 2]
def unused(classes, image_shape):
    module = Wrapped(classes, image_shape, lambda self, net, x: net(x))
    module.spare = nn.Parameter(torch.ones(3))
    return module
nothing = lambda classes, image_shape: small(classes, image_shape).requires_grad_(False)
always = wrapped(lambda self, net, x: net(F.dropout(x)))
counter, branch, depth, lost = wrapped(counting), wrapped(where), wrapped(stochastic_depth), wrapped(missing)
pythons = wrapped(lambda self, net, x: net(x) * random.random() if self.training else net(x))
numpys = wrapped(lambda self, net, x: net(x) * np.random.rand() if self.training else net(x))
permuted = wrapped(lambda self, net, x: net(x[torch.randperm(len(x))]) * 0 + net(x))
dropout = wrapped(lambda self, net, x: net(F.dropout(x, 0.5, self.training)))
def raising(classes, image_shape):
    raise KeyError("no such width")

def max_norm(self, net, x):
    with torch.no_grad():
        net[1].weight.copy_(net[1].weight.renorm(2, 0, 5.0))
    return net(x)

def max_norm_above(self, net, x):
    if net[1].weight.norm() > 50:
        net[1].weight.data.mul_(0.5)
    return net(x)

def max_norm_in_evaluation(self, net, x):
    if not self.training:
        net[1].weight.data.clamp_(-3, 3)
    return net(x)

def non_negative(self, net, x):
    net[1].weight.data.abs_()
    return net(x)

def parameter_hook(classes, image_shape):
    net = small(classes, image_shape)
    net[1].weight.register_hook(lambda g: 2 * g)
    return net

def accumulate_hook(classes, image_shape):
    net = small(classes, image_shape)
    net[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    return net

def with_parameter(change, value):
    def build(classes, image_shape):
        net = Wrapped(classes, image_shape, change)
        net.extra = value(net)
        return net
    return build

def counted_late(self, net, x):
    self.seen += 1
    return net(x) * (self.seen < 100)

CALLS = 0

def counted_globally(self, net, x):
    global CALLS
    CALLS += 1
    return net(x)

def frozen_in_forward(self, net, x):
    net[1].bias.requires_grad_(False)
    return net(x)

def without_gradient(self, net, x):
    with torch.no_grad():
        return net(x)

def mode_in_forward(self, net, x):
    self.eval()
    return net(x)

above, bounded, bounded_later = wrapped(max_norm_above), wrapped(max_norm), wrapped(max_norm_in_evaluation)
positive = wrapped(non_negative)
complex_parameter = with_parameter(lambda self, net, x: net(x) * self.extra.abs(),
                                   lambda net: nn.Parameter(torch.ones(3, dtype=torch.complex64)))
view_as_parameter = with_parameter(lambda self, net, x: net(x) + self.extra,
                                   lambda net: nn.Parameter(net.net[1].weight.detach()[0, :3]))
view_of_parameter = with_parameter(lambda self, net, x: F.linear(x.flatten(1), self.extra.view(3, -1)),
                                   lambda net: net.net[1].weight.view(-1))
expanded = with_parameter(lambda self, net, x: net(x) + self.extra,
                          lambda net: nn.Parameter(torch.zeros(1).expand(3)))
double = lambda classes, image_shape: Wrapped(classes, image_shape, lambda self, net, x: net(x.double())).double()
by_size = wrapped(lambda self, net, x: net(x) * len(x))
by_two = wrapped(lambda self, net, x: net(x) if len(x) <= 2 else net(x - x.mean(0)))
seldom = wrapped(
    lambda self, net, x: 2 * net(x) if self.training and len(x) < 4 and torch.rand(()) < 0.2 else net(x))
squeezed = wrapped(lambda self, net, x: net(x).squeeze())
transposed = wrapped(lambda self, net, x: F.dropout(net(x).t(), 0.5, self.training).t())
transposed_by_chance = wrapped(lambda self, net, x: F.dropout(net(x).t(), 0.1, self.training).t())
shuffled = wrapped(lambda self, net, x: net((x + x[torch.rand(len(x)).argsort()]) if self.training else x))
late, everywhere = wrapped(counted_late), wrapped(counted_globally)
toggled, detached, evaluating = wrapped(frozen_in_forward), wrapped(without_gradient), wrapped(mode_in_forward)
single = wrapped(lambda self, net, x: net(x.float()))
in_place = wrapped(lambda self, net, x: net(x.sub_(0.5)))

class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01)

own_gradient = wrapped(lambda self, net, x: Clamped.apply(net(x)))

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-100, 100)

clipped = wrapped(lambda self, net, x: Clipped.apply(net(x)))

def clipped_by_hook(self, net, x):
    y = net(x)
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-100, 100))
    return y
clipped_by_hook = wrapped(clipped_by_hook)

class Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return dout * ctx.module.net[1].weight.sum(), None

class Divided(Rescaled):
    @staticmethod
    def backward(ctx, dout):
        return dout / len(dout), None

def divided(self, net, x):
    return net(Divided.apply(self.bend(x), self))

def checkpointed(self, net, x):
    return torch.utils.checkpoint.checkpoint(lambda x: net(x) * net(x), self.bend(x), use_reentrant=False)

def reentrant(self, net, x):
    return torch.utils.checkpoint.checkpoint(net, self.bend(x), use_reentrant=True)

def rescaled(self, net, x):
    return net(Rescaled.apply(self.bend(x), self))

def hook_of_tensor(self, net, x):
    x = self.bend(x)
    if x.requires_grad:
        x.register_hook(lambda dx: dx * net[1].weight.sum())
    return net(x)

def bent(change):
    def made(classes, image_shape):
        module = Wrapped(classes, image_shape, change)
        module.bend = nn.Conv2d(image_shape[2], image_shape[2], 1)
        return module
    return made

checkpointed, reentrant = bent(checkpointed), bent(reentrant)
rescaled, hook_of_tensor, divided = bent(rescaled), bent(hook_of_tensor), bent(divided)

def hooked(where, register, hook):
    def build(classes, image_shape):
        net = nn.Sequential(small(classes, image_shape))
        getattr(net if where == "root" else net[0], register)(hook)
        return net
    return build

clamped_outputs = hooked("root", "register_forward_hook", lambda layer, inputs, outputs: outputs.clamp(-0.1, 0.1))
clamped_gradients = hooked("layer", "register_full_backward_pre_hook", lambda layer, g: (g[0].clamp(-0.01, 0.01),))
changed_inputs = hooked("layer", "register_forward_pre_hook", lambda layer, inputs: (inputs[0].clamp(-0.5, 0.5),))
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A module of the user's in the working directory."""
    (tmp_path / "users_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.modules.pop("users_own", None)
    assert sys.path == path


def engine_of(name: str, classes: int = 3) -> GenericEngine:
    """The engine of models that cannot be traced; ``test_tracing.py`` has the other."""
    network = models.build(f"users_own:{name}", classes, (8, 8, 2), stacked=False)
    engine = create_engine(network, resolve({}).config, torch.device("cpu"))
    assert isinstance(engine, GenericEngine)
    return engine


def batch(clients: int, images: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    pixels = torch.randn(clients, images, 8, 8, 2, generator=draw, dtype=torch.float64)
    labels = torch.randint(3, (clients, images), generator=draw)
    return pixels, labels, torch.full((clients, images), 1 / images, dtype=torch.float64)


def losses_of(
    engine: GenericEngine, clients: int, keys: torch.Tensor, way: str = "gradients"
) -> tuple[torch.Tensor, torch.Tensor]:
    values = engine.network.initial(torch.float64).expand(clients, -1).clone()
    grads = torch.zeros_like(values)
    return getattr(engine, way)(values, grads, *batch(clients), keys), grads


def plain(engine: GenericEngine, images: torch.Tensor) -> torch.Tensor:
    module = engine.network.module.double().eval()
    return module(images.permute(0, 3, 1, 2))


@pytest.mark.parametrize("way", ["_one_by_one", "_at_once"])
@pytest.mark.parametrize("name", ["small", "lazy", "frozen", "Scaled", "Tied", "Shared", "branch", "depth", "dropout"])
def test_gradients_and_outputs_are_the_plain_modules(name, way):
    """In evaluation mode, where nothing is random."""
    engine = engine_of(name)
    if way == "_at_once" and not engine.capturable:
        return
    engine._set_mode = lambda training: engine.network.module.eval()
    losses, grads = losses_of(engine, 2, torch.arange(2), way)
    images, labels, _ = batch(2)
    for i in range(2):
        module = engine.network.module.double()
        module.zero_grad()
        loss = F.cross_entropy(plain(engine, images[i]), labels[i])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-12, atol=0)
        found = engine.network.layout.unpack(grads[i])
        expected = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
        assert set(found) == set(expected)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-13)
    x = engine.network.initial(torch.float64)
    torch.testing.assert_close(engine.outputs(x, images[0]), plain(engine, images[0]).detach())


@pytest.mark.parametrize("way", ["_one_by_one", "_at_once"])
@pytest.mark.parametrize("name", ["checkpointed", "rescaled", "hook_of_tensor"])
def test_a_backward_pass_reads_the_clients_own_parameters(name, way):
    engine = engine_of(name)
    if way == "_at_once" and not engine.capturable:
        return
    values = torch.stack([engine.network.initial(torch.float64) * scale for scale in (1.5, 2.0)])
    images, labels, weight = batch(2)
    grads = torch.zeros_like(values)
    getattr(engine, way)(values, grads, images, labels, weight, torch.arange(2))
    module = engine.network.module.double()
    for i, row in enumerate(values):
        module.load_state_dict(engine.network.layout.unpack(row))
        module.zero_grad()
        F.cross_entropy(module(images[i].permute(0, 3, 1, 2)), labels[i]).backward()
        for parameter, found in engine.network.layout.unpack(grads[i]).items():
            torch.testing.assert_close(found, module.get_parameter(parameter).grad, rtol=1e-12, atol=1e-14)


def test_checkpointing_is_no_reason_against_stacked_layers():
    assert models.build("users_own:checkpointed", 3, (8, 8, 2)).untraceable_because == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("clipped", "Clipped is an autograd.Function, with a gradient of its own"),
        ("clipped_by_hook", "it has hooks on gradients"),
    ],
)
def test_a_gradient_of_ones_own_is_a_reason_also_where_a_small_batch_has_the_same(name, reason):
    assert reason in models.build(f"users_own:{name}", 3, (8, 8, 2)).untraceable_because


def test_frozen_parameters_are_constants():
    network = models.build("users_own:frozen", 3, (8, 8, 2))
    assert [e.name for e in network.layout.entries] == ["2.weight", "2.bias"]
    state = network.state_dict(torch.full((network.layout.size,), 7.0))
    network.module.load_state_dict(state)
    assert torch.equal(state["0.weight"], network.constants["0.weight"])
    assert (state["2.bias"] == 7).all()


@pytest.mark.parametrize("name", ["frozen", "Scaled", "Tied", "Shared"])
def test_a_saved_model_is_read_back_with_its_constants(name, tmp_path):
    other = models.build(f"users_own:{name}", 3, (8, 8, 2), seed=1)
    saved = {key: value * 2 for key, value in other.state_dict(other.initial()).items()}
    torch.save(saved, tmp_path / "init.pt")
    network = models.build(f"users_own:{name}", 3, (8, 8, 2))
    load_initial(tmp_path / "init.pt", network, torch.float32)
    read = network.state_dict(network.initial())
    assert set(read) == set(network.module.state_dict())
    for key, value in saved.items():
        assert torch.equal(read[key], value), key


REFUSED = {
    "batch_norm": "changes 0.running_mean, 0.running_var, 0.num_batches_tracked in its forward pass: layers with",
    "batch_only": "the outputs of an example depend on the other examples of its batch, as with BatchNorm; use",
    "spectral": "in its forward pass: layers with running statistics",
    "eleven": "got outputs of shape [2, 11] for 2 images, expected [2, 3]: one for each of the 3 classes",
    "pair": "got a tuple from its forward pass, expected a tensor",
    "two_arguments": "missing 1 required positional argument",
    "not_finite": "its outputs are not finite before any training; check its initial values",
    "integer": "got outputs of type torch.int64, expected floating-point numbers",
    "no_module": "got [1, 2] from the function, expected an nn.Module",
    "nothing": "has nothing to train: expected parameters with requires_grad",
    "raising": "KeyError: 'no such width' (",
    "lost": "AttributeError: 'Wrapped' object has no attribute 'nothing' (",
    "always": "draws random numbers in evaluation; F.dropout needs training=self.training",
    "counter": "two passes over the same batch differ; layers must not keep state",
    "pythons": "two passes over the same batch differ",
    "numpys": "two passes over the same batch differ",
    "permuted": "the random operation randperm cannot be repeated on other ranks or after a resume; expected dropout,",
    "bounded": "changes net.1.weight in its forward pass: a run's parameters change by its method alone",
    "above": "changes net.1.weight in its forward pass: a run's parameters",
    "bounded_later": "changes net.1.weight in its forward pass: a run's parameters",
    "positive": "changes net.1.weight in its forward pass: a run's parameters",
    "parameter_hook": "1.weight has a hook on its gradient, which a run would not call: leave it out",
    "accumulate_hook": "1.weight has a hook on its gradient",
    "complex_parameter": "got extra of type complex64, expected parameters of real floating-point numbers",
    "view_as_parameter": "extra and net.1.weight share their memory: expected tensors of their own",
    "view_of_parameter": "computes with views of its parameters that it has made before: make them in forward",
    "expanded": "elements of extra share their memory: make it a copy (.clone())",
    "double": "a run has all parameters and inputs in one type, that of --precision: leave out .double()",
    "by_size": "the outputs of an example depend on the number of examples in its batch (1 or 7)",
    "seldom": "the outputs of an example depend on the number of examples in its batch (1 or 7)",
    "by_two": "the outputs of an example depend on the other examples of its batch",
    "squeezed": "got outputs of shape [3] for 1 image, expected [1, 3]",
    "transposed": "the random numbers of an example depend on the number of examples in its batch: draw",
    "transposed_by_chance": "the random numbers of an example depend on the number of examples in its batch",
    "shuffled": "the outputs of an example depend on the other examples of its batch",
    "late": "seen changes with every pass; layers must not keep state, such as a counter",
    "everywhere": "users_own.CALLS changes with every pass",
    "toggled": "changes requires_grad of net.1.bias in its forward pass: set it before",
    "detached": "no parameter has a gradient: leave out torch.no_grad() and .detach()",
    "divided": "an example's gradient of bend.weight depends on the number of examples in its batch",
    "reentrant": "When use_reentrant=True",
    "evaluating": "calls train() or eval() in its forward pass: leave that to the run",
    "smal": "has no attribute 'smal'; expected package.module:function",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(UserError) as found:
        models.build(f"users_own:{name}", 3, (8, 8, 2))
    assert str(found.value).startswith("--model")
    assert REFUSED[name] in str(found.value)


@pytest.mark.parametrize("divisor", [1, 1000])
def test_a_model_of_integers_whose_range_is_not_known_may_not_mix_them(divisor):
    """Such as the negative ones of scans; a model may look up 0 and 1 in a table all the same."""
    about = About(Array("int16", (5,)), outputs=(3,))

    class Centred(nn.Linear):
        def forward(self, x):
            x = x.to(self.weight.dtype) / divisor
            return super().forward(x - x.mean(0))

    with pytest.raises(UserError, match=r"the outputs of an example depend on the (other|number of) examples"):
        models.build(Given(lambda about: Centred(5, 3)), (3,), about)
    table = models.build(
        Given(lambda about: nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(15, 3))), (3,), about
    )
    assert not table.untraceable_because


@pytest.mark.parametrize("name", ["in_place", "own_gradient", "clamped_outputs", "clamped_gradients", "changed_inputs"])
@pytest.mark.parametrize("stacked", [True, False])
def test_hooks_and_own_gradients_act_on_both_engines(name, stacked):
    """On batches whose outputs and gradients are so large that they act."""
    network = models.build(f"users_own:{name}", 3, (8, 8, 2), stacked=stacked)
    engine = create_engine(network, resolve({}).config, torch.device("cpu"))
    images, labels, weight = batch(4)
    images = 10 * images
    values = network.initial(torch.float64).expand(4, -1).clone()
    grads = torch.zeros_like(values)
    engine.gradients(values, grads, images.clone(), labels, weight, torch.arange(4))
    module = network.module.double()
    for i in range(4):
        module.zero_grad()
        F.cross_entropy(module(images[i].permute(0, 3, 1, 2).clone()), labels[i]).backward()
        for parameter, gradient in network.layout.unpack(grads[i]).items():
            torch.testing.assert_close(gradient, module.get_parameter(parameter).grad, rtol=1e-8, atol=1e-12)


def test_a_dry_run_leaves_the_model_as_it_was():
    network = models.build("users_own:Shared", 3, (8, 8, 2), seed=4)
    namespace = {}
    exec(OWN, namespace)
    torch.manual_seed(4)
    expected = namespace["Shared"](3, (8, 8, 2)).state_dict()
    found = network.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_run_refuses_changes_of_parameters_that_its_dry_run_has_not_seen():
    """As where they depend on the images."""
    engine = engine_of("small")
    weight, forward = engine.network.module[1], engine.network.module[1].forward

    def changing(x):
        with torch.no_grad():
            weight.weight.mul_(0.5)
        return forward(x)

    weight.forward = changing
    x = engine.network.initial(torch.float64)
    with pytest.raises(UserError, match="users_own:small changes its parameters in its forward pass"):
        engine.outputs(x, batch(1)[0][0])
    for way in ("_at_once", "_one_by_one"):
        engine.capturable = way == "_at_once"
        with pytest.raises(UserError, match="users_own:small changes its parameters in its forward pass"):
            losses_of(engine, 4, torch.arange(4))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_cast_that_another_precision_does_not_take_is_one_line(precision):
    network = models.build("users_own:single", 3, (8, 8, 2))
    with pytest.raises(UserError, match=r"^--model users_own:single: RuntimeError: .*dtype"):
        create_engine(network, resolve({"precision": precision}).config, torch.device("cpu"))


def test_the_place_of_an_error_is_in_the_users_file():
    with pytest.raises(UserError, match=r"users_own\.py, line \d+: return net\(x\) \+ self\.nothing\)$"):
        engine_of("lost")


@pytest.mark.parametrize(("name", "at_once"), [("dropout", True), ("depth", False), ("branch", False)])
def test_what_vmap_does_not_take_trains_client_by_client(name, at_once):
    engine = engine_of(name)
    assert engine.capturable == at_once
    assert ("one client after another" in engine.description) == (not at_once)


def test_both_ways_draw_the_same_numbers():
    engine = engine_of("dropout")
    (losses, grads), (others, other_grads) = (
        losses_of(engine, 3, torch.tensor([11, 12, 13]), way) for way in ("_one_by_one", "_at_once")
    )
    torch.testing.assert_close(losses, others, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, other_grads, rtol=1e-12, atol=1e-14)


def test_a_parameter_that_is_not_used_has_no_gradient():
    engine = engine_of("unused")
    _, grads = losses_of(engine, 2, torch.arange(2))
    found = engine.network.layout.unpack(grads[1])
    assert (found["spare"] == 0).all()
    assert (found["net.1.weight"] != 0).any()


@pytest.mark.parametrize(
    ("clients", "images", "way"), [(4, 4, "_at_once"), (3, 4, "_one_by_one"), (4, 10_500, "_one_by_one")]
)
def test_on_a_cpu_vmap_is_for_many_clients_with_little_work(clients, images, way, monkeypatch):
    """``small`` has 128 * 3 multiply-adds an image; 10,417 images have more than four million."""
    engine, ways = engine_of("small"), []
    for name in ("_at_once", "_one_by_one"):
        monkeypatch.setattr(engine, name, lambda *_, name=name: ways.append(name))
    engine.gradients(*(torch.zeros(clients, images) for _ in range(6)))
    assert ways == [way]
    assert engine.network.work == 384


@pytest.mark.parametrize("name", ["dropout", "depth"])
def test_random_layers_depend_on_the_clients_key_alone(name):
    engine = engine_of(name)
    keys = torch.tensor([11, 12, 13])
    together, grads = losses_of(engine, 3, keys)
    torch.manual_seed(99)
    again, _ = losses_of(engine, 3, keys)
    assert torch.equal(together, again)
    other, _ = losses_of(engine, 3, keys.flip(0))
    assert together[1] == other[1]
    assert together[0] != other[0]
    values = engine.network.initial(torch.float64).unsqueeze(0)
    images, labels, weight = (part[2:] for part in batch(3))
    alone = torch.zeros_like(values)
    loss = engine.gradients(values, alone, images, labels, weight, keys[2:])
    torch.testing.assert_close(loss[0], together[2], rtol=1e-12, atol=0)
    torch.testing.assert_close(alone[0], grads[2], rtol=1e-12, atol=1e-14)


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, in Python's integers."""
    mask, numbers = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


def test_the_numbers_are_splitmix64s():
    with Draws(torch.tensor([5]), stacked=False):
        drawn = torch.rand(4, dtype=torch.float64)
    # The first operation's own key: another constant than the elements', so that they do not share their numbers.
    state = splitmix64(5 + 0xBF58476D1CE4E5B9 - 0x9E3779B97F4A7C15, 1)[0]
    assert [int(u * 2**53) for u in drawn.tolist()] == [n >> 11 for n in splitmix64(state, 4)]


N = 40_000


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (lambda: torch.rand(2, N), 1 / 2, 1 / 12),
        (lambda: torch.randn(2, N), 0, 1),
        (lambda: torch.empty(2, N).normal_(2, 3), 2, 9),
        (lambda: torch.normal(torch.full((2, N), 4.0), 2.0), 4, 4),
        (lambda: torch.empty(2, N).uniform_(-1, 3), 1, 16 / 12),
        (lambda: torch.full((2, N), 0.3).bernoulli(), 0.3, 0.21),
        (lambda: torch.empty(2, N).bernoulli_(0.8), 0.8, 0.16),
        (lambda: torch.empty(2, N).exponential_(0.5), 2, 4),
        (lambda: torch.randint(1, 5, (2, N)), 2.5, 1.25),
        (lambda: torch.rand(2, N, dtype=torch.bfloat16), 1 / 2, 1 / 12),
        (lambda: F.dropout(torch.ones(2, N), 0.25), 1, 1 / 3),
    ],
)
def test_distributions(draw, mean, variance):
    """Mean and variance within five standard errors (those of the variance at most those of a normal's, times two)."""
    with Draws(torch.tensor([1, 2]), stacked=True):
        rows = draw().double()
    assert not torch.equal(rows[0], rows[1])
    for row in rows:
        assert abs(row.mean() - mean) < 5 * (variance / N) ** 0.5 + 1 / 512 * (mean == 1 / 2)
        assert abs(row.var() - variance) < 10 * variance * (2 / N) ** 0.5
    assert abs(torch.corrcoef(rows)[0, 1]) < 5 / N**0.5


def test_one_type_for_all_numbers_of_a_module():
    """But for those that have no such type."""
    module = torch.nn.Linear(2, 2)
    module.weight.data = module.weight.data.half()
    module.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    module.register_buffer("order", torch.arange(2))
    kinds = {name: value.dtype for name, value in in_type(module, torch.float64).state_dict().items()}
    assert kinds == dict(weight=torch.float64, bias=torch.float64, turns=torch.complex64, order=torch.int64)


class Sensitive(torch.nn.Module):
    """Computes ``error`` more with values in place of its own, and makes ``much`` of that where weights are large."""

    def __init__(self, error: float, much: float):
        super().__init__()
        self.fc, self.error, self.much = torch.nn.Linear(128, 3), error, much
        self.own = [self.fc.weight]

    def forward(self, x):
        y = self.fc(x.flatten(1)) + self.error * (self.fc.weight is not self.own[0])
        return torch.sin(y * (self.much if self.fc.weight.abs().max() > 0.5 else 1))


def test_what_a_deep_model_makes_of_rounding_is_no_reason():
    def made(error: float, much: float):
        return models.build(Given(lambda classes, shape: Sensitive(error, much)), 3, (8, 8, 2), stacked=False)

    assert made(1e-5, 1e4).layout.numel == 128 * 3 + 3
    with pytest.raises(UserError, match="views of its parameters"):
        made(0.1, 1.0)
