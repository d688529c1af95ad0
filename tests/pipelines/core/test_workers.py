"""Work in this process, and in processes of this machine. Spark's tasks run the work of the pipelines' tests."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import pytest

from upriver.pipelines.core.workers import LocalWorkers, ProcessWorkers, Workers

ITEMS = [b"%d" % n for n in range(5)]


@dataclass(frozen=True)
class Task:
    """Says which process it runs in."""

    name: str

    def __call__(self, item: bytes) -> bytes:
        return f"{self.name} {item.decode()} {os.getpid()}".encode()

    def fail(self, item: bytes) -> bytes:
        raise ValueError(f"{self.name} cannot do {item.decode()}")

    def end(self, _: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


@pytest.mark.parametrize("workers", [LocalWorkers(), ProcessWorkers(2)], ids=["here", "processes"])
def test_results_are_in_the_order_of_the_items(workers: Workers) -> None:
    done: list[int] = []
    found = [each.decode().split() for each in workers.map(Task("x"), ITEMS, done.append)]
    assert [words[:2] for words in found] == [["x", str(n)] for n in range(5)]
    assert sorted(done) == list(range(5))
    here = str(os.getpid())
    assert all((words[2] == here) == isinstance(workers, LocalWorkers) for words in found)
    assert workers.map(Task("x"), []) == []


def test_a_single_item_starts_no_process() -> None:
    assert ProcessWorkers().map(Task("x"), [b"1"]) == [f"x 1 {os.getpid()}".encode()]


def test_there_is_one_process_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert ProcessWorkers().count == 7
    assert (ProcessWorkers(3).count, LocalWorkers().count) == (3, 1)


def test_a_failure_in_a_process_is_raised_here() -> None:
    with pytest.raises(ValueError, match=r"x cannot do [01]"):
        ProcessWorkers(2).map(Task("x").fail, ITEMS[:2])


def test_a_killed_process_is_noticed() -> None:
    with pytest.raises(BrokenProcessPool):
        ProcessWorkers(2).map(Task("x").end, ITEMS)
