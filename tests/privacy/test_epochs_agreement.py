"""Epochs: keys of pairs, signatures, and what is refused."""

from __future__ import annotations

import struct
from copy import deepcopy

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from pretend_world import on_ranks

from fedlada_mpi.privacy import key_files
from fedlada_mpi.privacy.agreement import AES, CHACHA, agree, refuse_too_few
from fedlada_mpi.privacy.names import own_name, silo_names
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError

NAMES = ["", "c", "a", "d", "b"]


def epochs(config=None, names=NAMES, gpu=(), tamper=None):
    config = config or Config(secure=True)

    def action(world):
        return agree(world, config, names[world.rank], world.rank in gpu)

    return on_ranks(len(names), action, tamper)


@pytest.fixture
def signed(tmp_path):
    for name in NAMES[1:]:
        key_files.new(tmp_path, name)
    return Config(secure=True, silo_keys=str(tmp_path))


def test_both_silos_of_a_pair_have_the_same_secret():
    server, *silos = epochs()
    assert server.keys == {}
    assert server.silos == ("a", "b", "c", "d")
    by_name = {epoch.own: epoch for epoch in silos}
    pairs = {frozenset((own, other)) for own, epoch in by_name.items() for other in epoch.keys}
    assert len(pairs) == 6
    for own, epoch in by_name.items():
        for other, key in epoch.keys.items():
            assert by_name[other].keys[own] == key
    secrets = {key for epoch in silos for key in epoch.keys.values()}
    assert len(secrets) == 6


def test_neighbours_on_the_ring():
    _, *silos = epochs(Config(secure=True, secure_neighbours="2"))
    assert {epoch.own: sorted(epoch.keys) for epoch in silos} == {
        "a": ["b", "d"], "b": ["a", "c"], "c": ["b", "d"], "d": ["a", "c"],
    }  # fmt: skip


def test_keys_of_masks_are_expanded_as_in_rfc_5869():
    _, c, *_ = epochs()
    info = struct.pack("<qq", 3, 7) + b"round 0" + b"x"
    expected = {HKDFExpand(SHA256(), 32, info).derive(key) for key in c.keys.values()}
    assert {key for key, _ in c.streams("round 0", 3, b"x")} == expected


def test_streams_of_a_pair_are_the_same_with_opposite_signs():
    _, c, a, *_ = epochs()
    ours = dict(zip(a.keys, a.streams("round 0", 3, b"x"), strict=True))["c"]
    theirs = dict(zip(c.keys, c.streams("round 0", 3, b"x"), strict=True))["a"]
    assert ours[0] == theirs[0]
    assert ours[1] == -theirs[1]
    others = [("round 0", 4, b"x"), ("round 1", 3, b"x"), ("round 0", 3, b"y"), ("round", 0, b"3x")]
    keys = {key for about in others for key, _ in a.streams(*about)}
    assert len(keys) == 4 * len(a.keys)
    assert ours[0] not in keys


def test_an_epoch_has_keys_of_its_own(signed):
    first, second = epochs(signed)[1], epochs(signed)[1]
    assert first.signed
    assert set(first.keys.values()).isdisjoint(second.keys.values())


def test_one_gpu_makes_all_use_chacha():
    assert {epoch.cipher for epoch in epochs()} == {AES}
    assert {epoch.cipher for epoch in epochs(gpu=(2,))} == {CHACHA}


def test_without_masks_there_are_no_keys():
    found = epochs(Config(secure=True, secure_neighbours="0"))
    assert all(epoch.keys == {} and epoch.degree == 0 for epoch in found)
    assert "not masked" in found[0].description


def test_two_silos_with_one_name():
    found = epochs(names=["", "a", "b", "a"])
    assert all(isinstance(each, UserError) for each in found)
    assert str(found[0]) == "two silos have the name a: give each rank its own by --silos or FEDLADA_SILO"


def test_a_key_that_is_missing(signed, tmp_path):
    (tmp_path / "b.key").unlink()
    assert "expected the key of b: make it by python -m fedlada_mpi.keys new b" in str(epochs(signed)[0])


def test_a_public_key_that_is_missing(signed, tmp_path):
    (tmp_path / "b.pub").unlink()
    assert "copy b.pub from that silo" in str(epochs(signed)[0])


@pytest.mark.parametrize("with_keys", [[1, 2, 3, 4], [0, 1, 2, 3], [1]])
def test_keys_that_only_some_ranks_are_given(signed, with_keys):
    """The server needs none; a silo without its own would leave the others waiting for a signature."""

    def action(world):
        config = signed if world.rank in with_keys else Config(secure=True)
        return agree(world, config, NAMES[world.rank], False)

    found = on_ranks(len(NAMES), action)
    if 4 in with_keys:
        assert all(epoch.signed for epoch in found)
    else:
        assert all("--silo-keys: got none for" in str(each) and "b" in str(each) for each in found)


def test_a_server_that_says_that_nobody_signs(signed):
    def tamper(rank, items):
        if isinstance(items[0], dict) and "signs" in items[0]:
            return [{**item, "signs": False} for item in items]
        return items

    assert all("--silo-keys: got none for" in str(each) for each in epochs(signed, tamper=tamper))


def test_another_silos_signature(signed, tmp_path):
    (tmp_path / "b.pub").unlink()
    (tmp_path / "b.key").unlink()
    key_files.new(tmp_path, "b")
    (tmp_path / "b.pub").write_bytes(key_files.new(tmp_path / "more", "b").read_bytes())
    assert "the signature of b does not belong to" in str(epochs(signed)[0])


def test_a_key_that_two_silos_have(signed, tmp_path):
    for kind in ("pub", "key"):
        (tmp_path / f"b.{kind}").write_bytes((tmp_path / f"a.{kind}").read_bytes())
    assert "--silo-keys: a.pub and b.pub are one key: each silo needs its own" in str(epochs(signed)[0])


def test_a_signature_that_passes_for_anothers(signed, tmp_path):
    """Of a silo whose public key leads to that of the other."""

    def tamper(rank, items):
        signatures = all(isinstance(item, str) for item in items) and len(items[2]) == 128
        return ["", *[items[2]] * (len(items) - 1)] if signatures else items

    assert "does not belong to" in str(epochs(signed, tamper=tamper)[0])


@pytest.mark.parametrize("name", ["./a", "../a", "", "a\0", "x" * 65])
def test_a_name_that_is_none(name):
    def tamper(rank, items):
        if rank == 2 and isinstance(items[1], dict) and "key" in items[1]:
            items = [items[0], {**items[1], "name": name}, *items[2:]]
        return items

    expected = "as the name of a silo" if name else "the keys of 3 of 4 silos"
    assert expected in str(epochs(tamper=tamper)[2])


def test_what_ranks_were_told_before():
    """Such as the mean and the deviation that all normalise by."""

    def told(world):
        world.heard.update(b"another" if world.rank == 2 else b"this")
        return agree(world, Config(secure=True), NAMES[world.rank], False)

    found = on_ranks(len(NAMES), told)
    assert found[1].keys["a"] != found[2].keys["c"]


@pytest.mark.parametrize("signs", [True, False])
def test_a_server_in_the_middle(signed, signs):
    """It passes on a key of its own to one silo: signatures notice, and without them the two have no common secret."""

    def tamper(rank, items):
        if rank == 2 and isinstance(items[1], dict) and "key" in items[1]:
            items = deepcopy(items)
            items[1]["key"] = items[3]["key"][::-1]
        return items

    found = epochs(signed if signs else Config(secure=True), tamper=tamper)
    if signs:
        assert "the signature of" in str(found[2])
    else:
        assert found[1].keys["a"] != found[2].keys["c"]


def test_a_silo_notices_another_key_in_its_own_name():
    def tamper(rank, items):
        if rank == 1 and isinstance(items[1], dict):
            items = deepcopy(items)
            items[1]["key"] = "00" * 32
        return items

    assert "has not passed on the key of c" in str(epochs(tamper=tamper)[1])


@pytest.mark.parametrize("left_out", [[2], [2, 3, 4]])
def test_a_server_that_leaves_silos_out(signed, left_out):
    """To one that hears of fewer others; of none, it would send its sums without a mask."""

    def tamper(rank, items):
        if isinstance(items[0], dict) and rank == 1:
            return [items[0] if number in left_out else item for number, item in enumerate(items)]
        return items

    kept = 4 - len(left_out)
    assert f"has passed on the keys of {kept} of 4 silos" in str(epochs(signed, tamper=tamper)[1])


def test_a_server_that_tells_silos_different_things():
    """Of what they must know alike, such as whose clients there are: they have no common secrets."""

    def action(world):
        return agree(world, Config(secure=True), NAMES[world.rank], False, about=world.rank == 1)

    _, c, a, d, _ = on_ranks(len(NAMES), action)
    assert c.keys["a"] != a.keys["c"]
    assert a.keys["d"] == d.keys["a"]


@pytest.mark.parametrize("silos", [0, 1, 2])
def test_too_few(silos):
    with pytest.raises(UserError, match=f"got {silos} silo.*, expected at least 3: start 4 ranks or more"):
        refuse_too_few(silos, Config(secure=True))
    refuse_too_few(silos, Config(secure=True, secure_neighbours="0"))


def test_names(monkeypatch):
    assert silo_names(Config(), 2) == ["silo_0001", "silo_0002"]
    assert silo_names(Config(silos="x, y"), 2) == ["x", "y"]
    with pytest.raises(UserError, match="got 2 names, expected 3"):
        silo_names(Config(silos="x,y"), 3)
    with pytest.raises(UserError, match="expected a name of letters"):
        silo_names(Config(silos="x,../y"), 2)
    monkeypatch.setenv("FEDLADA_SILO", "z")
    assert own_name(Config(silos="x,y"), 1, 2) == "z"
