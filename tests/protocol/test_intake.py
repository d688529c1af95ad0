"""Bytes in any pieces: the same runs and messages come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.consumer.test_consumer import Stage, marker, mutation, of
from upriver.errors import WireError
from upriver.protocol.intake import Intake
from upriver.wire import dcp, memcached


@given(cuts=st.lists(st.integers(0, 120), max_size=30))
def test_pieces_make_no_difference(cuts: list[int]) -> None:
    stage = Stage()
    stream = stage.open()
    intake = Intake(stage.consumer)
    data = b"".join(
        message.encode()
        for message in (
            marker(stream, end=5),
            *(mutation(stream, seqno) for seqno in (1, 2, 3)),
            memcached.Stat(key=b"dcp"),
            *(mutation(stream, seqno) for seqno in (4, 5)),
            dcp.Noop(opaque=3),
            of(stream, dcp.StreamEnd()),
        )
    )
    at, left = 0, []
    for cut in [*cuts, len(data)]:
        left += intake.feed(memoryview(data)[at : at + cut], 0.0)
        at += cut
    assert " ".join(stage.copies[0].told[1:]).split() == ["k1", "k2", "k3", "k4", "k5"]
    assert [type(message) for message in left] == [memcached.Stat]
    assert stream.end_reason == "ok"
    assert len(stage.sent()) == 1


def test_a_lost_place_is_an_error() -> None:
    with pytest.raises(WireError):
        Intake(Stage().consumer).feed(b"GET / HTTP/1.1\r\n\r\n", 0.0)
