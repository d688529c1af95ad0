"""What passes between a producer and a consumer: every byte, in its order, but not the answers to the mover."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import WireError
from upriver.protocol.move.relay import PacketSplitter, decoded, is_for_mover
from upriver.wire import AnyResponse, dcp, memcached, upr

PACKETS = [
    dcp.SnapshotMarker(start_seqno=0, end_seqno=9).encode(),
    dcp.Mutation(by_seqno=1, key=b"k", value=b"v" * 100).encode(),
    dcp.Mutation(by_seqno=2, key=b"k").encode(),
    AnyResponse(opcode=0x57, value=b"refused").encode(),
    dcp.Deletion(by_seqno=3, key=b"k").encode(),
    dcp.StreamEnd().encode(),
    upr.AddStreamResponse(stream_opaque=5).encode(),
]


@given(
    packets=st.lists(st.sampled_from(PACKETS), max_size=20),
    cuts=st.lists(st.integers(1, 150), max_size=40),
)
def test_every_byte_passes_in_its_order_however_it_comes(packets: list[bytes], cuts: list[int]) -> None:
    data, at, splitter = b"".join(packets), 0, PacketSplitter()
    out, seen = bytearray(), []
    for cut in [*cuts, len(data)]:
        for piece, is_packet in splitter.split(memoryview(data)[at : at + cut]):
            out += piece
            if is_packet:
                seen.append(bytes(piece))
        at += cut
    assert bytes(out) == data
    assert seen == [packet for packet in packets if packet[0] != 0x80 or packet[1] not in (0x57, 0x58)]


def test_a_change_does_not_wait_for_its_end() -> None:
    splitter = PacketSplitter()
    (piece,) = splitter.split(PACKETS[1][:30])
    assert len(piece[0]) == 30
    (piece,) = splitter.split(PACKETS[1][30:])
    assert not piece[1]


def test_the_request_that_an_answer_belongs_to() -> None:
    for answer in (
        upr.AddStreamResponse(stream_opaque=5).encode(),
        AnyResponse(opcode=0x50).encode(),
        memcached.GetVbucketResponse(state=memcached.VbucketState.DEAD).encode(),
        memcached.GetAllVbucketSeqnosResponse().encode(),
    ):
        assert is_for_mover(answer)
    for other in (AnyResponse(opcode=0x5B).encode(), AnyResponse(opcode=0x53).encode(), dcp.StreamRequest().encode()):
        assert not is_for_mover(other)
    assert isinstance(decoded(PACKETS[0]), dcp.SnapshotMarker)


def test_what_makes_no_sense_is_an_error() -> None:
    with pytest.raises(WireError):
        list(PacketSplitter().split(b"hello, is anybody there?"))
