"""``--model hf:FOLDER``: a model in the format of transformers from a folder of this machine; nothing is downloaded.

Next tokens are predicted by the folder's causal language model, all else by its model for classifying sequences.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..support.errors import UserError, first_line, some
from ..support.inputs import check_path, read_bytes
from ..support.user_code import HUGGING_FACE, users_code
from ..tasks.base import Array
from .form import Form

TOKENS, MASK = "input_ids", "attention_mask"
CONFIG = "config.json"
HERE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # neither a network nor others' code
TRIED = 16  # tokens of a row, in a dry run
PADDING = 0  # what rows of different lengths are filled up with


class HuggingFace(nn.Module):
    """The logits of a model of transformers, ``model``.

    Where the data has no mask, places with the token ``padding`` are left out, but for the first, as a row that has
    none but such would have no outputs. ``config`` is the content of config.json.
    """

    def __init__(
        self, model: nn.Module, config: bytes, outputs: int, padding: int | None = None, fresh: tuple[str, ...] = ()
    ):
        super().__init__()
        # A constant, like the weights: a run goes on with the same.
        digest = torch.tensor(list(hashlib.sha256(config).digest()), dtype=torch.uint8)
        self.register_buffer("config_digest", digest, persistent=False)
        self.model, self.outputs, self.padding = model, outputs, padding
        self.fresh = fresh  # the names of parameters that the folder has no values of

    def logits(self, arrays: dict[str, Tensor]) -> Tensor:
        if self.padding is not None and MASK not in arrays:
            known = arrays[TOKENS] != self.padding
            arrays[MASK] = torch.cat((torch.ones_like(known[:, :1]), known[:, 1:]), 1).long()
        logits: Tensor = self.model(**arrays).logits
        return logits[..., : self.outputs]


class OfTokens(HuggingFace):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits({TOKENS: input_ids})


class OfArrays(HuggingFace):
    """Of several arrays by name, such as a mask of the data's own."""

    def forward(self, **arrays: Tensor) -> Tensor:
        return self.logits(arrays)


def hf_model(name: str, outputs: tuple[int, ...] | None, form: Form) -> tuple[HuggingFace, list[str]]:
    """The model in the folder that ``name`` gives, and what is to be said of it."""
    folder, what = Path(name.removeprefix(HUGGING_FACE)), f"--model {name}"
    check_path(str(folder), "--model")
    try:
        # Here, as it is optional and takes seconds.
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(
            f"{what}: cannot import transformers ({first_line(error)}): pip install 'fedlada_mpi[hf]'"
        ) from None
    if not (folder / CONFIG).is_file():
        raise UserError(f"{what}: got no file {CONFIG} in {folder}, expected a folder that save_pretrained wrote")
    tokens = _tokens(what, form)
    if outputs is None or not (len(outputs) == 1 or (len(outputs) == 2 and outputs[0] == tokens.shape[0])):
        shape = "any shape" if outputs is None else list(outputs)
        raise UserError(f"{what}: the task asks for outputs of {shape}, expected those of next-token or classification")
    *language, number = outputs  # the length of a row, where every token has outputs
    with _quiet(transformers), users_code(what, "a folder that save_pretrained wrote"):
        config = transformers.AutoConfig.from_pretrained(folder, **HERE)
        _check_config(what, config, tokens)
        config.use_cache = False
        if not language:
            config.num_labels = number
            config.pad_token_id = PADDING if config.pad_token_id is None else config.pad_token_id
        kind = transformers.AutoModelForCausalLM if language else transformers.AutoModelForSequenceClassification
        model, fresh, notes = _loaded(kind, folder, config)
    if language and config.vocab_size > number:
        notes.append(f"logits of the first {number} of {config.vocab_size} tokens, as the data has no others")
    # A causal language model sees no padding, which is behind a row's tokens.
    masked = not language and MASK in inspect.signature(model.forward).parameters
    wrapped = OfArrays if form.single is None else OfTokens
    padding = config.pad_token_id if masked else None
    return wrapped(model, read_bytes(folder / CONFIG), number, padding, fresh), notes


def _loaded(kind: Any, folder: Path, config: Any) -> tuple[nn.Module, tuple[str, ...], list[str]]:
    """A model with the weights in the folder, the names of those that it has not, and what is to be said of these."""
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return kind.from_config(config).float(), (), [f"{folder} has no weights: random ones, by --seed"]
    how = dict(config=config, output_loading_info=True, ignore_mismatched_sizes=True)
    model, found = kind.from_pretrained(folder, **how, **HERE)
    sizes = {key: (list(given), list(expected)) for key, given, expected in found["mismatched_keys"]}
    for key, (given, expected) in sizes.items():
        if key.startswith(f"{model.base_model_prefix}."):  # what is not in the body may be a head with other outputs
            raise ValueError(f"{key} has the shape {given}, and {expected} by {CONFIG}")
    fresh = tuple(f"model.{key}" for key in sorted({*found["missing_keys"], *sizes}))
    notes = [f"{folder} has no values of {some(fresh)}: random ones, by --seed"] if fresh else []
    return model.float(), fresh, notes


def short_rows(outputs: tuple[int, ...], form: Form) -> tuple[tuple[int, ...], Form]:
    """Outputs and inputs of a dry run, which takes long on long rows; models of transformers take any length."""
    length = _tokens("", form).shape[0]

    def cut(array: Array) -> Array:
        return replace(array, shape=(min(length, TRIED), *array.shape[1:])) if array.shape[:1] == (length,) else array

    arrays = form.arrays
    short = {name: cut(array) for name, array in arrays.items()} if isinstance(arrays, Mapping) else cut(arrays)
    return (min(length, TRIED), outputs[1]) if len(outputs) == 2 else outputs, replace(form, arrays=short)


def _tokens(what: str, form: Form) -> Array:
    tokens = form.arrays.get(TOKENS) if isinstance(form.arrays, Mapping) else form.arrays
    if tokens is None or not form.tokens(tokens) or len(tokens.shape) != 1:
        raise UserError(f"{what}: got {form.seen_shape}, expected rows of tokens, or several arrays with {TOKENS}")
    return tokens


def _check_config(what: str, config: Any, tokens: Array) -> None:
    if tokens.values > config.vocab_size:
        raise UserError(f"{what} has {config.vocab_size} tokens, and the data {tokens.values}: use its own tokenizer")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and tokens.shape[0] > longest:
        raise UserError(f"{what} takes rows of up to {longest} tokens, got {tokens.shape[0]}: make them shorter")


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars and reports: notes say what matters of them."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
