"""A Spark test runs once more when Spark gave up on a Python worker that was slow to start.

Spark waits ten seconds for a worker to connect back and has no setting for it. On a loaded machine that is too short,
and says nothing about the code under test.
"""

from typing import Any

import pytest
from _pytest.runner import runtestprotocol

CONNECT_BACK = "Python worker failed to connect back"


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
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
