"""One suite for a single process and for a world of ranks.

    python -m pytest
    mpirun -n 4 python -m mpi4py -m pytest --with-mpi

In a world only rank 0 reports progress, and the first failure on any rank is printed and ends every
rank: the others may be waiting in a collective that the failed one will never enter.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LAUNCHER_PREFIXES = ("OMPI_COMM_", "OMPI_FIRST_", "PMIX_", "PMI_", "PRTE_LAUNCHED")
# Ranks that fail together all get to print before the first of them ends the job.
GRACE = 1.0
LAST_BARRIER = 120.0

# From the environment, because importing MPI costs a second that most serial runs need not spend.
SIZE = next((int(os.environ[name]) for name in LAUNCHER_SIZES if name in os.environ), 1)
# Where SLURM and a browser must be present, a test that skips for want of them is a failure.
STRICT = os.environ.get("FEDLADA_TEST_STRICT") == "1"

for line in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
    if line and not line.startswith("#"):
        os.environ.setdefault(*line.split("=", 1))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def communicator():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if SIZE == 1:
        return
    if communicator().size == 1:
        os.write(
            2,
            f"error: the launcher started {SIZE} processes that do not see each other: use the mpirun of the "
            "MPI library that `python -m mpi4py --mpi-library` names, or srun --mpi=pmix\n".encode(),
        )
        os._exit(2)
    plugins = config.pluginmanager
    plugins.register(World(config))
    if communicator().rank > 0:
        plugins.unregister(plugins.get_plugin("terminalreporter"))
        plugins.register(pytest.TerminalReporter(config, open(os.devnull, "w")), "terminalreporter")  # noqa: SIM115


class World:
    """What a run over several ranks needs beside pytest-mpi: no rank is left waiting for another."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("serial"):
                item.add_marker(pytest.mark.skip(reason="starts processes of its own: runs in a world of one rank"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = "".join(f"\n--- {title}\n{content}" for title, content in report.sections)
            self.end(f"{report.nodeid} ({report.when}) failed", report.longreprtext + sections)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.end(f"collecting {report.nodeid} failed", report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.end("pytest failed", str(excrepr))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Rank 0 may report success only when all ranks have come this far."""
        request = communicator().Ibarrier()
        deadline = time.monotonic() + LAST_BARRIER
        while not request.Test():
            if time.monotonic() > deadline:
                self.end(f"some ranks did not finish within {LAST_BARRIER:.0f} s of this one", "")
            time.sleep(0.01)

    def end(self, what: str, text: str) -> None:
        """Print one rank's failure and end all ranks."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            sys.stdout.flush()
            # One write, so that the reports of several ranks do not mix.
            os.write(2, f"\nrank {communicator().rank} of {SIZE}: {what}; all ranks end here\n{text}\n".encode())
            time.sleep(GRACE)
            communicator().Abort(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    required = item.get_closest_marker("slurm") or item.get_closest_marker("browser")
    if STRICT and SIZE == 1 and required and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, although FEDLADA_TEST_STRICT=1 asks for it: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def world():
    """MPI.COMM_WORLD."""
    return communicator()


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory) -> Path:
    """One temporary directory, the same on all ranks."""
    if SIZE == 1:
        return tmp_path_factory.mktemp("shared")
    path = bytearray(4096)
    if communicator().rank == 0:
        name = os.fsencode(tmp_path_factory.mktemp("shared"))
        path[: len(name)] = name
    communicator().Bcast(path, root=0)
    return Path(os.fsdecode(bytes(path).rstrip(b"\0")))


@pytest.fixture(scope="session")
def digits_dir(shared_tmp) -> Path:
    """The embedded digits for the preset's 50 clients in 4 silo files, as a run prepares them."""
    from data_prep import PrepareSettings, prepare

    out = shared_tmp / "digits"
    if SIZE == 1 or communicator().rank == 0:
        prepare(PrepareSettings("digits", out=out, silos=4))
    if SIZE > 1:
        communicator().Barrier()
    return out


def find_mpirun() -> str | None:
    # Beside the interpreter comes first: there it belongs to the MPI that mpi4py loads.
    beside = Path(sys.executable).parent
    return next((found for path in (str(beside), None) for found in [shutil.which("mpirun", path=path)] if found), None)


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``mpirun(4, "--rounds", 2)`` runs ``python -m fedlada_mpi.run --rounds 2`` on 4 ranks, or alone for 1.

    ``module`` names another one, ``command`` replaces ``-m module``; ``check`` fails the test on a non-zero status.
    """

    def run(
        ranks: int,
        *arguments: object,
        module: str = "fedlada_mpi.run",
        command: tuple[str, ...] | None = None,
        timeout: float = 90,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        launcher = []
        if ranks > 1:
            program = find_mpirun() or pytest.skip("no mpirun: install the extra [mpi] or load an MPI module")
            launcher = [program, "-n", str(ranks)]
        line = [*launcher, sys.executable, *(command or ("-m", module)), *map(str, arguments)]
        # The child must not take this process for its launcher.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
        process = subprocess.Popen(
            line, env={**clean, **(env or {})}, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = stop(process)
            pytest.fail(f"not finished after {timeout} s: {' '.join(line)}\n{out[-4000:]}\n{err[-4000:]}")
        done = subprocess.CompletedProcess(line, process.returncode, out, err)
        if check and done.returncode != 0:
            pytest.fail(f"status {done.returncode}: {' '.join(line)}\n{out[-4000:]}\n{err[-4000:]}")
        return done

    return run


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a launcher and its ranks: it ends them itself on SIGTERM, the group is killed if that takes too long."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
