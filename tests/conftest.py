"""How the tests run: which of them, how deep, and on which worker.

Where ``UPRIVER_INTEROP=required`` is set, as CI does once the foreign tools are there, a test against one of them fails
instead of being skipped: a list of skipped tests is easily overlooked.
"""

import gc
import math
import os
import random
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.class_archive import environment
from tests.support.depth import DEEP, examples
from tests.support.durations import Durations, SessionSetup
from tests.support.spark_retry import SparkReruns, SparkRetry
from tests.support.spark_scheduling import SparkScheduling
from tests.support.spark_session import spark

__all__ = ["spark"]

# Without a deadline, because machines are loaded; in CI the same examples each time.
settings.register_profile(
    "deep" if DEEP else "quick",
    deadline=None,
    max_examples=examples(100),
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deep" if DEEP else "quick")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before a worker or a Spark starts, which inherit it.
os.environ |= environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-sample", type=float, metavar="FRACTION", help="Run only this fraction of the slow tests, at random."
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow-sample") is not None:
        os.environ.setdefault("UPRIVER_SLOW_SEED", str(random.randrange(1_000_000)))  # which the workers inherit
    config.pluginmanager.register(SparkRetry(), "spark-retry")
    config.pluginmanager.register(SessionSetup(), "session-setup")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "durations")
        config.pluginmanager.register(SparkReruns(), "spark-reruns")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SparkScheduling:
    return SparkScheduling(config, log)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--slow-sample") is None:
        return None
    return f"slow tests: a random sample; repeat it with UPRIVER_SLOW_SEED={os.environ['UPRIVER_SLOW_SEED']}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fraction = config.getoption("--slow-sample")
    if fraction is not None:
        slow = sorted(item.nodeid for item in items if item.get_closest_marker("slow") is not None)
        chosen = set(
            random.Random(os.environ["UPRIVER_SLOW_SEED"]).sample(slow, min(len(slow), math.ceil(len(slow) * fraction)))
        )
        left_out = [item for item in items if item.nodeid in slow and item.nodeid not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in slow or item.nodeid in chosen]


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = os.environ.get("UPRIVER_INTEROP") == "required" and item.get_closest_marker("interop") is not None
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"it must run where UPRIVER_INTEROP=required, and was skipped: {report.longrepr}"
    return report
