"""Every method against the reference, for every setting that changes the maths.

Double precision must agree to 1e-9 of the distance travelled, single precision to rounding. Each variation is also
shown to move the reference itself, so that none of the comparisons is empty.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from method_cases import BY_TIER, CASES, PAPER
from reference import Round
from tiers import on_ranks_with_all, slow
from training_runs import disagreement, make_data, run_here, run_reference

from fedlada_mpi import algorithms

ROUNDS, STEPS = 4, 3
SIZES = [4, 9, 6, 3, 8]
EVERYONE = [list(range(len(SIZES)))] * ROUNDS
EXACT = 1e-9
KNOWN: dict[str, list[Round]] = {}


# Methods whose variations are tried whenever tests run: with the most settings, and with state of clients.
VARIED = ("fedlada", "scaffold")


def by_tier(pairs):
    """Whenever tests run, and on 4 ranks with --all; of the paper's other methods with --all; further ones alone."""
    on_ranks_and_slow = partial(pytest.param, marks=[pytest.mark.ranks, pytest.mark.slow])
    paper = {method: on_ranks_with_all if method in VARIED else on_ranks_and_slow for method in PAPER}
    return [paper.get(pair[0], slow)(*pair) for pair in pairs]


VARIATIONS = by_tier((method, change) for method, case in CASES.items() for change in case.variations)
UNEQUAL = by_tier(
    [
        *((method, change) for method, case in CASES.items() for change in case.unequal),
        *((method, dict(weighting="uniform")) for method in PAPER),
    ]
)


def label(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "base"


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "unequal", SIZES, silos=3)


@pytest.fixture(scope="session")
def linear(shared_tmp):
    """For a model of one layer, as a method sees gradients, whatever they are of; with images on which each setting
    moves the result."""
    return make_data(shared_tmp / "linear", SIZES, silos=3, model="linear", seed=7)


@pytest.fixture(scope="session")
def copies(shared_tmp):
    return make_data(shared_tmp / "copies", COPIES, silos=2, one_image_per_client=True)


@pytest.fixture
def run_dir(shared_tmp, request):
    return shared_tmp / "methods" / request.node.name


def compare(data, out, method, settings, *, tolerance=EXACT, **more):
    flags = dict(rounds=ROUNDS, local_steps=STEPS)
    if "local_epochs" in more:
        del flags["local_steps"]
    run = run_here(data, out, algorithm=method, **{**flags, **settings, **more})
    assert len(run.participants) == ROUNDS
    expected = reference_of(data, method, settings, run.participants)
    error = disagreement(run.x, expected[-1].x, data.start)
    assert error < tolerance, f"{method} {settings}: {error:.2e} of the distance travelled"
    return run, expected


def reference_of(data, method, settings, participants=EVERYONE):
    """Tests that differ in what must not matter share one run of the reference."""
    key = repr((data.model, method, sorted(settings.items()), participants))
    if key not in KNOWN:
        KNOWN[key] = run_reference(data, method, participants, [STEPS] * len(SIZES), settings)
    return KNOWN[key]


def same_consistency(run, expected, tolerance):
    for record, reference in zip(run.metrics, expected, strict=True):
        if reference.consistency is None:
            assert record["consistency"] is None
        else:
            assert record["consistency"] == pytest.approx(reference.consistency, rel=tolerance)


def test_every_method_has_a_case():
    assert set(CASES) == set(algorithms.names())


@pytest.mark.ranks
@pytest.mark.parametrize("method", CASES)
def test_method_agrees_with_the_reference(method, data, run_dir):
    case = CASES[method]
    run, expected = compare(data, run_dir, method, case.settings)
    rates = [case.settings["lr"] * 0.8**t for t in range(ROUNDS)]
    np.testing.assert_allclose([record["lr"] for record in run.metrics], rates)
    same_consistency(run, expected, 1e-9)
    for record, reference in zip(run.metrics, expected, strict=True):
        down, up, paper = (0 if reference.silent else n * len(record["participants"]) for n in case.traffic)
        assert (record["bytes_down"], record["bytes_up"]) == (8 * len(data.start) * down, 8 * len(data.start) * up)
        assert record["paper_units"] == paper
    assert set(run.server) == {"x", *case.server}
    for name in case.server:
        vector, reference = run.server[name], expected[-1].vectors[name]
        assert np.linalg.norm(vector - reference) < EXACT * np.linalg.norm(reference), name


@pytest.mark.parametrize(("method", "change"), VARIATIONS, ids=label)
def test_every_setting_that_changes_the_maths(method, change, request, run_dir):
    # What depends on the parameter must find those of several layers.
    data = request.getfixturevalue("data" if "decay_on" in change else "linear")
    settings = {**CASES[method].settings, **change}
    _, expected = compare(data, run_dir, method, settings)
    base = reference_of(data, method, CASES[method].settings)
    assert disagreement(expected[-1].x, base[-1].x, data.start) > 0.01, "the setting changed nothing"


@pytest.mark.ranks
@pytest.mark.parametrize("method", PAPER)
def test_partial_participation(method, data, run_dir):
    run, _ = compare(data, run_dir, method, CASES[method].settings, participation=0.6, seed=3)
    for participants in run.participants:
        assert len(participants) == len(set(participants)) == 3
        assert set(participants) <= set(range(len(SIZES)))
    assert len({tuple(sorted(p)) for p in run.participants}) > 1


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedlada"])
def test_local_epochs_of_full_batches_are_as_many_steps(method, data, run_dir):
    compare(data, run_dir, method, CASES[method].settings, local_epochs=STEPS)


@pytest.mark.ranks(slow=True, two=True)
@pytest.mark.parametrize("method", BY_TIER)
def test_single_precision_agrees_to_rounding(method, data, run_dir):
    run, expected = compare(data, run_dir, method, CASES[method].settings, precision="fp32", tolerance=1e-4)
    same_consistency(run, expected, 1e-4)


@pytest.mark.ranks(slow=True, two=True)
@pytest.mark.parametrize("engine", ["stacked", "generic"])
@pytest.mark.parametrize("method", ["scaffold", "fedcm", "fedlada"])
def test_both_engines_agree_with_the_reference(method, engine, data, run_dir):
    compare(data, run_dir, method, CASES[method].settings, engine=engine)


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["scaffold", "fedlada"])
def test_training_in_small_groups_changes_nothing(method, data, run_dir):
    compare(data, run_dir, method, CASES[method].settings, max_clients_at_once=2)


# A client with copies of one image has the same gradient for any mini-batch, so clients may take
# unequal numbers of steps (batch 3: ceil(n_i / 3) per epoch) and still be followed exactly.
COPIES = [3, 8, 5, 2]
EPOCHS, BATCH = 2, 3
UNEQUAL_STEPS = [2, 6, 4, 2]


@pytest.mark.parametrize(("method", "change"), UNEQUAL, ids=label)
def test_unequal_numbers_of_local_steps(method, change, copies, run_dir):
    """With three of the four clients in a round, and means weighted by their sizes, where a method can have that."""
    case = CASES[method]
    own = {"weighting": "size", **case.settings, **case.requires, **change}
    settings = {"participation": 0.75, "local_epochs": EPOCHS, "batch_size": BATCH, **own}
    run = run_here(copies, run_dir, algorithm=method, rounds=ROUNDS, **settings)
    expected = run_reference(copies, method, run.participants, UNEQUAL_STEPS, settings)
    assert len(expected) == ROUNDS
    assert disagreement(run.x, expected[-1].x, copies.start) < EXACT
