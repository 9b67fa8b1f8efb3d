"""``fedlada_mpi`` from Python: what ``train`` and ``load`` give, what they refuse, and what they leave as it was."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from limits import LIMIT
from PIL import Image
from ranks import SIZE, barrier, is_root
from repository import ROOT
from torch import nn
from training_runs import CLASSES, SHAPE, make_data, run_here, without_times

import fedlada_mpi
from fedlada_mpi import Algorithm, Data, DivergedError, UserError, hyper, load, train
from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.mpi import world
from fedlada_mpi.rounds.callback import is_false
from fedlada_mpi.support import signals

SIZES = [4, 6, 5, 3]
SHORT = dict(algorithm="fedlada", rounds=3, local_steps=2, eval_every=2, lr=0.01)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "python", SIZES, silos=2)


@pytest.fixture
def settings(data, out):
    """A short run on the CPU, which prints nothing."""
    given = dict(dataset=data.shards, out=out, batch_size=2, participation=0.5, augment="none", device="cpu")
    return {**given, "model": "cnn", "quiet": True, **SHORT}


@pytest.fixture
def arrays(data):
    """The same data as that of the shards."""
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return dict(
        train_images=np.concatenate(data.images), train_labels=np.concatenate(data.labels), clients=clients,
        test_images=data.test[0], test_labels=data.test[1],
    )  # fmt: skip


class Tether(Algorithm):
    label = "Tethered"
    pull: float = hyper(0.5, "how strongly", least=0)

    def direction(self, c, s, g):
        return g.add_(c.x - s.x, alpha=self.pull)


def own_model(classes, image_shape):
    rows, columns, channels = image_shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(rows * columns * channels, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, classes)
    )


def beside(out: Path, name: str) -> Path:
    return out.with_name(f"{out.name}-{name}")


def parameters(run) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))


def same_columns(a, b) -> None:
    assert list(a) == list(b)
    for name in (name for name in a if not name.startswith("seconds")):
        np.testing.assert_array_equal(a[name], b[name])


def refusal(**given) -> str:
    with pytest.raises(UserError) as found:
        train(**given)
    barrier()
    assert "\n" not in str(found.value)
    return str(found.value)


def test_importing_the_package_is_cheap():
    code = (
        "import sys, fedlada_mpi; sys.exit(bool({'torch', 'numpy', 'mpi4py', 'fedlada_mpi.settings'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT)


def test_public_names():
    for name in fedlada_mpi.__all__:
        assert getattr(fedlada_mpi, name).__doc__
        assert name in dir(fedlada_mpi)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = fedlada_mpi.trian


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_same_as_the_command(data, out, settings, precision):
    given = {**settings, "precision": precision, "targets": [0.1]}
    run = train(**{**given, "out": out / "python"})
    words = {name: value for name, value in given.items() if name not in ("quiet", "targets", "out", "dataset")}
    same = dict(activation="relu", init="", checkpoint_every=50, targets="0.1")
    command = run_here(data, out / "command", **{**words, **same})
    saved = torch.load(out / "python" / "model.pt", weights_only=True)
    assert list(saved) == list(command.model)
    for name, value in run.model.module.state_dict().items():
        assert torch.equal(saved[name], command.model[name])
        assert torch.equal(value, command.model[name])
    records = [json.loads(line) for line in (out / "python" / "metrics.jsonl").read_text().splitlines()]
    assert list(map(without_times, records)) == list(map(without_times, command.metrics))
    assert without_times(run.summary) == without_times(command.summary)
    assert (run.dir, run.config["lr"], run.config["rounds"]) == (out / "python", 0.01, 3)


@pytest.mark.ranks
def test_load_is_what_train_gave(settings, out):
    run = train(**settings)
    again = load(out)
    assert (again.dir, again.config, again.summary) == (run.dir, run.config, run.summary)
    same_columns(again.metrics, run.metrics)
    assert equal(again, run)
    assert not again.model.training
    assert not run.model.training
    assert "fedlada" in repr(run)


def test_metrics_are_columns_for_pandas(settings):
    import pandas

    run = train(**settings)
    table = pandas.DataFrame(run.metrics).set_index("round")
    assert table.index.tolist() == [1, 2, 3]
    assert table.test_acc.notna().tolist() == [False, True, True]
    assert table.test_acc[3] == run.summary["final"]["test_acc"]
    assert table.participants.tolist() == [2, 2, 2]
    assert all(kind.kind in "if" for kind in table.dtypes)


def test_evaluate_and_predict(settings, data, tmp_path):
    run = train(**settings)
    final = run.summary["final"]
    assert run.evaluate()["accuracy"] == final["test_acc"]
    assert run.evaluate()["loss"] == pytest.approx(final["test_loss"], rel=1e-6)
    assert run.evaluate(*data.test) == run.evaluate()
    images, labels = data.test
    labels_found, shares = run.predict(images), run.predict(images, probabilities=True)
    assert (labels_found == labels).mean() == final["test_acc"]
    assert shares.shape == (len(images), CLASSES)
    assert np.allclose(shares.sum(1), 1)
    # Files: one of the same size, and a wider one with the image in its middle.
    Image.fromarray(images[0]).save(tmp_path / "0.png")
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = images[1]
    Image.fromarray(wide).save(tmp_path / "1.png")
    files = [tmp_path / "0.png", str(tmp_path / "1.png")]
    assert np.array_equal(run.predict(files, probabilities=True), run.predict(images[:2], probabilities=True))
    assert run.predict(files[0]).tolist() == labels_found[:1].tolist()
    # The module itself takes images as torchvision gives them.
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    assert np.array_equal(run.model(scaled).argmax(1).numpy(), labels_found)
    for call, expected in {
        lambda: run.predict(images / 255): "images: got float64, expected uint8",
        lambda: run.predict(images[0]): "images: got shape [8, 8, 3, 1], expected [n, 8, 8, 3]",
        lambda: run.predict(images[:, :4]): "images: got shape [12, 4, 8, 3], expected [n, 8, 8, 3]",
        lambda: run.predict(images[:0]): "expected at least one image",
        lambda: run.predict("cat.png"): "cat.png: cannot be read (No such file or directory)",
        lambda: run.predict(["cat.png", 3]): "images: got shape [2], expected [n, 8, 8, 3]",
        lambda: run.evaluate(images): "got inputs or targets alone",
        lambda: run.evaluate(images, labels[:-1]): "got 12 images and 11 labels",
        lambda: run.evaluate(images, labels + 1): "got labels 1 to 3, expected 0 to 2",
    }.items():
        with pytest.raises(UserError) as found:
            call()
        assert expected in str(found.value)


@pytest.mark.ranks
def test_arrays_give_what_their_shards_give(settings, data, arrays, shared_tmp, out):
    del settings["dataset"]
    where = dict(data_dir=shared_tmp / "arrays")
    given = Data(**arrays)
    run = train(data=given, **settings, **where)
    folder = Path(run.config["dataset"])
    assert folder == shared_tmp / "arrays" / f"arrays-{given.digest[:12]}"
    written = folder.stat().st_mtime_ns
    settings["out"] = beside(out, "shards")
    prepared = train(dataset=data.shards, **settings)
    assert equal(run, prepared)
    barrier()
    again = train(data=Data(**arrays), **{**settings, "out": beside(out, "again"), **where})
    assert equal(again, run)
    assert folder.stat().st_mtime_ns == written
    assert load(again.dir).evaluate() == run.evaluate()
    # Tensors, lists, images without channels, and a normalisation of one's own.
    arrays["train_images"], arrays["test_images"] = (arrays[f"{part}_images"][..., 0] for part in ("train", "test"))
    arrays |= dict(train_labels=torch.from_numpy(arrays["train_labels"]), clients=[[0, 1, 2], range(3, 18)])
    grey = train(data=Data(**arrays, mean=0.5, std=[0.25]), **{**settings, "out": beside(out, "grey"), **where})
    assert (grey.model.mean.flatten().tolist(), grey.model.std.flatten().tolist()) == ([0.5], [0.25])
    assert grey.config["clients"] == 2


@pytest.mark.ranks
def test_a_share_of_the_arrays_chooses_the_best_round(settings, arrays, shared_tmp):
    """Of 18 images 4 are held out, none of which a client keeps."""
    del settings["dataset"]
    given = {**settings, "eval_every": 1, "lr": 0.3, "algorithm": "fedavg", "data_dir": shared_tmp / "validation"}
    run = train(data=Data(**arrays), **given, validation=0.2)
    manifest = read_manifest(run.config["dataset"])
    assert (manifest.validation, int(manifest.sizes.sum()), manifest.clients) == (0.2, 14, len(SIZES))
    assert manifest.files["validation.h5"]["images"] == 4
    chosen = run.summary["best_validation"]
    best, last = load(run.dir, best=True), load(run.dir)
    assert equal(last, run)
    assert best.evaluate()["accuracy"] == pytest.approx(chosen["test_acc"], abs=1e-6)
    assert equal(best, last) == (chosen["round"] == settings["rounds"])
    refused = refusal(**given, data=Data(**arrays), validation=0.9, overwrite=True)
    assert re.fullmatch(
        "validation: got 0.9, which leaves (client . no row|no training example of .*): give less", refused
    )


def test_the_best_model_of_a_run_without_validation(settings):
    run = train(**settings)
    with pytest.raises(UserError, match=r"has no best\.pt, as it had no validation examples"):
        _ = load(run.dir, best=True).model


@pytest.mark.ranks
def test_where_arrays_cannot_be_written(settings, arrays):
    del settings["dataset"]
    given = {**settings, "data": Data(**arrays)}
    assert refusal(**given, data_dir="a\0b").startswith("data_dir: got 'a\\x00b', expected a path")
    assert refusal(**given, data_dir="é" * 300).startswith("data_dir: got 'ééé")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(train_images=np.zeros((18, 8, 8, 3))), "train images are float64, expected uint8"),
        (dict(train_images=np.zeros((18, 3, 8, 8), np.uint8)), "expected [n, height, width, 1 or 3] (channels last)"),
        (dict(train_images=np.zeros((17, 8, 8, 3), np.uint8)), "got 17 images and 18 labels"),
        (dict(test_images=np.zeros((12, 4, 4, 3), np.uint8)), "expected one size"),
        (dict(train_labels=np.zeros(18)), "labels are float64 of shape [18], expected one integer per image"),
        (dict(train_labels=np.eye(18, dtype=int)), "expected one integer per image"),
        (dict(train_labels=np.full(18, -1)), "train label -1 is negative"),
        (dict(train_labels=np.zeros(18, int)), "got 1 class, expected at least 2"),
        (dict(test_labels=np.full(12, 7)), "test label 7 is not among the training labels 0 to 2"),
        (dict(train_images=[[1], [1, 2]]), "data: train_images: got list, expected an array"),
        (dict(train_images=None), "got no train_images, expected Data(train_images="),
        (dict(clients=[]), "got no clients"),
        (dict(clients=7), "data: got clients 7, expected the owner of each row, or a list of index arrays"),
        (dict(clients=[[0, 1], []]), "client 1 has no rows"),
        (dict(clients=[[0, 18]]), "client 0: got index 18, expected 0 to 17, for 18 training rows"),
        (dict(clients=[[-1]]), "client 0: got index -1"),
        (dict(clients=[np.ones(18, bool)]), "client 0: got bool of shape [18], expected a list of integer indices"),
        (dict(clients=[0, 1]), "got 2 owners for 18 rows, expected one for each"),
        (dict(mean=[0.5]), "mean: got [0.5], expected 3 numbers, one per channel"),
        (dict(std=[1, 1, 0]), "std: got [1, 1, 0], expected more than 0"),
        (dict(class_names=["a", "b"]), "got labels up to 2 but 2 class names"),
    ],
)
def test_arrays_that_do_not_fit(arrays, change, expected):
    with pytest.raises(UserError) as found:
        Data(**{**arrays, **change})
    assert str(found.value).startswith("data: ")
    assert expected in str(found.value)


@pytest.mark.ranks
def test_own_method(settings, out):
    class Local(Tether):
        pass

    run = train(**{**settings, "algorithm": Local, "pull": 0.25})
    assert run.config["algorithm"] == f"{__name__}:test_own_method.<locals>.Local"
    assert run.config["pull"] == 0.25
    assert run.summary["method"] == "Tethered"
    barrier()
    resumed = train(**{**settings, "algorithm": Local, "pull": 0.25, "rounds": 4, "resume": True})
    assert resumed.summary["rounds"] == 4
    barrier()
    by_name = train(**{**settings, "algorithm": f"{__name__}:Tether", "pull": 0.25, "out": beside(out, "named")})
    other = train(**{**settings, "algorithm": "fedavg", "out": beside(out, "other")})
    assert equal(by_name, load(by_name.dir))
    assert not equal(by_name, other)


def test_a_built_in_class_is_its_name(settings):
    from fedlada_mpi.algorithms import find

    assert train(**{**settings, "algorithm": find("fedprox")}).config["algorithm"] == "fedprox"


def normalised(classes, image_shape):
    return nn.Sequential(nn.Conv2d(image_shape[2], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(classes))


def test_a_loaded_model_has_the_norms_that_it_was_trained_with(settings, out):
    run = train(**{**settings, "model": normalised, "norm": "layer"})
    images = torch.rand(3, SHAPE[2], *SHAPE[:2], generator=torch.Generator().manual_seed(1))
    assert torch.equal(load(out, model=normalised).model(images), run.model(images))


@pytest.mark.ranks
def test_own_model(settings, out):
    """The module that was given stays as it was, to the gradient and the mode."""
    torch.manual_seed(5)
    module = own_model(CLASSES, SHAPE)
    module[1].weight.requires_grad_(False)
    module[1].bias.grad = torch.ones_like(module[1].bias)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = train(**{**settings, "model": module})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training
    assert module[1].bias.grad.sum() == 8
    assert not torch.equal(run.model.module[4].weight, module[4].weight)
    assert torch.equal(run.model.module[1].weight, module[1].weight)
    assert run.predict(np.zeros((2, *SHAPE), np.uint8)).shape == (2,)  # Dropout is off
    assert equal(load(out, model=module), run)
    assert equal(load(out, model=own_model), run)
    with pytest.raises(
        UserError, match=r"its model torch\.nn.*Sequential cannot be made again .*load\(DIR, model=\.\.\."
    ):
        _ = load(out).model
    by_function = train(**{**settings, "model": own_model, "out": beside(out, "function")})
    assert equal(load(by_function.dir), by_function)
    same = train(**{**settings, "model": lambda *about: own_model(*about), "out": beside(out, "lambda")})
    assert equal(same, by_function)


@pytest.mark.ranks
def test_what_is_refused(settings, out):
    class Wrong(Algorithm):
        def direction(self, c, s, g):
            pass

    for change, expected in {
        (("round", 3),): "unknown setting 'round' (did you mean 'rounds'?)",
        (("lr", -1),): "lr: got -1.0, expected more than 0",
        (("rounds", "many"),): "rounds: got 'many', expected int",
        (("mu", 1),): "mu is not a setting of fedlada: leave it out (its own are: ",
        (("max_clients_at_once", -1),): "max_clients_at_once: got -1, expected at least 0",
        (("algorithm", "fedlad"),): "(did you mean 'fedlada'?)",
        (("algorithm", dict),): "algorithm: got <class 'dict'>, expected a name or a subclass of fedlada_mpi.Algorithm",
        (("algorithm", Wrong),): "direction returns NoneType, expected a tensor [C, d]",
        (("model", 3),): "model: got 3, expected a name, a module, or a function that returns one",
        (("model", nn.BatchNorm2d(3)),): "got outputs of shape [2, 3, 8, 8]",
        (("model", lambda classes, shape, more: None),): "missing 1 required positional argument: 'more'",
        (("data", 3), ("dataset", "digits")): "data: got 3, expected fedlada_mpi.Data(",
        (("resume", True), ("overwrite", True)): "resume and overwrite contradict each other",
        (("dataset", "nowhere"),): "dataset: got 'nowhere', expected one of",
        (("config", "none.toml"),): "config: cannot read none.toml",
        (("config", 3),): "config: got 3, expected the path of a file with settings",
        (("on_round", 3),): "on_round: got 3, expected a function of a round's record",
    }.items():
        message = refusal(**{**settings, **dict(change)})
        assert expected in message, message
        assert "python -m" in message or "--" not in message
        assert not out.exists()


@pytest.mark.ranks
def test_an_earlier_run_is_not_lost(settings, out):
    first = train(**settings)
    assert refusal(**settings) == (
        f"{out} already holds a run: add resume=True to go on, overwrite=True to discard it, or another out"
    )
    assert equal(train(**settings, resume=True), first)  # it is finished
    barrier()
    assert refusal(**{**settings, "rounds": 4, "lr": 0.02}, resume=True).startswith(
        f"resume=True: {out} was started with other settings (lr: 0.01 in the checkpoint, 0.02 now)"
    )
    assert train(**{**settings, "seed": 1}, overwrite=True).config["seed"] == 1


@pytest.mark.ranks
def test_a_callback_sees_and_stops(settings, out):
    seen = []
    stopped = train(**{**settings, "rounds": 9}, on_round=lambda record: seen.append(record) or record["round"] < 2)
    assert [record["round"] for record in seen] == ([1, 2] if is_root() else [])
    if is_root():
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert seen == lines
    assert (stopped.summary["status"], stopped.summary["rounds"]) == ("stopped", 2)
    barrier()
    resumed = train(**settings, resume=True, on_round=lambda record: None)
    whole = train(**{**settings, "out": beside(out, "whole")})
    assert equal(resumed, whole)
    assert resumed.summary["status"] == "finished"


def test_code_that_leaves_the_directory(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"

    def leaving(*_):
        elsewhere.mkdir(exist_ok=True)
        os.chdir(elsewhere)

    def model(classes, shape):
        leaving()
        return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

    run = train(**{**settings, "model": model, "out": "run", "on_round": leaving})
    assert Path.cwd() == tmp_path
    assert (tmp_path / run.dir / "model.pt").is_file()
    assert not [*elsewhere.iterdir()]


def test_a_training_that_diverges(settings):
    """The error names keywords, and the run can be read, and gone on with."""
    factors = [1.0]

    class Late(Algorithm):
        def direction(self, c, s, g):
            return g.mul_(factors[-1])

    def break_it(record):
        factors.append(float("inf") if record["round"] == 2 else 1.0)

    with pytest.raises(DivergedError, match=r"^round 3: .* lower lr, set clip, .* checkpoint is .*round_000002$"):
        train(**{**settings, "algorithm": Late, "on_round": break_it, "checkpoint_every": 2})
    assert load(settings["out"]).metrics["round"].tolist() == [1, 2]
    assert not (Path(settings["out"]) / "run.lock").exists()


@pytest.mark.parametrize("answer", [False, np.False_, np.array(False), torch.tensor(False)])
def test_what_stops_a_run(answer):
    assert is_false(answer)


@pytest.mark.parametrize(
    "answer", [None, True, 0, 0.0, "", [], np.True_, np.float32(0), np.array([False]), torch.tensor(0), object()]
)
def test_what_does_not(answer):
    assert not is_false(answer)


class OwnEnd(BaseException):
    """No ``Exception``."""


@pytest.mark.ranks
@pytest.mark.parametrize("raised", [LookupError, KeyboardInterrupt, GeneratorExit, StopIteration, SystemExit, OwnEnd])
def test_what_a_callback_raises_reaches_the_caller(settings, out, raised):
    def fail(record):
        raise raised("no such\nround")

    gc.collect()  # of what earlier tests have left open
    before = surroundings()
    kind, message = (
        (raised, "no such\nround") if is_root() else (UserError, f"on_round failed on rank 0: {raised.__name__}")
    )
    with pytest.raises(kind, match=message):
        train(**settings, checkpoint_every=1, on_round=fail)
    barrier()
    assert surroundings() == before
    assert not (out / "run.lock").exists()
    assert train(**settings, resume=True).summary["status"] == "finished"


@pytest.mark.ranks
def test_a_run_whose_lock_was_taken_writes_no_more(settings, out):
    other = {"token": "t", "host": "elsewhere", "pid": 1, "started": "", "job": "", "restart": 0}

    def take(record):
        if record["round"] == 2:
            while not (out / "checkpoint/round_000001").exists():  # which a thread writes
                time.sleep(0.01)
            (out / "run.lock").write_text(json.dumps(other))

    with pytest.raises(UserError, match=r"run\.lock was taken over by process 1 on elsewhere: nothing more is written"):
        train(**settings, checkpoint_every=1, on_round=take)
    barrier()
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["round_000001"]
    assert not (out / "summary.json").exists()
    assert json.loads((out / "run.lock").read_text()) == other


def surroundings() -> dict[str, object]:
    """What a training could leave changed in its process."""
    return {
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "excepthook": sys.excepthook,
        "threads": {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"},  # which torch.fx starts
        "files": {path.name for path in Path("/proc/self/fd").iterdir()},
        "torch threads": torch.get_num_threads(),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "matmul": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "type": (torch.get_default_dtype(), torch.is_grad_enabled()),
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002 (what users have)
        "random": random.getstate(),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "worlds": len(world._open),
        "stops": dict(signals._stops),
        "printing": np.get_printoptions(),
    }


@pytest.mark.parametrize("tf32", [False, True])
def test_nothing_is_left_changed(settings, out, monkeypatch, tf32):
    own = dict(model=own_model, algorithm=Tether)
    train(**{**settings, **own, "out": beside(out, "first")})  # which imports and starts what stays for good
    wrong = nn.Linear(1, 1)
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        before = surroundings()
        # In the order of the runs: switches on and off, threads, random numbers, a refused run.
        train(**{**settings, "precision": "fp32" if tf32 else "bf16", **own})
        assert surroundings() == before
        refusal(**settings)
        refusal(**{**settings, "model": wrong}, overwrite=True)
        assert surroundings() == before
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = False
    barrier()


@pytest.mark.ranks
@pytest.mark.parametrize("more", [{}, dict(diagnose=1, eval_clients=2), dict(engine="generic", sums="exact")])
def test_files_are_closed_without_the_garbage_collector(settings, more):
    """Which comes when it likes: after another run has asked for the memory, say."""
    gc.collect()
    gc.disable()
    try:
        before = surroundings()["files"]
        train(**settings, data_on="disk", **more)
        assert surroundings()["files"] == before
    finally:
        gc.enable()


@pytest.mark.ranks(slow=True, two=True)
@pytest.mark.parametrize("model", ["cnn", own_model])
def test_no_tensors_are_left(settings, model):
    def left() -> int:
        gc.collect()
        return sum(type(value) in (torch.Tensor, nn.Parameter) for value in gc.get_objects())

    train(**settings)
    before = left()
    train(**{**settings, "model": model}, overwrite=True)
    assert left() == before


def test_switches_of_torchs_new_names(settings):
    """Where a program has set these, torch refuses to read the old ones."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has none")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        train(**settings)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.ranks
def test_one_after_another_is_each_alone(settings, out):
    def result(name, **change):
        return train(**{**settings, **change, "out": out / name})

    first = result("first", model=own_model)
    torch.manual_seed(77)
    torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002 (what users do in between)
    other = result("other", model=own_model, seed=3)
    assert not equal(first, other)
    assert equal(result("again", model=own_model), first)


def test_at_once_is_each_alone(settings, out):
    """Two threads and the main one, each with a round under way while the others have theirs."""
    kinds = {
        "dropout": dict(model=own_model, algorithm=Tether),
        "cnn": dict(seed=4, algorithm="scaffold"),
        "double": dict(precision="fp64", algorithm="fedavg"),
    }
    expected = {name: train(**{**settings, **kind, "out": out / name}) for name, kind in kinds.items()}
    before = surroundings()
    meeting = threading.Barrier(len(kinds), timeout=LIMIT)
    found, failures = {}, []

    def work(name: str) -> None:
        def meet(record):
            meeting.wait()

        try:
            together = {**settings, **kinds[name], "out": out / f"{name}-at-once", "on_round": meet}
            found[name] = train(**together)
        except BaseException as error:
            meeting.abort()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("dropout", "double")]
    for thread in threads:
        thread.start()
    work("cnn")
    for thread in threads:
        thread.join()
    assert failures == []
    for name in kinds:
        assert equal(found[name], expected[name]), name
        same_columns(found[name].metrics, expected[name].metrics)
    assert surroundings() == before


def test_two_threads_prepare_the_same_data_once(settings, arrays, tmp_path):
    del settings["dataset"]
    runs = []

    def work(name: str) -> None:
        given = {**settings, "data": Data(**arrays), "data_dir": tmp_path / "data", "out": tmp_path / name}
        runs.append(train(**given))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 3
    assert all(equal(run, runs[0]) for run in runs)
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_one_run_in_a_directory(settings, out):
    """Also from a second thread, and from the run's own callback."""
    messages = []

    def second(record):
        thread = threading.Thread(target=lambda: messages.append(refusal(**settings, overwrite=True)))
        thread.start()
        thread.join()
        messages.append(refusal(**settings, overwrite=True))

    assert train(**{**settings, "rounds": 1}, on_round=second).summary["status"] == "finished"
    assert len(messages) == 2
    assert all(f"{out} is in use by process {os.getpid()}" in message for message in messages)


@pytest.mark.ranks
def test_a_run_from_the_callback_of_another(settings, out):
    """Alone it is a run of its own; on several ranks, of which only one calls it, it is refused."""
    inner = []

    def start(record):
        inner.append(train(**{**settings, "out": out / f"inner-{record['round']}"}))

    if SIZE == 1:
        assert equal(train(**settings, on_round=start), inner[-1])
        return
    with pytest.raises(UserError, match="a world of several ranks takes one at a time"):
        train(**settings, on_round=start)
    barrier()


def test_a_signal_stops_this_run_and_no_later_one(settings, out):
    def request_stop(record):
        if record["round"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = surroundings()
    assert train(**settings, on_round=request_stop).summary["status"] == "stopped"
    assert surroundings() == before
    assert train(**settings, resume=True).summary["status"] == "finished"


def test_a_signal_stops_runs_in_threads_too(settings, out):
    """While a run in the main thread handles signals."""
    results, started, sent = {}, threading.Event(), threading.Event()

    def in_thread(record):
        started.set()
        assert sent.wait(60)

    def work():
        results["thread"] = train(**{**settings, "out": out / "thread"}, on_round=in_thread)

    thread = threading.Thread(target=work)
    thread.start()

    def in_main(record):
        assert started.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        sent.set()

    results["main"] = train(**{**settings, "out": out / "main"}, on_round=in_main)
    thread.join()
    assert {name: (run.summary["status"], run.summary["rounds"]) for name, run in results.items()} == {
        "main": ("stopped", 2),
        "thread": ("stopped", 2),
    }


def test_an_interrupt_leaves_a_run_to_resume(settings, out):
    def interrupt(record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a script in the background ignores it
    try:
        before = surroundings()
        with pytest.raises(KeyboardInterrupt):
            train(**settings, checkpoint_every=1, on_round=interrupt)
        assert surroundings() == before
    finally:
        signal.signal(signal.SIGINT, outside)
    assert not (out / "run.lock").exists()
    partly = load(out)
    assert partly.summary == {}
    assert partly.metrics["round"].tolist() == [1, 2]
    with pytest.raises(UserError, match=r"has no model\.pt, as the run has not ended: go on with resume=True"):
        _ = partly.model
    resumed = train(**settings, resume=True)
    assert equal(resumed, train(**{**settings, "out": beside(out, "whole")}))


def test_what_load_refuses(tmp_path):
    for directory, expected in {
        tmp_path / "none": "load: there is no directory",
        tmp_path: "config.json cannot be read: No such file",
    }.items():
        with pytest.raises(UserError) as found:
            load(directory)
        assert expected in str(found.value)
    if SIZE == 1:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "summary.json").write_text("[]")
        with pytest.raises(UserError, match="holds list, expected results by name"):
            load(tmp_path)


def test_what_is_missing_from_a_finished_run_is_named(settings, out):
    train(**settings)
    if SIZE > 1:
        return
    summary = json.loads((out / "summary.json").read_text())
    torch.save(dict.fromkeys(torch.load(out / "model.pt"), torch.tensor(0.0)), out / "model.pt")
    with pytest.raises(UserError, match="does not fit"):
        _ = load(out).model
    (out / "model.pt").unlink()
    with pytest.raises(UserError, match=r"has no model\.pt, which was there when the run ended: copy it again"):
        _ = load(out).model
    (out / "summary.json").write_text(json.dumps({**summary, "data": {**summary["data"], "class_names": []}}))
    with pytest.raises(UserError, match="expected shape, mean, std and classes"):
        load(out).predict("cat.png")


def test_outputs_that_are_no_numbers_are_no_classes(settings, data):
    run = train(**settings)
    with torch.no_grad():
        next(run.model.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="the model's outputs for example 0 are NaN"):
        run.predict(data.test[0])


def test_printed_unless_quiet(settings, data, capfd):
    train(**settings)
    assert capfd.readouterr() == ("", "")
    train(**{**settings, "quiet": False}, overwrite=True)
    printed = capfd.readouterr().out
    assert "method   fedlada, 3 rounds, preset paper\n" in printed
    assert f"data     {data.shards.name}: 18 images, 3 classes, 4 clients; not augmented\n" in printed
    assert "note" not in printed
    assert "finished after 3 rounds" in printed
    train(**{**settings, "quiet": False, "augment": "paper", "preset": "tuned"}, overwrite=True)
    printed = capfd.readouterr().out
    assert "4 clients; augmented: half mirrored, half cropped (4 pixels around)\n" in printed
    assert "note     --preset tuned was chosen on cifar10: whether it is better on this data is not known\n" in printed
    train(**{**settings, "quiet": False, "algorithm": Tether}, overwrite=True)
    assert "Tether, 3 rounds\n" in capfd.readouterr().out


def test_a_failure_of_one_rank_ends_all(mpirun, tmp_path, data):
    """A script whose second rank fails in the middle of a run, and whose others would wait for it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import fedlada_mpi, sys\n"
        "from mpi4py import MPI\n"
        "class Fails(fedlada_mpi.Algorithm):\n"
        "    def begin(self, c, s, r):\n"
        "        super().begin(c, s, r)\n"
        "        if r.t == 2 and MPI.COMM_WORLD.rank == 1: raise RuntimeError('rank one')\n"
        f"fedlada_mpi.train(dataset={str(data.shards)!r}, algorithm=Fails, out='out', rounds=9, participation=1)\n"
    )
    done = mpirun(2, command=(str(script),), cwd=tmp_path)
    assert done.returncode != 0
    assert "rank 1 of 2 failed:" in done.stderr
    assert "RuntimeError: rank one" in done.stderr
