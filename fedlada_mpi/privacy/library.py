"""The library that keys and streams come from, which only runs with ``--secure`` need."""

from __future__ import annotations

from ..support.errors import PublicError


def require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise PublicError(
            "--secure needs the package cryptography: pip install 'fedlada_mpi[privacy]', on the machine of every rank"
        ) from None
