"""What the silos agree on at every start, resume and loss: an epoch, whose keys are used in no other.

Every silo makes an X25519 key and sends it to all, through the server. Then each signs all that it has received, with
the key that the others know (``key_files``), with its own name, and checks the signatures of all: a server in the
middle that has changed anything is noticed. A pair of neighbours (``graph``) then has a secret of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..mpi import World
from ..settings import Config, fixes_result
from ..settings.privacy import FEWEST_SILOS, neighbours
from ..support.errors import PublicError, shortened, some
from . import graph, key_files
from .library import require_cryptography
from .names import ALLOWED

AES, CHACHA = "AES-256-CTR", "ChaCha20"
_SIGNED, _PAIR = b"fedlada epoch v2", b"fedlada mask v1"


@dataclass(frozen=True)
class Epoch:
    """What this rank knows of an epoch; the server has no name and no keys."""

    silos: tuple[str, ...]  # in order
    own: str
    cipher: str
    signed: bool
    degree: int  # neighbours of every silo
    keys: Mapping[str, bytes] = field(repr=False)  # by neighbour

    def streams(self, what: str, number: int, received: bytes) -> list[tuple[bytes, int]]:
        """The key of every mask of a message, and its sign: the two silos of a pair add and subtract the same.

        ``what`` and ``number`` name the message, once in an epoch; ``received`` is a digest of what the silo has got
        from the server: masks of silos that were sent different models do not cancel.
        """
        info = struct.pack("<q", number) + struct.pack("<q", len(what)) + what.encode() + received
        return [(_expanded(key, info), 1 if self.own < other else -1) for other, key in self.keys.items()]

    @cached_property
    def description(self) -> str:
        """For people."""
        if not self.degree:
            return f"the sums of {len(self.silos)} silos are not masked (--secure-neighbours 0)"
        signed = "signed keys" if self.signed else "keys that nobody has signed"
        return f"the sums of {len(self.silos)} silos are masked, {self.degree} masks each, {self.cipher}, {signed}"


def _expanded(key: bytes, info: bytes) -> bytes:
    """32 bytes of HKDF-Expand with SHA-256 (RFC 5869), which are its first block."""
    return hmac.digest(key, info + b"\x01", "sha256")


def agree(world: World, config: Config, name: str, gpu: bool, about: object = None) -> Epoch:
    """A new epoch; ``name``: of this rank's silo, empty for the server. Collective.

    ``about``: what else all ranks must know alike, as JSON takes it: keys of those who know something else differ.
    """
    asked = neighbours(config.secure_neighbours)
    if asked == 0:
        names = [each for each in world.allgather_json(name) if each]
        return Epoch(tuple(sorted(names)), name, AES, False, 0, {})
    world.collectively(require_cryptography)
    return _agree(world, config, name, gpu, asked, about)


def _agree(world: World, config: Config, name: str, gpu: bool, asked: int | None, about: object) -> Epoch:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    if name:  # whose keys would be in a dump of its memory
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    secret = X25519PrivateKey.generate()
    mine = {"name": name, "key": secret.public_key().public_bytes_raw().hex(), "nonce": os.urandom(16).hex()}
    everyone = world.allgather_json({**mine, "gpu": gpu, "signs": bool(name and config.silo_keys)})
    silos = {str(each["name"]): each for each in everyone if each["name"]}
    world.collectively(lambda: _check(everyone, mine, world.size))
    world.collectively(lambda: _refuse_unsigned(everyone, bool(name and config.silo_keys)))
    # Not what may differ from silo to silo, such as paths.
    settings = {each: value for each, value in config.record().items() if fixes_result(each)}
    received = world.heard.hexdigest()  # the data that silos have agreed on, for instance
    described = json.dumps([everyone, settings, config.secure_neighbours, about, received], sort_keys=True)
    transcript = hashlib.sha256(described.encode()).digest()
    signed = any(each["signs"] for each in everyone)  # where all silos do; the server need not have their keys
    if signed:
        signature = world.collectively(lambda: _signature(config, name, transcript))
        signatures = world.allgather_json(signature)
        names = [str(each["name"]) for each in everyone]
        given = {other: signed for other, signed in zip(names, signatures, strict=True) if other}
        world.collectively(lambda: _verify(Path(config.silo_keys), given, transcript) if name else None)
    ordered = tuple(sorted(silos))
    degree = graph.degree(len(ordered), asked, config.secure_neighbours == "all")
    near = graph.neighbours(ordered.index(name), len(ordered), degree) if name else []
    keys = {ordered[i]: _pair_key(secret, name, silos[ordered[i]], transcript) for i in near}
    cipher = CHACHA if any(each["gpu"] for each in everyone) else AES
    return Epoch(ordered, name, cipher, signed, degree, keys)


def _check(everyone: Sequence[Mapping[str, Any]], mine: Mapping[str, Any], ranks: int) -> None:
    names = [str(each["name"]) for each in everyone if each["name"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PublicError(f"two silos have the name {some(twice)}: give each rank its own by --silos or FEDLADA_SILO")
    if strange := next((name for name in names if not ALLOWED.fullmatch(name)), ""):  # each leads to a file
        raise PublicError(f"the server has passed on {shortened(strange)} as the name of a silo")
    if not any(all(each[word] == mine[word] for word in mine) for each in everyone):
        raise PublicError(f"the server has not passed on the key of {mine['name'] or 'rank 0'} as it is")
    if len(everyone) != ranks or len(names) < ranks - 1:  # fewer silos, down to one, would hide less
        raise PublicError(f"the server has passed on the keys of {len(names)} of {ranks - 1} silos")
    if len({str(each["key"]) for each in everyone}) < ranks:
        raise PublicError("the server has passed on one key as that of two ranks")


def _refuse_unsigned(everyone: Sequence[Mapping[str, Any]], signs: bool) -> None:
    """Where a silo signs, all do, whatever the server says of them."""
    unsigned = [str(each["name"]) for each in everyone if each["name"] and not each["signs"]]
    if unsigned and (signs or len(unsigned) < sum(bool(each["name"]) for each in everyone)):
        raise PublicError(f"--silo-keys: got none for {some(unsigned)}, and other silos have theirs: give it to all")


def _signature(config: Config, name: str, transcript: bytes) -> str:
    if not name:
        return ""
    return key_files.private_key(Path(config.silo_keys), name).sign(_signed(name, transcript)).hex()


def _signed(name: str, transcript: bytes) -> bytes:
    """What a silo signs: without its name, its signature might pass for that of another."""
    return _SIGNED + transcript + name.encode()


def _verify(directory: Path, signatures: Mapping[str, str], transcript: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    owners: dict[bytes, str] = {}
    for name, signature in signatures.items():
        key = key_files.public_key(directory, name)
        if (other := owners.setdefault(key.public_bytes_raw(), name)) != name:
            raise PublicError(f"--silo-keys: {other}.pub and {name}.pub are one key: each silo needs its own")
        try:
            key.verify(bytes.fromhex(signature), _signed(name, transcript))
        except (InvalidSignature, ValueError):
            raise PublicError(
                f"--silo-keys: the signature of {name} does not belong to {directory / name}.pub: compare its "
                "fingerprint with that silo (python -m fedlada_mpi.keys show)"
            ) from None


def _pair_key(secret: Any, name: str, other: Mapping[str, Any], transcript: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other["key"])))
    except ValueError:
        raise PublicError(f"the key of {other['name']} is none: start the run again") from None
    info = _PAIR + "\0".join(sorted((name, str(other["name"])))).encode()
    return HKDF(SHA256(), 32, transcript, info).derive(shared)


def refuse_too_few(silos: int, config: Config) -> None:
    """Of two silos each would learn the other's sum."""
    if silos < FEWEST_SILOS and neighbours(config.secure_neighbours) != 0:
        raise PublicError(
            f"--secure: got {silos} silo{'s' * (silos != 1)}, expected at least {FEWEST_SILOS}: start "
            f"{FEWEST_SILOS + 1} ranks or more, of which rank 0 is the server"
        )
