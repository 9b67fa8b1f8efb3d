"""Local training: the two engines, chunks and uneven steps give the same run; gradient-free parameters by hand."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from method_cases import BY_TIER_AND_RANKS, CASES
from torch import nn
from training_runs import SHAPE, make_data, run_here

from fedlada_mpi import models
from fedlada_mpi.algorithms import Round, Vectors, create, resolve
from fedlada_mpi.bench import Bench, Workload
from fedlada_mpi.gpu.limits import TooManyElements
from fedlada_mpi.rounds.aggregate import RankSums
from fedlada_mpi.rounds.batches import LocalData, Normaliser
from fedlada_mpi.rounds.examples import Resident
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine
from fedlada_mpi.rounds.trainer import Trainer
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError

SIZES = [3, 9, 5, 1, 7]
SETTINGS = dict(
    rounds=3, participation=0.6, local_epochs=2, batch_size=4, augment="paper", crop_padding=1, seed=3, eval_every=3
)


class Narrow(nn.Module):
    """A ResNet of one block and 8 channels, down to 1x1 maps: most taps of its block meet padding only."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.GroupNorm(2, 8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn3 = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        shortcut = self.bn2(self.conv2(x)).relu()
        x = (self.bn3(self.conv3(shortcut)) + shortcut).relu()
        return self.fc(x.mean((2, 3)))


def narrow(classes, image_shape, activation):
    return Narrow(classes)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "trainer", SIZES, silos=2)


@pytest.fixture(autouse=True)
def narrow_model(monkeypatch):
    monkeypatch.setitem(models.OF_IMAGES, "narrow", narrow)


@pytest.fixture
def run(data, shared_tmp, request):
    def start(name: str, **settings):
        out = shared_tmp / "trainer-runs" / request.node.name / name
        return run_here(data, out, init="", **{"model": "narrow", **settings})

    return start


def same(found, expected, tolerance: float = 1e-10) -> None:
    begin = models.build("narrow", 3, SHAPE, seed=SETTINGS["seed"]).module.state_dict()
    travelled = sum(float((expected.model[n] - begin[n]).square().sum()) for n in begin) ** 0.5
    apart = sum(float((found.model[n] - expected.model[n]).square().sum()) for n in begin) ** 0.5
    assert travelled > 0.01
    assert apart < tolerance * travelled, f"{apart / travelled:.1e} of the distance travelled"
    for key in ("local_loss", "consistency", "train_loss", "test_loss"):
        values = [[record[key] for record in one.metrics] for one in (found, expected)]
        np.testing.assert_allclose(*np.array(values, float), rtol=1e-9, err_msg=key)


def test_the_narrow_model_has_gradient_free_parameters():
    layout = models.build("narrow", 3, SHAPE).layout
    # 8x8 -> 4x4 -> 2x2 -> 1x1: 5 of the taps of conv2 and 8 of conv3, 64 elements each.
    assert layout.size - layout.live == 13 * 64


@pytest.mark.parametrize("method", BY_TIER_AND_RANKS)
def test_engines_and_chunks_agree(method, run):
    settings = {**SETTINGS, **CASES[method].settings, **CASES[method].requires, "algorithm": method}
    generic = run("generic", engine="generic", **settings)
    same(run("stacked", **settings), generic)
    same(run("chunks", max_clients_at_once=1, **settings), generic)
    same(run("generic-chunks", engine="generic", max_clients_at_once=2, **settings), generic)


@pytest.mark.ranks(slow=True, two=True)
@pytest.mark.parametrize("steps", [dict(local_epochs=2), dict(local_steps=3)], ids=["uneven", "even"])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize(("method", "decay_mode"), [("fedavg", "l2"), ("scaffold", "l2"), ("fedlada", "decoupled")])
def test_gradient_free_parameters_only_decay(method, decay_mode, weighting, steps, run):
    """Without a gradient a step is x -= eta_t * lambda * x, so a round of K_i steps leaves (1 - eta_t lambda)^K_i of x.

    In batches of 4 and two epochs, sizes 3, 9, 5, 1, 7 make 2, 6, 4, 2, 4 steps; where all make the same number, most
    methods step such parameters once for all. SCAFFOLD's correction and FedLADA's
    g_a are zero in the first round; one round therefore shows it all.
    """
    rate, decay, server_rate = 0.1, 0.5, 0.7
    found = run(
        "run", algorithm=method, rounds=1, batch_size=4, lr=rate, weight_decay=decay, seed=3, **steps,
        server_lr=server_rate, decay_mode=decay_mode, weighting=weighting,
    )  # fmt: skip
    left = (1 - rate * decay) ** np.array([2, 6, 4, 2, 4] if "local_epochs" in steps else [3] * 5)
    weights = np.array(SIZES) if weighting == "size" else np.ones(5)
    factor = 1 - server_rate * (1 - (left * weights).sum() / weights.sum())
    begin = models.build("narrow", 3, SHAPE, seed=3).module.state_dict()["conv3.weight"].double()
    corner = torch.ones(3, 3, dtype=torch.bool)
    corner[1, 1] = False
    torch.testing.assert_close(
        found.model["conv3.weight"][..., corner], begin[..., corner] * factor, rtol=1e-12, atol=0
    )
    assert (found.model["conv3.weight"][..., 1, 1] - begin[..., 1, 1] * factor).abs().max() > 1e-3


@pytest.mark.ranks(slow=True, two=True)
@pytest.mark.parametrize("engine", ["stacked", "generic"])
@pytest.mark.parametrize(("method", "decay_mode"), [("fedavg", "l2"), ("fedlada", "decoupled")])
def test_decay_on_weights_spares_biases_and_norms(method, decay_mode, engine, run):
    """One step: tensors with one axis move as without decay, all others as with it, to the bit."""
    settings = dict(algorithm=method, decay_mode=decay_mode, engine=engine, rounds=1, local_steps=1, batch_size=4)
    found, all_decay, none = (
        run(f"{decay}-{which}", weight_decay=decay, decay_on=which, lr=0.1, **settings).model
        for decay, which in ((0.5, "weights"), (0.5, "all"), (0.0, "all"))
    )
    for name, value in found.items():
        assert torch.equal(value, (all_decay if value.ndim > 1 else none)[name])
        assert name in ("bn1.bias", "bn2.bias", "bn3.bias") or not torch.equal(all_decay[name], none[name])


@pytest.mark.ranks(slow=True)
def test_norms_of_single_tensors_include_gradient_free_parameters(run):
    """A single step of Fed-LAMB moves every tensor by eta_t times its norm, or freely where that is zero."""
    found = run(
        "run", algorithm="fedlamb", rounds=1, local_steps=1, batch_size=4, lr=0.05, weight_decay=0.5, participation=0.2,
        server_lr=1.0, seed=3,
    )  # fmt: skip
    begin = models.build("narrow", 3, SHAPE, seed=3).module.state_dict()
    for name, before in begin.items():
        if before.any():
            moved = (found.model[name] - before.double()).norm()
            torch.testing.assert_close(moved, 0.05 * before.double().norm(), rtol=1e-10, atol=0)


@pytest.mark.ranks(slow=True)
def test_the_clip_is_of_all_of_a_clients_gradient(run):
    """With a clip far under the gradient's norm, one step of plain SGD moves by exactly rate * clip."""
    settings = dict(
        algorithm="fedavg", rounds=1, local_steps=1, weight_decay=0, lr=0.5, participation=0.2, server_lr=1.0
    )
    found = run("run", clip=0.02, seed=3, **settings)
    begin = models.build("narrow", 3, SHAPE, seed=3).module.state_dict()
    moved = sum(float((found.model[n] - begin[n].double()).square().sum()) for n in begin) ** 0.5
    assert moved == pytest.approx(0.5 * 0.02, rel=1e-9)


class Local:
    """Three clients of 3, 6 and 6 images on one rank, without a run around them."""

    def __init__(self, network: models.Network, config: Config):
        images = torch.randint(0, 256, (15, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        normalise = Normaliser(torch.full((3,), 0.5), torch.full((3,), 0.25))
        starts, sizes = np.array([0, 3, 9]), np.array([3, 6, 6])
        data = LocalData(Resident(images, torch.arange(15) % 3), np.arange(3), starts, sizes, normalise)
        engine = GenericEngine(network) if network.forward is None else StackedEngine(network)
        network.module.double()
        self.layout, self.algorithm = network.layout, create(config)
        self.trainer = Trainer(config, self.algorithm, engine, data, torch.device("cpu"), torch.float64)
        zeros = torch.zeros(self.layout.size, dtype=torch.float64)
        self.server = Vectors(**{n: zeros.clone() for n in (*self.algorithm.down, *self.algorithm.derived)})
        self.server.x.copy_(network.initial(torch.float64))
        self.algorithm.start(self.server)

    def round(self, t: int, participants: list[int]):
        """The sums of what the clients send, as state_dicts, and the totals."""
        sums = RankSums(self.algorithm, self.layout.size, torch.float64, torch.device("cpu"))
        r = Round(t, 0.05, 2.0, len(participants), 3)
        assert self.trainer.round(self.server, r, np.array(participants), sums) == []
        return {name: self.layout.unpack(value) for name, value in sums.vectors.items()}, sums


@pytest.mark.slow
def test_engines_agree_on_resnet18():
    config = resolve(dict(algorithm="fedlada", local_epochs=1, batch_size=3, alpha=0.3, lr=0.1)).config
    networks = [models.build("resnet18", 3, SHAPE, stacked=stacked) for stacked in (True, False)]
    (stacked, totals), (generic, their_totals) = (Local(network, config).round(0, [0, 2]) for network in networks)
    assert totals.loss == pytest.approx(their_totals.loss, rel=1e-10)
    for quantity in ("offset", "v_hat"):
        for name, expected in generic[quantity].items():
            apart = (stacked[quantity][name] - expected).norm() / expected.norm()
            assert apart < 1e-7, f"{quantity} of {name}: {apart:.1e}"


def test_buffers_that_grow():
    """A rank trains one client, then three: as a trainer that never did the first round."""
    config = Config(algorithm="fedavg", local_epochs=1, batch_size=3)
    network = models.build("narrow", 3, SHAPE)
    grown = Local(network, config)
    grown.round(0, [1])
    for t, participants in ((1, [0, 1, 2]), (2, [2]), (3, [0, 2])):
        sums, totals = grown.round(t, participants)
        expected, their_totals = Local(network, config).round(t, participants)
        for name, value in expected["offset"].items():
            assert value.any(), name
            torch.testing.assert_close(sums["offset"][name], value, rtol=1e-10, atol=1e-14)
        assert totals.loss == pytest.approx(their_totals.loss, rel=1e-12)
        assert totals.norms2 == pytest.approx(their_totals.norms2, rel=1e-12)


def test_no_client_of_this_rank_was_drawn():
    sums, totals = Local(models.build("narrow", 3, SHAPE), Config(algorithm="fedavg")).round(0, [])
    assert not any(value.any() for value in sums["offset"].values())
    assert (totals.loss, totals.norms2) == (0.0, 0.0)


def test_evaluation_takes_smaller_batches_on_a_full_gpu():
    bench = Bench(Workload.of_images(resolve({"dataset": "digits"}).config), 20, torch.device("cpu"))
    (loss, correct, count), tried, room = bench.evaluation()(), [], 100

    def capture(work):
        tried.append(work.__self__.batch)
        if tried[-1] > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return SimpleNamespace(replay=work)

    bench.evaluator.capture = capture
    assert bench.evaluation()() == [pytest.approx(loss, rel=1e-6), correct, count]
    assert tried == [250, 125, 62]
    room = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        bench.evaluation()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, TooManyElements])
def test_streamed_examples_are_evaluated_in_smaller_batches_where_they_must(error, monkeypatch):
    bench = Bench(Workload.of_images(resolve({"dataset": "digits"}).config), 20, torch.device("cpu"))
    (loss, correct, count), outputs, tried = bench.evaluation()(), bench.trainer.engine.outputs, []

    def limited(x, inputs, dtype):
        tried.append(len(inputs))
        if tried[-1] > 100:
            raise error("too much")
        return outputs(x, inputs, dtype)

    monkeypatch.setattr(bench.trainer.engine, "outputs", limited)
    assert bench.evaluation()() == [pytest.approx(loss, rel=1e-6), correct, count]
    assert (tried[:2], sum(tried[2:])) == ([250, 125], 600)


@pytest.mark.parametrize(
    ("at_once", "what"),
    [(1, "--batch-size is"), (2, r"--batch-size or, for frozen layers, --max-clients-at-once \(here 2\) is")],
)
def test_a_batch_with_too_many_numbers_for_a_kernel(at_once, what, monkeypatch):
    config = resolve({"dataset": "digits", "max_clients_at_once": at_once}).config
    bench = Bench(Workload.of_images(config), 2, torch.device("cpu"))

    def refuse(*arguments):
        raise TooManyElements("max pooling: got 3,000,000,000 numbers of a client")

    monkeypatch.setattr(bench.trainer.engine, "gradients", refuse)
    with pytest.raises(UserError, match=f"^{what} too large for a GPU: max pooling: got 3,000,000,000 numbers"):
        bench.round()


def test_a_trainer_is_freed_at_once():
    """With a reference cycle, the garbage collector could free its CUDA graphs while another one is captured."""
    bench = Bench(Workload.of_images(resolve({"dataset": "digits"}).config), 2, torch.device("cpu"))
    bench.round()
    trainer = weakref.ref(bench.trainer)
    gc.disable()
    try:
        del bench
        assert trainer() is None
    finally:
        gc.enable()
