"""Which part of the package imports which, and where MPI is called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from repository import ROOT

PACKAGE = ROOT / "fedlada_mpi"
# What mpi4py calls the functions in which ranks meet.
COLLECTIVES = {
    *("Barrier", "Ibarrier", "Bcast", "Ibcast", "Gather", "Gatherv", "Allgather", "Allgatherv", "Scatter", "Scatterv"),
    *("Alltoall", "Alltoallv", "Reduce", "Allreduce", "Iallreduce", "Reduce_scatter", "Scan", "Exscan"),
    *("Dup", "Create", "Split", "Split_type", "Shrink", "Agree", "Free", "Allocate", "Allocate_shared", "Fence"),
    *("Send", "Recv", "Sendrecv", "Isend", "Irecv"),
}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def importers(name: str) -> set[str]:
    """The files of both packages that import ``name``."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    return {path.relative_to(ROOT).as_posix() for path in files if name in imported(path)}


def test_only_the_folder_mpi_imports_mpi4py():
    found = importers("mpi4py")
    assert "fedlada_mpi/mpi/world.py" in found
    assert {path for path in found if not path.startswith("fedlada_mpi/mpi/")} == set()


def test_the_package_does_not_import_its_commands_for_data():
    assert "data_prep/__main__.py" in importers("fedlada_mpi")
    assert {path for path in importers("data_prep") if path.startswith("fedlada_mpi/")} == set()


def test_importing_mpi_needs_no_torch():
    """A wrong launcher is reported without waiting for torch."""
    code = "import sys, fedlada_mpi.mpi; sys.exit('torch' in sys.modules or 'mpi4py.MPI' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=150)


def collectives(path: Path) -> set[str]:
    """Those that a file calls."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {call.attr for call in calls if isinstance(call, ast.Attribute)} & COLLECTIVES


def test_every_collective_is_in_the_table():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## The collectives")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `.*? \| `(\w+\.py)` \| (.*?) \|", table, re.MULTILINE)
    written = {(name, call) for name, calls in rows for call in re.findall(r"`(\w+)`", calls)}
    assert written == {(path.name, call) for path in (PACKAGE / "mpi").glob("*.py") for call in collectives(path)}
