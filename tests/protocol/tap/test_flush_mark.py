"""Which engine-specific data of a flush is a mark, and which vbuckets it lists."""

import pytest

from upriver.protocol.tap.flush_mark import FlushMark, mark_in, marked


@pytest.mark.parametrize("number", [1, 2**48, 2**64 - 1])
@pytest.mark.parametrize("vbuckets", [{0}, {7, 8}, {1023}, set(range(1024)), set(range(1, 1024, 3))])
def test_our_own_mark_is_recognised(number: int, vbuckets: set[int]) -> None:
    assert mark_in(marked(number, vbuckets)) == FlushMark(number, frozenset(vbuckets))


def test_it_is_short() -> None:
    assert len(marked(1, range(1024))) == 16 + 128


@pytest.mark.parametrize("private", [b"", bytes(8), b"12345678", bytes(16), bytes(24), marked(7, {1})[:-1]])
def test_data_of_another_engine_is_not_a_mark(private: bytes) -> None:
    assert mark_in(private) is None
