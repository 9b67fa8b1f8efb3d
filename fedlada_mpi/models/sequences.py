"""Built-in models with attention or recurrence: a small GPT, the LSTM of the federated literature, ViT-Tiny."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .architectures import MakeActivation
from .form import Form

STD = 0.02  # of the initial weights of transformers


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        found = F.scaled_dot_product_attention(self._split(q), self._split(k), self._split(v), is_causal=self.causal)
        return self.proj(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """[N, heads, T, width of a head]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks and a last norm, on x plus a learned embedding of every place."""

    def __init__(self, length: int, width: int, depth: int, heads: int, causal: bool):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x + self.positions))

    def initialise(self) -> None:
        """As GPT-2: what is added to a shortcut is smaller the more there are."""
        nn.init.normal_(self.positions, std=STD)
        residual = STD / (2 * len(self.blocks)) ** 0.5
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=residual if name.endswith(("proj.weight", "mlp.2.weight")) else STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class GPT(nn.Module):
    """The next token after each of a row, with the embedding's weights in the last layer, too."""

    def __init__(self, tokens: int, length: int, width: int = 128, depth: int = 4, heads: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.transformer = Transformer(length, width, depth, heads, causal=True)
        self.head = nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embedding.weight, std=STD)
        self.head.weight = self.embedding.weight
        self.transformer.initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.transformer(self.embedding(tokens)))


def gpt(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """For text: a transformer of 4 layers, 128 wide, 4 heads, which sees all tokens up to each."""
    return GPT(_vocabulary("gpt", outputs, form), outputs[0])


class LSTM(nn.Module):
    def __init__(self, tokens: int, embedded: int = 8, width: int = 256, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedded)
        self.lstm = nn.LSTM(embedded, width, layers, batch_first=True)
        self.fc = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embedding(tokens))[0])


def lstm(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """For text: two LSTM layers of 256 on embeddings of 8, as LEAF and FedAvg's paper have them for Shakespeare."""
    return LSTM(_vocabulary("lstm", outputs, form))


def _vocabulary(name: str, outputs: tuple[int, ...], form: Form) -> int:
    if not form.tokens(form.single) or len(outputs) != 2:
        raise ValueError(f"{name} takes rows of tokens, got {form.seen_shape}")
    return outputs[1]


class ViT(nn.Module):
    """A vision transformer with the mean over all patches in place of a class token (Beyer et al. 2022)."""

    def __init__(self, classes: int, size: tuple[int, int], channels: int, patch: int, width: int = 192):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.transformer = Transformer(size[0] // patch * (size[1] // patch), width, depth=12, heads=3, causal=False)
        self.fc = nn.Linear(width, classes)
        self.transformer.initialise()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.transformer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def vit_tiny(classes: int, image_shape: tuple[int, int, int], activation: MakeActivation) -> nn.Module:
    """ViT-Tiny: 12 layers, 192 wide, 3 heads; patches of 4 pixels, of 16 where images are larger than 64."""
    rows, columns, channels = image_shape
    patch = 4 if max(rows, columns) <= 64 else 16
    if rows % patch or columns % patch:
        raise ValueError(f"vit_tiny cuts images into patches of {patch} pixels, got {rows}x{columns}")
    return ViT(classes, (rows, columns), channels, patch)
