"""The library that keys, streams and noise come from, which only runs with ``--secure`` or ``--dp`` need."""

from __future__ import annotations

from ..support.errors import PublicError


def require_cryptography(setting: str = "--secure") -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise PublicError(
            f"{setting} needs the package cryptography: pip install 'fedlada_mpi[privacy]', on the machine of every "
            "rank"
        ) from None
