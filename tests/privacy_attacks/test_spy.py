"""Everything that leaves a silo, recorded by a spy, in two runs that differ in one silo's images.

With the same keys in both runs, whatever differs depends on the images. It must be a masked message that differs by as
much as the integers below the mask do, which a run without masks shows. Anything else that differs is a leak, be it a
number, a text, a file or a time: a collective that is added without a mask fails here.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import spying
from repository import ROOT
from spying import Sent
from tiers import slow
from training_runs import make_data
from uniformity import HIGHEST, LOWEST, chi_square, lag_correlation

RANKS, EXCHANGED = 4, 2  # the rank whose images are exchanged
SPYING = str(ROOT / "tests" / "helpers" / "spying.py")
SIZES = [8, 7, 6, 8, 5, 7]
SETTINGS = (
    "--secure --dataset shards --out out --rounds 2 --participation 1 --batch-size 4 --local-steps 3 --device cpu "
    "--model linear --eval-every 1 --checkpoint-every 1 --partition natural --clients 6"
).split()


class Runs:
    """Secure runs of the same silos with two sets of images: ``a``, and ``b`` in which one silo has others."""

    def __init__(self, folder: Path, mpirun):
        self.folder, self.mpirun = folder, mpirun
        make_data(folder / "a", SIZES, silos=RANKS - 1)
        self._exchange(folder / "a", folder / "b")
        self.records = cache(self._records)

    @staticmethod
    def _exchange(source: Path, target: Path) -> None:
        """The same images but for those of one silo: upside down, and in another order than their labels."""
        from data_prep import PrepareSettings, prepare
        from fedlada_mpi.data.manifest import read_manifest
        from fedlada_mpi.data.owners import owned_clients

        target.mkdir()
        raw = dict(np.load(source / "raw.npz"))
        for client in owned_clients(read_manifest(source / "shards"), RANKS - 1)[EXCHANGED - 1]:
            own = raw["train_clients"] == client
            raw["train_images"][own] = raw["train_images"][own][::-1, ::-1]
        np.savez(target / "raw.npz", **raw)
        prepare(
            PrepareSettings(
                "npz", target / "shards", raw=str(target / "raw.npz"), clients=len(SIZES), silos=RANKS - 1,
                partition="natural",
            )
        )  # fmt: skip

    def _records(self, which: str, more: str, masks: bool = True, fixed: bool = True) -> list[list[Sent]]:
        """By rank. The runs have the same paths, so that those make no difference."""
        where = self.folder / which
        for name in ("out", "records"):
            shutil.rmtree(where / name, ignore_errors=True)
        options = ["--fixed-keys"] if fixed else []
        words = [*options, "records", *SETTINGS, *more.split(), *([] if masks else ["--secure-neighbours", "0"])]
        self.mpirun(RANKS, *words, command=(SPYING,), cwd=where, check=True)
        return spying.read(where / "records", RANKS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mpirun) -> Runs:
    return Runs(tmp_path_factory.mktemp("spied"), mpirun)


def different(a: list[Sent], b: list[Sent]) -> list[tuple[Sent, Sent]]:
    """The messages of two runs that differ; that there are as many, of the same kinds and sizes, is a condition."""
    assert [shape(sent) for sent in a] == [shape(sent) for sent in b]
    return [(x, y) for x, y in zip(a, b, strict=True) if x.content != y.content]


def shape(sent: Sent) -> tuple[str, str, str, int]:
    return sent.call, sent.kind, sent.by, len(sent.content)


def leaks(masked: list[tuple[Sent, Sent]], plain: list[tuple[Sent, Sent]]) -> list[str]:
    """What depends on the images, and is not explained by integers below a mask."""
    if len(masked) != len(plain):
        extra = {x.by for x, _ in masked} ^ {p.by for p, _ in plain}
        return [f"{len(masked)} messages depend on the images, expected {len(plain)}: {sorted(extra)}"]
    found = []
    for (x, y), (p, q) in zip(masked, plain, strict=True):
        if shape(x) != shape(p):
            found.append(f"{x.call} by {x.by} in place of {p.by}")
        elif len(x.content) % 8 or not np.array_equal(x.words - y.words, p.words - q.words):
            found.append(f"{x.call} of {x.kind} by {x.by} is no masked message")
        elif np.any(x.words == p.words):
            found.append(f"{x.call} of {x.kind} by {x.by} is not masked")
    return found


CASES = ["--algorithm fedlada", slow("--algorithm fedlada --transport shared"), slow("--algorithm scaffold"),
         slow("--algorithm fednova --weighting size")]  # fmt: skip


@pytest.mark.parametrize("method", CASES)
def test_what_depends_on_a_silos_images_is_masked(runs, method):
    masked, plain = ((runs.records("a", method, masks), runs.records("b", method, masks)) for masks in (True, False))
    for rank in range(1, RANKS):
        apart = different(masked[0][rank], masked[1][rank])
        assert not leaks(apart, different(plain[0][rank], plain[1][rank])), f"rank {rank}"
        assert apart, "the exchanged images made no difference: nothing was tested"
    # In the first round the others have the same model and the same images in both runs.
    first = {rank: _first_difference(masked[0][rank], masked[1][rank]) for rank in range(1, RANKS)}
    assert all(first[EXCHANGED] < place for rank, place in first.items() if rank != EXCHANGED)


def _first_difference(a: list[Sent], b: list[Sent]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.content != y.content)


@pytest.mark.parametrize("method", CASES)
def test_a_silo_writes_nothing_that_others_read(runs, method):
    for sent in runs.records("a", method)[EXCHANGED]:
        assert sent.call not in ("socket", "printed"), sent
        assert sent.call != "file" or not sent.content.startswith((b"out", bytes(runs.folder / "a" / "out"))), sent
