"""A Spark test runs once more when Spark gave up on a Python worker that was slow to start.

Spark waits ten seconds for a worker to connect back and has no setting for it. On a loaded machine that is too short,
and says nothing about the code under test. If it happens often, something else is wrong: then the run fails.
"""

from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

CONNECT_BACK: Final = "Python worker failed to connect back"
#: How many tests of one run may need a second attempt.
RERUNS_MAX: Final = 2
#: The property of a report that says that it is from the second attempt.
RERUN: Final = "spark_rerun"


class SparkRetry:
    """A plugin for the processes that run tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: pytest.Item | None) -> bool | None:
        if item.get_closest_marker("spark") is None and "spark" not in item.fixturenames:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if any(report.failed and CONNECT_BACK in report.longreprtext for report in reports):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            reports[0].user_properties.append((RERUN, True))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class SparkReruns:
    """A plugin that counts second attempts. With xdist it runs in the process that distributes the tests."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    @property
    def too_many(self) -> bool:
        return len(self.tests) > RERUNS_MAX

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (RERUN, True) in report.user_properties:
            self.tests.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        terminalreporter.section(f"Spark tests that ran twice: {len(self.tests)}")
        for test in self.tests:
            terminalreporter.write_line(test)
        if self.too_many:
            terminalreporter.write_line(
                f"{len(self.tests)} tests needed a second attempt because a Python worker did not connect back, more"
                f" than {RERUNS_MAX}: the run fails. Run them on a machine with less load."
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
