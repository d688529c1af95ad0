"""The slowest tests at the end of each run. A test that takes too long and is not marked for it fails the run."""

import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.depth import DEEP

#: What a test may take on a quiet machine unless it is marked ``slow`` or ``heavy``.
LIMIT_S: Final = 10.0
SHOWN: Final = 10
#: With more load than this for each core, durations say little about the tests: they are shown and judged no more.
LOAD_MAX: Final = 3.0


def load() -> float:
    """How many processes want each core, at least 1."""
    return max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1))


class Durations:
    """A plugin that collects them; with xdist it runs in the process that hands out the tests."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.too_long: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + report.duration
        may_be_long = DEEP or "slow" in report.keywords or "heavy" in report.keywords
        factor = load()
        if report.when == "call" and not may_be_long and factor <= LOAD_MAX and report.duration > LIMIT_S * factor:
            self.too_long.append(
                f"{report.nodeid} took {report.duration:.1f} s, more than {LIMIT_S:.0f} s at a load of {factor:.1f} for"
                " each core. Make it smaller, or mark it slow or heavy."
            )

    def lines(self) -> Iterator[str]:
        """The slowest tests, each with its seconds."""
        slowest = sorted(self.took.items(), key=lambda each: -each[1])[:SHOWN]
        return (f"{seconds:7.1f} s  {test}" for test, seconds in slowest)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.took:
            return
        terminalreporter.section(f"slowest {SHOWN} tests")
        for line in (*self.lines(), *self.too_long):
            terminalreporter.write_line(line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # CI shares its machine with others, whose load is not seen here: it shows them and goes on.
        if self.too_long and session.exitstatus == pytest.ExitCode.OK and not os.environ.get("CI"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
