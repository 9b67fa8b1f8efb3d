"""Small models of the kinds that people train today: ViT, GPT, DistilBERT and U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedlada_mpi.tasks import About, Array

TOKENS, LENGTH = 11, 6


class ViTBlock(nn.Module):
    """As in timm: queries, keys and values by one layer, split after their axes are turned."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, classes=5, image_shape=(32, 32, 3), width=12, heads=3, depth=2, patch=8, dropout=0.0):
        super().__init__()
        rows, columns, channels = image_shape
        count = (rows // patch) * (columns // patch)
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.1 * torch.randn(1, count + 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPTBlock(nn.Module):
    """As in nanoGPT, with the mask of a buffer where ``written_out``."""

    def __init__(self, width: int, heads: int, dropout: float, written_out: bool, length: int):
        super().__init__()
        self.heads, self.dropout, self.written_out = heads, dropout, written_out
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def attend(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.heads, C // self.heads).transpose(1, 2) for y in (q, k, v))
        if self.written_out:
            att = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
            att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
            y = self.attn_dropout(att) @ v
        else:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """With the table of tokens as the last layer's weight."""

    def __init__(self, tokens=TOKENS, length=LENGTH, width=8, heads=2, depth=2, dropout=0.0, written_out=False):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(tokens, width), nn.Embedding(length, width), nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(width, heads, dropout, written_out, length) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        positions = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class DistilBERT(nn.Module):
    """Tokens and a mask of those that are there; the norm is last, and a class is read from the first token."""

    def __init__(self, tokens=TOKENS, length=LENGTH, width=8, heads=2, depth=2, classes=3, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(tokens, width, padding_idx=0)
        self.places, self.norm, self.drop = nn.Embedding(length, width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(
                q=nn.Linear(width, width), k=nn.Linear(width, width), v=nn.Linear(width, width),
                out=nn.Linear(width, width), sa_norm=nn.LayerNorm(width, eps=1e-12), lin1=nn.Linear(width, 2 * width),
                lin2=nn.Linear(2 * width, width), out_norm=nn.LayerNorm(width, eps=1e-12), drop=nn.Dropout(dropout),
            )) for _ in range(depth)
        )  # fmt: skip
        self.pre, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask):
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device).unsqueeze(0).expand_as(input_ids)
        x = self.drop(self.norm(self.words(input_ids) + self.places(positions)))
        for layer in self.layers:
            n, _, width = x.shape
            q, k, v = (
                layer[name](x).view(n, -1, self.heads, width // self.heads).transpose(1, 2) for name in ("q", "k", "v")
            )
            scores = torch.matmul(q / (width // self.heads) ** 0.5, k.transpose(2, 3))
            mask = (attention_mask == 0).view(n, 1, 1, length).expand_as(scores)
            weights = nn.functional.softmax(scores.masked_fill(mask, torch.finfo(scores.dtype).min), dim=-1)
            y = torch.matmul(layer["drop"](weights), v).transpose(1, 2).contiguous().view(n, -1, width)
            x = layer["sa_norm"](layer["out"](y) + x)
            x = layer["out_norm"](layer["drop"](layer["lin2"](F.gelu(layer["lin1"](x)))) + x)
        return self.classifier(F.relu(self.pre(x[:, 0])))


class UNet(nn.Module):
    """With learnt and with interpolated steps up, for two or three sides."""

    def __init__(self, channels=2, classes=3, width=4, sides=2):
        super().__init__()
        conv, up = (nn.Conv2d, nn.ConvTranspose2d) if sides == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.mode = "bilinear" if sides == 2 else "trilinear"
        self.pool = nn.MaxPool2d(2) if sides == 2 else nn.MaxPool3d(2)

        def block(inner, out):
            return nn.Sequential(
                conv(inner, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU(), conv(out, out, 3, padding=1), nn.SiLU()
            )

        self.down1, self.down2, self.bottom = block(channels, width), block(width, 2 * width), block(2 * width, 8)
        self.up, self.up2 = up(8, 2 * width, 2, stride=2), conv(2 * width, width, 1)
        self.join1, self.join2 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = conv(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        y = self.join1(torch.cat([b, self.up(self.bottom(self.pool(b)))], dim=1))
        y = self.up2(F.interpolate(y, scale_factor=2, mode=self.mode, align_corners=False))
        return self.head(self.join2(torch.cat([a, y], dim=1)))


IMAGES = About(Array("uint8", (32, 32, 3)), classes=5, image=True)
TEXT = About(Array("int64", (LENGTH,), TOKENS), Array("int64", (LENGTH,)), classes=TOKENS)
MASKED = About({"input_ids": Array("int64", (LENGTH,), TOKENS), "attention_mask": Array("int64", (LENGTH,), 2)})
ZOO = {
    "vit": (ViT, IMAGES),
    "gpt": (GPT, TEXT),
    "distilbert": (DistilBERT, MASKED),
    "unet": (UNet, About(Array("float32", (2, 8, 8)))),
}
