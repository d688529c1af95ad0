"""Which dialect a connection speaks, told from its first bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.vectors import messages_of
from upriver.errors import WireError
from upriver.wire import DIALECTS, dcp, memcached, tap, upr, upr_draft3
from upriver.wire.detect import detect


@pytest.mark.parametrize(
    ("packet", "name"),
    [
        (tap.Connect(name=b"n").encode(), "tap"),
        (dcp.Open(name=b"n").encode(), "dcp"),
        (upr.Open(name=b"n").encode(), "dcp"),
        (upr_draft3.StreamRequest().encode(), "upr_draft3"),
        (upr_draft3.FailoverLogRequest().encode(), "upr_draft3"),
        (upr.StreamRequest().encode(), "upr"),
        (dcp.StreamRequest().encode(), "dcp"),
        (upr.AddStream().encode(), "memcached"),
        (memcached.Get(key=b"k").encode(), "memcached"),
        (memcached.Hello().encode(), "memcached"),
        (memcached.GetAllVbucketSeqnos().encode(), "memcached"),
    ],
)
def test_the_first_packet_tells(packet: bytes, name: str) -> None:
    assert detect(packet) is DIALECTS[name]


@pytest.mark.parametrize("opcode", range(0x40, 0x48))
def test_every_opcode_of_tap_is_tap(opcode: int) -> None:
    assert detect(bytes((0x80, opcode, 0, 0, 0))) is tap.tap


@pytest.mark.parametrize("opcode", [0x3F, 0x48])
def test_the_neighbours_of_tap_are_not(opcode: int) -> None:
    assert detect(bytes((0x80, opcode, 0, 0, 0))) is memcached.memcached


def test_one_byte_is_enough_for_a_draft() -> None:
    assert detect(b"\x01") is DIALECTS["upr_draft2"]


@pytest.mark.parametrize("text", ["upr_draft1", "upr_draft2"])
def test_the_drafts_with_the_short_header_look_alike(text: str) -> None:
    requests = [vector.wire for vector in messages_of(text) if vector.wire and vector.wire[0] == 1]
    assert requests
    assert {detect(request) for request in requests} == {DIALECTS["upr_draft2"]}


def test_too_few_bytes_do_not_tell() -> None:
    packet = dcp.Open(name=b"n").encode()
    assert [detect(packet[:size]) for size in range(5)] == [None] * 5
    assert detect(packet[:5]) is dcp.dcp


@given(st.binary(min_size=1).filter(lambda data: data[0] not in (0x01, 0x80)))
def test_any_other_first_byte_is_refused(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        detect(data)
    assert (caught.value.offset, caught.value.found) == (0, f"0x{data[0]:02x}")


@given(st.binary())
def test_the_answer_does_not_change_with_more_bytes(data: bytes) -> None:
    try:
        first = detect(data[:5])
    except WireError:
        return
    assert detect(data) is first
