import gc
import threading
import weakref

from upriver.engine.durability_waiters import DurabilityWaiters, told
from upriver.engine.table import Ledger, Table
from upriver.errors import StorageError

ERROR = StorageError("data", "full")


def room() -> tuple[DurabilityWaiters, Table]:
    return DurabilityWaiters(threading.RLock()), Table(3, Ledger(lambda: 1.0))


def test_each_is_told_once_and_in_order() -> None:
    waiting, table = room()
    heard: list[int] = []
    for seqno in (1, 2, 3, 2):
        waiting.for_change(table, seqno, lambda seqno=seqno: heard.append(seqno), None)  # type: ignore[misc]
    for reached in (2, 2, 3):
        for call in waiting.persisted(lambda _, reached=reached: reached):  # type: ignore[misc]
            call()
        heard.append(-reached)
    assert heard == [1, 2, 2, -2, -2, 3, -3]
    assert len(waiting) == 0


def test_a_cancelled_wait_is_gone_with_everything_it_held() -> None:
    class Peer:
        def answer(self) -> None:
            raise AssertionError("it has gone")

    waiting, table = room()
    peer = Peer()
    gone = weakref.ref(peer)
    waits = [waiting.for_change(table, 1, peer.answer, None), waiting.for_everything(peer.answer, None)]
    assert len(waiting) == 2
    assert all(wait.waiting for wait in waits)
    for wait in waits * 2:
        wait.cancel()
    assert len(waiting) == 0
    del peer
    gc.collect()
    assert gone() is None
    assert told(waits) == []
    assert waiting.persisted(lambda _: 9) == []
    assert waiting.failed(ERROR) == []


def test_cancelling_does_not_search() -> None:
    waiting, table = room()
    waits = [waiting.for_change(table, 1, int, None) for _ in range(200_000)]
    for wait in waits:  # quadratic, this would take minutes
        wait.cancel()
    assert len(waiting) == 0


def test_a_wait_that_was_taken_along_can_still_be_cancelled() -> None:
    waiting, table = room()
    heard: list[str] = []
    first = waiting.for_everything(lambda: heard.append("first"), None)
    waiting.for_everything(lambda: heard.append("second"), None)
    waiting.for_change(table, 7, lambda: heard.append("cut"), None)
    taken = waiting.take_for_everything() + waiting.on_cut([3])
    waiting.for_everything(lambda: heard.append("late"), None)
    first.cancel()
    for call in told(taken):
        call()
    assert heard == ["second", "cut"]
    assert len(waiting) == 1


def test_only_those_who_listen_hear_that_their_change_is_undone() -> None:
    waiting, table = room()
    heard: list[str] = []
    waiting.for_change(table, 2, lambda: heard.append("deaf"), None)
    waiting.for_change(table, 1, lambda: heard.append("kept"), None, lambda: heard.append("never"))
    waiting.for_change(table, 2, lambda: heard.append("never"), None, lambda: heard.append("undone"))
    for call in waiting.undone(table, 1) + waiting.undone(table, 1):
        call()
    assert heard == ["undone"]
    for call in waiting.persisted(lambda _: 2):
        call()
    assert heard == ["undone", "deaf", "kept"]
    assert waiting.undone(table, 0) == []


def test_only_those_who_listen_hear_of_a_failure() -> None:
    waiting, table = room()
    heard: list[object] = []
    waiting.for_change(table, 1, lambda: heard.append("deaf"), None)
    waiting.for_change(table, 1, lambda: heard.append("never"), heard.append)
    waiting.for_everything(lambda: heard.append("never"), heard.append)
    for call in waiting.failed(ERROR) + waiting.failed(ERROR):
        call()
    assert heard == [ERROR, ERROR]
    for call in waiting.persisted(lambda _: 1):
        call()
    assert heard == [ERROR, ERROR, "deaf"]
