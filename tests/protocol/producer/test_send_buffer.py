"""One piece of memory for what is sent, which is never overwritten while somebody holds on to it."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol.producer.send_buffer import COPIED_BYTES, SendBuffer

LARGE = COPIED_BYTES + 1


@given(st.lists(st.binary(max_size=30)), st.integers(0, 40))
def test_everything_is_taken_in_its_order(parts: list[bytes], room_bytes: int) -> None:
    outbox = SendBuffer(room_bytes)
    for part in parts:
        if len(part) <= len(outbox.room):
            outbox.room[: len(part)] = part
            outbox.filled(len(part))
        else:
            outbox.put(part)
    assert outbox.size == sum(map(len, parts))
    assert outbox.take() == b"".join(parts)
    assert outbox.size == 0


def test_what_was_taken_is_overwritten_unless_somebody_holds_on_to_it() -> None:
    outbox = SendBuffer(LARGE)
    outbox.put(b"1" * LARGE)
    first = outbox.take()
    outbox.put(b"2" * LARGE)
    assert bytes(first) == b"2" * LARGE
    second = outbox.take()
    outbox.let_go()
    outbox.put(b"3" * LARGE)
    assert (bytes(second), bytes(outbox.take())) == (b"2" * LARGE, b"3" * LARGE)


def test_what_is_small_is_copied_so_that_nobody_holds_on_to_all_the_memory() -> None:
    outbox = SendBuffer(LARGE)
    outbox.put(bytes(COPIED_BYTES))
    assert isinstance(outbox.take(), bytes)
    outbox.put(bytes(LARGE))
    assert isinstance(outbox.take(), memoryview)


def test_what_is_too_large_has_memory_of_its_own_which_does_not_stay() -> None:
    outbox = SendBuffer(10)
    outbox.put(b"before ")
    outbox.put(bytes(100))
    large = outbox.take()
    assert large == b"before " + bytes(100)
    assert len(outbox.room) == 10
    outbox.put(b"after")
    assert large == b"before " + bytes(100)


def test_what_was_left_half_way_is_forgotten() -> None:
    outbox = SendBuffer(10)
    outbox.put(b"half")
    outbox.clear()
    outbox.put(b"whole")
    assert bytes(outbox.take()) == b"whole"
