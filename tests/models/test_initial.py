"""Files for ``--init``: the parameters of the model, or one line."""

from __future__ import annotations

import pickle

import pytest
import torch
from hostile import DAMAGES, OBSTACLES, damage_file, one_line
from torch import nn

from fedlada_mpi.errors import UserError
from fedlada_mpi.models import Network
from fedlada_mpi.models.initial import load_initial
from fedlada_mpi.models.layout import Layout

pytestmark = pytest.mark.serial  # nothing of it depends on ranks
GOOD = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


class Opens:
    """A pickle that would run a command."""

    def __reduce__(self):
        return print, ("executed",)


def network() -> Network:
    """With parameters ``a`` and ``b``."""
    module = nn.Module()
    for name, value in GOOD.items():
        module.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
    return Network("mine", module, (1, 1, 1), Layout([(name, value.shape) for name, value in GOOD.items()]))


def loaded(path) -> torch.Tensor:
    mine = network()
    load_initial(path, mine, torch.float32)
    return mine.initial()


def refused(path) -> str:
    with pytest.raises(UserError) as found:
        load_initial(path, network(), torch.float32)
    assert one_line(str(found.value))
    assert str(found.value).startswith("--init: ")
    return str(found.value)


def test_a_state_dict(tmp_path):
    torch.save(GOOD, tmp_path / "model.pt")
    flat = loaded(tmp_path / "model.pt")
    assert torch.equal(network().layout.unpack(flat)["a"], GOOD["a"])
    torch.save({name: value.half() for name, value in GOOD.items()}, tmp_path / "half.pt")
    assert torch.equal(loaded(tmp_path / "half.pt"), flat)


@pytest.mark.parametrize("kind", [*DAMAGES, *OBSTACLES])
def test_files_that_are_none(kind, tmp_path):
    torch.save(GOOD, tmp_path / "model.pt")
    damage_file(tmp_path / "model.pt", kind)
    if kind != "twice":  # torch reads the second archive
        refused(tmp_path / "model.pt")


def test_a_path_that_is_none(tmp_path):
    refused(tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": torch.ones(5)}, "does not fit mine (differs in b)"),
        ({"b": torch.ones(4, 1)}, "does not fit mine (differs in b)"),
        ({"c": torch.ones(1)}, "does not fit mine (differs in c)"),
        ({3: torch.ones(1)}, "does not fit mine (differs in 3)"),
        ({"b": {"nested": torch.ones(4)}}, "is not a state_dict of tensors"),
        ({"b": 1.0}, "is not a state_dict of tensors"),
        ({"b": torch.ones(4, dtype=torch.int64)}, "b is a torch.strided torch.int64 tensor, expected plain"),
        ({"b": torch.ones(4, dtype=torch.bool)}, "b is a torch.strided torch.bool tensor, expected plain"),
        ({"b": torch.ones(4, dtype=torch.complex64)}, "b is a torch.strided torch.complex64 tensor, expected plain"),
        ({"b": torch.ones(4).to_sparse()}, "b is a torch.sparse_coo torch.float32 tensor, expected plain"),
        ({"b": torch.ones(4, device="meta")}, "b is a meta tensor, expected plain"),
        ({"b": torch.tensor([1.0, 2.0, float("nan"), 4.0])}, "b has values that are not finite in torch.float32"),
        ({"b": torch.full((4,), -float("inf"))}, "b has values that are not finite in torch.float32"),
        ({"b": torch.full((4,), 1e300, dtype=torch.float64)}, "b has values that are not finite in torch.float32"),
    ],
)
def test_tensors_that_do_not_fit(changes, words, tmp_path):
    torch.save({**GOOD, **changes}, tmp_path / "model.pt")
    assert words in refused(tmp_path / "model.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_tensor(tmp_path):
    torch.save({**GOOD, "b": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt")


def test_a_pickle_is_not_executed(tmp_path, capsys):
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Opens()))
    refused(tmp_path / "model.pt")
    torch.save({"a": Opens()}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt")
    assert capsys.readouterr().out == ""
