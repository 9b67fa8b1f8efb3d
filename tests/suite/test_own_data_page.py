"""The commands of docs/own-data.md, as they are printed, on a small folder of images."""

from __future__ import annotations

import os
import re
import subprocess

import numpy as np
import pytest
from limits import LIMIT
from PIL import Image
from ranks import programs
from repository import ROOT


@pytest.mark.slow
def test_from_a_folder_of_photos_to_a_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLADA_DATA", raising=False)
    random = np.random.default_rng(0)
    for channel, name in enumerate(("cats", "dogs")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(31):
            pixels = random.integers(0, 60, (*random.integers(30, 70, 2), 3), dtype=np.uint8)
            pixels[..., channel] += 180
            place = tmp_path / "photos" / name / f"{number}.png" if number else tmp_path / "new.jpg"
            Image.fromarray(pixels).save(place)
    page = (ROOT / "docs/own-data.md").read_text()
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "bash", "bash", "python", "bash"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_"))}
    environment |= {"PATH": programs(), "PYTHONPATH": str(ROOT)}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    printed = []
    for language, code in blocks:
        if language == "python":
            exec(code, {})
            printed.append(capsys.readouterr().out)
            continue
        words = ["bash", "-euc", code]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert re.fullmatch(r"new\.jpg +\d+\.\d%  dogs\n", printed[2])
    assert "'accuracy': 1.0" in printed[3]
    assert "\ndogs [[" in printed[3]
    assert "preparing data/photos-6clients-dirichlet0.1, once" in printed[4]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["photos", "photos-6clients-dirichlet0.1"]
