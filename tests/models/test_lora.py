"""Low-rank adapters: the formula, what is trained and sent, files, and what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import from_root
from torch import nn

import fedlada_mpi
from fedlada_mpi import models
from fedlada_mpi.models.initial import load_initial
from fedlada_mpi.models.lora import Lora, adapters, merged
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.base import About, Array

SHAPE, CLASSES = (4, 4, 1), 3


class Block(nn.Module):
    """With attention written out, a layer that is used twice, and a head."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 6) for _ in range(3))
        self.twice, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, classes)

    def forward(self, x):
        x = x.flatten(1, 2)
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        x = self.twice(self.norm(self.twice(weights @ self.value(x))))
        return self.head(x.mean(1))


class Tied(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, classes)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x.flatten(1))))))


class Packed(nn.Module):
    """Whose attention takes the weights of out_proj without calling it."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, classes)

    def forward(self, x):
        x = x.flatten(1, 2)
        return self.head(self.attn(x, x, x, need_weights=False)[0].mean(1))


class Stacked(nn.Module):
    """transformers' Conv1D, as GPT-2 has it: weights [inputs, outputs]."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


Conv1D = type("Conv1D", (Stacked,), {"__module__": "transformers.pytorch_utils"})


def build(model=Block, lora=None, **options):
    return models.build(Given(model), CLASSES, SHAPE, lora=lora, **options)


def peft(layer: nn.Module, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """peft/tuners/lora/layer.py: result + lora_B(lora_A(x)) * scaling, where scaling = lora_alpha / r."""
    return F.linear(x, layer.weight, layer.bias) + F.linear(F.linear(x, a), b) * (alpha / len(a))


def written_out(base: Block, values: dict[str, torch.Tensor], x: torch.Tensor, alpha: float) -> torch.Tensor:
    def layer(name, x):
        return peft(getattr(base, name), x, values[f"{name}.lora_a"], values[f"{name}.lora_b"], alpha)

    x = x.permute(0, 3, 1, 2).flatten(1, 2)
    weights = (layer("query", x) @ base.key(x).transpose(1, 2)).softmax(-1)
    x = layer("twice", base.norm(layer("twice", weights @ layer("value", x))))
    return base.head(x.mean(1))


@pytest.mark.parametrize("engine", [StackedEngine, GenericEngine])
def test_outputs_and_gradients_are_those_of_the_formula(engine):
    """Of two clients, in float64."""
    network = build(lora=Lora(2, "query|value|twice", alpha=3.0), stacked=engine is StackedEngine)
    assert (network.forward is None) == (engine is GenericEngine)
    torch.manual_seed(0)
    states = [{e.name: torch.randn(e.shape, dtype=torch.float64) for e in network.layout.entries} for _ in range(2)]
    values = torch.stack([network.layout.pack(state, torch.float64) for state in states])
    images, labels = torch.randn(2, 5, *SHAPE, dtype=torch.float64), torch.randint(CLASSES, (2, 5))
    weight, grads = torch.full((2, 5), 0.2, dtype=torch.float64), torch.zeros_like(values)
    losses = engine(network).gradients(values, grads, images, labels, weight, None)
    base = merged(copy.deepcopy(build(lora=Lora(2, "query|value|twice")).module)).double()  # B is zero
    for client, state in enumerate(states):
        leaves = {name: value.requires_grad_() for name, value in state.items()}
        loss = F.cross_entropy(written_out(base, leaves, images[client], 3.0), labels[client])
        loss.backward()
        torch.testing.assert_close(losses[client], loss.detach(), rtol=1e-10, atol=1e-10)
        for name, gradient in network.layout.unpack(grads[client]).items():
            torch.testing.assert_close(gradient, leaves[name].grad, rtol=1e-10, atol=1e-10)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    module = nn.Sequential(nn.Flatten(), Doubled(16, CLASSES))
    network = models.build(Given(module), CLASSES, SHAPE, lora=Lora(2, alpha=3.0))
    assert not network.untraceable_because
    layer, x = network.module[1], torch.randn(5, 16)
    nn.init.normal_(layer.lora_b)
    expected = 2 * F.linear(x, layer.weight, layer.bias) + 1.5 * x @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(layer(x), expected)
    found = StackedEngine(network).outputs(network.initial(), x.view(5, 4, 4, 1))
    torch.testing.assert_close(found, expected)


def test_adapters_alone_are_trained_and_begin_as_nothing():
    plain, network = build(), build(lora=Lora(2, "query|twice"))
    names = [f"{layer}.lora_{part}" for layer in ("query", "twice") for part in "ab"]
    assert [e.name for e in network.layout.entries] == names
    assert network.layout.numel == (2 * 4 + 6 * 2) + (2 * 6 + 6 * 2)
    assert set(network.constants) == set(plain.module.state_dict())
    x = torch.randn(5, 1, 4, 4)
    assert torch.equal(network.module(x), plain.module(x))
    a = network.module.query.lora_a
    assert network.module.query.lora_b.eq(0).all()
    assert a.abs().max() <= 0.5  # 1 / sqrt(inputs)
    assert 0.2 < a.std() < 0.4
    assert network.notes == ["LoRA of rank 2, alpha 16, on 2 layers (query, twice): 44 parameters trained, 165 frozen"]


def test_draws_depend_on_the_seed_alone():
    one, same, other = (build(lora=Lora(2, "query"), seed=seed).module.query.lora_a for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    base = build(seed=5).module.query.weight
    assert not torch.isin(one, base).any()  # as if both came from one sequence


def test_the_base_is_in_memory_once():
    network = build(lora=Lora(2), stacked=False)
    engine = GenericEngine(network)
    engine.outputs(network.initial(), torch.zeros(2, *SHAPE))
    stacked = build(lora=Lora(2))
    stack = stacked.stack(torch.zeros(3, stacked.layout.live))
    assert stack.value["head.weight"].stride(0) == 0  # the same for three clients
    assert engine.constants[torch.float32]["head.weight"].data_ptr() == network.module.head.weight.data_ptr()


def test_a_fixed_is_a_constant():
    network = build(lora=Lora(2, "query", fixed_a=True))
    assert [e.name for e in network.layout.entries] == ["query.lora_b"]
    assert "query.lora_a" in network.constants
    assert "A fixed: 12 parameters trained" in network.notes[0]
    saved = network.saved(network.initial())
    assert set(saved["state_dict"]) == {"query.lora_a", "query.lora_b"}


def test_a_head_is_trained_as_it_is():
    network = build(lora=Lora(2, train="^head"))
    assert [e.name for e in network.layout.entries if "lora" not in e.name] == ["head.weight", "head.bias"]
    assert "head.lora_a" not in adapters(network.module)
    assert "trained as they are: head.weight, head.bias" in network.notes[0]


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: Conv1D(3, 4)])
def test_merged_layers_are_plain(make):
    torch.manual_seed(1)
    layer = make().double()
    kind, module, x = type(layer), nn.Sequential(layer), torch.randn(7, 4, dtype=torch.float64)
    Lora(2).attach("mine", module, seed=0)
    nn.init.normal_(layer.lora_b)
    expected = module(x)
    assert merged(module) is module
    assert type(module[0]) is kind
    assert set(module.state_dict()) == {"0.weight", "0.bias"}
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_conv1d_by_the_formula():
    module, x = nn.Sequential(Conv1D(3, 4).double()), torch.randn(7, 4, dtype=torch.float64)
    Lora(2, alpha=5.0).attach("mine", module, seed=0)
    layer = module[0]
    nn.init.normal_(layer.lora_b)
    expected = x @ layer.weight + layer.bias + 2.5 * x @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)


def test_tied_weights():
    """As they are all frozen, only a layer that would be adapted itself is in the way."""
    assert adapters(build(Tied, Lora(2)).module) == {"head.lora_a", "head.lora_b"}
    with pytest.raises(UserError, match=r"two of .*:Tied shares its weights with another layer"):
        build(Tied, Lora(2, "two|head"))


def test_by_default_layers_that_attention_does_not_call_are_left_out():
    assert adapters(build(Packed, Lora(2)).module) == {"head.lora_a", "head.lora_b"}


def lazy(classes, image_shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def convolution(classes, image_shape):
    return nn.Sequential(nn.Conv2d(1, CLASSES, 4), nn.Flatten())


def parametrised(classes, image_shape):
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(16, classes)))


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        (
            Block,
            Lora(2, "atn"),
            "--lora-on: 'atn' matches no linear layer of .*, which has query, key, value and 2",
        ),
        (Block, Lora(2, "key", train="hed"), "--lora-train: 'hed' matches no parameter of .*, which has query.weight"),
        (Block, Lora(2, "head", train="head"), "--lora-on: 'head' matches no linear layer"),
        (Packed, Lora(2, "attn"), "attn.out_proj of .* is not called, so that an adapter would have no effect"),
        (convolution, Lora(2), "has no linear layers"),
        (Block, Lora(2, train="."), "no linear layer of .* is left for adapters"),
        (lazy, Lora(2), "has no sizes yet"),
        (parametrised, Lora(2, "1"), "has no weights of its own"),
    ],
)
def test_what_cannot_be_adapted(model, lora, words):
    with pytest.raises(UserError, match=words):
        build(model, lora)


def test_a_rank_that_no_layer_has_is_said():
    assert "the rank is more than the weights have of head" in build(lora=Lora(5, "head|twice")).notes[0]


def test_a_file_of_base_weights_fits_as_it_is(tmp_path):
    other = build(seed=9)
    torch.save(other.module.state_dict(), tmp_path / "base.pt")
    network = build(lora=Lora(2))
    before = network.digest()
    load_initial(tmp_path / "base.pt", network, torch.float32)
    assert torch.equal(network.constants["head.weight"], other.module.head.weight)
    assert network.digest() != before
    body = {f"module.{name}": value for name, value in other.module.state_dict().items() if "head" not in name}
    torch.save(body, tmp_path / "part.pt")
    part = build(lora=Lora(2))
    load_initial(tmp_path / "part.pt", part, torch.float32, partial=True)
    assert torch.equal(part.constants["key.weight"], other.module.key.weight)
    assert part.notes[1].startswith("--init-partial: 10 of 12 tensors from part.pt without 'module'")
    torch.save(network.saved(network.initial()), tmp_path / "model.pt")
    with pytest.raises(UserError, match="has the adapters of a run with --lora alone"):
        load_initial(tmp_path / "model.pt", network, torch.float32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(lora_on="fc"), "lora_on: got no lora, expected"),
        (dict(lora=0, lora_fixed_a=True), "lora_fixed_a: got no lora"),
        (dict(lora=2, lora_on="fc("), r"lora_on: got 'fc\(', expected a regular expression: missing \)"),
        (dict(lora=2, lora_train="*"), "lora_train: got '\\*', expected a regular expression"),
        (dict(lora=-1), "lora: got -1, expected at least 0"),
        (dict(lora=2, lora_alpha=0), "lora_alpha: got 0.0, expected more than 0"),
        (dict(lora=2, model="cnn", lora_on="conv"), "'conv' matches no linear layer of cnn, which has fc"),
    ],
)
def test_settings_that_are_refused(settings, words, tmp_path):
    with pytest.raises(UserError, match=words):
        fedlada_mpi.train(out=tmp_path / "run", quiet=True, rounds=1, **settings)
    assert not (tmp_path / "run").exists()


RANDOM = np.random.default_rng(0)
INPUTS, TARGETS = RANDOM.normal(size=(30, 6)).astype(np.float32), RANDOM.integers(0, 3, 30)
DATA = fedlada_mpi.Data(
    inputs=INPUTS[:24], targets=TARGETS[:24], clients=np.arange(24) % 3, test=(INPUTS[24:], TARGETS[24:])
)
SMALL = dict(data=DATA, model="mlp", lora=2, rounds=2, local_steps=2, batch_size=4, lr=0.05, eval_every=0, quiet=True)


def train(folder, **settings):
    return fedlada_mpi.train(**{**SMALL, "data_dir": f"{folder}/data", "out": f"{folder}/run", **settings})


@pytest.mark.parametrize(("algorithm", "precision"), [("fedavg", "fp32"), ("fedlada", "bf16"), ("scaffold", "fp64")])
def test_a_run_and_what_is_loaded_of_it(algorithm, precision, tmp_path):
    run = train(tmp_path, algorithm=algorithm, precision=precision, lora_train="fc.bias", lora_alpha=3)
    file = torch.load(run.dir / "model.pt", weights_only=True)
    assert file["lora"] == {"rank": 2, "on": "", "alpha": 3.0, "fixed_a": False, "train": "fc.bias"}
    assert {name.partition(".")[2] for name in file["state_dict"]} == {"lora_a", "lora_b", "bias"}
    assert file["state_dict"]["fc1.lora_b"].any()
    loaded = fedlada_mpi.load(run.dir)
    assert type(loaded.model.module) is nn.Sequential
    names = {f"{layer}.{part}" for layer in ("fc1", "fc2", "fc") for part in ("weight", "bias")}
    assert set(loaded.model.module.state_dict()) == names
    assert loaded.evaluate() == run.evaluate()
    assert run.evaluate()["loss"] == pytest.approx(
        run.summary["final"]["test_loss"], rel=1e-2 if precision == "bf16" else 1e-6
    )
    size = sum(value.numel() for value in file["state_dict"].values()) * (8 if precision == "fp64" else 4)
    moved = 1 if algorithm == "fedavg" else 2  # vectors, to each of three clients and back
    record = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[0])
    assert record["bytes_down"] == record["bytes_up"] == 3 * moved * size


def test_a_fixed_travels_not(tmp_path):
    whole, fixed = (train(tmp_path, out=tmp_path / str(a), algorithm="fedavg", lora_fixed_a=a) for a in (False, True))
    before = models.build("mlp", 3, About(Array("float32", (6,))), lora=Lora(2)).module
    state = torch.load(fixed.dir / "model.pt", weights_only=True)["state_dict"]
    assert torch.equal(state["fc1.lora_a"], before.fc1.lora_a)
    assert whole.metrics["bytes_up"][0] - fixed.metrics["bytes_up"][0] == 3 * 4 * 2 * (6 + 200 + 200)
    assert fedlada_mpi.load(fixed.dir).evaluate() == fixed.evaluate()


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", ["fedlada", "scaffold"])
def test_exact_sums_and_a_resume_give_the_same_bits(algorithm, tmp_path_factory):
    there = from_root(lambda: str(tmp_path_factory.mktemp("lora")))
    given = dict(algorithm=algorithm, sums="exact", server_trains=True)
    whole = train(there, **given, out=f"{there}/whole")
    train(there, **given, rounds=1, out=f"{there}/parts")
    resumed = train(there, **given, out=f"{there}/parts", resume=True)
    fast = train(there, algorithm=algorithm, out=f"{there}/fast")
    for name, value in whole.model.module.state_dict().items():
        assert torch.equal(resumed.model.module.state_dict()[name], value), name
        torch.testing.assert_close(fast.model.module.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_the_base_from_a_file(tmp_path):
    """It is not in the run's own files: what has changed is refused, by a resume and by load."""
    about, base = About(Array("float32", (6,))), tmp_path / "base.pt"
    torch.save(models.build("mlp", 3, about, seed=7).module.state_dict(), base)
    run = train(tmp_path, algorithm="fedavg", init=base)
    assert fedlada_mpi.load(run.dir).evaluate() == run.evaluate()
    torch.save(models.build("mlp", 3, about, seed=8).module.state_dict(), base)
    with pytest.raises(UserError, match="model of other frozen parameters"):
        train(tmp_path, algorithm="fedavg", init=base, rounds=3, resume=True)
    with pytest.raises(UserError, match="has adapters of a model with other frozen values"):
        fedlada_mpi.load(run.dir).evaluate()
    base.unlink()
    with pytest.raises(UserError, match=r"its model is made of adapters and of --init .*No such file"):
        fedlada_mpi.load(run.dir).evaluate()


def test_the_best_round_has_adapters_too(tmp_path):
    run = train(tmp_path, algorithm="fedavg", eval_every=1, data=None, dataset="digits", clients=3, validation=0.1)
    assert set(torch.load(run.dir / "best.pt", weights_only=True)) == {"lora", "base", "state_dict"}
    assert fedlada_mpi.load(run.dir, best=True).evaluate()["loss"] > 0


@pytest.mark.parametrize("change", [lambda f: f.pop("base"), lambda f: f["state_dict"].popitem(), lambda f: f.clear()])
def test_a_damaged_model_file(change, tmp_path):
    run = train(tmp_path, algorithm="fedavg", rounds=1)
    file = torch.load(run.dir / "model.pt", weights_only=True)
    change(file)
    torch.save(file, run.dir / "model.pt")
    with pytest.raises(UserError, match=r"has no adapters|does not fit the adapters"):
        fedlada_mpi.load(run.dir).evaluate()


def test_a_module_of_ones_own(tmp_path):
    """Whose values are the base; the object itself stays as it is."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    before = copy.deepcopy(module.state_dict())
    run = train(tmp_path, model=module, algorithm="fedavg", lora_on="0", lora_train="2")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert fedlada_mpi.load(run.dir, model=module).evaluate() == run.evaluate()
    change = run.model.module[0].weight - module[0].weight
    assert 0 < torch.linalg.matrix_rank(change.double(), rtol=1e-4) <= 2
    assert torch.equal(run.model.module[0].bias, module[0].bias)
    with pytest.raises(UserError, match="other frozen values"):
        fedlada_mpi.load(run.dir, model=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))).evaluate()
