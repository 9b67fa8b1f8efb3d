"""The fused path of torch's attention layers in evaluation, which is none that vmap takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Switch:
    """That of this process, while any of its threads is in a block."""

    lock = threading.Lock()
    blocks = 0
    before = True


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Off inside the block; afterwards as before, where blocks of several threads overlap, once the last has ended."""
    mha = torch.backends.mha
    with _Switch.lock:
        if not _Switch.blocks:
            _Switch.before = mha.get_fastpath_enabled()
            mha.set_fastpath_enabled(False)
        _Switch.blocks += 1
    try:
        yield
    finally:
        with _Switch.lock:
            _Switch.blocks -= 1
            if not _Switch.blocks:
                mha.set_fastpath_enabled(_Switch.before)
