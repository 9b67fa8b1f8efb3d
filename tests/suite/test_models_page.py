"""docs/models.md: its models train as the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess

import numpy as np
import pytest
import torch
from limits import LIMIT
from ranks import programs
from repository import ROOT

import fedlada_mpi

PAGE = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.slow
def test_a_model_of_your_own(tmp_path):
    section = PAGE.partition("## A model of your own")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash"]
    (tmp_path / "my_model.py").write_text(blocks[0][1])
    environment = {**os.environ, "PATH": programs(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["bash", "-euc", blocks[1][1]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generic" not in done.stdout
    summary = json.loads((tmp_path / "runs" / "my_model" / "summary.json").read_text())
    assert summary["final"]["test_acc"] > 0.9


@pytest.mark.slow
def test_fine_tuning_of_the_head(tmp_path, monkeypatch):
    """The page's model, from random weights in place of ImageNet's, which would have to be downloaded."""
    monkeypatch.chdir(tmp_path)
    vision = pytest.importorskip("torchvision").models
    section = PAGE.partition("## Fine-tuning")[2]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    found: dict = {}
    exec(code, found)
    imagenet = vision.resnet18().state_dict()
    torch.save(imagenet, "imagenet.pt")
    images, labels = np.zeros((12, 32, 32, 3), np.uint8), np.arange(12) % 3
    images[np.arange(12), labels] = 255
    clients = np.array_split(np.arange(12), 2)
    data = fedlada_mpi.Data(
        train_images=images, train_labels=labels, clients=clients, test_images=images, test_labels=labels
    )
    run = fedlada_mpi.train(
        data=data, model=found["head_only"], norm="group:2", init="imagenet.pt", init_partial=True, local_steps=1,
        rounds=1, device="cpu", out="runs/head", quiet=True,
    )  # fmt: skip
    trained = run.model.module.state_dict()
    kept = [name for name, tensor in trained.items() if torch.equal(tensor, imagenet[name])]
    assert {*trained} - {*kept} == {"fc.weight", "fc.bias"}
    assert len(kept) == 60
