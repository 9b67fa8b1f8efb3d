"""Everything that leaves a silo, recorded by a spy, in two runs that differ in one silo's images.

With the same keys in both runs, whatever differs depends on the images. It must be a masked message that differs by as
much as the integers below the mask do, which a run without masks shows. Anything else that differs is a leak, be it a
number, a text, a file or a time: a collective that is added without a mask fails here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import spying
from repository import ROOT
from spying import Sent
from training_runs import make_data
from uniformity import HIGHEST, LOWEST, chi_square, lag_correlation

RANKS, EXCHANGED = 4, 2  # the rank whose images are exchanged
SPYING = str(ROOT / "tests" / "helpers" / "spying.py")
SIZES, OTHER_SIZES = [8, 7, 6, 8, 5, 7], [8, 7, 4, 10, 5, 7]
SETTINGS = (
    "--dataset shards --rounds 2 --participation 1 --batch-size 4 --local-steps 3 --device cpu --model linear "
    "--eval-every 1 --checkpoint-every 1 --partition natural --clients 6"
)
SECURE, UNMASKED = "--secure", "--secure --secure-neighbours 0"
DP = "--dp client --noise-multiplier 1 --delta 0.01 --clip-norm 1 --participation 0.7"


class Runs:
    """Runs of the same silos: in ``b`` one silo has other images than in ``a``, in ``c`` clients of other sizes.

    Silos have as many images in all.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        make_data(folder / "a", SIZES, silos=RANKS - 1)
        self._exchange(folder / "a", folder / "b")
        make_data(folder / "c", OTHER_SIZES, silos=RANKS - 1, seed=6)
        self.asked: list[dict[str, object]] = []
        self.numbers: dict[str, int] = {}

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

    def ask(self, which: str, words: str, **more: object) -> Path:
        """A run of the next launch; where its records will be. Paths are the same for all data."""
        number = self.numbers.setdefault(f"{words} {more}", len(self.numbers))
        where, words = self.folder / which, f"{SETTINGS} {words} --out out-{number}"
        records = where / f"records-{number}"
        self.asked.append({"where": str(where), "records": str(records), "words": words.split(), **more})
        return records

    def pair(self, words: str, **more: object) -> tuple[Path, Path]:
        """A run, and one with other images."""
        return self.ask("a", words, **more), self.ask("b", words, **more)

    def launch(self, mpirun) -> None:
        mpirun(RANKS, json.dumps(self.asked), command=(SPYING,), cwd=self.folder, check=True)


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def by_rank(records: Iterable[Path], rank: int) -> list[list[Sent]]:
    return [spying.read(each, RANKS)[rank] for each in records]


def messages(sent: list[Sent]) -> list[Sent]:
    """Without files, some of which a silo writes only once, to remember checksums."""
    return [each for each in sent if each.call != "file"]


def places(a: list[Sent], b: list[Sent]) -> list[int]:
    """Of the messages that differ; that there are as many in both runs, of the same kinds and sizes, is a condition."""
    a, b = messages(a), messages(b)
    assert [shape(sent) for sent in a] == [shape(sent) for sent in b]
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.content != y.content]


def different(a: list[Sent], b: list[Sent]) -> list[tuple[Sent, Sent]]:
    """The messages of two runs that differ."""
    return [(messages(a)[i], messages(b)[i]) for i in places(a, b)]


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


CASES = ["--algorithm scaffold --transport shared", f"--algorithm fedlada --adaptive-clip {DP}"]


def check_masked(masked: tuple[Path, Path], plain: tuple[Path, Path]) -> None:
    """What differs between the runs of a pair differs by what it does without masks."""
    first = {}
    for rank in range(1, RANKS):
        pair = by_rank(masked, rank)
        apart = different(*pair)
        assert not leaks(apart, different(*by_rank(plain, rank))), f"rank {rank}"
        assert apart, "the exchanged images made no difference: nothing was tested"
        first[rank] = places(*pair)[0]
    # In the first round the others have the same model and the same images in both runs.
    if masked[1].parent.name == "b":
        assert all(first[EXCHANGED] < place for rank, place in first.items() if rank != EXCHANGED)


def check_written(records: Path) -> None:
    """A silo writes only files of its own, and nothing elsewhere."""
    number, where = records.name.removeprefix("records-"), records.parent
    own = Path(f"out-{number}", "silos", f"silo_{EXCHANGED:04d}")
    for sent in spying.read(records, RANKS)[EXCHANGED]:
        assert sent.call not in ("socket", "printed"), sent
        if sent.call == "file":
            path = Path(sent.content.decode())
            in_run = {f"out-{number}", "shards"} & {*path.parts[:1], *path.parts[len(where.parts) :][:1]}
            assert not in_run or path.is_relative_to(own) or path.is_relative_to(where / own), sent


def check_random(drawn: Path, masked: tuple[Path, Path], plain: tuple[Path, Path]) -> None:
    for rank in range(1, RANKS):
        sent = messages(spying.read(drawn, RANKS)[rank])
        content = b"".join(sent[i].content for i in places(*by_rank(masked, rank)))
        assert len(content) > 5 * 256 * 8
        assert LOWEST < chi_square(content) < HIGHEST
        assert abs(lag_correlation(content)) < 5 / np.sqrt(len(content))
        assert chi_square(b"".join(p.content for p, _ in different(*by_rank(plain, rank)))) > 100


def test_what_depends_on_a_silos_images_is_masked(runs, mpirun):
    """And looks random; a number that is not masked is found, by whichever way it leaves the silo."""
    method = "--algorithm fedlada"
    masked, plain = (runs.pair(f"{method} {how}") for how in (SECURE, UNMASKED))
    drawn = runs.ask("a", f"{method} {SECURE}", fixed=False)
    leaky = [runs.pair(f"{method} {SECURE}", leak=way) for way in ("Gather", "Reduce", "print")]
    runs.launch(mpirun)
    check_masked(masked, plain)
    check_written(masked[0])
    check_random(drawn, masked, plain)
    for pair in leaky:
        assert leaks(different(*by_rank(pair, EXCHANGED)), different(*by_rank(plain, EXCHANGED)))


@pytest.mark.slow
def test_the_same_with_other_methods_and_noise_and_of_sizes(runs, mpirun):
    asked = [tuple(runs.pair(f"{method} {how}") for how in (SECURE, UNMASKED)) for method in CASES]
    sized = [runs.pair(f"--algorithm fednova --weighting size {how}") for how in (SECURE, UNMASKED)]
    of_sizes = [(a, runs.ask("c", f"--algorithm fednova --weighting size {how}"))
                for (a, _), how in zip(sized, (SECURE, UNMASKED), strict=True)]  # fmt: skip
    runs.launch(mpirun)
    for masked, plain in (*asked, sized, of_sizes):
        check_masked(masked, plain)
        check_written(masked[0])


def test_a_call_that_the_spy_does_not_know_is_refused(mpirun):
    script = "import spying; spying.arm(); from mpi4py import MPI; MPI.COMM_WORLD.gather(1)"
    done = mpirun(1, command=("-c", script), env={"PYTHONPATH": str(ROOT / "tests" / "helpers")})
    assert done.returncode != 0
    assert "gather: the spy does not know what this call sends" in done.stderr
