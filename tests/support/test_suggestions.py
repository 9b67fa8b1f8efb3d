"""What is suggested for a name that there is not."""

from __future__ import annotations

import pytest

from fedlada_mpi.settings import DATASETS, SETTINGS
from fedlada_mpi.support import launcher
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.suggestions import SYNONYMS, did_you_mean

OPTIONS = [f"--{name.replace('_', '-')}" for name in SETTINGS] + ["--eps", "--ranks"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--learning-rate", OPTIONS, "--lr"),
        ("--epochs", OPTIONS, "--local-epochs"),
        ("--num_clients", OPTIONS, "--clients"),
        ("--nproc", OPTIONS, "--ranks"),
        ("gpu", SETTINGS["device"].choices, "cuda"),
        ("fp16", SETTINGS["precision"].choices, "bf16"),
        ("CIFAR10", DATASETS, "cifar10"),
        ("CIFAR-100", DATASETS, "cifar100"),
        ("learning_rate", SETTINGS, "lr"),
        ("criterion", SETTINGS, "loss"),
        ("ruonds", SETTINGS, "rounds"),
        ("gpu", ["gnu"], "gnu"),
        ("xyzzy", SETTINGS, ""),
    ],
)
def test_a_suggestion(name, known, meant):
    assert did_you_mean(name, known) == (f" (did you mean {meant!r}?)" if meant else "")


def test_synonyms_are_of_names_that_there_are():
    choices = {choice for setting in SETTINGS.values() for choice in setting.choices}
    assert {*SYNONYMS.values()} <= {*SETTINGS, *choices, "ranks", ""}
    assert not {*SYNONYMS} & {name.replace("_", "") for name in SETTINGS}


def test_the_number_of_ranks_as_mpirun_spells_it():
    with pytest.raises(UserError, match=r"-n: got 'p', expected a number .*: mpirun's -np 4 is -n 4 here"):
        launcher.asked(["-np", "4"])
