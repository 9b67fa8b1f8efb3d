"""The pytest plug-in for a run over several ranks: it runs what communicates, and keeps the ranks together.

Only rank 0 reports. After every test all ranks meet; what failed on another rank is reported by rank 0 with its number,
and the next test begins. Where the others do not come, as they wait in a collective that a failed rank has left, all
ranks end. With the file FEDLADA_TEST_LOG in the environment, the same command then goes on behind the test in question.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest._code.code import TerminalRepr
from ranks import SIZE, communicator

# Seconds in which ranks come to an end that are not waiting for the one that failed.
AFTER_A_FAILURE = float(os.environ.get("FEDLADA_TEST_AFTER_A_FAILURE", "20"))
LAST_MEETING = 320.0  # longer than a test may take


class OfRank(TerminalRepr):
    """The failure of a rank, as pytest shows one."""

    def __init__(self, rank: int, text: str) -> None:
        self.text = text
        lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        self.reprcrash = SimpleNamespace(message=f"rank {rank} of {SIZE}: {lines[0] if lines else text.strip()[-200:]}")

    def toterminal(self, tw) -> None:
        tw.line(self.reprcrash.message)
        tw.line(self.text)


class RankPlugin:
    """What a run over several ranks needs in addition to pytest-mpi: no rank is left waiting for another."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.comm = config, communicator().Dup()
        self.rank = self.comm.rank
        self.failure = ""
        path = os.environ.get("FEDLADA_TEST_LOG")
        self.log = Path(path) if path else None
        # What an earlier start of this command has done: the test that it stopped at is not tried again.
        lines = self.log.read_text().splitlines() if self.log and self.log.exists() else []
        noted = [line.split(" ", 1) for line in lines]
        self.done = {name for word, name in noted if word == "begun"}
        self.stopped_at = sorted(self.done - {name for word, name in noted if word == "ended"})
        self.comm.Barrier()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """What is marked ``ranks(slow=True)`` is left to 4 ranks, ``ranks(slow=True, two=True)`` to 2."""
        for item in items:
            for mark in item.iter_markers("ranks"):
                if mark.kwargs.get("slow"):
                    item.add_marker("two_ranks" if mark.kwargs.get("two") else "four_ranks")
        chosen = [item for item in items if item.get_closest_marker("ranks") and item.nodeid not in self.done]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.failure = ""
        self._note("begun", item.nodeid)
        result = yield
        self._meet(item)
        self._note("ended", item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not isinstance(report.longrepr, OfRank):
            sections = "".join(f"\n--- {title}\n{content}" for title, content in report.sections)
            self.failure += f"{report.nodeid} ({report.when}) failed\n{report.longreprtext}{sections}\n"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._end(f"collecting {report.nodeid} failed\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._end(f"pytest failed\n{excrepr}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self.stopped_at:
            terminalreporter.write_line(f"FAILED {name} - ended all ranks of an earlier start: see above", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Rank 0 may report success only when all ranks have come this far."""
        self._wait(LAST_MEETING)
        self._note("finished", "all")
        if self.stopped_at and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        """A rank that leaves with a failure ends all, so none does before rank 0 has printed its summary."""
        sys.stdout.flush()
        self._wait(LAST_MEETING)

    def _note(self, word: str, name: str) -> None:
        if self.log and self.rank == 0:
            with self.log.open("a") as file:
                file.write(f"{word} {name}\n")

    def _meet(self, item: pytest.Item) -> None:
        """All ranks learn of each other's failures, and go on together."""
        self._wait(AFTER_A_FAILURE if self.failure else LAST_MEETING)
        stop = item.session.shouldfail or item.session.shouldstop
        everyone = self.comm.allgather((self.failure, stop))
        if self.rank == 0:
            for rank, (failure, _) in enumerate(everyone[1:], 1):
                if failure:
                    report = pytest.TestReport(
                        item.nodeid, item.location, {}, "failed", OfRank(rank, failure), "call", duration=0.0
                    )
                    item.ihook.pytest_runtest_logreport(report=report)
        elif not item.session.shouldfail:
            item.session.shouldfail = next((stop for _, stop in everyone if stop), False)

    def _wait(self, seconds: float) -> None:
        """Until all ranks are here; ends them if that takes too long."""
        request = self.comm.Ibarrier()
        deadline = time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > deadline:
                self._end(self.failure or f"some ranks did not come within {seconds:.0f} s")
            time.sleep(0.002)

    def _end(self, text: str) -> None:
        """Print one rank's failure and end all ranks."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            sys.stdout.flush()
            # One write, so that the reports of several ranks do not mix.
            os.write(2, f"\nrank {self.rank} of {SIZE}: {text}\nrank {self.rank} ends all ranks\n".encode())
            time.sleep(1.0)  # ranks that fail at the same time all get to print
            self.comm.Abort(1)
