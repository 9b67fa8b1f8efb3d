"""Which part of the package imports which, and where MPI is called."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from limits import LIMIT
from repository import ROOT

from data_prep import PrepareSettings, prepare

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


def test_the_analysis_of_runs_does_not_know_the_paper():
    modules = {path: ast.parse(path.read_text()) for path in (PACKAGE / "analysis").glob("*.py")}
    assert len(modules) > 10
    imports = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {part for node in imports for part in (*(node.module or "").split("."), *(n.name for n in node.names))}
    assert not names & {"reproduction", "report"}


def test_importing_mpi_needs_no_torch():
    """A wrong launcher is reported without waiting for torch."""
    code = "import sys, fedlada_mpi.mpi; sys.exit('torch' in sys.modules or 'mpi4py.MPI' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT)


# Libraries that take long to import, and that a run needs for some settings only, or not at all.
SELDOM_NEEDED = (
    *("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch._inductor", "triton", "torchvision"),
    *("transformers", "dp_accounting", "scipy", "cryptography", "matplotlib", "plotly", "pandas", "sklearn"),
    *("numpy.testing", "PIL", "mlflow", "wandb", "torch.utils.tensorboard"),
)


def test_a_run_imports_what_it_needs(tmp_path):
    prepare(PrepareSettings(dataset="digits", out=str(tmp_path / "data/digits")))  # which draws a picture, unlike a run
    code = (
        "import sys, torch; before = {*sys.modules}; from fedlada_mpi import run; "
        "assert run.main(['--rounds', '1', '--data-dir', 'data', '--out', 'run']) == 0; "
        "print('imported:', *({*sys.argv[1:]} & {*sys.modules} - before))"
    )
    command = [sys.executable, "-c", code, *SELDOM_NEEDED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.splitlines()[-1:] == ["imported:"], done.stdout + done.stderr


def modules() -> dict[str, Path]:
    """The modules of both packages, by their dotted names."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, files, strict=True)}


def arrows() -> set[tuple[str, str]]:
    """Which module imports which, also inside functions and for types alone."""
    known, found = modules(), set()
    for name, path in known.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known and target != name:
                    found.add((name, target))
    return found


def room(module: str) -> str:
    """A folder of the package, or a module in its root."""
    return ".".join(module.split(".")[:2]) if module.startswith("fedlada_mpi.") else module.split(".")[0]


def floors(imports: set[tuple[str, str]]) -> dict[str, int]:
    """The length of the longest way down from each; raises ``RecursionError`` for a circle."""
    below: dict[str, set[str]] = {}
    for start, end in imports:
        below.setdefault(start, set()).add(end)
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((floor(other) for other in below.get(name, ())), default=0)
        return found[name]

    for name in {name for arrow in imports for name in arrow}:
        floor(name)
    return found


def test_imports_run_one_way():
    """No circle of modules, and none of rooms: a room imports only rooms on lower floors."""
    found = arrows()
    assert ("fedlada_mpi.rounds.server", "fedlada_mpi.rounds.silo") in found
    assert floors(found)["fedlada_mpi.support.errors"] == 1
    rooms = floors({(room(a), room(b)) for a, b in found if room(a) != room(b)})
    assert max(rooms.values()) <= 10
    assert rooms["fedlada_mpi.rounds"] < rooms["fedlada_mpi.session"] < rooms["fedlada_mpi.run"]


def test_only_doors_stand_in_the_root():
    assert len([*PACKAGE.glob("*.py")]) <= 12


def test_lost_ranks_are_the_business_of_one_folder():
    """A round, and the assembly of a run, go on as if there were no departures."""
    for file in ("rounds/server.py", "rounds/silo.py", "session/assemble.py", "session/journal.py"):
        words = set(re.findall(r"[a-z]+", (PACKAGE / file).read_text().lower()))
        assert words.isdisjoint({"lost", "departures", "departure", "snapshot", "survivors"}), file


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
