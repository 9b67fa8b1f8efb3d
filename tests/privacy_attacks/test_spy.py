"""Everything that leaves a silo, recorded by a spy, in two runs that differ in one silo's images.

With the same keys in both runs, whatever differs depends on the images. It must be a masked message that differs by as
much as the integers below the mask do, which a run without masks shows. Anything else that differs is a leak, be it a
number, a text, a file or a time: a collective that is added without a mask fails here.
"""

from __future__ import annotations

import shutil
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
SIZES, OTHER_SIZES = [8, 7, 6, 8, 5, 7], [8, 7, 4, 10, 5, 7]
SETTINGS = (
    "--secure --dataset shards --out out --rounds 2 --participation 1 --batch-size 4 --local-steps 3 --device cpu "
    "--model linear --eval-every 1 --checkpoint-every 1 --partition natural --clients 6"
)


class Runs:
    """Secure runs of the same silos: in ``b`` one silo has other images than in ``a``, in ``c`` clients of other sizes.

    Silos have as many images in all.
    """

    def __init__(self, folder: Path, mpirun):
        self.folder, self.mpirun = folder, mpirun
        make_data(folder / "a", SIZES, silos=RANKS - 1)
        self._exchange(folder / "a", folder / "b")
        make_data(folder / "c", OTHER_SIZES, silos=RANKS - 1, seed=6)
        self.known: dict[tuple[object, ...], list[list[Sent]]] = {}

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

    def records(
        self, which: str, method: str, masks: bool = True, fixed: bool = True, leak: str = ""
    ) -> list[list[Sent]]:  # fmt: skip
        """What left the ranks of a run. The runs have the same paths, so that those make no difference."""
        asked = (which, method, masks, fixed, leak)
        if asked not in self.known:
            where = self.folder / which
            for name in ("out", "records"):
                shutil.rmtree(where / name, ignore_errors=True)
            options = [*(["--fixed-keys"] if fixed else []), *(["--leak", leak] if leak else [])]
            words = [*SETTINGS.split(), *method.split(), *([] if masks else ["--secure-neighbours", "0"])]
            self.mpirun(RANKS, *options, "records", *words, command=(SPYING,), cwd=where, check=True)
            self.known[asked] = spying.read(where / "records", RANKS)
        return self.known[asked]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mpirun) -> Runs:
    return Runs(tmp_path_factory.mktemp("spied"), mpirun)


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
    first = {rank: places(masked[0][rank], masked[1][rank])[0] for rank in range(1, RANKS)}
    assert all(first[EXCHANGED] < place for rank, place in first.items() if rank != EXCHANGED)


@pytest.mark.slow
def test_how_many_images_clients_have_is_masked(runs):
    method = "--algorithm fedavg --weighting size"
    masked, plain = ((runs.records("a", method, masks), runs.records("c", method, masks)) for masks in (True, False))
    for rank in range(1, RANKS):
        apart = different(masked[0][rank], masked[1][rank])
        assert not leaks(apart, different(plain[0][rank], plain[1][rank])), f"rank {rank}"


@pytest.mark.parametrize("method", CASES)
def test_a_silo_writes_only_files_of_its_own(runs, method):
    own = (Path("out/silos") / f"silo_{EXCHANGED:04d}", runs.folder / "a/out/silos" / f"silo_{EXCHANGED:04d}")
    for sent in runs.records("a", method)[EXCHANGED]:
        assert sent.call not in ("socket", "printed"), sent
        if sent.call == "file":
            path = Path(sent.content.decode())
            in_run = {"out", "shards"} & {*path.parts[:1], *path.parts[len(runs.folder.parts) + 1 :][:1]}
            assert not in_run or path.is_relative_to(own[0]) or path.is_relative_to(own[1]), sent


@pytest.mark.parametrize("way", ["Gather", slow("Reduce"), slow("print")])
def test_a_leak_is_found(runs, way):
    """Of one number in a round, by a collective that is not masked."""
    method = "--algorithm fedlada"
    a, b = (runs.records(which, method, leak=way)[EXCHANGED] for which in "ab")
    plain = [runs.records(which, method, masks=False)[EXCHANGED] for which in "ab"]
    assert leaks(different(a, b), different(*plain))


@pytest.mark.slow
def test_a_call_that_the_spy_does_not_know_is_refused(runs):
    with pytest.raises(pytest.fail.Exception, match="gather: the spy does not know what this call sends"):
        runs.records("a", "--algorithm fedlada", leak="gather")


def test_masked_messages_look_random(runs):
    method = "--algorithm fedlada"
    for rank in range(1, RANKS):
        masked = places(*(runs.records(which, method)[rank] for which in "ab"))
        sent = messages(runs.records("a", method, fixed=False)[rank])  # with keys that were drawn
        content = b"".join(sent[i].content for i in masked)
        assert len(content) > 5 * 256 * 8
        assert LOWEST < chi_square(content) < HIGHEST
        assert abs(lag_correlation(content)) < 5 / np.sqrt(len(content))
        plain = different(*(runs.records(which, method, masks=False)[rank] for which in "ab"))
        assert chi_square(b"".join(p.content for p, _ in plain)) > 100
