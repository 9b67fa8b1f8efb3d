"""Files for ``--init``: the parameters of the model, or one line."""

from __future__ import annotations

import pickle
import tarfile

import pytest
import torch
from hostile import DAMAGES, OBSTACLES, damage_file, one_line
from torch import nn

from fedlada_mpi.models import Network
from fedlada_mpi.models.initial import load_initial
from fedlada_mpi.models.layout import Layout
from fedlada_mpi.support.errors import UserError

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


def test_one_bit_of_the_values(tmp_path):
    """Which torch.load takes as they are."""
    path = tmp_path / "model.pt"
    torch.save(GOOD, path)
    content = bytearray(path.read_bytes())
    content[content.index(GOOD["a"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["a"], GOOD["a"])
    assert "it is damaged: the checksum of model/data/0 in it is another one" in refused(path)


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch always saves checksums")
def test_a_file_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(GOOD, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(network().layout.unpack(loaded(tmp_path / "model.pt"))["a"], GOOD["a"])


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


def with_constant() -> Network:
    """``a`` trained, ``b`` frozen, and a counter."""
    mine = network()
    mine.module.b.requires_grad_(False)
    mine.module.register_buffer("count", torch.tensor(0))
    mine.constants = {"b": mine.module.b.detach(), "count": mine.module.count}
    mine.layout = Layout([("a", GOOD["a"].shape)])
    return mine


def test_a_tar_file_is_not_read(tmp_path):
    """Not even by a torch that would extract what is in it."""
    path = tmp_path / "model.pt"
    with tarfile.open(path, "w") as file:
        file.add(__file__, "storages")
    with pytest.raises(UserError, match=r"cannot read .*model\.pt as a state_dict: it is a tar file: save it again"):
        load_initial(path, network(), torch.float32)


def test_a_part_of_a_state_dict(tmp_path):
    state = {"a": GOOD["a"].double(), "b": torch.ones(5), "head.weight": torch.ones(1), "count": torch.tensor(1.0)}
    torch.save(state, tmp_path / "model.pt")
    mine = with_constant()
    load_initial(tmp_path / "model.pt", mine, torch.float32, partial=True)
    assert torch.equal(mine.initial(), mine.layout.pack(GOOD))
    assert mine.module.a.dtype == torch.float32
    assert mine.notes == [
        "--init-partial: 1 of 3 tensors from model.pt; at their initial values: b, count; "
        "not used: b, head.weight, count"
    ]


def test_frozen_parts_take_values_too(tmp_path):
    torch.save({"b": GOOD["b"].half()}, tmp_path / "model.pt")
    mine, other = with_constant(), with_constant()
    for network in (mine, other):
        load_initial(tmp_path / "model.pt", network, torch.float32, partial=True)
    assert torch.equal(mine.constants["b"], GOOD["b"])
    assert mine.digest() == other.digest() != with_constant().digest()
    assert torch.equal(mine.state_dict(mine.initial())["b"], GOOD["b"])


@pytest.mark.parametrize(
    ("wrap", "about"),
    [
        (lambda state: {"state_dict": state, "epoch": 3}, "model.pt['state_dict']"),
        (lambda state: {"model": state, "optimizer": {"lr": 0.1}}, "model.pt['model']"),
        (lambda state: {f"module.{n}": v for n, v in state.items()}, "model.pt without 'module'"),
        (
            lambda state: {"state_dict": {f"module.net.{n}": v for n, v in state.items()}},
            "model.pt['state_dict'] without 'module' without 'net'",
        ),
    ],
)
def test_wrapped_state_dicts(wrap, about, tmp_path):
    torch.save(wrap(GOOD), tmp_path / "model.pt")
    mine = with_constant()
    load_initial(tmp_path / "model.pt", mine, torch.float32, partial=True)
    assert mine.notes == [f"--init-partial: 2 of 3 tensors from {about}; at their initial values: count"]
    assert torch.equal(mine.module.a, GOOD["a"])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"c": torch.ones(2)}, "fits mine: got c; expected a, b"),
        ({}, "fits mine: got no tensors; expected a, b"),
        ({"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.int64)}, "fits mine: got a, b; expected a, b"),
        ([torch.ones(2)], "holds list, expected a state_dict"),
        ({"b": torch.full((4,), float("inf"))}, "b has values that are not finite in torch.float32"),
    ],
)
def test_files_of_which_nothing_fits(state, words, tmp_path):
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(UserError) as found:
        load_initial(tmp_path / "model.pt", network(), torch.float32, partial=True)
    assert words in str(found.value)
    assert one_line(str(found.value))


def test_the_whole_is_refused_with_a_hint(tmp_path):
    torch.save({"a": GOOD["a"]}, tmp_path / "model.pt")
    assert refused(tmp_path / "model.pt").endswith("(differs in b); --init-partial takes what fits")


@pytest.mark.parametrize("content", [b"", b"hello\n", b"PK\x03\x04 and no more"])
def test_what_torch_did_not_write_is_named_so(tmp_path, content):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.pt as a state_dict: it is damaged, or no file of torch\.save"):
        load_initial(tmp_path / "model.pt", network(), torch.float32)
