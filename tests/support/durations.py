"""The slowest tests at the end of each run. A test that takes too long and is not marked for it fails the run."""

import os
import time
from collections.abc import Generator, Iterator
from typing import Any, Final

import pytest

from tests.support.depth import DEEP

#: What a test and its fixtures may take on a quiet machine unless it is marked ``slow`` or ``heavy``.
LIMIT_S: Final = 10.0
#: The same in CI. It shares its machine with others, and the load does not show everything that they do.
LIMIT_IN_CI_S: Final = 30.0
SHOWN: Final = 10
#: With more load than this for each core, durations say little about the tests: they are shown, but fail nothing.
LOAD_MAX: Final = 3.0
#: The property of a report that says how long its setup worked for the whole session.
SESSION_SETUP: Final = "session_setup_s"


def load() -> float:
    """How many processes want each core, at least 1."""
    return max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1))


class SessionSetup:
    """A plugin for the processes that run tests: measures the fixtures that a test sets up for all tests after it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope != "session":
            return (yield)
        began = time.perf_counter()
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "setup":
            report.user_properties.append((SESSION_SETUP, self.seconds))
            self.seconds = 0.0
        return report


class Durations:
    """A plugin that collects durations. With xdist it runs in the process that distributes the tests."""

    def __init__(self) -> None:
        self.limit_s = LIMIT_IN_CI_S if os.environ.get("CI") else LIMIT_S
        self.took: dict[str, float] = {}
        self.too_long: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for_session = sum(float(str(value)) for name, value in report.user_properties if name == SESSION_SETUP)
        own = report.duration - (for_session if report.when == "setup" else 0.0)
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + own
        if report.when == "call":
            self._judge(report, self.took[report.nodeid])

    def _judge(self, report: pytest.TestReport, seconds: float) -> None:
        may_be_long = DEEP or "slow" in report.keywords or "heavy" in report.keywords
        factor = load()
        if not may_be_long and factor <= LOAD_MAX and seconds > self.limit_s * factor:
            self.too_long.append(
                f"{report.nodeid} took {seconds:.1f} s, more than {self.limit_s:.0f} s at a load of {factor:.1f} for"
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
        if self.too_long and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
