"""Attention in users' models: trained, with and without dropout, the same on any ranks and after a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import from_root
from tiers import slow
from torch import nn
from torch.nn import functional as F

from fedlada_mpi import Data, models, train
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array


class Attention(nn.Module):
    """One head over rows of tokens."""

    def __init__(self, dropout: float = 0.0, causal: bool = True):
        super().__init__()
        self.dropout, self.causal = dropout, causal
        self.embedding, self.project, self.head = nn.Embedding(7, 8), nn.Linear(8, 24), nn.Linear(8, 7)

    def forward(self, tokens):
        q, k, v = self.project(self.embedding(tokens)).chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)))


ABOUT = About(Array("int64", (5,), 7), Array("int64", (5,)), classes=7)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("module", [Attention(), Attention(0.3), Attention(causal=False), Encoder(), Encoder(0.3)])
def test_attention_is_taken(module):
    network = models.build(Given(module), (5, 7), ABOUT)
    assert network.layout.numel == sum(p.numel() for p in module.parameters())


@pytest.mark.ranks
@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("module", [Attention(0.3), slow(Encoder(0.3))], ids=["attention", "encoder"])
def test_dropout_in_attention_is_the_same_on_any_ranks_and_after_a_resume(tmp_path_factory, module):
    there = from_root(lambda: str(tmp_path_factory.mktemp("runs")))
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = np.random.default_rng(0).integers(0, 7, (12, 5))
    data = Data(inputs=tokens, clients=np.arange(12) % 3, test=(tokens,), task="next-token")
    given = dict(data=data, model=module, algorithm="fedavg", precision="fp64", sums="exact", batch_size=2,
                 local_steps=2, lr=0.1, participation=1.0, rounds=2, quiet=True, data_dir=f"{there}/data")  # fmt: skip
    whole = train(**given, out=f"{there}/whole")
    train(**{**given, "rounds": 1}, out=f"{there}/parts")
    resumed = train(**given, out=f"{there}/parts", resume=True)
    together = train(**{**given, "sums": "fast"}, out=f"{there}/together")
    for name, value in whole.model.module.state_dict().items():
        assert torch.equal(resumed.model.module.state_dict()[name], value), name
        torch.testing.assert_close(together.model.module.state_dict()[name], value, rtol=1e-9, atol=1e-10)
