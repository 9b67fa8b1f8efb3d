"""The picture of the label distributions, whatever the classes are called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fedlada_mpi.data.picture import MOST_BARS, _title, draw
from fedlada_mpi.data.shards import read_manifest

NAMES = ["$x_{", "$a$ $b_{", r"\frac{", "<script>", "a\nb", "\0", "\ud800", "x" * 5000, "&", ""]


@pytest.mark.parametrize("many", [False, True])
def test_class_names_are_no_formulas(many, digits_dir, tmp_path):
    manifest = read_manifest(digits_dir)
    assert manifest.classes == len(NAMES) <= MOST_BARS
    copies = 3 if many else 1  # bars, or a heat map
    changes = dict(
        class_names=tuple(NAMES) * copies,
        classes=manifest.classes * copies,
        counts=manifest.counts.repeat(copies, axis=1),
        dataset="$y_{",
    )
    draw(replace(manifest, **changes), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width > 1000


def test_the_title_has_the_least_and_the_most_images_of_a_client(digits_dir):
    manifest = read_manifest(digits_dir)
    assert manifest.clients == 50
    sizes = np.arange(1_001, 1_051)[::-1]
    assert _title(replace(manifest, sizes=sizes)).startswith("digits: 50 clients, 1,001 to 1,050 images each · ")
    assert _title(replace(manifest, sizes=np.full(50, 20))).startswith("digits: 50 clients, 20 images each · ")
