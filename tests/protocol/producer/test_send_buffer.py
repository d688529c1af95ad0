"""One piece of memory for what is sent, which is never overwritten while somebody holds on to it."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol.producer.send_buffer import COPIED_BYTES, SendBuffer

LARGE = COPIED_BYTES + 1


@given(st.lists(st.binary(max_size=30)), st.integers(0, 40))
def test_everything_is_taken_in_its_order(parts: list[bytes], room_bytes: int) -> None:
    buffer = SendBuffer(room_bytes)
    for part in parts:
        if len(part) <= len(buffer.room):
            buffer.room[: len(part)] = part
            buffer.filled(len(part))
        else:
            buffer.put(part)
    assert buffer.size == sum(map(len, parts))
    assert buffer.take() == b"".join(parts)
    assert buffer.size == 0


def test_what_was_taken_is_overwritten_unless_somebody_holds_on_to_it() -> None:
    buffer = SendBuffer(LARGE)
    buffer.put(b"1" * LARGE)
    first = buffer.take()
    buffer.put(b"2" * LARGE)
    assert bytes(first) == b"2" * LARGE
    second = buffer.take()
    buffer.let_go()
    buffer.put(b"3" * LARGE)
    assert (bytes(second), bytes(buffer.take())) == (b"2" * LARGE, b"3" * LARGE)


def test_what_is_small_is_copied_so_that_no_reader_keeps_all_the_memory() -> None:
    buffer = SendBuffer(LARGE)
    buffer.put(bytes(COPIED_BYTES))
    assert isinstance(buffer.take(), bytes)
    buffer.put(bytes(LARGE))
    assert isinstance(buffer.take(), memoryview)


def test_what_is_too_large_has_memory_of_its_own_which_does_not_stay() -> None:
    buffer = SendBuffer(10)
    buffer.put(b"before ")
    buffer.put(bytes(100))
    large = buffer.take()
    assert large == b"before " + bytes(100)
    assert len(buffer.room) == 10
    buffer.put(b"after")
    assert large == b"before " + bytes(100)


def test_what_was_left_half_way_is_forgotten() -> None:
    buffer = SendBuffer(10)
    buffer.put(b"half")
    buffer.clear()
    buffer.put(b"whole")
    assert bytes(buffer.take()) == b"whole"
