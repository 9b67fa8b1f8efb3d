"""A model of a round's time on many nodes, from measured latency, bandwidth and step times.

    python -m fedlada_mpi.scaling                                           ResNet-18 on nodes of four H200
    python -m fedlada_mpi.scaling --bandwidth 125e6 --latency 5e-5          the same over 1 Gbit/s
    python -m fedlada_mpi.scaling --participants 400 --wire bf16 --plot scaling.png

    train       fixed + per_client * ceil(S / silos)               all silos alike; rank 0 only serves
    transport   sum over the vectors of max(on the wire, in the node) + one piece
      wire      (P + N - 2) * (latency + piece / bandwidth)        P pieces along a chain of N nodes
                2 * (P + log2(N) - 1) * (the same)                 along a tree, where that is less
    messages    10 small collectives * (log2(ranks) * latency + 0.1 ms)      0.1 ms: ranks that wait poll
    server      seconds * vectors

It leaves out evaluation, checkpoints, clients of different sizes, ranks that are late, and others on the network.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .settings import Parser, Setting, check_value
from .support import disk
from .support.errors import UserError

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PIECE = 1 << 18  # as in mpi/relay.py, which needs MPI
COLLECTIVES, POLL = 10, 1e-4
AT_LEAST_ONE = ("participants", "ranks_per_node", "elements", "up", "down", "bandwidth")
MOST = 10**15
PHASES = {"train": "#0fa587", "transport": "#4e79a7", "messages": "#f28e2b", "server": "#b07aa1"}


@dataclass(frozen=True)
class Setup:
    """What a round depends on; the defaults are ResNet-18, FedLADA in TF32, on nodes of four H200."""

    participants: int = 100  # S
    ranks_per_node: int = 4
    elements: int = 11_181_642  # of a vector
    up: int = 2  # vectors
    down: int = 2
    wire: str = "fp32"
    latency: float = 2e-6  # seconds between nodes; assumed
    bandwidth: float = 12.5e9  # bytes/s between nodes, one way; assumed: 100 Gbit/s
    fixed: float = 0.0282  # seconds of training; measured: 0.037 s for one client, 0.116 s for ten
    per_client: float = 0.0088
    node_bcast: float = 0.0036  # seconds within a node for a vector; measured for four ranks
    node_reduce: float = 0.0084
    server: float = 0.001  # seconds for a vector


def wire_seconds(nodes: int, size: int, s: Setup) -> float:
    """For a vector with elements of ``size`` bytes."""
    if nodes == 1:
        return 0.0
    pieces = math.ceil(s.elements / PIECE)
    hop = s.latency + s.elements / pieces * size / s.bandwidth
    return min(pieces + nodes - 2, 2 * (pieces + math.log2(nodes) - 1)) * hop


def round_seconds(nodes: int, s: Setup) -> dict[str, float]:
    """The phases of a round; their sum is its time."""
    ranks = nodes * s.ranks_per_node
    silos = max(1, ranks - 1)
    # With --wire bf16, sums and the change of x are rounded, what else goes down is not.
    small = 2 if s.wire == "bf16" else 4
    vectors = [(small, s.node_reduce)] * s.up + [(small, s.node_bcast)] + [(4, s.node_bcast)] * (s.down - 1)
    pieces = math.ceil(s.elements / PIECE)
    moved = 0.0
    for size, in_node in vectors:
        on_wire = wire_seconds(nodes, size, s)
        moved += max(on_wire, in_node) + (min(on_wire, in_node) / pieces if nodes > 1 else 0.0)
    return {
        "train": s.fixed + s.per_client * math.ceil(s.participants / silos),
        "transport": moved,
        "messages": COLLECTIVES * (math.log2(max(2, ranks)) * s.latency + POLL),
        "server": s.server * (s.up + s.down),
    }


def table(s: Setup) -> str:
    lines = ["| nodes | ranks | " + " | ".join(PHASES) + " | round, s |", "| ---: " * (len(PHASES) + 3) + "|"]
    for nodes in NODES:
        phases = round_seconds(nodes, s)
        cells = " | ".join(f"{phases[name]:.3f}" for name in PHASES)
        lines.append(f"| {nodes:,} | {nodes * s.ranks_per_node:,} | {cells} | {sum(phases.values()):.3f} |")
    return "\n".join(lines)


def draw(setups: dict[str, Setup], path: Path) -> None:
    """A panel for each: what a round's seconds are made of, over the number of nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(setups), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(setups), squeeze=False)[0]
    for axes, (title, s) in zip(panels, setups.items(), strict=True):
        rows = [round_seconds(nodes, s) for nodes in NODES]
        values = [[row[name] for row in rows] for name in PHASES]
        axes.stackplot(NODES, values, labels=list(PHASES), colors=list(PHASES.values()), linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(NODES[::2], [f"{nodes:,}" for nodes in NODES[::2]])
        axes.set_xlim(NODES[0], NODES[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("nodes")
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("seconds of a round")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise UserError(f"--plot: got {path}, expected a name that ends in .{', .'.join(sorted(known))}")
    with disk.writing(path, "then give the same command again"):
        figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m fedlada_mpi.scaling", description=__doc__, formatter_class=form)
    for field in fields(Setup):
        kind = type(getattr(Setup(), field.name))
        choices = ("fp32", "bf16") if field.name == "wire" else None
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=field.default, choices=choices, help=f"[{field.default}]")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, also over 1 Gbit/s")
    try:
        options = vars(parser.parse_all(argv))
        path = options.pop("plot")
        setup = Setup(**options)
        _check(setup)
        print(table(setup))
        if path:
            slow = replace(setup, bandwidth=125e6, latency=5e-5)
            names = [f"{s.bandwidth * 8 / 1e9:g} Gbit/s, {s.latency * 1e6:g} µs, {s.wire}" for s in (setup, slow)]
            draw(dict(zip(names, (setup, slow), strict=True)), path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(setup: Setup) -> None:
    for name, value in vars(setup).items():
        if name != "wire":
            check_value(Setting(value, "", least=int(name in AT_LEAST_ONE), most=MOST), value, name)


if __name__ == "__main__":
    raise SystemExit(main())
