"""What a training changes in the process around it, which is as before when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ..rounds.device import (
    FUSED_ATTENTION,
    attention_enabled,
    refuse_unrepeatable,
    release_freed_memory,
    set_attention,
    set_onednn,
)
from ..support.fast_path import without_fast_path

_lock = threading.Lock()
_running = 0
_put_back: list[Callable[[], object]] = []


@contextmanager
def torch_state_restored() -> Iterator[None]:
    """Torch's threads, switches and GPU are afterwards as before; where trainings overlap, once the last has ended."""
    global _running
    with _lock:
        if not _running:
            _put_back[:] = _actions()
        _running += 1
    try:
        with without_fast_path():
            yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                for action in _put_back:
                    action()


def _actions() -> list[Callable[[], object]]:
    """What puts everything back to its present state."""
    threads = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    actions: list[Callable[[], object]] = [partial(_set_threads, threads), partial(_set_gpu, gpu), release_freed_memory]
    for switches in (torch.backends.cuda.matmul, torch.backends.cudnn):
        actions.append(partial(setattr, switches, *_precision(switches)))
    actions += [partial(set_attention, kind, attention_enabled(kind)) for kind in FUSED_ATTENTION]
    actions.append(partial(set_onednn, bool(torch.backends.mkldnn.enabled)))
    actions.append(partial(refuse_unrepeatable, torch.are_deterministic_algorithms_enabled()))
    return actions


def _precision(switches: Any) -> tuple[str, Any]:
    """The attribute that says whether products are in TF32: torch has two, and refuses one where the other was set."""
    with suppress(RuntimeError):
        return "allow_tf32", switches.allow_tf32
    return "fp32_precision", switches.fp32_precision


def _set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _set_gpu(number: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(number)
