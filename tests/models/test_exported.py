"""What torch.fx cannot trace and torch.export can: on stacked layers, and equal to the module in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sequence_zoo import GPT, LENGTH, MASKED, TEXT, TOKENS
from stacked_checks import built, check_stacked
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array


class Checked(GPT):
    """An assertion on the length, a loop over places and a branch on a shape, which torch.fx cannot follow."""

    def forward(self, tokens):
        assert tokens.size(1) <= LENGTH
        x = self.wte(tokens)
        x = x + torch.stack([x[:, : place + 1].mean(1) for place in range(tokens.size(1))], 1)
        x = x + self.wpe.weight[: tokens.size(1)] if x.shape[-1] > 1 else x
        for block in self.h:
            x = block(x)
        lowest = torch.finfo(x.dtype).min
        return self.lm_head(self.ln_f(x.masked_fill(x < lowest / 2, 0).to(self.ln_f.weight.dtype)))


def test_a_model_that_torch_fx_cannot_trace():
    torch.manual_seed(0)
    check_stacked(Checked(dropout=0.1), TEXT)


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.up = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 3, 2, 2),
        )
        self.line, self.fc = nn.Conv1d(3, 2, 3), nn.Linear(4, 5)
        self.register_buffer("order", torch.tensor([1, 0]))

    def forward(self, x):
        assert x.shape[1] == 2
        y = self.up(F.max_pool2d(F.relu(self.norm(self.conv(x[:, self.order]))), 2))
        y = F.adaptive_avg_pool2d(1 - F.relu6(3 * y), (6, 1)).squeeze(-1)
        y = y.masked_fill((y > 1) | (y < -5), 0.5).mul_(2)
        return self.fc(self.line(y).flatten(1)[:, ::2]) @ torch.eye(5, dtype=x.dtype) - 2 * x[:, 0, :1, 0]


def test_layers_of_images():
    torch.manual_seed(0)
    check_stacked(Maps(), About(Array("float32", (2, 6, 6))))


class Branching(nn.Linear):
    """A branch on values, which torch.export cannot follow either."""

    def forward(self, x):
        return super().forward(x if self.bias.sum() > 0 else -x)


def test_what_torch_says_of_a_model_that_it_cannot_follow_is_not_shown(capfd):
    network = models.build(Given(Branching(6, 3)), (3,), About(Array("float32", (6,))))
    assert "cannot be traced" in network.untraceable_because
    assert capfd.readouterr() == ("", "")


def test_the_module_keeps_no_tensors_of_the_trace():
    module = Checked()
    before = set(vars(module))
    network = built(module, TEXT)
    assert set(vars(network.module)) == before


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids).logits


class MaskedLogits(Logits):
    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask).logits


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return Logits(transformers.GPT2LMHeadModel(config)), TEXT


def bert(transformers):
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return MaskedLogits(transformers.BertForSequenceClassification(config)), MASKED


def llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Logits(transformers.LlamaForCausalLM(config)), TEXT


@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_models_of_hugging_face(make):
    torch.manual_seed(0)
    # Llama's norms and positions are computed in float32, whatever the type of the rest.
    check_stacked(*make(pytest.importorskip("transformers")), close=1e-9 if make is llama else 1e-12)
