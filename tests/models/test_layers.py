"""Layers and models of today on stacked layers: nothing under vmap, and what the module gives, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sequence_zoo import GPT, LENGTH, TEXT, TOKENS, ZOO, DistilBERT, UNet, ViT
from stacked_checks import built, check_stacked
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fedlada_mpi import models
from fedlada_mpi.models import by_autograd, recurrent
from fedlada_mpi.models.attention import attention
from fedlada_mpi.models.form import as_stored, each
from fedlada_mpi.models.resample import adaptive_average, average, border, by_products, interpolation
from fedlada_mpi.models.stack import Stack
from fedlada_mpi.rounds.gradients import GenericEngine
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.randomness import Draws
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array, NextToken, client_loss

ROWS = About(Array("float32", (6, 8)))  # tokens, width
LINE, MAP, VOLUME = (About(Array("float32", shape)) for shape in ((4, 9), (4, 6, 7), (2, 4, 6, 4)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def gradients(network, clients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[C, d] of the sum of all outputs' squares, for some clients in their order, each with its own parameters."""
    draw = torch.Generator().manual_seed(3)
    start = network.initial(dtype)
    values = start + 0.05 * torch.randn(3, len(start), generator=draw, dtype=torch.float64).to(dtype) * (start != 0)
    inputs = each(network.form.random(3, 2, draw=draw), lambda value: as_stored(value, dtype)[clients])
    values = values[clients].contiguous()
    grads = torch.zeros_like(values)
    stack = network.stack(values, grads)
    stack.draws = Draws(clients, stacked=True)
    network.forward(stack, inputs).square().sum().backward()
    return grads


def frozen_gpt() -> GPT:
    module = GPT(dropout=0.2)
    module.h[0].requires_grad_(False)
    return module


PLACED = {
    **{name: (model, about) for name, (model, about) in ZOO.items()},
    "frozen": (frozen_gpt, TEXT),
    "gru": (lambda: Of(lambda self, x: self.layer(x)[0], layer=nn.GRU(8, 5, 2, dropout=0.2, batch_first=True)), ROWS),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_clients_bits_do_not_depend_on_its_place_in_the_stack(name):
    model, about = PLACED[name]
    network, order = built(model(), about), torch.tensor([2, 0, 1])
    expected = gradients(network, torch.arange(3), torch.float32)
    assert expected.norm() > 0
    assert torch.equal(gradients(network, order, torch.float32), expected[order])


@pytest.mark.parametrize("name", ZOO)
def test_models_of_today(name):
    model, about = ZOO[name]
    check_stacked(model(), about)


@pytest.mark.parametrize("model", [ViT, GPT, DistilBERT])
def test_what_they_drop(model):
    about = next(about for kind, about in ZOO.values() if kind is model)
    assert check_stacked(model(dropout=0.3), about).draws


def test_attention_written_out_with_a_mask_in_a_buffer():
    check_stacked(GPT(written_out=True, dropout=0.2), TEXT)


def test_attention_written_out_as_on_a_gpu(monkeypatch):
    """The same numbers by products and a softmax; its weights are then part of what a client takes in memory."""
    network = built(ViT(), ZOO["vit"][1])
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # a run of another test may have switched it off
        fused = gradients(network, torch.arange(3), torch.float64)
        whole = [network.activation_bytes(4, torch.float32, on_gpu) for on_gpu in (False, True)]
    scores = 2 * 3 * 17 * 17 * 4 * 4  # layers, heads, tokens, tokens, examples, bytes
    assert whole[1] - whole[0] > 0.8 * scores
    monkeypatch.setattr(Stack, "on_gpu", property(lambda self: True, lambda self, value: None), raising=False)
    written = gradients(network, torch.arange(3), torch.float64)
    torch.testing.assert_close(written, fused, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tokens_that_see_none(dropout):
    """Whose rows of a mask are empty: zeros, and no gradient that is not a number."""
    network = built(ViT(), ZOO["vit"][1])
    stack = network.stack(network.initial(torch.float64).expand(2, -1))
    stack.on_gpu, stack.draws = True, Draws(torch.arange(2), stacked=True)
    q, k, v = torch.randn(3, 2, 2, 1, 4, 5, dtype=torch.float64, requires_grad=True).unbind(0)
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    mask[:, 2] = False
    out = attention(stack, q, k, v, mask, dropout)
    assert out[..., 2, :].abs().max() == 0
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
    if not dropout:
        expected = F.scaled_dot_product_attention(q[..., :2, :], k, v)
        torch.testing.assert_close(out[..., :2, :], expected, rtol=1e-12, atol=1e-12)


def test_a_unet_of_volumes():
    check_stacked(UNet(sides=3), About(Array("float32", (2, 4, 4, 8))))


class Of(nn.Module):
    """A function of a module's layers and its input, with a learnt shift before, so that inputs have a gradient."""

    def __init__(self, function: Callable, *shift: int, **layers: nn.Module):
        super().__init__()
        self.function, self.shift = function, nn.Parameter(0.1 * torch.randn(shift or (1,)))
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x + self.shift)


MASKS = {
    "none": lambda x: None,
    "boolean": lambda x: torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1),
    "float": lambda x: torch.full((6, 6), -1e4, dtype=x.dtype, device=x.device).triu(1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(mask, padded, batch_first):
    def forward(self, x):
        absent = (x[..., 0] > 0.5).masked_fill(torch.arange(6, device=x.device) == 0, False) if padded else None
        y = x if batch_first else x.transpose(0, 1)
        y, _ = self.attention(y, y, y, key_padding_mask=absent, attn_mask=MASKS[mask](x))
        return y if batch_first else y.transpose(0, 1)

    check_stacked(Of(forward, attention=nn.MultiheadAttention(8, 2, batch_first=batch_first)), ROWS)


def test_attention_to_other_tokens_and_masks_of_heads():
    def forward(self, x):
        mask = (x[:, :2, :6] > 0).repeat_interleave(2, 0).masked_fill(torch.arange(6) == 1, False)
        return self.attention(x[:, :2], x, x.flip(1), attn_mask=mask, need_weights=False)[0]

    check_stacked(Of(forward, attention=nn.MultiheadAttention(8, 2, 0.2, bias=False, batch_first=True)), ROWS)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_encoders(norm_first, activation, dropout):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, activation, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x, mask=MASKS["boolean"](x), is_causal=True)

    check_stacked(Of(forward, encoder=encoder), ROWS)


def test_a_decoder():
    layer = nn.TransformerDecoderLayer(8, 2, 12, 0.1, batch_first=True)
    check_stacked(Of(lambda self, x: self.layer(x[:, :3], x, memory_mask=x.new_zeros(3, 6)), layer=layer), ROWS)


def test_grouped_queries_and_masks_of_examples():
    def forward(self, x):
        q, k = x.unflatten(2, (4, 2)).transpose(1, 2), x[..., :4].unflatten(2, (2, 2)).transpose(1, 2)
        mask = (x[:, None, None, :, 0] > -1) | (torch.arange(6) == 0)
        return F.scaled_dot_product_attention(q, k, k, mask, scale=0.3, enable_gqa=True).flatten(1)

    check_stacked(Of(forward, 8), ROWS)


LAYERS = {
    "layer norm over two axes": (lambda self, x: self.norm(x), ROWS, dict(norm=nn.LayerNorm((6, 8)))),
    "layer norm without a bias": (lambda self, x: self.norm(x), MAP, dict(norm=nn.LayerNorm((6, 7), bias=False))),
    "rms norm": (lambda self, x: self.norm(x), ROWS, dict(norm=nn.RMSNorm(8))),
    "rms norm over two axes": (lambda self, x: self.norm(x), ROWS, dict(norm=nn.RMSNorm((6, 8), eps=1e-3))),
    "norms used twice": (
        lambda self, x: self.c(self.b(self.a(self.c(self.b(self.a(x)))))), ROWS,
        dict(a=nn.LayerNorm(8), b=nn.RMSNorm(8), c=nn.GroupNorm(2, 6)),
    ),
    "conv1d": (lambda self, x: F.relu(self.conv(x)), LINE, dict(conv=nn.Conv1d(4, 6, 3, stride=2, padding=1))),
    "conv1d of groups": (lambda self, x: self.conv(x), LINE, dict(conv=nn.Conv1d(4, 8, 3, padding="same", groups=2))),
    "depthwise conv1d": (lambda self, x: self.conv(x), LINE, dict(conv=nn.Conv1d(4, 4, 3, groups=4))),
    "dilated conv1d": (lambda self, x: self.conv(x), LINE, dict(conv=nn.Conv1d(4, 6, 3, dilation=2, bias=False))),
    "even conv1d": (lambda self, x: self.conv(x), LINE, dict(conv=nn.Conv1d(4, 6, 4, padding="same"))),
    "conv1d used twice": (lambda self, x: self.conv(self.conv(x)), LINE, dict(conv=nn.Conv1d(4, 4, 3, padding=1))),
    "conv2d used twice": (
        lambda self, x: self.conv(torch.tanh(self.conv(x))), MAP, dict(conv=nn.Conv2d(4, 4, 3, padding=1, groups=2))
    ),
    "conv3d": (lambda self, x: self.conv(x), VOLUME, dict(conv=nn.Conv3d(2, 3, (1, 3, 2), (1, 2, 1), (0, 1, 1)))),
    "conv3d of groups": (lambda self, x: self.conv(x), VOLUME, dict(conv=nn.Conv3d(2, 4, 3, groups=2, dilation=1))),
    "transposed 1d": (lambda self, x: self.up(x), LINE, dict(up=nn.ConvTranspose1d(4, 3, 4, 3, 1, output_padding=2))),
    "transposed 2d": (lambda self, x: self.up(x), MAP, dict(up=nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2))),
    "transposed 2d without overlap": (lambda self, x: self.up(x), MAP, dict(up=nn.ConvTranspose2d(4, 3, 2, 2))),
    "transposed 3d": (lambda self, x: self.up(x), VOLUME, dict(up=nn.ConvTranspose3d(2, 3, 3, 2, dilation=2))),
    "upsampling": (lambda self, x: self.b(self.a(x)), MAP, dict(a=nn.Upsample(scale_factor=2), b=nn.Upsample((9, 5)))),
    "bilinear": (lambda self, x: self.a(x), MAP, dict(a=nn.Upsample((9, 10), mode="bilinear", align_corners=True))),
    "pools 1d": (
        lambda self, x: self.c(self.b(self.a(x))), LINE,
        dict(a=nn.MaxPool1d(2, 1), b=nn.AvgPool1d(3, 2), c=nn.AdaptiveAvgPool1d(2)),
    ),
    "pools 2d": (lambda self, x: self.b(self.a(x)), MAP, dict(a=nn.AvgPool2d(2, 1), b=nn.AdaptiveAvgPool2d((3, None)))),
    "pools 3d": (
        lambda self, x: self.c(self.b(self.a(x))), VOLUME,
        dict(a=nn.MaxPool3d(2, 1), b=nn.AvgPool3d(2, 1), c=nn.AdaptiveAvgPool3d(1)),
    ),
    "adaptive maxima": (
        lambda self, x: self.c(self.a(x)).flatten(1).sum(1, keepdim=True), LINE,
        dict(a=nn.AdaptiveMaxPool1d(3), c=nn.Conv1d(4, 2, 1)),
    ),
    "borders": (lambda self, x: self.b(self.a(x)), MAP, dict(a=nn.ReflectionPad2d(2), b=nn.ReplicationPad2d(1))),
    "dropout of channels": (lambda self, x: self.b(self.a(x)), MAP, dict(a=nn.Dropout2d(0.4), b=nn.Conv2d(4, 2, 1))),
    "dropout of channels before a flattened map": (
        lambda self, x: self.b(self.a(x.relu()).flatten(1))[:, None, None], MAP,
        dict(a=nn.Sequential(nn.Conv2d(4, 2, 3), nn.Dropout2d(0.4)), b=nn.LazyLinear(3)),
    ),
    "bilinear product": (lambda self, x: x @ self.a.weight @ self.a.weight.T, ROWS, dict(a=nn.Linear(8, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    forward, about, layers = LAYERS[name]
    check_stacked(Of(forward, **layers), about)


OPERATIONS = {
    "einsum": lambda x, w: torch.einsum("btd,de->bte", x, w) + torch.einsum("btd, bsd -> bt", x, x)[..., None],
    "implicit einsum": lambda x, w: torch.einsum("...ij,...kj", x, x),
    "examples and tokens as one axis": lambda x, w: torch.tanh(x.reshape(-1, 8) @ w).view(-1, 6, 8),
    "tokens first": lambda x, w: (x.permute(1, 0, 2) * torch.arange(6, device=x.device).view(6, 1, 1)).transpose(0, 1),
    "indices": lambda x, w: x[:, [0, 2, 2]].cumsum(1)[:, 1:, ::2] * x[:, None, -1, ::2],
    "a tensor as index": lambda x, w: x[:, torch.tensor([1, 1])].flatten(1),
    "tensors as indices": lambda x, w: x[torch.arange(x.size(0)), x[..., 0].argmax(1)],
    "comparisons": lambda x, w: torch.where(x > w.mean(), x, -2 * x).masked_fill(x.abs() < 0.1, 0.5).clamp(min=-1),
    "stacks": lambda x, w: torch.stack([x, x.roll(1, 1), x.flip(2)], 2).logsumexp(2).softmax(1),
    "parts": lambda x, w: x.chunk(2, -1)[0].tanh() * x.split([4, 4], 2)[1] + x.unbind(2)[3][..., None],
    "a weight's own operations": lambda x, w: x @ (w / w.norm(dim=0, keepdim=True)) + w.exp().sum(),
    "largest": lambda x, w: x.max(1).values + x.amin(1) + x.max(dim=1, keepdim=True)[0][:, 0],
    "repeated": lambda x, w: x.repeat(1, 2, 1)[:, 3:9] + w[:6].unsqueeze(0).repeat(x.shape[0], 1, 1),
    "state of each example": lambda x, w: torch.cat([torch.zeros(x.size(0), 1, 8, dtype=x.dtype), x], 1)[:, :-1],
    "positions": lambda x, w: x + torch.sin(torch.arange(6)[:, None] / 10 ** torch.linspace(0, 1, 8)).to(x.dtype),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    module = Of(lambda self, x: OPERATIONS[name](x, self.weight))
    module.weight = nn.Parameter(torch.randn(8, 8))
    check_stacked(module, ROWS)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_recurrent_layers(monkeypatch, kind, batch_first, bidirectional, large):
    if large:  # as weights of layers that do not stay in the cache
        monkeypatch.setattr(recurrent, "LARGE", 0)
    layer = kind(8, 5, 2, batch_first=batch_first, bidirectional=bidirectional)

    def forward(self, x):
        out, states = self.layer(x if batch_first else x.transpose(0, 1))
        last = states[0] if kind is nn.LSTM else states
        return torch.cat([out.flatten(1) if batch_first else out.transpose(0, 1).flatten(1), last[-1]], 1)

    network = check_stacked(Of(forward, layer=layer), ROWS)
    double, single = (gradients(network, torch.arange(3), dtype) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_between_recurrent_layers(kind, batch_first):
    def forward(self, x):
        out = self.layer(x if batch_first else x.transpose(0, 1))[0]
        return (out if batch_first else out.transpose(0, 1))[:, -1]

    layer = kind(8, 5, 3, dropout=0.4, batch_first=batch_first, bidirectional=True)
    assert check_stacked(Of(forward, layer=layer), ROWS).draws
    assert type(layer) is kind  # the run has a copy


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("bias", [True, False])
def test_a_recurrent_layer_from_given_states(kind, bias):
    """Whose last states are used, too, so that all their gradients reach the first ones."""
    lstm = kind is nn.LSTM

    def forward(self, x):
        h = torch.zeros(4, x.size(0), 5, dtype=x.dtype, device=x.device) + self.h
        out, last = self.layer(x, (h, h.tanh()) if lstm else h)
        last = last[0] * last[1] if lstm else last
        return out[:, 2, :5] + last.sum(0)

    module = Of(forward, layer=kind(8, 5, 2, bias=bias, batch_first=True, bidirectional=True))
    module.h = nn.Parameter(torch.randn(4, 1, 5))
    check_stacked(module, ROWS)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_last_states_alone(kind):
    """No gradient arrives at the outputs of all steps, or at those of the last layer alone."""

    def forward(self, x):
        last = self.layer(x)[1]
        return last[1][-1] if kind is nn.LSTM else last[0]

    check_stacked(Of(forward, layer=kind(8, 5, 2, batch_first=True)), ROWS)


class Products(TorchDispatchMode):
    """The rows of every product, and how many models it is of."""

    def __init__(self):
        super().__init__()
        self.rows, self.models, self.largest = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in ("mm", "addmm"):
            self.rows.append(args[-2].shape[0])
        elif name in ("bmm", "baddbmm"):
            self.models.append(args[-2].shape[0])
        if isinstance(out, torch.Tensor) and name not in ("expand", "view", "slice", "select", "as_strided", "detach"):
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_frozen_layers_are_computed_once_for_all_clients():
    """A product takes the tokens of all clients, and no client has a copy of a weight."""
    body = GPT(tokens=400, width=16, written_out=True).requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.conv = body, nn.Conv1d(16, 16, 1).requires_grad_(False)
            self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
            self.norm.requires_grad_(False)
            self.attention.requires_grad_(False)
            self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, tokens):
            x = self.body.wte(tokens)
            x = self.body.h[0](x + self.b(self.a(x)))
            x = self.attention(x, x, x)[0] + self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.body.lm_head(self.norm(x))

    about = About(Array("int64", (LENGTH,), 400), Array("int64", (LENGTH,)), classes=400)
    network = check_stacked(Adapted(), about)
    clients, examples = 3, 2
    values = network.initial().expand(clients, -1).contiguous()
    stack = network.stack(values, torch.zeros_like(values))
    with Products() as products:
        network.forward(stack, torch.zeros(clients, examples, LENGTH, dtype=torch.int64))[..., :1].sum().backward()
    # Forward: four layers of the block, two of attention, the convolution and the head; backward: to their inputs.
    assert products.rows == [clients * examples * LENGTH] * 16
    adapters = [count for count in products.models if count == clients]
    assert len(adapters) == 5  # two products forward, of which the first needs no gradient of its inputs
    assert products.largest < clients * 400 * 16


def test_truth_values_reach_a_model_as_they_are():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 3), nn.LayerNorm(6)

        def forward(self, x, mask):
            x = torch.where(mask.unsqueeze(-1), self.a(x), self.norm(self.a(x)))
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=(mask | ~mask[:, :1]).unsqueeze(1))
            return self.b(x.masked_fill(~mask.unsqueeze(-1), 0.5).mean(1))

    about = About({"x": Array("float32", (5, 4)), "mask": Array("bool", (5,), 2)})
    network = check_stacked(Masked(), about)
    assert {value.dtype for value in network.form.zeros(1, 2).values()} == {torch.float32, torch.bool}


class Looked(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.out = nn.Embedding(TOKENS, 4, **options), nn.Linear(4, TOKENS)

    def forward(self, tokens):
        return self.out(torch.tanh(self.table(tokens)))


def test_frequencies_of_tokens_are_refused_as_padding_counts():
    with pytest.raises(UserError, match=r"gradient of table.weight depends on .* leave out scale_grad_by_freq"):
        models.build(Given(Looked(scale_grad_by_freq=True)), None, TEXT)


def test_sparse_gradients_on_the_generic_engine():
    networks = [models.build(Given(Looked(sparse=sparse)), None, TEXT, stacked=False) for sparse in (True, False)]
    values = networks[0].initial().expand(2, -1).contiguous()
    tokens, weight = networks[0].form.random(2, 3, draw=torch.Generator().manual_seed(0)), torch.full((2, 3), 1 / 3)
    found, expected = (torch.zeros_like(values) for _ in networks)
    for network, grads in zip(networks, (found, expected), strict=True):
        GenericEngine(network, loss=client_loss(NextToken(TEXT))).gradients(values, grads, tokens, tokens, weight, None)
    torch.testing.assert_close(found, expected)


def test_embeddings_with_padding():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(TOKENS, 4, padding_idx=-2), nn.Embedding(TOKENS, 4)
            self.tied = nn.Linear(4, TOKENS)
            self.tied.weight = self.a.weight

        def forward(self, tokens):
            return self.tied(torch.tanh(self.a(tokens) * self.b(tokens)))

    check_stacked(Words(), TEXT)
    ids, table = torch.tensor([[1, 1, 3], [3, 0, 0]]), torch.zeros(2, 4, 2, requires_grad=True)
    by_autograd.embedding(ids, table, padding_idx=3).sum().backward()
    assert table.grad[..., 0].tolist() == [[0, 2, 0, 0], [2, 0, 0, 0]]


@pytest.mark.parametrize(
    ("function", "sides", "arguments"),
    [
        (F.interpolate, interpolation, dict(scale_factor=(1.7, 2), mode="bilinear")),
        (F.interpolate, interpolation, dict(size=(9, 4), mode="bilinear", align_corners=True)),
        (F.adaptive_avg_pool2d, adaptive_average, dict(output_size=(4, None))),
        (F.avg_pool2d, average, dict(kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)),
        (F.pad, border, dict(pad=(2, 1, 0, 3), mode="reflect")),
        (F.pad, border, dict(pad=(2, 1, 0, 3), mode="replicate")),
    ],
)
def test_sides_as_products(function, sides, arguments):
    """As GPUs compute them, whose own kernels have gradients that differ from time to time."""
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    found = by_products(x, sides(x, **arguments))
    torch.testing.assert_close(found, function(x, **arguments), rtol=1e-12, atol=1e-12)
