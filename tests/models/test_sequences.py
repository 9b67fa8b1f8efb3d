"""The built-in transformers and the LSTM, against torch's own layers and by their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks.base import About, Array

TOKENS, LENGTH = 11, 6
TEXT = About(Array("int64", (LENGTH,), TOKENS), Array("int64", (LENGTH,)))


def built(name: str) -> models.Network:
    return models.build(name, (LENGTH, TOKENS), TEXT)


def block(width: int) -> int:
    """Parameters: two norms, queries, keys, values and their projection, two linear layers with 4 times the width."""
    return 2 * 2 * width + 4 * width * (width + 1) + width * 4 * width + 4 * width + 4 * width * width + width


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        (lambda: built("gpt"), 128 * (TOKENS + LENGTH) + 4 * block(128) + 2 * 128),
        (lambda: built("lstm"), 8 * TOKENS + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 257 * TOKENS),
        (
            lambda: models.build("vit_tiny", 10, (32, 32, 3)),
            192 * (4 * 4 * 3 + 1) + 192 * 64 + 12 * block(192) + 2 * 192 + 193 * 10,
        ),
    ],
)
def test_number_of_parameters(network, parameters):
    assert network().layout.numel == parameters


def as_torch_has_it(block: nn.Module, width: int, heads: int) -> nn.Module:
    """A block with its weights in torch's own encoder layer."""
    theirs = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, nn.GELU(approximate="tanh"), batch_first=True, norm_first=True
    ).double()  # fmt: skip
    names = {
        "norm1": "norm1", "norm2": "norm2", "attn.qkv.": "self_attn.in_proj_", "attn.proj": "self_attn.out_proj",
        "mlp.0": "linear1", "mlp.2": "linear2",
    }  # fmt: skip
    state = {}
    for name, value in block.double().state_dict().items():
        ours = next(prefix for prefix in names if name.startswith(prefix))
        state[names[ours] + name.removeprefix(ours)] = value
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize(("name", "width", "heads", "causal"), [("gpt", 128, 4, True), ("vit_tiny", 192, 3, False)])
def test_a_block_is_torchs_encoder_layer(name, width, heads, causal):
    network = built(name) if causal else models.build(name, 10, (8, 8, 3))
    ours = network.module.transformer.blocks[0]
    x = torch.randn(2, LENGTH, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1) if causal else None
    theirs = as_torch_has_it(ours, width, heads)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_no_token_sees_a_later_one(name):
    module = built(name).module.eval()
    tokens = torch.randint(TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % TOKENS
    before, after = module(tokens), module(changed)
    assert before.shape == (3, LENGTH, TOKENS)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()


def test_a_new_gpt_knows_nothing():
    tokens = torch.randint(TOKENS, (50, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = built("gpt").module(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(TOKENS).log().item(), abs=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.build("vit_tiny", 10, (30, 32, 3)), "--model vit_tiny: .* patches of 4 pixels, got 30x32"),
        (
            lambda: models.build("gpt", 10, (32, 32, 3)),
            r"--model gpt: gpt takes rows of tokens, got images \[3, 32, 32\]",
        ),
        (
            lambda: models.build("gpt", (5, 2), About(Array("bool", (5,), 2))),
            r"--model gpt: gpt takes rows of tokens, got truth values \[5\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
