"""Every call in which a rank may wait for others counts for ``--patience``: found in the source, none is forgotten."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from repository import ROOT

# Methods of MPI's communicators, windows and requests that end only when other ranks do their part.
COLLECTIVES = {f"{name}{kind}" for name in ("Allgather", "Alltoall", "Gather", "Scatter") for kind in ("", "v")}
COLLECTIVES |= {"Allreduce", "Barrier", "Bcast", "Reduce", "Reduce_scatter", "Scan", "Exscan", "Alltoallw"}
MESSAGES = {"Send", "Ssend", "Recv", "Sendrecv", "Probe", "Mprobe", "Wait", "Waitall", "Waitany", "Waitsome"}
COMMUNICATORS = {"Dup", "Create", "Split", "Split_type", "Free", "Agree", "Shrink"}
WINDOWS = {"Allocate", "Allocate_shared", "Fence", "Lock", "Lock_all", "Unlock", "Unlock_all", "Flush", "Flush_all"}
WAITING = COLLECTIVES | MESSAGES | COMMUNICATORS | WINDOWS
# Before there is a limit by setting, the start has one of its own.
BLOCKS = ("wait_limit", "limited")


class Waits(ast.NodeVisitor):
    """Collects where MPI's waiting methods are called, and where the package's functions are, with what is around."""

    def __init__(self, file: str):
        self.file = file
        self.owner, self.function, self.limited = "", "", False
        self.waiting: list[tuple[str, str, int, bool]] = []  # method, function, line, limited
        self.calls: list[tuple[str, str, bool]] = []  # name, calling function, limited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self.function, self.limited
        decorated = any(isinstance(item, ast.Name) and item.id == "waits" for item in node.decorator_list)
        # What makes an object is called by the name of its class.
        self.function, self.limited = self.owner if node.name == "__init__" else node.name, decorated
        self.generic_visit(node)
        self.function, self.limited = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.owner = node.name
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        before = self.limited
        self.limited = before or any(block in ast.unparse(item) for item in node.items for block in BLOCKS)
        self.generic_visit(node)
        self.limited = before

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in WAITING:
            self.waiting.append((name, self.function, node.lineno, self.limited))
        self.calls.append((name, self.function, self.limited))
        self.generic_visit(node)


def unlimited(folder: Path) -> list[str]:
    """Where a rank may wait without a limit: neither in such a block, nor in a function that is called only there."""
    files = []
    for path in sorted(folder.glob("*.py")):
        files.append(Waits(path.name))
        files[-1].visit(ast.parse(path.read_text()))
    callers: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for file in files:
        for name, function, limited in file.calls:
            callers[name].append((function, limited))

    def is_limited(function: str, seen: frozenset[str] = frozenset()) -> bool:
        found = [caller for caller in callers[function] if caller[0] != function]
        return bool(found) and all(
            limited or (caller not in seen and is_limited(caller, seen | {function})) for caller, limited in found
        )

    return [
        f"{file.file}:{line}: {method} in {function}"
        for file in files
        for method, function, line, limited in file.waiting
        if not limited and not is_limited(function)
    ]


def test_every_wait_is_limited():
    assert unlimited(ROOT / "fedlada_mpi" / "mpi") == []


def test_one_that_is_not_is_found(tmp_path):
    (tmp_path / "a.py").write_text(
        "def free(comm):\n    comm.Barrier()\n"
        "def held(world):\n    with world.wait_limit:\n        inner(world.comm)\n"
        "def inner(comm):\n    comm.Bcast(1)\n"
        "@waits\ndef decorated(self):\n    self.comm.Reduce(1)\n"
    )
    assert unlimited(tmp_path) == ["a.py:2: Barrier in free"]
