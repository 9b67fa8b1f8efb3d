"""Adapters on a frozen base in transformers' format: stacked, nothing under vmap, and the base in one product."""

from __future__ import annotations

import json

import pytest
from sequence_zoo import GPT, TEXT
from stacked_checks import check_network

from fedlada_mpi import models
from fedlada_mpi.models import Lora, added_norm, low_rank
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.base import About, Array

LENGTH, TOKENS, CLASSES = 6, 20, 3
ROWS = About(Array("int64", (LENGTH,), TOKENS), classes=TOKENS)
SIZES = dict(vocab_size=24, initializer_range=0.5)
GPT2 = dict(model_type="gpt2", n_embd=8, n_layer=2, n_head=2, n_positions=16, **SIZES)
BERT = dict(
    model_type="bert", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16, **SIZES,
)  # fmt: skip
LLAMA = dict(BERT, model_type="llama", pad_token_id=None)


@pytest.mark.parametrize(
    ("config", "outputs", "lora", "adapted"),
    [
        (GPT2, (LENGTH, TOKENS), Lora(2), 8),
        (GPT2, (LENGTH, TOKENS), None, 0),
        (LLAMA, (LENGTH, TOKENS), Lora(2, "attn", fixed_a=True), 4),
        (BERT, (CLASSES,), Lora(2, "attention"), 4),
        (GPT2, (CLASSES,), Lora(2), 9),
    ],
)
def test_adapters_on_stacked_layers(tmp_path, monkeypatch, config, outputs, lora, adapted):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = models.build(f"hf:{tmp_path}", outputs, ROWS, lora=lora)
    check_network(network, close=1e-9 if config is LLAMA else 1e-11)
    called, linear = [], low_rank.linear
    monkeypatch.setattr(low_rank, "linear", lambda p, x, layer: called.append(layer.weight) or linear(p, x, layer))
    network.forward(network.stack(network.initial().expand(2, -1)), network.form.zeros(2, 1))
    assert len(set(called)) == len(called) == adapted  # a layer and its adapter are one step


@pytest.mark.parametrize("fixed_a", [False, True])
def test_steps_of_a_transformer(monkeypatch, fixed_a):
    """Two adapted layers with an activation between them are one step, and so are a sum and its norm."""
    met = []

    def counted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: met.append(name) or function(*arguments))

    counted(low_rank, "pair")
    counted(added_norm, "added_frozen")
    counted(added_norm, "frozen")
    network = models.build(Given(GPT(depth=2)), None, TEXT, lora=Lora(2, fixed_a=fixed_a))
    check_network(network)
    met.clear()
    network.forward(network.stack(network.initial().expand(2, -1)), network.form.zeros(2, 1))
    assert met == ["frozen", "added_frozen", "pair", "added_frozen", "added_frozen", "pair", "added_frozen"]
