"""The commands of docs/silos.md, as they are printed, on small folders of images."""

from __future__ import annotations

import json
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
def test_from_three_folders_to_a_model(tmp_path):
    random = np.random.default_rng(0)
    page = (ROOT / "docs/silos.md").read_text()
    classes = re.search(r"`classes.txt`\n\n((?:    .*\n)+)", page).group(1).split()
    assert classes == ["cats", "dogs", "foxes"]
    (tmp_path / "classes.txt").write_text("\n".join(classes))
    for silo, (count, missing) in {"berlin": (12, "foxes"), "oslo": (7, ""), "rome": (9, "cats")}.items():
        for channel, name in enumerate(classes):
            folder = tmp_path / f"photos-{silo}" / name
            folder.mkdir(parents=True) if name != missing else None
            for number in range(count if name != missing else 0):
                pixels = random.integers(0, 60, (20, 24, 3), dtype=np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(folder / f"{number}.png")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_"))}
    environment |= {"PATH": programs(), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = []
    for code in blocks:
        words = ["bash", "-euc", code]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].count("others see secure/") == 3
    note = re.search(r"note     silos (.*?) run as the same account", page).group(1)
    assert f"silos {note} run as the same account" in printed[1]
    own = [json.loads(line) for line in printed[2].splitlines()]
    assert [record["round"] for record in own] == [1, 2, 3]
    assert own[-1]["test_examples"] == 3  # 0.2 of 7, of each class
    run = [json.loads(line) for line in (tmp_path / "runs/silos/metrics.jsonl").read_text().splitlines()]
    assert run[-1]["test_acc"] is not None
    assert not {path.name for path in (tmp_path / "runs" / "silos").rglob("*")} & {"silos", "log.txt", "clients.h5"}
