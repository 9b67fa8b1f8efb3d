"""Which part of the package imports which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from repository import ROOT

PACKAGE = ROOT / "fedlada_mpi"


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


def test_the_analysis_of_runs_does_not_know_the_paper():
    modules = {path: ast.parse(path.read_text()) for path in (PACKAGE / "analysis").glob("*.py")}
    assert len(modules) > 10
    imports = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {part for node in imports for part in (*(node.module or "").split("."), *(n.name for n in node.names))}
    assert not names & {"reproduction", "report"}


def test_importing_mpi_needs_no_torch():
    """A wrong launcher is reported without waiting for torch."""
    code = "import sys, fedlada_mpi.mpi; sys.exit('torch' in sys.modules or 'mpi4py.MPI' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=150)
