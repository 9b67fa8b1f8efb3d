"""Which runs refuse to share their process with others."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from fedlada_mpi.session.plan import Plan, Request, one_at_a_time
from fedlada_mpi.session.recovery import attempts
from fedlada_mpi.session.recovery.attempts import Attempts
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError


def trained(monkeypatch, original_size: int, uses_gpu: bool, profile: str) -> str:
    """How a run ends that has one rank left of so many, while another holds the process."""
    world = SimpleNamespace(
        rank=0, size=1, original_size=original_size, original_ranks=[0], tolerant=False,
        collectively=lambda action: action(), limit_waiting=lambda *about: None, agree=lambda flags, good: flags,
    )  # fmt: skip
    monkeypatch.setattr(attempts, "uses_gpu", lambda config: uses_gpu)
    monkeypatch.setattr(attempts, "Training", lambda *about: SimpleNamespace(run=lambda: "finished"))
    with ExitStack() as at_end, one_at_a_time("a world of several ranks"), ExitStack() as around:
        run = Attempts(Request({}), world, at_end, around)
        run.plan = Plan(vars(Config(profile=profile)), "", 0)
        run.run()
        return run.status


@pytest.mark.parametrize(("uses_gpu", "profile"), [(True, "none"), (False, "3-5")])
def test_of_several_in_a_process_the_second_is_refused(uses_gpu, profile, monkeypatch):
    what = "a GPU" if uses_gpu else "--profile"
    with pytest.raises(UserError, match=f"another training of this process is running, and {what} takes one at a time"):
        trained(monkeypatch, 1, uses_gpu, profile)


@pytest.mark.parametrize(("uses_gpu", "profile"), [(True, "none"), (False, "3-5")])
def test_the_last_of_several_ranks_goes_on(uses_gpu, profile, monkeypatch):
    """As it has held its process since the start."""
    assert trained(monkeypatch, 2, uses_gpu, profile) == "finished"


def test_others_share_it(monkeypatch):
    assert trained(monkeypatch, 1, False, "none") == "finished"
