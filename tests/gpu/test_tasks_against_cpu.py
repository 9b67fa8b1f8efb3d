"""Whole runs of every task on a GPU against the same on the CPU; skipped where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedlada_mpi import Data, Task, train
from fedlada_mpi.rounds import examples

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
PLAIN = dict(algorithm="fedlada", precision="fp64", batch_size=3, local_steps=4, lr=1e-2, rounds=3, eval_every=1,
             participation=1.0, eval_clients=1, quiet=True)  # fmt: skip


def data(task: str) -> Data:
    draw = np.random.default_rng(0)
    inputs, owners = draw.normal(size=(24, 4)), np.arange(24) % 3
    targets = {
        "classification": draw.integers(0, 3, 24),
        "multilabel": draw.random((24, 2)) < 0.5,
        "regression": draw.poisson(2.0, 24).astype(float),
        "survival": np.column_stack([draw.random(24) < 0.7, draw.random(24)]).astype(float),
        "segmentation": draw.integers(0, 2, (24, 5, 5)).astype(np.uint8),
    }
    if task == "next-token":
        tokens = draw.integers(0, 6, (24, 7))
        return Data(inputs=tokens, clients=owners, test=(tokens,), task=task)
    if task == "segmentation":
        inputs = draw.normal(size=(24, 1, 5, 5))
    return Data(inputs=inputs, targets=targets[task], clients=owners, test=(inputs, targets[task], owners), task=task)


def noisy(batch):
    return batch + 0.1 * torch.randn_like(batch)


class Own(Task):
    """With a host's decision in its loss, which no graph takes."""

    def loss(self, outputs, targets):
        error = outputs[:, 0] - targets
        return error.abs() if float(error.detach().abs().max()) > 1e6 else error.square()

    def outputs(self):
        return (1,)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.project, self.head = nn.Embedding(6, 8), nn.Linear(8, 24), nn.Linear(8, 6)

    def forward(self, tokens):
        q, k, v = self.project(self.embedding(tokens)).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("classification", {"metrics": "auc,balanced_acc"}),
        ("multilabel", {}),
        *(("regression", {"loss": loss}) for loss in ("squared", "absolute", "huber", "poisson")),
        *(("survival", {"loss": loss}) for loss in ("discrete", "cox")),
        ("segmentation", {}),
        ("next-token", {}),
        ("next-token", {"model": Attention()}),
        ("regression", {"augment": noisy}),
        ("regression", {"task": Own}),
        ("regression", {"engine": "generic"}),
    ],
)
@pytest.mark.parametrize("compiler", ["auto", "off"])
def test_as_on_the_cpu(tmp_path, task, more, compiler):
    runs = [
        train(**{**PLAIN, "data": data(task), "data_dir": tmp_path / "data", "out": tmp_path / device, "device": device,
                 "compile": compiler, **more})
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    cpu, gpu = runs
    for name, value in cpu.model.module.state_dict().items():
        torch.testing.assert_close(gpu.model.module.state_dict()[name], value, rtol=1e-8, atol=1e-9, msg=name)
    for name, values in cpu.metrics.items():
        if name.startswith(("train_", "test_", "client_")):
            np.testing.assert_allclose(gpu.metrics[name], values, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("on", ["host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["images", "segmentation", "next-token"])
@pytest.mark.parametrize("algorithm", ["fedlada", "mimelite"])
def test_streamed_as_on_the_device(tmp_path, monkeypatch, kind, on, precision, algorithm):
    monkeypatch.setattr(examples, "SLOT_STEPS", 2)
    draw = np.random.default_rng(0)
    if kind == "images":
        images, labels = draw.integers(0, 256, (90, 8, 8, 3), dtype=np.uint8), draw.integers(0, 3, 90)
        given = Data(inputs=images, targets=labels, clients=np.arange(90) % 4, test=(images[:20], labels[:20]))
    else:
        given = data(kind)
    settings = {**PLAIN, "precision": precision, "local_steps": 7, "algorithm": algorithm}
    settings |= {"augment": "paper"} if kind == "images" else {}
    device, streamed = (
        train(**settings, data=given, data_dir=tmp_path / "data", out=tmp_path / place, device="cuda", data_on=place)
        for place in ("device", on)
    )
    for name, value in device.model.module.state_dict().items():
        assert torch.equal(streamed.model.module.state_dict()[name], value), name
    for name, values in device.metrics.items():
        if name.startswith(("train_", "test_", "client_")):
            np.testing.assert_equal(streamed.metrics[name], values, err_msg=name)
