"""The pytest plug-in that keeps the ranks of a test run together.

Only rank 0 reports progress. The first failure on any rank is printed and ends every rank: the others may be waiting
in a collective that the failed one will never enter.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext

import pytest
from ranks import SIZE, communicator

# Ranks that fail at the same time all get to print before the first of them ends the job.
GRACE = 1.0
LAST_BARRIER = 120.0


class RankPlugin:
    """What a run over several ranks needs in addition to pytest-mpi: no rank is left waiting for another."""

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
