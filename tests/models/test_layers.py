"""Models of today on stacked layers: nothing under vmap, and what the module gives, in float64."""

from __future__ import annotations

import pytest
import torch
from sequence_zoo import ZOO, GPT, MASKED, TEXT, DistilBERT, UNet, ViT
from stacked_checks import check_stacked

from fedlada_mpi.tasks import About, Array


@pytest.mark.parametrize("name", ZOO)
def test_models_of_today(name):
    torch.manual_seed(0)
    model, about = ZOO[name]
    check_stacked(model(), about)


@pytest.mark.parametrize("model", [ViT, GPT, DistilBERT])
def test_what_they_drop(model):
    torch.manual_seed(0)
    about = next(about for kind, about in ZOO.values() if kind is model)
    assert check_stacked(model(dropout=0.3), about).draws
