"""Keys of silos on disk, and the command that makes them."""

from __future__ import annotations

import hashlib
import os
import stat
from base64 import b64encode
from types import SimpleNamespace

import pytest

from fedlada_mpi import keys
from fedlada_mpi.privacy import key_files
from fedlada_mpi.support.errors import UserError


def test_a_pair(tmp_path, capsys):
    assert keys.main(["new", "hospital_a", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    private, public = key_files.private_key(tmp_path, "hospital_a"), key_files.public_key(tmp_path, "hospital_a")
    public.verify(private.sign(b"text"), b"text")
    digits = hashlib.sha256(private.public_key().public_bytes_raw()).hexdigest()
    assert printed.strip().endswith("fingerprint  " + " ".join(digits[i : i + 4] for i in range(0, 64, 4)))
    assert stat.S_IMODE((tmp_path / "hospital_a.key").stat().st_mode) == 0o600
    assert keys.main(["show", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"hospital_a  {digits[:4]} ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new"], "expected that of the silo"),
        (["new", "../a"], "expected a name of letters"),
        (["show"], "has no public keys"),
        (["show", "b"], "cannot read"),
    ],
)
def test_refusals(tmp_path, capsys, words, message):
    assert keys.main([*words, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_no_key_is_overwritten(tmp_path):
    key_files.new(tmp_path, "a")
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(UserError, match="is there already"):
        key_files.new(tmp_path, "a")
    assert (tmp_path / "a.key").read_bytes() == before


def test_keys_that_anyone_could_exchange(tmp_path):
    key_files.new(tmp_path / "keys", "a")
    key_files.public_key(tmp_path / "keys", "a")
    for path in (tmp_path / "keys", tmp_path / "keys" / "a.pub"):
        path.chmod(path.stat().st_mode | stat.S_IWOTH)
        with pytest.raises(UserError, match=f"anyone may write to {path}, and exchange keys: chmod o-w {path}"):
            key_files.public_key(tmp_path / "keys", "a")
        path.chmod(path.stat().st_mode & ~stat.S_IWOTH)


@pytest.mark.parametrize("linked", ["", "a.pub", "keys"])
def test_keys_that_anyone_could_move_away(linked, tmp_path):
    """With a directory above them, or behind a link."""
    above, at = tmp_path / "above", tmp_path / "above" / "keys"
    key_files.new(at, "a")
    directory = tmp_path / "linked" if linked else at
    if linked == "a.pub":
        directory.mkdir()
        (directory / "a.pub").symlink_to(at / "a.pub")
    elif linked:
        directory.symlink_to(at)
    key_files.public_key(directory, "a")
    above.chmod(0o777)
    with pytest.raises(UserError, match=f"anyone may write to {above}, and exchange keys: chmod o-w {above}"):
        key_files.public_key(directory, "a")
    above.chmod(0o1777)  # as /tmp, where only owners move what is theirs
    key_files.public_key(directory, "a")
    at.chmod(0o1777)
    with pytest.raises(UserError, match="anyone may write to"):
        key_files.public_key(directory, "a")


def test_keys_on_a_volume_that_is_read_only(tmp_path, monkeypatch):
    key_files.new(tmp_path / "keys", "a")
    (tmp_path / "keys").chmod(0o1777)
    with pytest.raises(UserError, match="anyone may write"):
        key_files.public_key(tmp_path / "keys", "a")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    key_files.public_key(tmp_path / "keys", "a")


def test_a_pipe_is_not_waited_for(tmp_path):
    for name, read in (("a.key", key_files.private_key), ("a.pub", key_files.public_key)):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="it is not a regular file"):
            read(tmp_path, "a")


def test_keys_of_an_unknown_kind(tmp_path):
    algorithm = "300506032a0304"  # an identifier that nobody has given to anything
    for name, kind, content, read in (
        ("a.key", "PRIVATE KEY", f"3010020100{algorithm}040404040404", key_files.private_key),
        ("a.pub", "PUBLIC KEY", f"300e{algorithm}03050004040404", key_files.public_key),
    ):
        pem = f"-----BEGIN {kind}-----\n{b64encode(bytes.fromhex(content)).decode()}\n-----END {kind}-----\n"
        (tmp_path / name).write_text(pem)
        (tmp_path / name).chmod(0o600)
        with pytest.raises(UserError, match=r"is no (public )?key of"):
            read(tmp_path, "a")


def test_damaged_and_open_keys(tmp_path):
    key_files.new(tmp_path, "a")
    (tmp_path / "a.key").chmod(0o640)
    with pytest.raises(UserError, match="others may read"):
        key_files.private_key(tmp_path, "a")
    (tmp_path / "a.key").chmod(0o600)
    (tmp_path / "a.key").write_bytes((tmp_path / "a.pub").read_bytes())
    with pytest.raises(UserError, match="is no key of"):
        key_files.private_key(tmp_path, "a")
    (tmp_path / "a.pub").write_text("nothing")
    with pytest.raises(UserError, match="is no public key"):
        key_files.public_key(tmp_path, "a")


def test_a_link_to_nothing_leaves_no_half_of_a_pair(tmp_path):
    (tmp_path / "a.pub").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"a\.pub is there already"):
        key_files.new(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pub"]
