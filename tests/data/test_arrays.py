"""Data of any arrays from Python: what is given comes back from the shards, and what does not fit is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedlada_mpi.data import prepare as preparation
from fedlada_mpi.data.arrays import Data, shards
from fedlada_mpi.data.normalise import time_edges
from fedlada_mpi.data.rows import Ragged, padded, ragged, shifted, take_rows
from fedlada_mpi.data.shards import padded_inputs, read_clients, read_manifest, read_silos, read_test
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.tasks import About, Array

X = np.arange(18, dtype=np.float32).reshape(6, 3)
Y = np.array([0.5, 1, 2, 3, 4, 5], np.float32)
OWNERS = np.array(["b", "a", "b", "c", "c", "c"])


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(preparation, "draw", lambda manifest, path: path.write_bytes(b""))


@pytest.fixture
def written(tmp_path):
    """The manifest, all clients and the test rows of data, from its shards."""

    def write(validation: float = 0.0, **arrays):
        data = arrays.pop("data", None) or Data(**arrays)
        manifest = read_manifest(shards(data, {"data_dir": str(tmp_path), "validation": validation}))
        return manifest, read_silos(manifest, range(manifest.silos)), read_test(manifest)

    return write


def test_a_table_of_floats(written):
    manifest, shard, test = written(inputs=X, targets=Y, clients=OWNERS, test=(X[:2] + 1, Y[:2]))
    assert (manifest.format, manifest.task, manifest.classes, manifest.image) == (2, "regression", 0, False)
    assert manifest.client_names == ("a", "b", "c")
    assert (manifest.sizes.tolist(), manifest.test_sizes.tolist(), manifest.counts.shape) == (
        [1, 2, 3],
        [0, 0, 0],
        (3, 0),
    )
    assert shard.inputs.tolist() == X[[1, 0, 2, 3, 4, 5]].tolist()
    assert (shard.inputs.dtype, shard.targets.dtype) == (np.float32, np.float32)
    assert shard.targets.tolist() == [1, 0.5, 2, 3, 4, 5]
    assert shard.offsets.tolist() == [0, 1, 3, 6]
    assert shard.test is None
    assert (test[0].tolist(), test[1].tolist()) == ((X[:2] + 1).tolist(), [0.5, 1])
    assert manifest.about() == About(Array("float32", (3,)), Array("float32"))
    some = read_clients(manifest, [2, 0])
    assert some.targets.tolist() == [3, 4, 5, 1]


def test_test_rows_of_their_own(written):
    tests = (X[:4], Y[:4], ["c", "a", "c", "a"])
    manifest, shard, test = written(inputs=X, targets=Y, clients=OWNERS, test=tests)
    assert test is None
    assert "test.h5" not in manifest.files
    assert manifest.test_sizes.tolist() == [2, 0, 2]
    assert shard.test.client_ids.tolist() == shard.client_ids.tolist() == [0, 1, 2]
    assert shard.test.offsets.tolist() == [0, 2, 2, 4]
    assert shard.test.targets.tolist() == [1, 3, 0.5, 2]
    assert read_clients(manifest, [1, 2]).test.targets.tolist() == [0.5, 2]
    other = written(inputs=X, targets=Y, clients=OWNERS, test=(X[:4], Y[:4], ["c", "a", "c", "c"]))[0]
    assert other.digest != manifest.digest


def test_named_and_ragged_inputs(written):
    inputs = {"tokens": [[1, 2, 3], [4], [5, 6]], "age": torch.tensor([0.5, 0.25, 1.0])}
    tests = {"tokens": [[9], [7]], "age": torch.tensor([1.0, 2.0])}
    manifest, shard, test = written(
        inputs=inputs, targets=[True, False, True], clients=[[2, 0], [1]], test=(tests, [True, False])
    )
    assert (manifest.task, manifest.classes, manifest.class_names) == ("classification", 2, ("0", "1"))
    assert manifest.counts.tolist() == [[0, 2], [1, 0]]
    assert shard.inputs["tokens"].values.tolist() == [5, 6, 1, 2, 3, 4]
    assert shard.inputs["tokens"].starts.tolist() == [0, 2, 5, 6]
    assert shard.inputs["age"].tolist() == [1, 0.5, 0.25]
    assert shard.targets.tolist() == [1, 1, 0]
    assert test[0]["tokens"].starts.tolist() == [0, 1, 2]
    assert padded_inputs(manifest.arrays, shard.inputs)["tokens"].tolist() == [[5, 6, 0], [1, 2, 3], [4, 0, 0]]
    assert manifest.about().inputs == {"tokens": Array("int64", (3,), 10), "age": Array("float32")}
    assert read_clients(manifest, [1]).inputs["tokens"].values.tolist() == [4]


def test_a_row_without_tokens(written):
    _, shard, _ = written(inputs=[[1, 2], [], [3]], targets=[0, 1, 0], clients=[[0, 1, 2]], test=([[], [5]], [0, 1]))
    assert (shard.inputs.values.dtype, shard.inputs.starts.tolist()) == (np.int64, [0, 2, 2, 3])


def test_tokens_without_targets(written):
    manifest, shard, test = written(inputs=[[1, 2, 3], [4], [5, 6]], clients=[[0, 1], [2]], test=([[9, 8, 7, 6]],))
    assert (manifest.task, manifest.classes, manifest.targets.shape) == ("next-token", 10, (4,))
    assert shard.targets.tolist() == [[2, 3, -1, -1], [-1] * 4, [6, -1, -1, -1]]
    assert test[1].tolist() == [[8, 7, 6, -1]]
    dense = np.array([[1, 255], [3, 4]], np.uint8)
    manifest, shard, _ = written(inputs=dense, clients=[[0], [1]], test=(dense,))
    assert (manifest.classes, shard.targets.tolist()) == (256, [[255, -1], [4, -1]])
    assert shard.inputs.dtype == np.uint8


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", ">f4"])
def test_types_stay(written, dtype):
    values = np.array([[0, 1], [1, 1], [1, 0]]).astype(dtype)
    manifest, shard, test = written(inputs=values, targets=values, clients=[[0, 1], [2]], test=(values, values))
    assert shard.inputs.dtype == shard.targets.dtype == test[0].dtype == np.dtype(dtype).newbyteorder("=")
    assert np.array_equal(shard.inputs, values)
    assert manifest.targets.shape == (2,)


def test_images_with_tests_of_their_own(written):
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2, 1)
    labels = [0, 1, 0, 1, 0, 1]
    manifest, shard, _ = written(inputs=images, targets=labels, clients=OWNERS, test=(images, labels, OWNERS))
    assert (manifest.format, manifest.image, manifest.image_shape) == (2, True, (2, 2, 1))
    assert manifest.mean == pytest.approx((images.mean() / 255,))
    assert manifest.about().image
    assert np.array_equal(shard.test.inputs, images[[1, 0, 2, 3, 4, 5]])
    nobody = written(inputs=images, targets=labels, clients=OWNERS, test=(images, labels))[0]
    old_way = Data(images, labels, OWNERS, images, labels)
    assert (nobody.format, nobody.client_names) == (1, ("a", "b", "c"))
    assert written(data=old_way)[0].root == nobody.root
    masks = written(
        inputs=images,
        targets=images[..., 0] % 3,
        clients=OWNERS,
        test=(images, images[..., 0] % 3),
        task="segmentation",
    )
    assert (masks[0].format, masks[0].image, masks[0].classes) == (2, True, 3)


def test_pooled_normalisation_is_applied_when_read(written):
    inputs = np.array([[1, 7], [3, 7], [5, 7], [11, 7]], np.float32)
    manifest, shard, _ = written(
        inputs=inputs, targets=Y[:4], clients=[[0, 1], [2, 3]], test=(inputs, Y[:4]), normalise="pooled"
    )
    assert (manifest.inputs.mean, manifest.inputs.std) == ((5, 7), (pytest.approx(14**0.5), 1))
    assert np.array_equal(shard.inputs, inputs)
    got = padded_inputs(manifest.arrays, shard.inputs)
    assert got == pytest.approx((inputs - [5, 7]) / [14**0.5, 1])
    assert got.dtype == np.float32


def test_normalisation_by_client_is_in_the_values(written):
    inputs = np.array([[1.0], [3.0], [10.0], [10.0]])
    tests = (np.array([[5.0], [12.0]]), [0.0, 0.0], [0, 1])
    manifest, shard, _ = written(inputs=inputs, targets=Y[:4], clients=[[0, 1], [2, 3]], test=tests, normalise="client")
    assert manifest.inputs.mean == ()
    assert shard.inputs.ravel().tolist() == [-1, 1, 0, 0]  # means 2 and 10, deviations 1 and, of a constant, 1
    assert shard.test.inputs.ravel().tolist() == [3, 2]
    _, _, nobody = written(inputs=inputs, targets=Y[:4], clients=[[0, 1], [2, 3]], test=tests[:2], normalise="client")
    assert nobody[0].ravel() == pytest.approx((np.array([5, 12]) - 6) / 16.5**0.5)  # by all: mean 6, variance 16.5


def test_validation_is_drawn_from_bins_of_the_target(written):
    values = np.arange(20.0)
    manifest, shard, _ = written(
        inputs=values, targets=values, clients=[range(20)], test=(values, values), validation=0.5
    )
    _, held = read_test(manifest, name="validation.h5")
    assert (len(shard.targets), len(held)) == (10, 10)
    assert sorted([*shard.targets, *held]) == values.tolist()
    assert np.bincount(held.astype(int) // 2).tolist() == [1] * 10


def test_ends_of_time_bins(written):
    times = np.arange(1, 21.0)
    targets = np.stack([np.ones(20), times], axis=1)
    targets[-1, 0] = 0
    data = dict(inputs=times, targets=targets, clients=[range(20)], test=(times, targets), task="survival")
    assert written(**data)[0].edges == (2, 4, 6, 8, 10, 12, 14, 16, 18, 19)
    assert written(**data)[0].about().edges == (2, 4, 6, 8, 10, 12, 14, 16, 18, 19)


def test_torch_data_sets(written):
    class Pairs(torch.utils.data.Dataset):
        def __init__(self, *values: float):
            self.values = values

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, i: int):
            return torch.tensor([self.values[i], 1.0]), self.values[i] > 1

    data = Data.from_datasets({"b": Pairs(1, 2), "a": Pairs(3)}, test={"b": Pairs(4)}, class_names=["low", "high"])
    manifest, shard, test = written(data=data)
    assert (manifest.client_names, manifest.class_names, test) == (("a", "b"), ("low", "high"), None)
    assert shard.inputs.tolist() == [[3, 1], [1, 1], [2, 1]]
    assert shard.targets.tolist() == [1, 0, 1]
    assert shard.test.offsets.tolist() == [0, 0, 1]
    manifest, shard, test = written(data=Data.from_datasets([Pairs(i) for i in range(11)], test=Pairs(0, 9)))
    assert shard.inputs[:, 0].tolist() == list(range(11))
    assert test[1].tolist() == [0, 1]
    with pytest.raises(UserError, match=r"clients: got the name 'a.x00', expected one without NUL"):
        Data.from_datasets({"a": Pairs(1), "a\0": Pairs(2)}, test=Pairs(1))
    with pytest.raises(UserError, match="data set 'a' has no rows"):
        Data.from_datasets({"a": Pairs()}, test=Pairs(1))
    with pytest.raises(UserError, match=r"got 3, expected pairs \(x, y\)"):
        Data.from_datasets([[3]], test=Pairs(1))


def test_masks_of_truth_values_are_classes(written):
    masks = np.arange(24).reshape(6, 2, 2) % 3 == 0
    manifest, shard, test = written(inputs=X, targets=masks, clients=OWNERS, test=(X, masks), task="segmentation")
    assert (manifest.classes, shard.targets.dtype) == (2, np.uint8)
    np.testing.assert_array_equal(test[1], masks)


def good(**changes):
    return {**dict(inputs=X, targets=Y, clients=OWNERS, test=(X, Y)), **changes}


REFUSED = {
    "a NaN among the inputs": (dict(inputs=np.where(X == 4, np.nan, X)), "training inputs: got nan in row 1"),
    "an infinite target": (dict(test=(X, np.where(Y == 3, np.inf, Y))), "test targets: got inf in row 3"),
    "masked inputs": (dict(inputs=np.ma.masked_equal(X, 4)), "data: inputs: got masked values, expected none"),
    "masked targets": (dict(targets=np.ma.masked_equal(Y, 4)), "data: targets: got masked values"),
    "masked test rows": (dict(test=([*np.ma.masked_equal(X, 4)], Y)), "data: test inputs: got masked values"),
    "targets by name": (dict(targets={"age": Y, 2: Y}), "data: targets: got a dict of 'age', 2, expected one array"),
    "test targets by name": (dict(test=(X, {"age": Y})), "data: test targets: got a dict of 'age', expected one array"),
    "a single target": (dict(targets=3), "data: targets: got a single value, expected an array"),
    "a single input": (dict(inputs="x"), "data: inputs: got a single value, expected an array"),
    "a class as the task": (dict(task=Data), "data: task: got <class .* expected the name of one; a class is for"),
    "class names that are none": (dict(class_names=3), "data: class_names: got 3, expected a list of names"),
    "class names in one": (dict(class_names="ab"), "data: class_names: got 'ab', expected a list of names"),
    "rows of masked targets": (dict(targets=[*np.ma.masked_equal(X, 4)]), "data: targets: got masked values"),
    "objects": (dict(inputs=np.array([{}] * 6)), "training inputs are object, expected bool, integers or floats"),
    "text": (dict(targets=list("abcdef"), test=(X, list("abcdef"))), "training targets are <U1"),
    "complex numbers": (dict(inputs=X + 1j), "training inputs are complex"),
    "fewer targets": (dict(targets=Y[:5]), "got 6 rows of inputs and 5 targets"),
    "an owner with NUL": (dict(clients=["a\0", *OWNERS[1:]]), r"clients: got the name 'a.x00', expected one"),
    "an owner with NUL in pandas": (dict(clients=np.array(["a\0b"] * 6, object)), "expected one without NUL"),
    "fewer owners": (dict(clients=OWNERS[:5]), "got 5 owners for 6 rows"),
    "owners that are numbers with a point": (dict(clients=np.ones(6)), "clients: got float64 of shape"),
    "an unknown owner of a test row": (dict(test=(X, Y, [*OWNERS[:5], "z"])), "test rows of 'z', who has no training"),
    "fewer owners of test rows": (dict(test=(X, Y, OWNERS[:5])), r"got shape \[5\], expected one for each of 6"),
    "a client without rows": (dict(clients=[[0, 1], []]), "client 1 has no rows"),
    "owners in a column": (dict(clients=np.arange(6)[:, None]), r"clients: got shape \[6, 1\], expected the owner of"),
    "owners in a column of torch": (dict(clients=torch.arange(6)[:, None]), r"clients: got shape \[6, 1\], expected"),
    "an index beyond the rows": (dict(clients=[[0, 6]]), "got index 6, expected 0 to 5"),
    "other test columns": (dict(test=(X[:, :2], Y)), r"inputs of float32 \[3\] and test inputs of float32 \[2\]"),
    "other test inputs": (dict(inputs={"a": X}, test=({"b": X}, Y)), "training inputs 'a' and test inputs 'b'"),
    "a name that is no keyword": (dict(inputs={"my age": X}), "got the name 'my age', expected a keyword"),
    "a name that is zero": (dict(inputs={0: X}), "got the name 0, expected a keyword"),
    "an empty name": (dict(inputs={"": X}), "got the name '', expected a keyword"),
    "no arrays": (dict(inputs={}), "got no arrays"),
    "images, too": (dict(train_images=X), "got train_images and inputs, expected images and labels, or inputs"),
    "no test rows": (dict(test=None), "got no test"),
    "no clients": (dict(clients=None), "got no clients"),
    "test rows alone": (dict(test=X), "test: got .*, expected .inputs, targets."),
    "empty test rows": (dict(test=(X[:0], Y[:0])), "test rows: got none"),
    "negative classes": (dict(targets=[-1, 0, 1, 0, 1, 0], test=(X, [0] * 6)), "got class -1 in targets"),
    "numbers that are no classes": (dict(targets=[0, 1, 700, 0, 1, 0], test=(X, [0] * 6)), "class 700 among 6 rows"),
    "an unknown test class": (dict(targets=[0, 1] * 3, test=(X, [5] * 6)), "got class 5 of 2 classes"),
    "tokens to normalise": (
        dict(inputs=[[1, 2]] * 6, targets=None, test=([[1, 2]] * 6,), normalise="pooled"),
        "no effect on tokens and images",
    ),
    "rows of several shapes": (dict(inputs=[X, X[:1], *[X] * 4]), r"got a row of shape \[6, 3\], expected all of one"),
    "an unknown task": (dict(task="regresion"), "did you mean 'regression'"),
    "an unknown normalisation": (dict(normalise="all"), "normalise: got 'all', expected one of none, pooled, client"),
    "odd events": (dict(targets=X[:, :2], test=(X, X[:, :2]), task="survival"), "expected events of 0 or 1"),
    "tokens that are floats": (dict(targets=None, test=(X,)), "expected them, or tokens as inputs"),
    "targets alone": (dict(test=(X,)), "targets of training or test rows alone"),
    "a single value": (dict(inputs=3.0), "got a single value, expected an array"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as refused:
        shards(Data(**good(**changes)), {})  # integers may be numbers of a task that a run names
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).startswith("data")


def test_training_values_of_another_width_are_widened(written):
    _, shard, test = written(**good(test=(X.astype(np.float64), Y.astype(np.float64))))
    assert shard.inputs.dtype == test[0].dtype == np.float64


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    folders = [shards(Data(**good(test=(X, Y, OWNERS))), {"data_dir": str(tmp_path / name)}) for name in "ab"]
    a, b = (read_manifest(folder) for folder in folders)
    assert (a.root.name, a.files, a.digest) == (b.root.name, b.files, b.digest)
    assert json.loads((a.root / "manifest.json").read_text())["format"] == 2


def test_rows_of_any_length():
    rows = ragged([np.array([1, 2, 3]), np.array([], int), np.array([4])])
    taken = take_rows(rows, np.array([2, 0, 0, 1]))
    assert (taken.values.tolist(), taken.starts.tolist()) == ([4, 1, 2, 3, 1, 2, 3], [0, 1, 4, 7, 7])
    assert padded(rows, 2, fill=-1).tolist() == [[1, 2], [-1, -1], [4, -1]]
    assert shifted(rows).tolist() == [[2, 3, -1], [-1, -1, -1], [-1, -1, -1]]
    assert shifted(Ragged(np.array([300, 70000]), np.array([0, 2]))).dtype == np.int32


def test_edges_are_quantiles_of_events():
    targets = np.array([[1, time] for time in range(1, 101)] + [[0, 1000]] * 50, float)
    assert time_edges(targets, 4) == [25, 50, 75, 100]
    assert time_edges(np.array([[1.0, 2], [1, 2], [1, 2], [1, 7]]), 20) == [2, 7]
    with pytest.raises(UserError, match="without any event"):
        time_edges(targets[100:])


def test_rows_of_tests_are_not_those_of_more_clients():
    halves = [[0, 1, 2], [3, 4, 5]]
    more = Data(**good(clients=halves * 2, test=(X, Y)))
    tested = Data(**good(clients=halves, test=(X, Y, ["0"] * 3 + ["1"] * 3)))
    assert more.digest != tested.digest
