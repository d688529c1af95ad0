"""What waits for a second try, in which order, and what makes it needless."""

from typing import Any

from upriver.protocol.tap.retry_queue import Retry, RetryQueue
from upriver.wire import tap
from upriver.wire.dialects.tap import Control, TapFlag


def retry(key: bytes, due: float = 0.0, stream: Any = None) -> Retry:
    return Retry(tap.Mutation(vbucket=1, key=key, value=b"v", rev_seqno=1, nru=0).encode(), stream, 0, due)


def test_a_message_gets_a_new_number_and_asks_for_an_answer() -> None:
    again = tap.tap.decode(retry(b"b").numbered(2**32 + 9))
    assert isinstance(again, tap.Mutation)
    assert (again.opaque, again.key, again.tap_flags) == (9, b"b", TapFlag.ACK)


def test_they_come_out_when_their_time_has_come() -> None:
    retries = RetryQueue()
    assert (retries.next_due, retries.take_due(9), len(retries), retries.bytes) == (None, None, 0, 0)
    first, second = retry(b"a", 5), retry(b"b", 7)
    for each in (first, second):
        retries.add(each)
    assert (retries.next_due, len(retries), retries.bytes) == (5, 2, 2 * len(first.message))
    assert retries.take_due(4.9) is None
    assert retries.take_due(6) is first
    assert (retries.take_due(6), retries.next_due, len(retries)) == (None, 7, 1)


def test_newer_changes_make_them_needless() -> None:
    retries = RetryQueue()
    one, two = retry(b"a"), retry(b"b")
    control = Retry(tap.Opaque(vbucket=1, control=Control.CLOSE_BACKFILL).encode(), None, 0, 0.0)
    for each in (one, two, control):
        retries.add(each)
    assert retries.overtaken({(1, b"a"), (2, b"b"), None}) == [one]
    assert retries.overtaken({(1, b"a")}) == []
    assert [retries.take_due(0) for _ in range(3)] == [two, control, None]
    assert retries.bytes == 0


def test_they_are_found_by_their_stream() -> None:
    retries = RetryQueue()
    mine, other = object(), object()
    for key, stream in ((b"a", mine), (b"b", other), (b"c", mine)):
        retries.add(retry(key, stream=stream))
    assert retries.holds_of(mine)  # type: ignore[arg-type]
    retries.drop(mine)  # type: ignore[arg-type]
    assert not retries.holds_of(mine)  # type: ignore[arg-type]
    assert retries.holds_of(other)  # type: ignore[arg-type]
    assert retries.overtaken({(1, b"a")}) == []
    assert len(retries) == 1
