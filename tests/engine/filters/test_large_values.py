"""Large values are judged in another process."""

import os
import queue
import signal
import threading

import pyarrow as pa
import pytest

from tests.support.node_process import PATIENCE_S
from upriver.engine.filters import LargeValues, ValueFilter
from upriver.engine.filters.large_values import WAITING_MAX
from upriver.model import SNAPPY

WANTED = ValueFilter(("n",), equals=7)


def compressed(value: bytes) -> bytes:
    return bytes(pa.compress(value, codec="snappy", asbytes=True))


def document(number: int, size: int = 100_000) -> bytes:
    return b'{"pad": "%s", "n": %d}' % (b"x" * size, number)


def verdict(judge: LargeValues, value: bytes, datatype: int = 0) -> bool | None:
    told: queue.Queue[bool | None] = queue.Queue()
    judge.judge(WANTED, memoryview(value), datatype, told.put)
    return told.get(timeout=PATIENCE_S)


@pytest.fixture
def judge() -> LargeValues:
    return LargeValues()


def test_the_same_verdicts_as_in_place(judge: LargeValues) -> None:
    for value, datatype in (
        (document(7), 0),
        (document(8), 1),
        (b"no JSON" * 10_000, 0),
        (compressed(document(7)), SNAPPY),
        (compressed(document(8)), SNAPPY | 1),
    ):
        assert verdict(judge, value, datatype) is WANTED.passes(1, value, datatype)
    judge.close()


def test_a_value_passes_if_the_process_is_killed(judge: LargeValues) -> None:
    assert verdict(judge, document(8)) is False
    process = judge._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert verdict(judge, document(8)) is True
    assert verdict(judge, document(8)) is False  # another process
    judge.close()


def test_few_values_wait_at_a_time(judge: LargeValues) -> None:
    told: queue.Queue[bool | None] = queue.Queue()
    go_on, first = threading.Event(), threading.Event()

    def hold(passes: bool | None) -> None:
        told.put(passes)
        first.set()
        go_on.wait(PATIENCE_S)

    judge.judge(WANTED, memoryview(document(7)), 0, hold)
    assert first.wait(PATIENCE_S)
    for _ in range(WAITING_MAX):
        judge.judge(WANTED, memoryview(document(7)), 0, told.put)
    judge.judge(WANTED, memoryview(document(7)), 0, told.put)  # no room
    go_on.set()
    assert [told.get(timeout=PATIENCE_S) for _ in range(WAITING_MAX + 2)].count(None) == 1
    judge.close()


def test_nothing_is_judged_after_the_end(judge: LargeValues) -> None:
    assert verdict(judge, document(7)) is True
    process = judge._process
    judge.close()
    assert process is not None
    assert process.returncode is not None
    judge.judge(WANTED, memoryview(document(7)), 0, lambda _: pytest.fail("it is closed"))
