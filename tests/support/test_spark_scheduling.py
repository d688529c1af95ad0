"""What shares a Spark runs in one process and first; all others run beside it, and nothing runs twice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.spark_scheduling import SparkScheduling

SESSION = "def test_it(spark: SparkSession) -> None: ..."
SERVER = "def test_it(connect_server: ConnectServer) -> None: ..."
PROCESS = "@pytest.mark.spark\ndef test_it() -> None: ..."
PLAIN = "def test_it() -> None: ..."


class Worker:
    """A process that runs the tests that it gets."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.waiting: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def tests(tmp_path: Path) -> list[str]:
    """Four tests of each file, in the order in which pytest collects them."""
    files = {"a": PLAIN, "b": PROCESS, "c": SESSION, "d": PLAIN, "e": SERVER, "f": SESSION, "g": SERVER, "h": PLAIN}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return [f"{name}.py::test_{number}" for name in files for number in range(4)]


def runs(directory: Path, tests: list[str], turns: str) -> list[list[str]]:
    """What each of two processes has run, one test at each turn, and then everything."""
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["2*popen"], rootpath=directory, option=SimpleNamespace(loadscopereorder=True)
    )
    scheduling = SparkScheduling(config)
    workers: list[Any] = [Worker(name) for name in "01"]
    ran: list[list[str]] = [[], []]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()

    def run(number: int) -> None:
        index = workers[number].waiting.pop(0)
        ran[number].append(tests[index])
        scheduling.mark_test_complete(workers[number], index)

    for turn in turns:
        run(int(turn))
    while scheduling.has_pending:
        run(0 if workers[0].waiting else 1)
    assert scheduling.tests_finished
    assert all(worker.shutting_down for worker in workers)
    return ran


@pytest.mark.parametrize("turns", ["01" * 12, "0" * 24, "1" * 15])
def test_what_shares_a_spark_runs_in_one_process(tmp_path: Path, tests: list[str], turns: str) -> None:
    first, second = runs(tmp_path, tests, turns)
    assert sorted(first + second) == sorted(tests)
    for shared in ("cf", "eg", "b"):
        assert {test[0] for test in first} & set(shared) in (set(), set(shared))
        assert not {test[0] for test in first} & {test[0] for test in second} & set(shared)


def test_one_process_begins_with_spark_and_the_other_at_the_end(tmp_path: Path, tests: list[str]) -> None:
    first, second = runs(tmp_path, tests, "01" * 10)
    assert {test[0] for test in first[:8]} == set("cf")
    assert second[:8] == list(reversed(tests))[:4] + list(reversed(tests))[16:20]
