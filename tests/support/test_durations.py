"""A test that takes too long fails the run, here and in CI, whether the time goes into the test or its fixtures."""

from typing import Any

import pytest

from tests.support import durations
from tests.support.durations import Durations, SessionSetup

pytest_plugins = ["pytester"]

TESTS = """
    import time
    import pytest

    @pytest.fixture
    def own():
        time.sleep({fixture})

    @pytest.fixture(scope="session")
    def shared():
        time.sleep({session})

    {mark}
    def test_it(own, shared):
        time.sleep({test})
"""
#: For the processes of xdist, which have no plugins of ours otherwise.
CONFTEST = """
    from tests.support.durations import SessionSetup

    def pytest_configure(config):
        config.pluginmanager.register(SessionSetup(), "session-setup")
"""


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for, on a quiet machine that is not one of CI."""
    monkeypatch.setattr(durations, "LIMIT_S", 0.5)
    monkeypatch.setattr(durations, "LIMIT_IN_CI_S", 1.5)
    monkeypatch.setattr(durations, "DEEP", False)
    monkeypatch.setattr(durations, "load", lambda: 1.0)
    monkeypatch.delenv("CI", raising=False)


def result_of(
    pytester: pytest.Pytester,
    *options: str,
    fixture: float = 0,
    session: float = 0,
    test: float = 0,
    mark: str = "",
) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  heavy\n")
    pytester.makepyfile(TESTS.format(fixture=fixture, session=session, test=test, mark=mark))
    plugins = [Durations(), *([] if options else [SessionSetup()])]
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options, plugins=plugins)


@pytest.mark.parametrize(("fixture", "test"), [(0.0, 0.6), (0.6, 0.0), (0.3, 0.3)])
def test_a_long_test_fails_the_run(pytester: pytest.Pytester, fixture: float, test: float) -> None:
    result = result_of(pytester, fixture=fixture, test=test)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*::test_it took 0.* s, more than 0 s at a load of 1.0*mark it slow or heavy."])


@pytest.mark.parametrize(("session", "test", "ends"), [(0.6, 0, 0), (0, 0.6, 1)])
def test_durations_come_from_other_processes(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    session: float,
    test: float,
    ends: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeconftest(CONFTEST)
    assert result_of(pytester, "-n", "1", session=session, test=test).ret == ends


@pytest.mark.parametrize(
    "allowed",
    [
        {},
        {"session": 0.6},  # it is set up for all tests, whichever comes first
        {"test": 0.6, "mark": "@pytest.mark.heavy"},
        {"test": 0.6, "mark": "@pytest.mark.slow"},
    ],
)
def test_others_do_not(pytester: pytest.Pytester, allowed: dict[str, Any]) -> None:
    result = result_of(pytester, **allowed)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*slowest 10 tests*", "* s  *::test_it"])


@pytest.mark.parametrize("load", [2.9, durations.LOAD_MAX + 0.1])
def test_a_loaded_machine_takes_longer(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    monkeypatch.setattr(durations, "load", lambda: load)
    assert result_of(pytester, test=0.6).ret == pytest.ExitCode.OK


@pytest.mark.parametrize(("test", "ends"), [(0.6, pytest.ExitCode.OK), (1.6, pytest.ExitCode.TESTS_FAILED)])
def test_ci_allows_more_but_not_everything(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: float, ends: pytest.ExitCode
) -> None:
    monkeypatch.setenv("CI", "true")
    assert result_of(pytester, test=test).ret == ends
