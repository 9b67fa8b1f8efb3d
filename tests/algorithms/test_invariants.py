"""What must hold for any data: the identities of the methods, and one FedLADA round computed by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from reference import Settings, federate, local_adaptive
from training_runs import disagreement, make_data, run_here

SIZES = [4, 9, 6, 3, 8]


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "invariants", SIZES, silos=2)


@pytest.fixture(scope="session")
def lone_client(shared_tmp):
    return make_data(shared_tmp / "lone", [10])


@pytest.fixture
def run_dir(shared_tmp, request):
    return shared_tmp / "runs" / request.node.name


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_alpha_one_is_localadam_to_the_bit(precision, data, run_dir):
    common = dict(
        rounds=3, local_epochs=2, batch_size=2, augment="paper", crop_padding=1, participation=0.6, precision=precision
    )
    amended = run_here(data, run_dir / "fedlada", algorithm="fedlada", alpha=1.0, **common)
    plain = run_here(data, run_dir / "localadam", algorithm="localadam", **common)
    assert all(torch.equal(amended.model[name], plain.model[name]) for name in data.names)
    assert amended.participants == plain.participants


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("decay_mode", ["l2", "decoupled"])
def test_one_client_and_one_round_is_amsgrad_of_torch(decay_mode, lone_client, run_dir):
    """torch corrects the bias: its rate is multiplied by (1-b1^k) / sqrt(1-b2^k) to take that out again."""
    b1, b2, lr, decay, steps = 0.9, 0.99, 0.01, 0.1, 6
    run = run_here(
        lone_client, run_dir, algorithm="fedlada", alpha=1.0, rounds=1, local_steps=steps, lr=lr, weight_decay=decay,
        decay_mode=decay_mode, beta1=b1, beta2=b2, clip=0,
    )  # fmt: skip
    x = torch.tensor(lone_client.start, requires_grad=True)
    optimizer = torch.optim.Adam([x], betas=(b1, b2), eps=0.0, amsgrad=True)
    optimizer.state[x] = amsgrad_state(x, floor=1e-16)
    for k in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * (1 - b1**k) / np.sqrt(1 - b2**k)
        before = x.detach().clone()
        x.grad = torch.from_numpy(lone_client.gradients[0](before.numpy())) + (
            decay * before if decay_mode == "l2" else 0
        )
        optimizer.step()
        if decay_mode == "decoupled":
            x.data -= lr * decay * before
    assert disagreement(run.x, x.detach().numpy(), lone_client.start) < 1e-9


@pytest.mark.ranks(slow=True)
def test_one_client_and_one_step_per_round_is_amsgrad_without_memory(lone_client, run_dir):
    """Moments start again in every round, so the betas act as zero but for the factor (1-b1) / sqrt(1-b2) of the rate;
    only v_hat, the greatest v of all rounds, goes on."""
    b1, b2, lr, rounds = 0.9, 0.99, 0.01, 8
    run = run_here(
        lone_client, run_dir, algorithm="fedlada", alpha=1.0, rounds=rounds, local_steps=1, lr=lr, lr_decay=1.0,
        weight_decay=0, beta1=b1, beta2=b2, clip=0, v_init="zero",
    )  # fmt: skip
    x = torch.tensor(lone_client.start, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=lr * (1 - b1) / np.sqrt(1 - b2), betas=(0.0, 0.0), eps=0.0, amsgrad=True)
    optimizer.state[x] = amsgrad_state(x, floor=1e-16 / (1 - b2))
    for _ in range(rounds):
        x.grad = torch.from_numpy(lone_client.gradients[0](x.detach().numpy()))
        optimizer.step()
    assert disagreement(run.x, x.detach().numpy(), lone_client.start) < 1e-9


def amsgrad_state(x: torch.Tensor, floor: float) -> dict[str, torch.Tensor]:
    return dict(
        step=torch.tensor(0.0), exp_avg=torch.zeros_like(x), exp_avg_sq=torch.zeros_like(x),
        max_exp_avg_sq=torch.full_like(x, floor),
    )  # fmt: skip


LADA = dict(lr=0.02, lr_decay=0.9, server_lr=0.7, weight_decay=0.0, alpha=0.3, beta1=0.7, beta2=0.9, clip=0.6)


@pytest.fixture(scope="session")
def lada_rounds(data, shared_tmp):
    """The same run stopped after 1, 2, 3 and 4 rounds."""
    out = shared_tmp / "lada"
    return [
        run_here(data, out / str(t), algorithm="fedlada", rounds=t, local_steps=3, participation=0.6, **LADA)
        for t in (1, 2, 3, 4)
    ]


@pytest.mark.ranks(slow=True)
def test_a_shorter_run_is_the_beginning_of_a_longer_one(lada_rounds):
    participants = lada_rounds[-1].participants
    for t, run in enumerate(lada_rounds, 1):
        assert run.participants == participants[:t]


def test_v_never_falls(lada_rounds, data):
    """v^{t+1} >= v^t element by element, from v^0 = eps_v^2 on."""
    v = [np.full_like(data.start, 1e-16), *(run.server["v"] for run in lada_rounds)]
    for before, after in pairwise(v):
        assert np.all(after >= before)
    assert np.all(v[1] > v[0])
    assert np.any(v[2] > v[1])


def test_g_a_is_the_amended_mean_of_the_local_directions(lada_rounds, data):
    """g_a^{t+1} = alpha * mean(m / sqrt(v_hat)) + (1-alpha) * g_a^t, with g_a taken from the run's own parameters and
    the directions from the reference, started at the run's own x^t."""
    x = [data.start, *(run.x for run in lada_rounds)]
    g_a, v = np.zeros_like(data.start), np.full_like(data.start, 1e-16)
    settings = Settings(**LADA)
    for t, participants in enumerate(lada_rounds[-1].participants):
        rate = LADA["lr"] * LADA["lr_decay"] ** t
        local = [local_adaptive(x[t], data.gradients[i], 3, rate, settings, v, g_a) for i in participants]
        directions = np.mean([d for _, _, seen in local for d in seen], axis=0)
        following = (x[t] - x[t + 1]) / (LADA["server_lr"] * 3 * rate)
        expected = LADA["alpha"] * directions + (1 - LADA["alpha"]) * g_a
        assert np.linalg.norm(following - expected) < 1e-9 * np.linalg.norm(expected)
        g_a, v = following, np.mean([v_hat for _, v_hat, _ in local], axis=0)


@pytest.mark.ranks
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedlada"])
def test_consistency_is_the_mean_distance_to_the_new_model(algorithm, weighting, server_lr, data, run_dir):
    settings = dict(lr=0.05, server_lr=server_lr, weighting=weighting, weight_decay=0.0, clip=1.0)
    settings |= dict(eps=0.01) if algorithm == "fedadam" else {}
    run = run_here(data, run_dir, algorithm=algorithm, rounds=3, local_steps=2, lr_decay=1.0, decay_mode="l2",
                   **settings, **({"alpha": 0.5} if algorithm == "fedlada" else {}))  # fmt: skip
    expected = federate(
        algorithm, data.start, data.gradients, SIZES, [2] * 5, run.participants, Settings(alpha=0.5, **settings)
    )
    for record, reference in zip(run.metrics, expected, strict=True):
        assert record["consistency"] == pytest.approx(reference.consistency, rel=1e-8)


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_consistency_of_one_client_is_zero_and_never_negative(precision, lone_client, run_dir):
    run = run_here(
        lone_client, run_dir, algorithm="fedavg", rounds=6, local_steps=3, server_lr=1.0, precision=precision
    )  # fmt: skip
    travelled = np.sum((run.x - lone_client.start) ** 2)
    for record in run.metrics:
        assert 0 <= record["consistency"] < 1e-6 * travelled


@pytest.mark.ranks
def test_evaluation_is_that_of_the_plain_module(data, run_dir):
    run = run_here(data, run_dir, algorithm="fedavg", rounds=2, local_steps=2, eval_every=1)
    record = run.metrics[-1]
    module = data.module
    module.load_state_dict(run.model)
    for name, images, labels in (
        ("train", np.concatenate(data.images), np.concatenate(data.labels)),
        ("test", *data.test),
    ):
        inputs = torch.from_numpy((images / 255.0 - np.array(data.mean)) / np.array(data.std)).permute(0, 3, 1, 2)
        with torch.no_grad():
            scores = module(inputs)
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels)).item()
        assert record[f"{name}_loss"] == pytest.approx(loss, rel=1e-5)
        assert record[f"{name}_acc"] == pytest.approx((scores.argmax(1).numpy() == labels).mean())


# Two parameters (p, q), two clients A and B, K = 2, eta = 1/4, eta_g = 2, alpha = 1/2, b1 = 0.4, b2 = 0.64, v starts
# at 0; x^t = (1, 2), v^t = (4, 1), g_a^t = (0.5, 1). Gradients: A: (16p - 13.5, 5.75 - q), B: (128p - 133, 63 - 32q).
#
# One step on a parameter: m = 0.4 m + 0.6 g; v = 0.64 v + 0.36 g^2; v_hat = max(v, v_hat);
#                          parameter -= 1/4 * (1/2 * m / sqrt(v_hat) + 1/2 * g_a).
#
#            g      m       v       v_hat   m/sqrt   step            parameter
#   A p  1   2.5    1.5     2.25    4       0.75     0.375 + 0.25    1 - 0.15625 = 0.84375      (the server's v wins)
#        2   0      0.6     1.44    4       0.3      0.15  + 0.25    0.84375 - 0.1 = 0.74375
#   A q  1   3.75   2.25    5.0625  5.0625  1        0.5   + 0.5     2 - 0.25 = 1.75            (the client's v wins)
#        2   4      3.3     9       9       1.1      0.55  + 0.5     1.75 - 0.2625 = 1.4875     (and grows)
#   B p  1  -5     -3       9       9      -1       -0.5   + 0.25    1 + 0.0625 = 1.0625
#        2   3      0.6     9       9       0.2      0.1   + 0.25    1.0625 - 0.0875 = 0.975
#   B q  1  -1     -0.6     0.36    1      -0.6     -0.3   + 0.5     2 - 0.05 = 1.95
#        2   0.6    0.12    0.36    1       0.12     0.06  + 0.5     1.95 - 0.14 = 1.81
#
#   offset_A = (0.25625, 0.5125), offset_B = (0.025, 0.19), mean = (0.140625, 0.35125)
#   x^{t+1} = (1, 2) - 2 * mean = (0.71875, 1.2975);  v^{t+1} = ((4+9)/2, (9+1)/2) = (6.5, 5)
#   g_a^{t+1} = mean / (2 * 1/4) = (0.28125, 0.7025); check: 1/2 * (0.75+0.3-1+0.2)/4 + 1/2 * 0.5 = 0.28125
HAND_X, HAND_V, HAND_G_A = [0.71875, 1.2975], [6.5, 5.0], [0.28125, 0.7025]
HAND_V_HAT = [[4.0, 9.0], [9.0, 1.0]]
HAND_OFFSET = [[0.25625, 0.5125], [0.025, 0.19]]
HAND = dict(lr=0.25, server_lr=2.0, alpha=0.5, beta1=0.4, beta2=0.64)


def hand_gradients(x):
    """[C, 2] -> [C, 2]: client A in the first row, client B in the second."""
    slope = x.new_tensor([[16.0, -1.0], [128.0, -32.0]])
    shift = x.new_tensor([[-13.5, 5.75], [-133.0, 63.0]])
    return slope * x + shift


def test_round_by_hand_of_the_reference():
    gradients = [lambda x, i=i: hand_gradients(torch.from_numpy(np.stack([x, x])))[i].numpy() for i in (0, 1)]
    start = dict(v=np.array([4.0, 1.0]), g_a=np.array([0.5, 1.0]))
    [result] = federate("fedlada", np.array([1.0, 2.0]), gradients, [1, 1], [2, 2], [[0, 1]], Settings(**HAND), start)
    np.testing.assert_allclose(result.x, HAND_X, rtol=1e-12)
    np.testing.assert_allclose(result.vectors["v"], HAND_V, rtol=1e-12)
    np.testing.assert_allclose(result.vectors["g_a"], HAND_G_A, rtol=1e-12)


def test_round_by_hand_of_the_package():
    from fedlada_mpi.algorithms import ClientVectors, Round, Vectors, create, resolve

    method = create(resolve(dict(algorithm="fedlada", v_init="zero", **HAND)).config)
    server = Vectors(**{name: torch.zeros(2, dtype=torch.float64) for name in ("x", "v", "g_a", *method.private)})
    for name, values in dict(x=[1.0, 2.0], v=[4.0, 1.0], g_a=[0.5, 1.0]).items():
        getattr(server, name).copy_(torch.tensor(values))
    clients = ClientVectors(**{name: torch.zeros(2, 2, dtype=torch.float64) for name in ("x", *method.slots)})
    clients.steps = torch.full((2, 1), 2.0, dtype=torch.float64)
    this = Round(t=0, lr=HAND["lr"], steps=2.0, participants=2, clients=2)

    method.begin(clients, server, this)
    for _ in range(2):
        gradient = method.before_clip(clients, server, hand_gradients(clients.x))
        clients.x -= this.lr * method.direction(clients, server, gradient)
    sent = {name: value.clone() for name, value in method.finish(clients, server, this).items()}
    before = server.x.clone()
    method.server(server, {name: value.mean(0) for name, value in sent.items()}, this)
    method.derive(server, before, this)

    np.testing.assert_allclose(sent["offset"], HAND_OFFSET, rtol=1e-12)
    np.testing.assert_allclose(sent["v_hat"], HAND_V_HAT, rtol=1e-12)
    np.testing.assert_allclose(server.x, HAND_X, rtol=1e-12)
    np.testing.assert_allclose(server.v, HAND_V, rtol=1e-12)
    np.testing.assert_allclose(server.g_a, HAND_G_A, rtol=1e-12)


def test_scaled_scaffold_keeps_the_raw_gradients_of_opposed_clients():
    """Gradients +1 and -1, K = 2, eta = 1/4, a = 1/2. Round 1: c_i = 0, so x_i = -+0.5 and c_i+ = +-1, c = 0.

    Round 2: directions +-1 - 1/2 * +-1 = +-1/2, so x_i = -+0.25; c_i+ is still +-1. A c_i that grew to g / a would
    cancel the scale.
    """
    from fedlada_mpi.algorithms import ClientVectors, Round, Vectors, create, resolve

    method = create(resolve(dict(algorithm="scaffold", alpha=0.5)).config)
    gradients = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    s = Vectors(x=torch.zeros(1, dtype=torch.float64), c=torch.zeros(1, dtype=torch.float64))
    c = ClientVectors(x=torch.zeros_like(gradients), c_i=torch.zeros_like(gradients), steps=torch.full((2, 1), 2.0))
    this = Round(t=0, lr=0.25, steps=2.0, participants=2, clients=2)
    for moved in (0.5, 0.25):
        method.begin(c, s, this)
        for _ in range(2):
            c.x -= this.lr * method.direction(c, s, gradients.clone())
        sent = method.finish(c, s, this)
        np.testing.assert_allclose(sent["offset"], [[moved], [-moved]], rtol=1e-15)
        np.testing.assert_allclose(c.c_i, gradients, rtol=1e-15)
        method.server(s, {name: value.mean(0) for name, value in sent.items()}, this)
        np.testing.assert_allclose(s.c, [0.0], atol=1e-15)
