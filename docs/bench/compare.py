"""Rounds on a GPU of two or more versions of the package, in turn, so that a warm or shared GPU treats them alike.

    git worktree add /tmp/before v0.1.0
    python docs/bench/compare.py before=/tmp/before after=.                    all workloads
    python docs/bench/compare.py before=/tmp/before after=. --only one gpt2    those whose names begin so
    python docs/bench/compare.py before=/tmp/before after=. --repeats 5 --json compared.json
    python docs/bench/compare.py before=/tmp/before after=. --only one -- --model lenet3    more for fedlada_mpi.bench

Every figure is a median of 20 rounds in a process of its own; a table has the median of these and, in brackets, the
smallest and the largest. ``first`` is what the first round took, with kernels that were compiled for it: every version
has a cache of kernels of its own, and the first repeat finds it empty.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

GPT2 = ["--dataset", "shakespeare", "--model", "docs/bench/gpt2.py:gpt2", "--tokens", "50257", "--lora", "8",
        "--lora-on", "attn|mlp"]  # fmt: skip
TEXT = ["--dataset", "shakespeare"]
WORKLOADS = {
    "one-tf32": ["--participants", "1", "--precision", "tf32"],
    "one-bf16": ["--participants", "1", "--precision", "bf16"],
    "ten-tf32": ["--participants", "10", "--precision", "tf32"],
    "ten-bf16": ["--participants", "10", "--precision", "bf16"],
    "vit": ["--participants", "10", "--precision", "bf16", "--model", "vit_tiny"],
    "mobilenet": ["--participants", "10", "--precision", "bf16", "--model", "torchvision:mobilenet_v2"],
    "resnet50": ["--participants", "10", "--precision", "bf16", "--model", "torchvision:resnet50"],
    "lstm": ["--participants", "10", "--precision", "bf16", *TEXT, "--model", "lstm", "--batch-size", "10"],
    "gpt2-small": ["--participants", "10", "--precision", "bf16", *GPT2, "--length", "128", "--batch-size", "2"],
    "gpt2-large": ["--participants", "10", "--precision", "bf16", *GPT2, "--length", "256", "--batch-size", "16",
                   "--rounds", "5"],
}  # fmt: skip
LIMIT = 300  # seconds of a process


def bench(tree: Path, arguments: list[str], cache: Path) -> dict[str, Any]:
    """What ``python -m fedlada_mpi.bench`` of this version measures, or an error's last line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        command = [sys.executable, "-m", "fedlada_mpi.bench", "--only", "round", *arguments, "--json", str(file)]
        surroundings = {**os.environ, "PYTHONPATH": str(tree), "TRITON_CACHE_DIR": str(cache)}
        try:
            ended = subprocess.run(command, cwd=tree, env=surroundings, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT} s"}
        if ended.returncode:
            return {"error": (ended.stderr.strip().splitlines() or ["no message"])[-1]}
        return next(row for row in json.loads(file.read_text())["results"] if "seconds" in row)


def cell(found: list[dict[str, Any]]) -> str:
    if errors := [each["error"] for each in found if "error" in each]:
        return errors[0][:60]
    seconds = [each["seconds"] for each in found]
    first = found[0]["first_round_seconds"]
    return f"{median(seconds):.4f} ({min(seconds):.4f} to {max(seconds):.4f}), first {first:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME=DIRECTORY")
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help=" ".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--caches", type=Path, metavar="DIRECTORY", help="of kernels, kept for the next call [none]")
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    asked = parser.parse_args(own)
    versions = {name: Path(tree).absolute() for name, _, tree in (each.partition("=") for each in asked.versions)}
    results: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as temporary:
        caches = asked.caches or Path(temporary)
        for workload, arguments in WORKLOADS.items():
            if not workload.startswith(tuple(asked.only)):
                continue
            for _ in range(asked.repeats):
                for name, tree in versions.items():
                    results[workload][name].append(bench(tree, [*arguments, *more], caches / name))
            for name in versions:
                print(f"{workload:12} {name:12} {cell(results[workload][name])}", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
