"""Which engine-specific data of a flush is a mark."""

import pytest

from upriver.protocol.tap.flush_mark import mark_in, marked


@pytest.mark.parametrize("mark", [1, 2**48, 2**64 - 1])
def test_our_own_mark_is_recognised(mark: int) -> None:
    assert mark_in(marked(mark)) == mark


@pytest.mark.parametrize("private", [b"", bytes(8), b"12345678", bytes(16), marked(7)[:-1], marked(7) + b"x"])
def test_data_of_another_engine_is_not_a_mark(private: bytes) -> None:
    assert mark_in(private) == 0
