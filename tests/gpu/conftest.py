"""What every test on a GPU starts from."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def full_float32():
    """Whatever precision a run in the same process has set."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed
