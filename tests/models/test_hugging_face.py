"""Models in transformers' format, from folders that it wrote; all of them are tiny and random."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest
import torch
from repository import ROOT

import fedlada_mpi
from fedlada_mpi import models
from fedlada_mpi.models import Lora
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks.base import About, Array

LENGTH, TOKENS, CLASSES = 12, 20, 3
ROWS = About(Array("int64", (LENGTH,), TOKENS), classes=TOKENS)
VOCABULARY = dict(vocab_size=24, initializer_range=0.5)  # so that every token counts
SIZES = dict(max_position_embeddings=16, **VOCABULARY)
BERT = dict(model_type="bert", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **SIZES)
GPT2 = dict(model_type="gpt2", n_embd=8, n_layer=2, n_head=2, n_positions=16, **VOCABULARY)
LLAMA = dict(BERT, model_type="llama", pad_token_id=None)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def folder(transformers, tmp_path):
    """A function that makes the folder of a config, with weights where a kind of model is given."""

    def made(config: dict, kind: str = "") -> str:
        there = tmp_path / config["model_type"]
        there.mkdir(exist_ok=True)
        (there / "config.json").write_text(json.dumps(config))
        if kind:
            torch.manual_seed(0)
            about = transformers.AutoConfig.from_pretrained(there)
            getattr(transformers, kind).from_config(about).save_pretrained(there)
        return str(there)

    return made


def build(path: str, outputs=(LENGTH, TOKENS), inputs=ROWS, **options):
    return models.build(f"hf:{path}", outputs, inputs, stacked=False, **options)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_language_model(config, folder, transformers):
    path = folder(config, "AutoModelForCausalLM")
    network = build(path)
    assert network.notes == ["logits of the first 20 of 24 tokens, as the data has no others"]
    expected = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = torch.randint(TOKENS, (4, LENGTH))
    with torch.no_grad():
        assert torch.equal(network.module.eval()(tokens), expected(tokens).logits[..., :TOKENS])
    assert network.layout.numel == sum(p.numel() for p in expected.parameters())  # GPT-2's tied head counts once


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_padding_is_not_seen(config, folder, transformers):
    """Rows of classification are filled up with 0: their outputs are those of the rows as they were."""
    network = build(folder(config), (CLASSES,))
    module, model = network.module.eval(), network.module.model.eval()
    rows = [torch.randint(1, TOKENS, (length,)) for length in (LENGTH, 5, 1)]
    filled = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row[None]).logits for row in rows])
        torch.testing.assert_close(module(filled), alone)
        assert module(torch.zeros(2, LENGTH, dtype=torch.int64)).isfinite().all()
        module.padding = None
        assert (config is GPT2) == torch.allclose(module(filled), alone, rtol=1e-3)  # which sees no later tokens anyway


def test_a_mask_of_the_data(folder):
    """Several arrays reach the model by their names."""
    arrays = {"input_ids": Array("int64", (LENGTH,), TOKENS), "attention_mask": Array("int64", (LENGTH,), 2)}
    module = build(folder(BERT), (CLASSES,), About(arrays)).module.eval()
    tokens = torch.randint(TOKENS, (2, LENGTH))
    mask = torch.ones_like(tokens)
    cut = mask.clone()
    cut[:, 6:] = 0
    with torch.no_grad():
        short = module(input_ids=tokens[:, :6], attention_mask=mask[:, :6])
        torch.testing.assert_close(module(input_ids=tokens, attention_mask=cut), short)
        assert not torch.allclose(module(input_ids=tokens, attention_mask=mask), short, rtol=1e-3)


def test_a_config_alone_is_random_by_the_seed(folder):
    path = folder(GPT2)
    one, same, other = (build(path, seed=seed) for seed in (1, 1, 2))
    assert one.notes[0] == f"{path} has no weights: random ones, by --seed"
    assert torch.equal(one.initial(), same.initial())
    assert not torch.equal(one.initial(), other.initial())


def test_a_new_head_is_trained_next_to_adapters(folder):
    network = build(folder(BERT, "AutoModelForMaskedLM"), (CLASSES,), lora=Lora(2, "attention"))
    trained = {e.name for e in network.layout.entries if "lora" not in e.name}
    assert trained == {f"model.{n}.{p}" for n in ("bert.pooler.dense", "classifier") for p in ("weight", "bias")}
    assert "has no values of model.bert.pooler.dense.bias" in network.notes[0]
    assert "on 4 layers" in network.notes[1]


def test_a_head_of_other_outputs_is_a_new_one(folder, tmp_path):
    path = folder(BERT, "AutoModelForSequenceClassification")  # of two classes
    assert not build(path, (2,)).notes
    names = "model.classifier.bias, model.classifier.weight"
    assert build(path, (CLASSES,)).notes == [f"{path} has no values of {names}: random ones, by --seed"]
    folder(BERT | {"vocab_size": 25})
    with pytest.raises(UserError, match=r"word_embeddings.weight has the shape \[24, 8\], and \[25, 8\]"):
        build(path, (CLASSES,))


def test_adapters_on_layers_of_gpt2(folder):
    """Which are transformers' Conv1D; the head shares its weights with the embedding."""
    network = build(folder(GPT2), lora=Lora(2))
    names = {e.name.rpartition(".")[0].rpartition(".h.0.")[2] for e in network.layout.entries if ".h.0." in e.name}
    assert names == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert not any("lm_head" in e.name for e in network.layout.entries)
    with pytest.raises(UserError, match=r"lm_head of .* shares its weights with another layer"):
        build(folder(GPT2), lora=Lora(2, "lm_head"))


@pytest.mark.parametrize(("config", "outputs"), [(GPT2, (LENGTH, TOKENS)), (BERT, (CLASSES,))], ids=["gpt2", "bert"])
def test_adapters_on_stacked_layers(config, outputs, folder):
    network = models.build(f"hf:{folder(config)}", outputs, ROWS, lora=Lora(2, "attn|attention"))
    assert not network.untraceable_because
    assert network.forward is not None


def test_a_run(folder, tmp_path):
    """With rows of different lengths; what is loaded is what was trained, and a resume goes on with the same bits."""
    random = np.random.default_rng(0)
    rows = [np.arange(start, start + length) % TOKENS for start, length in random.integers(3, 9, (24, 2))]
    data = fedlada_mpi.Data(inputs=rows[:18], clients=np.arange(18) % 3, test=(rows[18:],))
    small = GPT2 | {"n_layer": 1}  # each of the runs traces all layers
    path = folder(small, "AutoModelForCausalLM")
    given = dict(data=data, model=f"hf:{path}", lora=2, lora_on="attn|mlp", algorithm="fedlada", lr=0.05, local_steps=2)
    given |= dict(batch_size=4, eval_every=0, quiet=True, data_dir=tmp_path / "data")
    run = fedlada_mpi.train(**given, rounds=2, out=tmp_path / "run")
    assert fedlada_mpi.load(run.dir).evaluate() == run.evaluate()
    assert type(run.model.module.model).__name__ == "GPT2LMHeadModel"
    assert not any("lora" in name for name in run.model.state_dict())
    fedlada_mpi.train(**given, rounds=1, out=tmp_path / "parts")
    resumed = fedlada_mpi.train(**given, rounds=2, out=tmp_path / "parts", resume=True)
    for name, value in run.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    written = (tmp_path / "gpt2" / "config.json").read_bytes()
    given |= dict(engine="generic")  # which traces nothing: most of the time of a run
    for other in ({"initializer_range": 0.4}, {"n_head": 4}):
        folder(small | other, "AutoModelForCausalLM" if "n_head" not in other else "")
        with pytest.raises(UserError, match="model of other frozen parameters"):
            fedlada_mpi.train(**given, rounds=3, out=tmp_path / "parts", resume=True)
        folder(small, "AutoModelForCausalLM")
    assert (tmp_path / "gpt2" / "config.json").read_bytes() == written
    fedlada_mpi.train(**given, rounds=3, out=tmp_path / "parts", resume=True)


@pytest.mark.parametrize(
    ("config", "outputs", "inputs", "words"),
    [
        (GPT2 | {"vocab_size": 19}, (LENGTH, TOKENS), ROWS, "has 19 tokens, and the data 20: use its own tokenizer"),
        (GPT2 | {"n_positions": 8}, (LENGTH, TOKENS), ROWS, "takes rows of up to 8 tokens, got 12"),
        (GPT2, None, ROWS, "the task asks for outputs of any shape"),
        (GPT2, (4, 8, 8), ROWS, r"the task asks for outputs of \[4, 8, 8\]"),
        (GPT2, (CLASSES,), (8, 8, 3), r"got images \[3, 8, 8\], expected rows of tokens"),
        (GPT2, (CLASSES,), About({"age": Array("int64", (1,), 9)}), "expected rows of tokens, or several arrays"),
        ({"model_type": "nobody's"}, (CLASSES,), ROWS, "ValueError: The checkpoint you are trying to load"),
        (BERT | {"model_type": "vit"}, (LENGTH, TOKENS), ROWS, "--model hf:"),
    ],
)
def test_refused(config, outputs, inputs, words, folder):
    with pytest.raises(UserError, match=words):
        build(folder(config), outputs, inputs)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", None])
def test_folders_that_are_none(content, transformers, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"--model hf:.*expected a folder that save_pretrained wrote"):
        build(str(tmp_path))


def test_damaged_weights(folder, tmp_path):
    path = folder(GPT2, "AutoModelForCausalLM")
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(UserError, match=f"--model hf:{path}: "):
        build(path)


def test_code_in_the_folder_is_not_run(folder, tmp_path):
    path = folder({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}})
    (tmp_path / "theirs" / "theirs.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UserError, match="contains custom code"):
        build(path)


def test_without_transformers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = r"cannot import transformers \(.*\): pip install 'fedlada_mpi\[hf\]'"
    with pytest.raises(UserError, match=words):
        build(str(tmp_path))


@pytest.mark.slow
def test_the_program_for_a_real_checkpoint(folder, transformers, tmp_path, monkeypatch):
    """Of docs/adapters.md, with a tiny one in its place."""
    page = (ROOT / "docs/adapters.md").read_text()
    program = textwrap.dedent(page.partition("`letters/NAME.txt`:\n")[2])
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"word{i}": i for i in range(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder(GPT2 | {"n_positions": 128}, "AutoModelForCausalLM")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (tmp_path / "letters").mkdir()
    random = np.random.default_rng(0)
    for name in ("Ada", "Bea", "Cas"):
        (tmp_path / "letters" / f"{name}.txt").write_text(" ".join(random.choice([*words], 700)))
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(program, found)
    assert len(found["run"].metrics["round"]) == 20
    merged = transformers.AutoModelForCausalLM.from_pretrained("gpt2-letters").eval()
    tokens = torch.tensor([found["rows"][0][1]])
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits[..., :TOKENS], found["run"].model(tokens))
