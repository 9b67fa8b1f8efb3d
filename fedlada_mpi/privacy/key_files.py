"""Keys by which silos know each other: NAME.pub of every silo, the same files everywhere, and NAME.key at its owner.

    python -m fedlada_mpi.keys new hospital_a --dir keys

There is no authority behind them: people compare fingerprints, by telephone for instance, before the first run.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ..support import disk
from ..support.errors import PublicError
from ..support.inputs import reason, require_regular
from .library import require_cryptography
from .names import check_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
LONGEST = 4096  # bytes of a key file


def new(directory: Path, name: str) -> Path:
    """Make a pair of keys; returns the file for the others."""
    require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    check_name(name, "NAME")
    private, public = directory / f"{name}.key", directory / f"{name}.pub"
    for path in (private, public):
        if os.path.lexists(path):
            raise PublicError(f"{path} is there already: remove it, or choose another name")
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with disk.writing(private, "then try again"):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secret)
        disk.write_new(public, shown)
    return public


def private_key(directory: Path, name: str) -> Ed25519PrivateKey:
    """A silo's own key, which nobody else may read."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = directory / f"{name}.key"
    content = _read(path, f"the key of {name}: make it by python -m fedlada_mpi.keys new {name} --dir {directory}")
    if path.stat().st_mode & OPEN_TO_OTHERS:
        raise PublicError(f"--silo-keys: others may read {path}: make new keys, or chmod 600 {path}")
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise PublicError(f"--silo-keys: {path} is no key of python -m fedlada_mpi.keys: make new ones")
    return key


def public_key(directory: Path, name: str) -> Ed25519PublicKey:
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    path = directory / f"{name}.pub"
    content = _read(path, f"the public key of {name}: copy {name}.pub from that silo to {directory}")
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise PublicError(f"--silo-keys: {path} is no public key of python -m fedlada_mpi.keys: copy it again")
    return key


def fingerprint(key: Ed25519PublicKey) -> str:
    """What people compare: SHA-256 of the key, in groups."""
    digits = hashlib.sha256(key.public_bytes_raw()).hexdigest()
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def names(directory: Path) -> list[str]:
    """Those with a public key in the directory."""
    return sorted(path.stem for path in directory.glob("*.pub"))


def _read(path: Path, expected: str) -> bytes:
    try:
        require_regular(path)
        _refuse_exchangeable(path)
        with open(path, "rb") as file:
            return file.read(LONGEST)
    except OSError as error:
        raise PublicError(f"--silo-keys: cannot read {path} ({reason(error)}), expected {expected}") from None


def _refuse_exchangeable(path: Path) -> None:
    """Also in a directory above, of a link or of what it leads to: whoever may write there can move what is in it."""
    for place in (path, path.absolute(), path.resolve()):
        for above, each in enumerate((place, *place.parents)):
            mode = each.stat().st_mode
            # In a directory like /tmp only owners move what is theirs, but anyone may add a key that is not there yet.
            open_to_all = mode & stat.S_IWOTH and not (above > 1 and mode & stat.S_ISVTX)
            # Nobody writes to a volume that is mounted read-only, as Kubernetes' secrets are.
            if open_to_all and not os.statvfs(each).f_flag & os.ST_RDONLY:
                raise PublicError(f"--silo-keys: anyone may write to {each}, and exchange keys: chmod o-w {each}")
