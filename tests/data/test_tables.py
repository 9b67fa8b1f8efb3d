"""Tables and texts, .npz files of any arrays, and folders of images with tests of the owners' own."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.__main__ import main
from data_prep.inspect import main as inspect
from fedlada_mpi.data import prepare as preparation
from fedlada_mpi.data.datasets import ensure, resolve_dataset
from fedlada_mpi.data.partition import strata
from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.shards import padded_inputs, read_manifest, read_silos, read_test
from fedlada_mpi.data.sources import ArraySet, load
from fedlada_mpi.data.sources.embedded import EMBEDDED
from fedlada_mpi.data.sources.table import load_csv, read_columns, single, targets_of
from fedlada_mpi.settings import PRESETS
from fedlada_mpi.support.errors import UserError

TABLE = """cost,age,sex,hospital,insured,name
1.5,20,f,north,True,a
2.5,30,m,north,False,b
3.5,40,f,south,True,c
1,50,m,south,True,d
2,25,f,south,False,e
7,35,f,10,True,f
"""


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(preparation, "draw", lambda manifest, path: path.write_bytes(b""))


@pytest.fixture
def table(tmp_path) -> Path:
    (tmp_path / "visits.csv").write_text(TABLE)
    return tmp_path / "visits.csv"


def test_columns(table):
    rows = load("csv", table, 1, target=["cost"], client="hospital", drop=["name"], test_share=0.4)
    assert isinstance(rows, ArraySet)
    assert rows.feature_names == ["age", "sex=f", "sex=m", "insured"]
    assert (rows.task, rows.class_names, rows.targets.dtype, rows.inputs.dtype) == ("regression", [], "f4", "f4")
    everything = np.concatenate([rows.inputs, rows.test_inputs]).tolist()
    assert sorted(everything)[:2] == [[20, 1, 0, 1], [25, 1, 0, 0]]
    # Of 2, 3 and 1 rows: one, one (0.4 of three is 1.2) and none are for testing, as one must stay.
    assert {name: rows.owners.tolist().count(name) for name in ("north", "south", "10")} == {
        "north": 1,
        "south": 2,
        "10": 1,
    }
    assert sorted(rows.test_owners.tolist()) == ["north", "south"]
    again = load("csv", table, 1, target=["cost"], client="hospital", drop=["name"], test_share=0.4)
    assert np.array_equal(again.test_inputs, rows.test_inputs)


@pytest.mark.parametrize(
    ("target", "task", "expected", "names", "values"),
    [
        (["sex"], "", "classification", ["f", "m"], [0, 1, 0, 1, 0, 0]),
        (["insured"], "", "classification", ["False", "True"], [1, 0, 1, 1, 0, 1]),
        (["age"], "classification", "classification", ["20", "25", "30", "35", "40", "50"], [0, 2, 4, 5, 1, 3]),
        (["insured"], "regression", "regression", [], [1, 0, 1, 1, 0, 1]),
        (["cost", "age"], "regression", "regression", [], [[1.5, 20], [2.5, 30], [3.5, 40], [1, 50], [2, 25], [7, 35]]),
        (["insured", "cost"], "survival", "survival", [], [[1, 1.5], [0, 2.5], [1, 3.5], [1, 1], [0, 2], [1, 7]]),
        (["insured"], "multilabel", "multilabel", ["insured"], [[True], [False], [True], [True], [False], [True]]),
    ],
)  # fmt: skip
def test_targets(table, target, task, expected, names, values):
    columns = read_columns(table)
    targets, *others = targets_of({name: columns[name] for name in target}, task, table)
    assert (targets.tolist(), others) == (values, [names, expected])
    rows = load("csv", table, 1, target=target, drop=["name"], task=task, test_share=0.2)
    assert (rows.task, rows.class_names, rows.owners, rows.test_owners) == (expected, names, None, None)
    assert (len(rows.targets), len(rows.test_targets)) == (5, 1)


REFUSED = {
    "an unknown target": (TABLE, ["csot"], {}, r"no column 'csot' in .*did you mean 'cost'"),
    "no target": (TABLE, [], {}, "no target given, expected --target COLUMN of cost"),
    "a missing number": (TABLE.replace(",40,", ",,"), ["cost"], {}, "column 'age' has no value in row 3: fill it in"),
    "a missing word": (TABLE.replace(",m,", ",NA,"), ["cost"], {}, "column 'sex' has no value in row 2"),
    "a missing cell of Excel": (TABLE.replace(",m,", ",#N/A,"), ["cost"], {}, "column 'sex' has no value in row 2"),
    "missing in lower case": (TABLE.replace(",40,", ",na,"), ["cost"], {}, "column 'age' has no value in row 3"),
    "a missing owner": (TABLE.replace(",10,", ",None,"), ["cost"], dict(client="hospital"), "'hospital' has no value"),
    "a missing target": (TABLE.replace("\n7,", "\nnan,"), ["cost"], {}, "column 'cost' has no value in row 6"),
    "a row of nobody": (TABLE.replace(",south,", ",,", 1), ["cost"], dict(client="hospital"), "no value in row 3"),
    "infinity": (TABLE.replace(",40,", ",inf,"), ["cost"], {}, "column 'age' has 'inf' in row 3"),
    "a number beyond float32": (TABLE.replace(",40,", ",1e99,"), ["cost"], {}, "column 'age' has '1e99' in row 3"),
    "a short row": (TABLE + "1,2\n", ["cost"], {}, "row 7 has 2 cells, expected 6"),
    "no rows": ("cost,age\n", ["cost"], {}, "no rows"),
    "nothing": ("", ["cost"], {}, "no rows"),
    "a name twice": ("a,a\n1,2\n", ["a"], {}, "two columns are called 'a'"),
    "no name": ("a,,y\n1,2,3\n", ["y"], {}, "column 2 has no name"),
    "separators at the end": ("a,y,\n1,2,\n", ["y"], {}, "column 3 has no name"),
    "names that numpy would cut": ("h,a,y\nX\0,1,2\nX,1,2\n", ["y"], dict(client="h"), "it has bytes of 0"),
    "one class": ("a,y\n1,no\n2,no\n3,no\n", ["y"], {}, "all rows are of class 'no', expected at least 2 classes"),
    "a target that is dropped": ("a,y\n1,2\n", ["y"], dict(drop=["y"]), "--drop: got 'y', which is the target"),
    "no inputs": ("cost,h\n1,a\n2,a\n", ["cost"], dict(client="h"), "no columns are left for the inputs"),
    "text to predict as a number": (TABLE, ["sex"], dict(task="regression"), "column 'sex' is text, expected numbers"),
    "two targets without a task": (TABLE, ["cost", "age"], {}, "expected --task survival with event and time"),
    "times alone": (TABLE, ["cost"], dict(task="survival"), "expected --target EVENT TIME"),
    "odd events": (TABLE, ["cost", "age"], dict(task="survival"), "expected events of 0 or 1"),
    "the client as the target": (TABLE, ["hospital"], dict(client="hospital"), "which is the target"),
    "bytes": (b"\xff\xfe\0a", ["cost"], {}, "not a table of text"),
    "a quote without an end": ('cost,age\n1,"2\n', ["cost"], {}, "not a table of text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_tables(tmp_path, name):
    text, target, options, message = REFUSED[name]
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as refused:
        load("csv", tmp_path / "a.csv", 1, target=target, **{"drop": ["name"] * ("name" in str(text)), **options})
    assert len(str(refused.value).splitlines()) == 1


def test_a_column_of_many_words(tmp_path):
    (tmp_path / "a.csv").write_text("y,id\n" + "".join(f"{i},p{i}\n" for i in range(30)))
    with pytest.raises(UserError, match="column 'id' is text with 30 values, expected at most 20: add --drop id"):
        load("csv", tmp_path / "a.csv", 1, target=["y"])


def test_from_a_table_to_shards(table, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLADA_DATA", str(tmp_path / "data"))
    words = ["--dataset", "csv", "--raw", str(table), "--target", "cost", "--client", "hospital", "--drop", "name"]
    assert main(words) == 0
    root = tmp_path / "data" / "visits"
    manifest = read_manifest(root)
    assert (manifest.client_names, manifest.normalise) == (("10", "north", "south"), "pooled")
    shard = read_silos(manifest, range(manifest.silos))
    assert padded_inputs(manifest.arrays, shard.inputs).mean(axis=0) == pytest.approx(np.zeros(4), abs=1e-6)
    assert (manifest.test_sizes.tolist(), read_test(manifest)) == ([0, 1, 1], None)
    assert inspect([str(root)]) == 0
    assert "regression, inputs float32 [4], targets float32 []" in capsys.readouterr().out
    assert main(words) == 0
    assert "already prepared" in capsys.readouterr().out
    assert main([*words[:-2], "--drop", "name", "age"]) == 2
    assert "other settings (drop ['name'] not ['name', 'age'])" in capsys.readouterr().err
    assert "--target cost --client hospital --drop name" in manifest.command
    assert main([*words[:-2], "--resize", "3"]) == 2
    assert "--resize has no effect on --dataset csv" in capsys.readouterr().err
    # A run that divides the rows anew finds the table and its options again.
    flags = dict(dataset="visits", clients=2, partition="iid", data_dir=str(tmp_path / "data"))
    resolved, directory = resolve_dataset(flags, {})
    other = ensure(resolved.config, directory, 1)
    assert (other.sizes.tolist(), other.test_sizes.tolist(), other.rows("test.h5")) == ([2, 2], [0, 0], 2)
    assert (other.feature_names, other.client_names) == (manifest.feature_names, ())


def test_dirichlet_over_bins_of_a_number(tmp_path):
    (tmp_path / "a.csv").write_text("y,x\n" + "".join(f"{i},{i % 7}\n" for i in range(100)))
    settings = dict(raw=tmp_path / "a.csv", target=["y"], clients=4, silos=1, dirichlet=0.1)
    manifest = prepare(PrepareSettings("csv", tmp_path / "out", strata=4, **settings))
    shard = read_silos(manifest, [0])
    assert (manifest.sizes.tolist(), manifest.reading["strata"]) == ([20] * 4, 4)
    quarters = [np.bincount(shard.targets[20 * i : 20 * i + 20].astype(int) // 25, minlength=4).max() for i in range(4)]
    assert np.mean(quarters) > 12  # of 20, where a random part has about 7
    # A third of the numbers is below 2, another below 3.
    assert strata(np.array([5.0, 1, 2, 2, 2, 9]), 3).tolist() == [2, 0, 1, 1, 1, 2]
    with pytest.raises(UserError, match="--strata: got 0, expected at least 1"):
        prepare(PrepareSettings("csv", tmp_path / "out", strata=0, **settings))


def test_texts(tmp_path):
    raw = tmp_path / "plays"
    raw.mkdir()
    (raw / "hamlet.txt").write_bytes(bytes(range(40)))
    (raw / "macbeth.txt").write_bytes(bytes(range(100, 130)))
    manifest = prepare(PrepareSettings("text", tmp_path / "out", raw, length=4))
    shard = read_silos(manifest, range(manifest.silos))
    assert (manifest.task, manifest.classes, manifest.client_names) == ("next-token", 256, ("hamlet", "macbeth"))
    # 36 of 40 and 27 of 30 bytes are for training, in rows of four; the last three of each are too few for a row.
    assert (manifest.sizes.tolist(), manifest.test_sizes.tolist()) == ([9, 6], [1, 0])
    assert shard.inputs[8].tolist() == [32, 33, 34, 35]
    assert shard.targets[:9].tolist()[7:] == [[29, 30, 31, 32], [33, 34, 35, -1]]
    assert (shard.test.inputs.tolist(), shard.test.targets.tolist()) == ([[36, 37, 38, 39]], [[37, 38, 39, -1]])
    (raw / "short.txt").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"short.txt: 3 bytes, expected more than 4 for rows of 4"):
        load("text", raw, 1, length=4)
    (raw / "short.txt").unlink()
    (raw / "folder").mkdir()
    with pytest.raises(UserError, match="folder: not a regular file"):
        load("text", raw, 1, length=4)
    with pytest.raises(UserError, match="expected a folder of texts"):
        load("text", raw / "hamlet.txt", 1, length=4)


def saved(path: Path, **arrays) -> Path:
    rows = dict(train_inputs=np.eye(4), test_inputs=np.eye(4)[:2], train_targets=np.ones(4), test_targets=np.ones(2))
    np.savez(path, **{name: value for name, value in {**rows, **arrays}.items() if value is not None})
    return path


def test_npz_of_arrays(tmp_path):
    clients = dict(train_clients=np.array([3, 3, 12, 12]), test_clients=np.array([12, 3]))
    labels = dict(
        train_targets=np.array([0, 1, 0, 1]), test_targets=np.array([1, 0]), class_names=np.array(["no", "yes"])
    )
    manifest = prepare(PrepareSettings("npz", tmp_path / "out", saved(tmp_path / "a.npz", **clients, **labels)))
    assert (manifest.client_names, manifest.class_names) == (("3", "12"), ("no", "yes"))
    assert (manifest.task, manifest.test_sizes.tolist(), manifest.normalise) == ("classification", [1, 1], "none")
    assert manifest.counts.tolist() == [[1, 1], [1, 1]]
    assert read_silos(manifest, [0, 1]).test.targets.tolist() == [0, 1]
    tokens = np.array([[1, 2, 3]] * 4)
    rows = load(
        "npz",
        saved(tmp_path / "a.npz", train_inputs=tokens, test_inputs=tokens, train_targets=None, test_targets=None),
        1,
    )
    assert (rows.task, rows.targets[0].tolist(), rows.classes) == ("next-token", [2, 3, -1], 4)
    named = load(
        "npz",
        saved(tmp_path / "a.npz", task=np.array("regression"), train_targets=np.arange(4), test_targets=np.arange(2)),
        1,
    )
    assert (named.task, named.classes) == ("regression", 0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (dict(test_inputs=None), "expected also test_inputs"),
        (dict(test_targets=None), "expected also test_targets"),
        (dict(train_targets=np.ones(3)), "4 rows of train_inputs and 3 of train_targets"),
        (dict(train_inputs=np.array([{}] * 4, object)), "train_inputs has Python objects"),
        (dict(train_inputs=np.full((4, 4), np.nan)), "training inputs: got nan in row 0"),
        (dict(test_clients=np.ones(2)), "test_clients alone"),
        (dict(train_clients=np.ones(3)), "one owner per training row"),
        (
            dict(train_clients=np.arange(1, 5), test_clients=np.array([0, 9])),
            "test rows of '0', who has no training rows",
        ),
        (dict(train_clients=np.arange(4), test_clients=np.array([3, 9])), "test rows of '9', who has no training rows"),
        (dict(task=np.array("magic")), "task 'magic', expected one of classification"),
        (dict(train_targets=None, test_targets=None), "expected them, or tokens"),
    ],
)
def test_refused_npz(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message) as refused:
        load("npz", saved(tmp_path / "a.npz", **arrays), 1)
    assert len(str(refused.value).splitlines()) == 1


def image(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (3, 2), level).save(path)


def test_folders_with_tests_of_the_owners(tmp_path):
    for place, level in {
        "train/b/cat/0": 1,
        "train/b/dog/0": 2,
        "train/a/dog/0": 3,
        "test/b/dog/0": 4,
        "test/b/cat/1": 5,
    }.items():
        image(tmp_path / "raw" / f"{place}.png", level)
    manifest = prepare(PrepareSettings("imagefolder", tmp_path / "out", tmp_path / "raw"))
    shard = read_silos(manifest, [0, 1])
    assert (manifest.format, manifest.image, manifest.client_names) == (2, True, ("a", "b"))
    assert (manifest.counts.tolist(), manifest.test_sizes.tolist()) == ([[0, 1], [1, 1]], [0, 2])
    assert shard.test.inputs[:, 0, 0, 0].tolist() == [5, 4]
    dealt = prepare(PrepareSettings("imagefolder", tmp_path / "dealt", tmp_path / "raw", partition="iid", clients=2))
    assert (dealt.format, dealt.rows("test.h5")) == (1, 2)
    image(tmp_path / "raw" / "test/zoo/dog/0.png", 6)
    with pytest.raises(UserError, match="test images of 'zoo', who has no training images, expected one of a, b"):
        load("imagefolder", tmp_path / "raw", 1)


def test_what_ships_with_the_package_needs_no_raw_data(tmp_path, monkeypatch):
    owners = np.repeat(np.arange(6), 4)
    rows = np.arange(24, dtype=np.float32)[:, None]
    made = ArraySet(rows, rows[:, 0], rows[:6], rows[:6, 0], owners, np.arange(6), task="regression", loss="poisson")
    monkeypatch.setitem(EMBEDDED, "randhie", lambda: made)
    resolved, directory = resolve_dataset(dict(dataset="randhie", data_dir=str(tmp_path)), {})
    manifest = ensure(resolved.config, directory, 2)
    assert directory == tmp_path / "randhie"
    assert (manifest.sizes.tolist(), manifest.test_sizes.tolist()) == ([4] * 6, [1] * 6)
    assert (manifest.loss, manifest.normalise, manifest.silos) == ("poisson", "pooled", 2)
    assert "--raw" not in manifest.command
    for name in EMBEDDED:
        rows = made if name == "randhie" else EMBEDDED[name]()
        preset = PRESETS[name]
        assert (preset["clients"], preset["task"]) == (len(np.unique(rows.owners)), rows.task)
        assert preset.get("loss", "") == rows.loss
    resolved, directory = resolve_dataset(dict(dataset="randhie", data_dir=str(tmp_path), dirichlet=0.5, clients=3), {})
    assert ensure(resolved.config, directory, 2).sizes.tolist() == [8] * 3
    with pytest.raises(UserError, match="--raw has no effect on randhie"):
        prepare(PrepareSettings("randhie", tmp_path / "x", tmp_path))


@pytest.mark.parametrize(
    ("text", "how", "words"),
    [
        ("a;y\n1;2,5\n2;3\n3;4,5\n", dict(target=["y"]), "column 'y' has decimal commas"),
        ("a,l,m\n1,0,2\n2,1,0\n3,0,1\n", dict(target=["l", "m"], task="multilabel"), "expected 0 or 1 in each"),
    ],
)
def test_numbers_that_would_become_others_are_refused(tmp_path, text, how, words):
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        load_csv(tmp_path / "odd.csv", **how)


@pytest.mark.parametrize("cell", ["1,234.5", "none", "<0.1", "-", "3 days"])
@pytest.mark.parametrize("target", ["days", "y"])
def test_one_odd_cell_makes_no_text_of_numbers(tmp_path, cell, target):
    """As a target it would be 5 classes, as a feature 5 columns."""
    (tmp_path / "a.csv").write_text(f'days,y\n0.5,1\n1,2\n2.5,3\n2,1\n"{cell}",2\n')
    with pytest.raises(UserError, match=f"column 'days' has {cell!r} in row 5, expected a number, as in other rows"):
        load_csv(tmp_path / "a.csv", target=[target])


def test_words_for_nothing(tmp_path):
    """A category among words, but no value among numbers."""
    (tmp_path / "a.csv").write_text("rh,y\n+,1\n-,2\nnone,3\n")
    assert load_csv(tmp_path / "a.csv", target=["y"]).feature_names == ["rh=+", "rh=-", "rh=none"]
    (tmp_path / "a.csv").write_text("a,y\nNone,1\n2,2\n-,3\n")
    with pytest.raises(UserError, match="column 'a' has 'None' in row 1, expected a number"):
        load_csv(tmp_path / "a.csv", target=["y"])


def test_as_many_words_as_rows_are_no_classes(tmp_path):
    column = [f"{i}d" for i in range(50)]
    with pytest.raises(UserError, match="'y' is text with 50 values in 60 rows, expected at most 30 classes: make"):
        targets_of({"y": [*column, *column[:10]]}, "", tmp_path / "a.csv")


def test_truth_values_in_any_spelling_are_two_classes(tmp_path):
    targets, names, task = targets_of({"y": ["True", "FALSE", "true", "False"]}, "", tmp_path / "a.csv")
    assert (targets.tolist(), names, task) == ([1, 0, 1, 0], ["false", "true"], "classification")


@pytest.mark.parametrize(
    ("codes", "labels"),
    [
        (["1000003", "1000001", "1000002", "1000001"], [2, 0, 1, 0]),
        (["2.1234568", "-3", "2.1234567", "10"], [2, 0, 1, 3]),
        (["9007199254740993", "9007199254740992", "9007199254740992", "9007199254740993"], [1, 0, 0, 1]),
    ],
)
def test_classes_have_the_names_of_their_codes(tmp_path, codes, labels):
    targets, names, _ = targets_of({"y": codes}, "classification", tmp_path / "a.csv")
    assert (targets.tolist(), [names[label] for label in labels]) == (labels, codes)


def test_numbers_that_float32_cannot_tell_apart_are_refused(tmp_path):
    """It has steps of 128 from 2^30 to 2^31; the deviation of 0 to 100 is 29."""
    times = [f"{1_700_000_000 + i},{i % 7}" for i in range(101)]
    (tmp_path / "a.csv").write_text("\n".join(["time,y", *times]))
    words = (
        "column 'time' has numbers from 1700000000 to 1700000100, which float32 rounds by .*: subtract 1700000000 from"
    )
    with pytest.raises(UserError, match=words + " all, or add --drop time"):
        load_csv(tmp_path / "a.csv", target=["y"])
    with pytest.raises(UserError, match=words + " all$"):
        load_csv(tmp_path / "a.csv", target=["time"])
    with pytest.raises(UserError, match=words + " all$"):
        load_csv(tmp_path / "a.csv", target=["y", "time"], task="regression")


@pytest.mark.parametrize(
    "column", [[1.6e9, 1.7e9, 1.65e9], [0.3, 0.1 + 0.2, 0.3], [1600000001, 1600000001, 1600000001], [1e-3, 1e12, 5]]
)
def test_numbers_that_float32_rounds_a_little(tmp_path, column):
    assert single("x", np.array(column, float), tmp_path).tolist() == np.array(column, np.float32).tolist()


def test_codes_are_no_numbers(tmp_path):
    (tmp_path / "codes.csv").write_text("code,y\n1_2,3\n12,4\n1_2,5\n")
    assert load_csv(tmp_path / "codes.csv", target=["y"]).feature_names == ["code=12", "code=1_2"]


def test_a_table_of_many_columns(tmp_path):
    """A search for names that occur twice may not take the square of their number."""
    names = [f"c{i}" for i in range(40_000)]
    (tmp_path / "wide.csv").write_text("\n".join([",".join(names), ",".join(["1"] * len(names))]))
    started = time.process_time()
    assert [*read_columns(tmp_path / "wide.csv")] == names
    assert time.process_time() - started < 3


def test_owners_with_leading_zeros_stay_apart(tmp_path):
    (tmp_path / "zeros.csv").write_text("a,h,y\n1,01,3\n2,1,4\n3,01,5\n4,1,6\n")
    found = load_csv(tmp_path / "zeros.csv", target=["y"], client="h")
    assert sorted(found.owners) == ["01", "1"]
