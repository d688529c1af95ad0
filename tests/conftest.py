"""How tests run: properties without a deadline, because machines are loaded, and in CI the same way each time.

Where ``UPRIVER_INTEROP=required`` is set, as CI does once the foreign tools are there, a test against one of them fails
instead of being skipped: nobody reads a list of skipped tests.
"""

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.spark_session import spark

__all__ = ["spark"]

settings.register_profile(
    "upriver", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("upriver")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep everything that needs Spark on one worker: one JVM for all of it."""
    for item in items:
        if item.get_closest_marker("spark") is not None or "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = os.environ.get("UPRIVER_INTEROP") == "required" and item.get_closest_marker("interop") is not None
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"it must run where UPRIVER_INTEROP=required, and was skipped: {report.longrepr}"
    return report
