"""NVIDIA's Multi-Process Service, with which several processes compute on one GPU at the same time.

Only the standard library is imported: what starts runs need not wait for torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # where processes find the service, with a default of NVIDIA's
SECONDS = 20  # in which the daemon starts or ends


def gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    return [str(i) for i in range(len([*devices.glob("nvidia[0-9]*")]))]


def is_running(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether processes of this environment use the service."""
    return Path(environment.get(PIPES, "/tmp/nvidia-mps")).exists()


@contextmanager
def shared() -> Iterator[dict[str, str]]:
    """Start the service; yields what processes that use it need in their environment, nothing where there is none.

    A service that is already running, as on many clusters, is left as it is.
    """
    if PIPES in os.environ or shutil.which(CONTROL) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="fedlada-mps-", ignore_cleanup_errors=True) as folder:
        places = {f"CUDA_MPS_{name.upper()}_DIRECTORY": os.path.join(folder, name) for name in ("pipe", "log")}
        for place in places.values():
            os.mkdir(place)
        if not _control(["-d"], "", places):
            yield {}
            return
        try:
            yield places
        finally:
            _control([], "quit\n", places)


def _control(arguments: list[str], words: str, places: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            [CONTROL, *arguments], input=words, text=True, env={**os.environ, **places}, timeout=SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
