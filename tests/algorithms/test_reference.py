"""The reference itself, compared with torch.optim and with closed forms, so that it cannot be wrong unnoticed."""

import numpy as np
import pytest
import torch
from reference import Settings, clipped, federate

SIZES = [2, 5, 3]
START = np.array([1.0, -2.0, 0.5])
# Client i has the loss |A_i (x - b_i)|^2 / 2, so its gradient is A_i' A_i (x - b_i).
_random = np.random.default_rng(3)
HESSIANS = [a.T @ a / 3 for a in _random.normal(size=(3, 4, 3))]
CENTRES = list(_random.normal(size=(3, 3)))
GRADIENTS = [lambda x, h=h, b=b: h @ (x - b) for h, b in zip(HESSIANS, CENTRES, strict=True)]
EVERYONE = [0, 1, 2]


def run(method, rounds=4, steps=1, **settings):
    return federate(method, START, GRADIENTS, SIZES, [steps] * 3, [EVERYONE] * rounds, Settings(**settings))


def pooled(x, weighting):
    weights = np.array(SIZES if weighting == "size" else [1, 1, 1], float)
    return sum(w * g(x) for w, g in zip(weights / weights.sum(), GRADIENTS, strict=True))


def optimise(make, rounds, weighting="uniform", rates=None, state=None):
    """The pooled problem with an optimizer of torch."""
    x = torch.tensor(START, requires_grad=True)
    optimizer = make([x])
    if state:
        optimizer.state[x] = state
    for t in range(rounds):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[t]
        x.grad = torch.from_numpy(pooled(x.detach().numpy(), weighting))
        optimizer.step()
    return x.detach().numpy()


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fedavg_with_one_step_is_sgd_on_the_pooled_loss(weighting):
    x = run("fedavg", lr=0.2, lr_decay=0.9, weight_decay=0.1, weighting=weighting)[-1].x
    rates = [0.2 * 0.9**t for t in range(4)]
    expected = optimise(lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.1), 4, weighting, rates)
    np.testing.assert_allclose(x, expected, rtol=1e-13)


def test_fedavg_on_quadratics_follows_the_closed_form():
    x = run("fedavg", rounds=1, steps=3, lr=0.2, server_lr=0.7)[-1].x
    contraction = [np.linalg.matrix_power(np.eye(3) - 0.2 * h, 3) for h in HESSIANS]
    ends = [b + c @ (START - b) for b, c in zip(CENTRES, contraction, strict=True)]
    np.testing.assert_allclose(x, START + 0.7 * (np.mean(ends, axis=0) - START), rtol=1e-13)


def test_fedprox_is_fedavg_on_a_loss_with_the_proximal_term():
    prox = [lambda x, g=g: g(x) + 0.3 * (x - START) for g in GRADIENTS]
    expected = federate("fedavg", START, prox, SIZES, [3] * 3, [EVERYONE], Settings(lr=0.2))[-1].x
    np.testing.assert_allclose(run("fedprox", rounds=1, steps=3, lr=0.2, mu=0.3)[-1].x, expected, rtol=1e-14)


def test_scaffold_keeps_c_as_the_mean_of_c_i_and_removes_the_drift():
    """With all clients present c is the mean of all c_i, and the fixed point is the optimum of the pooled loss."""
    rounds = run("scaffold", rounds=400, steps=4, lr=0.2)
    optimum = np.linalg.solve(sum(HESSIANS), sum(h @ b for h, b in zip(HESSIANS, CENTRES, strict=True)))
    np.testing.assert_allclose(rounds[-1].x, optimum, rtol=1e-9)
    np.testing.assert_allclose(rounds[-1].vectors["c"], pooled(optimum, "uniform"), atol=1e-9)
    biased = run("fedavg", rounds=400, steps=4, lr=0.2)[-1].x
    assert np.linalg.norm(biased - optimum) > 1e-3


def test_fedcm_with_one_step_is_damped_momentum():
    """buf = (1-alpha) buf + alpha g; torch begins with buf = g, so its first step gets the rate alpha * lr."""
    alpha, lr = 0.25, 0.2
    x = run("fedcm", lr=lr, alpha=alpha)[-1].x
    position, buffer = START, np.zeros(3)
    for _ in range(4):
        buffer = (1 - alpha) * buffer + alpha * pooled(position, "uniform")
        position = position - lr * buffer
    np.testing.assert_allclose(x, position, rtol=1e-13)
    expected = optimise(lambda p: torch.optim.SGD(p, lr=alpha * lr), 1)
    np.testing.assert_allclose(run("fedcm", rounds=1, lr=lr, alpha=alpha)[-1].x, expected, rtol=1e-13)


def test_fedadam_with_one_step_is_adam_on_the_server():
    """D = lr * gradient; torch corrects the bias, which its rate and its eps take out again."""
    b1, b2, lr, server_lr = 0.9, 0.99, 0.2, 0.1
    x = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.Adam([x], betas=(b1, b2))
    for t in range(1, 5):
        root = np.sqrt(1 - b2**t)
        optimizer.param_groups[0].update(lr=server_lr * (1 - b1**t) / root, eps=0.01 / root)
        x.grad = torch.from_numpy(lr * pooled(x.detach().numpy(), "uniform"))
        optimizer.step()
    ours = run("fedadam", lr=lr, server_lr=server_lr, beta1=b1, beta2=b2, eps=0.01)[-1].x
    np.testing.assert_allclose(ours, x.detach().numpy(), rtol=1e-12)
    amended = run("fedadam_amended", lr=lr, server_lr=server_lr, beta1=b1, beta2=b2, eps=0.01, alpha=1.0)[-1].x
    np.testing.assert_array_equal(ours, amended)


def test_fedadam_amended_with_one_step():
    """The client's direction is damped momentum, and the server's Adam works on its mean times the rate."""
    alpha, lr, server_lr = 0.4, 0.2, 0.1
    x, g_a, m, v = START, np.zeros(3), np.zeros(3), np.zeros(3)
    for _ in range(4):
        g_a = alpha * pooled(x, "uniform") + (1 - alpha) * g_a
        m, v = 0.9 * m + 0.1 * lr * g_a, 0.99 * v + 0.01 * (lr * g_a) ** 2
        x = x - server_lr * m / (np.sqrt(v) + 0.01)
    ours = run("fedadam_amended", lr=lr, server_lr=server_lr, alpha=alpha, eps=0.01)[-1].x
    np.testing.assert_allclose(ours, x, rtol=1e-12)


@pytest.mark.parametrize("decay_mode", ["l2", "decoupled"])
def test_localadam_of_one_client_in_one_round_is_amsgrad_of_torch(decay_mode):
    """torch corrects the bias: its rate is multiplied by (1-b1^k) / sqrt(1-b2^k) to take that out again."""
    b1, b2, lr, decay, steps = 0.9, 0.99, 0.05, 0.1, 6
    x = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.Adam([x], betas=(b1, b2), eps=0.0, amsgrad=True)
    for k in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * (1 - b1**k) / np.sqrt(1 - b2**k)
        before = x.detach().clone()
        x.grad = torch.from_numpy(GRADIENTS[0](before.numpy())) + (decay * before if decay_mode == "l2" else 0)
        optimizer.step()
        if decay_mode == "decoupled":
            x.data -= lr * decay * before
    settings = Settings(lr=lr, weight_decay=decay, decay_mode=decay_mode, beta1=b1, beta2=b2)
    ours = federate("localadam", START, GRADIENTS[:1], [2], [steps], [[0]], settings)[-1].x
    np.testing.assert_allclose(ours, x.detach().numpy(), rtol=1e-12)


def test_localadam_with_bias_correction_and_without_the_maximum_is_adam_of_torch():
    b1, b2, lr, eps, steps = 0.9, 0.99, 0.05, 1e-3, 6
    x = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr, betas=(b1, b2), eps=eps)
    for _ in range(steps):
        x.grad = torch.from_numpy(GRADIENTS[0](x.detach().numpy()))
        optimizer.step()
    settings = Settings(lr=lr, beta1=b1, beta2=b2, eps=eps, bias_correction=True, v_max=False)
    [last] = federate("localadam", START, GRADIENTS[:1], [2], [steps], [[0]], settings)
    np.testing.assert_allclose(last.x, x.detach().numpy(), rtol=1e-12)
    corrected = optimizer.state[x]["exp_avg_sq"].numpy() / (1 - b2**steps)
    np.testing.assert_allclose(last.vectors["v"], corrected, rtol=1e-12)


@pytest.mark.parametrize("decay_mode", ["l2", "decoupled"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fresh_localadam_is_a_new_optimiser_of_torch_each_round(decay_mode, amsgrad):
    """Three rounds of one client: torch's optimiser is made anew in each, as the client's is."""
    b1, b2, lr, eps, decay, steps = 0.9, 0.99, 0.05, 1e-3, 0.1, 4
    x = torch.tensor(START, requires_grad=True)
    kind = torch.optim.Adam if decay_mode == "l2" else torch.optim.AdamW
    for _ in range(3):
        optimizer = kind([x], lr, betas=(b1, b2), eps=eps, weight_decay=decay, amsgrad=amsgrad)
        for _ in range(steps):
            x.grad = torch.from_numpy(GRADIENTS[0](x.detach().numpy()))
            optimizer.step()
    settings = Settings(
        lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay, decay_mode=decay_mode, bias_correction=True,
        v_init="fresh", v_max=amsgrad, correct_after_max=amsgrad,
    )  # fmt: skip
    ours = federate("localadam", START, GRADIENTS[:1], [2], [steps], [[0]] * 3, settings)[-1].x
    np.testing.assert_allclose(ours, x.detach().numpy(), rtol=1e-6)


def test_clip_scales_only_what_is_longer():
    np.testing.assert_allclose(clipped(np.array([3.0, 4.0]), 1.0), [0.6, 0.8], rtol=1e-15)
    np.testing.assert_array_equal(clipped(np.array([3.0, 4.0]), 5.0), [3.0, 4.0])
    np.testing.assert_array_equal(clipped(np.array([3.0, 4.0]), 0.0), [3.0, 4.0])
