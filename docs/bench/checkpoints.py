"""What a checkpoint takes of the thread that trains: written by it, and by a thread of its own; in turns.

python docs/bench/checkpoints.py --repeats 12
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedlada_mpi.mpi import World
from fedlada_mpi.rundir.checkpoint import Draft, save
from fedlada_mpi.rundir.checkpoint_writer import CheckpointWriter
from fedlada_mpi.settings import Config

RESNET18 = 11_173_962  # parameters; FedLADA keeps three vectors of them


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor in this thread."""
    clock, processor = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - clock, time.thread_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    vectors = {name: torch.randn(RESNET18) for name in ("x", "v", "g_a")}
    waiting, in_thread = [], []
    with tempfile.TemporaryDirectory() as folder, World() as world:
        out, writer = Path(folder), CheckpointWriter(world)

        def begin(t: int) -> None:
            writer.begin(Draft(out, t, 0, Config(), writer.copies(vectors), {}), shared=False)

        for t in range(1, 2 * options.repeats, 2):
            waiting.append(timed(lambda t=t: save(world, Draft(out, t, 0, Config(), vectors, {}))))
            begun = timed(lambda t=t: begin(t + 1))
            while writer.is_writing:
                time.sleep(0.01)
            settled = timed(writer.settle)
            in_thread.append((begun[0] + settled[0], begun[1] + settled[1]))
        writer.close()
    for name, rows in (("rounds wait", waiting), ("by a thread", in_thread)):
        clock, processor = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name}: {clock:.3f} s by the clock, {processor:.3f} s of the processor")


if __name__ == "__main__":
    main()
