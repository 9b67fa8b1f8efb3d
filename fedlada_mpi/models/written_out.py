"""Layers of torch that are many operations, written out in them, so that they can be traced.

torch's own code asks for shapes and for its fused kernels, which no trace can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


@fx.wrap
def added_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of attention layers, in which True means to leave a key out, as numbers to be added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


@fx.wrap
def mask_of_heads(mask: Tensor, heads: int) -> Tensor:
    """[N * heads, ...] -> [N, heads, ...]; a mask for all of them stays as it is."""
    return mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask


def _multihead_attention(
    layer: nn.MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Of sequences in batches. The weights are None: a model that uses them cannot be traced."""
    inputs = [x if layer.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    if query is key and key is value:
        q, k, v = F.linear(inputs[0], layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    else:
        weights = layer.in_proj_weight.chunk(3, 0)
        biases: Any = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3, 0)
        q, k, v = (F.linear(x, weights[i], biases[i]) for i, x in enumerate(inputs))
    heads = layer.num_heads
    q, k, v = (x.unflatten(-1, (heads, layer.head_dim)).transpose(1, 2) for x in (q, k, v))
    mask = None if attn_mask is None else mask_of_heads(added_mask(attn_mask, q), heads)
    if key_padding_mask is not None:
        padding = added_mask(key_padding_mask, q).unsqueeze(1).unsqueeze(1)
        mask = padding if mask is None else mask + padding
    out = F.scaled_dot_product_attention(q, k, v, mask, layer.dropout if layer.training else 0.0)
    out = F.linear(out.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    return (out if layer.batch_first else out.transpose(0, 1)), None


def _encoder_layer(
    layer: nn.TransformerEncoderLayer, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    x, masks = src, (src_mask, src_key_padding_mask)
    if layer.norm_first:
        x = x + layer._sa_block(layer.norm1(x), *masks)
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(x + layer._sa_block(x, *masks))
    return layer.norm2(x + layer._ff_block(x))


def _encoder(
    layer: nn.TransformerEncoder, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:  # fmt: skip
    for inner in layer.layers:
        src = inner(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if layer.norm is None else layer.norm(src)


def _decoder_layer(
    layer: nn.TransformerDecoderLayer, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None,
    tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None, tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:  # fmt: skip
    x, own, other = tgt, (tgt_mask, tgt_key_padding_mask), (memory, memory_mask, memory_key_padding_mask)
    if layer.norm_first:
        x = x + layer._sa_block(layer.norm1(x), *own)
        x = x + layer._mha_block(layer.norm2(x), *other)
        return x + layer._ff_block(layer.norm3(x))
    x = layer.norm1(x + layer._sa_block(x, *own))
    x = layer.norm2(x + layer._mha_block(x, *other))
    return layer.norm3(x + layer._ff_block(x))


LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: _multihead_attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoderLayer: _decoder_layer,
}


def written_out(layer: nn.Module) -> Callable[..., Any] | None:
    """What a layer does with its arguments, in operations that can be traced; None if there is no such form."""
    if type(layer) is nn.MultiheadAttention:
        same_widths = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
        return _multihead_attention if same_widths else None
    return LAYERS.get(type(layer))
