"""Every method against the reference, for every setting that changes the maths.

Double precision must agree to 1e-9 of the distance travelled, single precision to rounding. Each variation is also
shown to move the reference itself, so that none of the comparisons is empty.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from product import beside, disagreement, make_data, run_here
from reference import Settings, federate

ROUNDS, STEPS = 4, 3
SIZES = [4, 9, 6, 3, 8]
EXACT = 1e-9

SGD = dict(lr=0.2, lr_decay=0.8, server_lr=0.7, weight_decay=0.05, clip=0.6)
FEDADAM = dict(SGD, server_lr=0.1, beta1=0.7, beta2=0.9, eps=0.02)
ADAPTIVE = dict(
    lr=0.02, lr_decay=0.8, server_lr=0.7, weight_decay=0.5, decay_mode="decoupled", clip=0.6, beta1=0.7, beta2=0.9,
    v_init="zero",
)  # fmt: skip
BASE = {
    "fedavg": SGD,
    "fedprox": dict(SGD, mu=0.5),
    "scaffold": dict(SGD, alpha=1.0),
    "fedcm": dict(SGD, alpha=0.3),
    "fedadam": FEDADAM,
    "fedadam_amended": dict(FEDADAM, alpha=0.3),
    "localadam": ADAPTIVE,
    "fedlada": dict(ADAPTIVE, alpha=0.3),
}
# What the server must remember between rounds, beside x.
SERVER_VECTORS = {
    "fedavg": [],
    "fedprox": [],
    "scaffold": ["c"],
    "fedcm": ["g_a"],
    "fedadam": ["m", "v"],
    "fedadam_amended": ["m", "v", "g_a"],
    "localadam": ["v"],
    "fedlada": ["v", "g_a"],
}
# Vectors per participant and round: down and up for a client without memory, and as the paper charges them.
TRAFFIC = {
    "fedavg": (1, 1, 1),
    "fedprox": (1, 1, 1),
    "scaffold": (2, 2, 2),
    "fedcm": (2, 1, 2),
    "fedadam": (1, 1, 1),
    "fedadam_amended": (2, 1, 2),
    "localadam": (2, 2, 2),
    "fedlada": (3, 2, 2),
}
FOR_ALL = [dict(clip=0.0), dict(lr_decay=1.0), dict(weight_decay=0.0), dict(weighting="size"), dict(server_lr=1.3)]
FOR_ADAM = [dict(beta1=0.0), dict(beta2=0.5)]
FOR_ADAPTIVE = [
    *FOR_ADAM, dict(decay_mode="l2"), dict(v_init="server"), dict(decay_mode="l2", v_init="server"), dict(eps_v=0.1)
]  # fmt: skip
OWN = {
    "fedprox": [dict(mu=2.0)],
    "scaffold": [dict(alpha=0.4)],
    "fedcm": [dict(alpha=0.9)],
    "fedadam": [*FOR_ADAM, dict(eps=0.3)],
    "fedadam_amended": [*FOR_ADAM, dict(eps=0.3), dict(alpha=0.9)],
    "localadam": FOR_ADAPTIVE,
    "fedlada": [*FOR_ADAPTIVE, dict(alpha=0.9)],
}
VARIATIONS = [(method, change) for method in BASE for change in (*FOR_ALL, *OWN.get(method, []))]


def label(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())


@pytest.fixture(scope="module")
def data(shared_tmp):
    return make_data(shared_tmp / "unequal", SIZES, silos=3)


@pytest.fixture(scope="module")
def copies(shared_tmp):
    return make_data(shared_tmp / "copies", COPIES, silos=2, one_image_per_client=True)


@pytest.fixture
def run_dir(shared_tmp, request):
    return shared_tmp / "methods" / request.node.name


@cache
def base_result(method, data):
    everyone = [list(range(len(SIZES)))] * ROUNDS
    settings = Settings(**BASE[method])
    return federate(method, data.start, data.gradients, SIZES, [STEPS] * len(SIZES), everyone, settings)[-1].x


def compare(data, out, method, settings, *, tolerance=EXACT, **more):
    flags = dict(rounds=ROUNDS, local_steps=STEPS)
    if "local_epochs" in more:
        del flags["local_steps"]
    run = run_here(data, out, algorithm=method, **{**flags, **settings, **more})
    expected = beside(run, method, ROUNDS, [STEPS] * len(SIZES), settings)
    error = disagreement(run.x, expected[-1].x, data.start)
    assert error < tolerance, f"{method} {settings}: {error:.2e} of the distance travelled"
    return run, expected


@pytest.mark.parametrize("method", BASE)
def test_method_agrees_with_the_reference(method, data, run_dir):
    run, expected = compare(data, run_dir, method, BASE[method])
    np.testing.assert_allclose([r["lr"] for r in run.metrics], [BASE[method]["lr"] * 0.8**t for t in range(ROUNDS)])
    for record, reference in zip(run.metrics, expected):
        assert record["consistency"] == pytest.approx(reference.consistency, rel=1e-9)
        down, up, paper = (vectors * len(record["participants"]) for vectors in TRAFFIC[method])
        assert (record["bytes_down"], record["bytes_up"]) == (8 * len(data.start) * down, 8 * len(data.start) * up)
        assert record["paper_units"] == paper
    assert set(run.server) == {"x", *SERVER_VECTORS[method]}
    for name in SERVER_VECTORS[method]:
        vector, reference = run.server[name], expected[-1].vectors[name]
        assert np.linalg.norm(vector - reference) < EXACT * np.linalg.norm(reference), name


@pytest.mark.parametrize(("method", "change"), VARIATIONS, ids=label)
def test_every_setting_that_changes_the_maths(method, change, data, run_dir):
    settings = {**BASE[method], **change}
    _, expected = compare(data, run_dir, method, settings)
    assert disagreement(expected[-1].x, base_result(method, data), data.start) > 0.01, "the setting changed nothing"


@pytest.mark.parametrize("method", BASE)
def test_partial_participation(method, data, run_dir):
    run, _ = compare(data, run_dir, method, BASE[method], participation=0.6, seed=3)
    for participants in run.participants:
        assert len(participants) == len(set(participants)) == 3
        assert set(participants) <= set(range(len(SIZES)))
    assert len({tuple(sorted(p)) for p in run.participants}) > 1


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedlada"])
def test_local_epochs_of_full_batches_are_as_many_steps(method, data, run_dir):
    compare(data, run_dir, method, BASE[method], local_epochs=STEPS)


@pytest.mark.parametrize("method", BASE)
def test_single_precision_agrees_to_rounding(method, data, run_dir):
    run, expected = compare(data, run_dir, method, BASE[method], precision="fp32", tolerance=1e-4)
    for record, reference in zip(run.metrics, expected):
        assert record["consistency"] == pytest.approx(reference.consistency, rel=1e-4)


@pytest.mark.parametrize("engine", ["stacked", "generic"])
@pytest.mark.parametrize("method", ["scaffold", "fedcm", "fedlada"])
def test_both_engines_agree_with_the_reference(method, engine, data, run_dir):
    compare(data, run_dir, method, BASE[method], engine=engine)


@pytest.mark.parametrize("method", ["scaffold", "fedlada"])
def test_training_in_small_groups_changes_nothing(method, data, run_dir):
    compare(data, run_dir, method, BASE[method], max_clients_at_once=2)


# A client with copies of one image has the same gradient for any mini-batch, so clients may take
# unequal numbers of steps (batch 3: ceil(n_i / 3) per epoch) and still be followed exactly.
COPIES = [3, 8, 5, 2]
EPOCHS, BATCH = 2, 3
UNEQUAL_STEPS = [2, 6, 4, 2]


@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("method", BASE)
def test_unequal_numbers_of_local_steps(method, weighting, copies, run_dir):
    settings = dict(BASE[method], weighting=weighting)
    run = run_here(
        copies,
        run_dir,
        algorithm=method,
        rounds=ROUNDS,
        local_epochs=EPOCHS,
        batch_size=BATCH,
        participation=0.75,
        **settings,
    )
    expected = beside(run, method, ROUNDS, UNEQUAL_STEPS, settings)
    assert disagreement(run.x, expected[-1].x, copies.start) < EXACT
