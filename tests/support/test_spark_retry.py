"""A Spark test runs again if its worker did not connect back, and the run says so; it fails when that is frequent."""

import pytest

from tests.support.spark_retry import CONNECT_BACK, RERUNS_MAX, SparkReruns, SparkRetry

pytest_plugins = ["pytester"]

#: For the processes of xdist, which have no plugins of ours otherwise.
CONFTEST = """
    from tests.support.spark_retry import SparkRetry

    def pytest_configure(config):
        config.pluginmanager.register(SparkRetry(), "spark-retry")
"""
#: Each of the tests fails the first time.
TESTS = """
    import pytest

    tried = set()

    {mark}
    @pytest.mark.parametrize("number", range({count}))
    def test_it(number):
        first = number not in tried
        tried.add(number)
        assert not first, "{problem}"
"""


def result_of(
    pytester: pytest.Pytester, *options: str, count: int, mark: str = "@pytest.mark.spark", problem: str = CONNECT_BACK
) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n  spark\n")
    pytester.makepyfile(TESTS.format(count=count, mark=mark, problem=problem))
    plugins = [SparkReruns(), *([] if options else [SparkRetry()])]
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options, plugins=plugins)


@pytest.mark.parametrize(
    ("count", "ends"), [(RERUNS_MAX, pytest.ExitCode.OK), (RERUNS_MAX + 1, pytest.ExitCode.TESTS_FAILED)]
)
def test_second_attempts_are_counted(pytester: pytest.Pytester, count: int, ends: pytest.ExitCode) -> None:
    result = result_of(pytester, count=count)
    result.assert_outcomes(passed=count)
    assert result.ret == ends
    result.stdout.fnmatch_lines([f"*Spark tests that ran twice: {count}*", "*::test_it[[]0[]]"])
    assert ("the run fails" in result.stdout.str()) == (ends != pytest.ExitCode.OK)


def test_second_attempts_in_other_processes_are_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeconftest(CONFTEST)
    result = result_of(pytester, "-n", "1", count=RERUNS_MAX + 1)
    result.assert_outcomes(passed=RERUNS_MAX + 1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(("mark", "problem"), [("", CONNECT_BACK), ("@pytest.mark.spark", "another")])
def test_other_failures_stay(pytester: pytest.Pytester, mark: str, problem: str) -> None:
    result = result_of(pytester, count=1, mark=mark, problem=problem)
    result.assert_outcomes(failed=1)
    assert "ran twice" not in result.stdout.str()
