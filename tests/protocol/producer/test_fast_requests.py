"""Runs of requests are read as the declared message reads them, and end where something is unusual."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_node import node_with_peer
from tests.support.stream_requests import ask, brief, uuid_of
from upriver.protocol.producer.fast_requests import REQUEST_BYTES, RUN_REQUESTS_MAX, PlainRequest, plain_requests
from upriver.wire import Response, dcp, upr

U64 = st.integers(0, 2**64 - 1)
REQUESTS = st.builds(
    dcp.StreamRequest,
    vbucket=st.integers(0, 2**16 - 1),
    opaque=st.integers(0, 2**32 - 1),
    cas=U64,
    flags=st.integers(0, 2**7 - 1).map(dcp.StreamFlag),
    start_seqno=U64,
    end_seqno=U64,
    vbucket_uuid=U64,
    snapshot_start=U64,
    snapshot_end=U64,
)


@given(requests=st.lists(REQUESTS, max_size=5), before=st.binary(max_size=30), cut=st.integers(0, REQUEST_BYTES - 1))
def test_a_run_says_what_its_messages_say(requests: list[dcp.StreamRequest], before: bytes, cut: int) -> None:
    packets = [request.encode() for request in requests]
    data = before + b"".join(packets) + dcp.StreamRequest().encode()[:cut]
    for kind in (bytes, bytearray, memoryview):
        found = list(plain_requests(kind(data), len(before)))
        assert found == [
            PlainRequest(**{name: int(getattr(request, name)) for name in PlainRequest._fields}) for request in requests
        ]
        assert all(each.code == dcp.StreamRequest.declaration.opcode for each in found)


@pytest.mark.parametrize(
    "strange",
    [
        dcp.StreamRequest(datatype=1).encode(),
        dcp.StreamRequest().encode()[:28] + b"\0\0\0\1" + dcp.StreamRequest().encode()[32:],
        upr.StreamRequest().encode() + bytes(REQUEST_BYTES),
        dcp.FailoverLogRequest().encode() + bytes(REQUEST_BYTES),
    ],
)
def test_what_is_unusual_ends_a_run(strange: bytes) -> None:
    usual = dcp.StreamRequest(vbucket=3).encode()
    assert [each.vbucket for each in plain_requests(usual + strange + usual, 0)] == [3]


def test_a_run_is_bounded() -> None:
    data = dcp.StreamRequest().encode() * (RUN_REQUESTS_MAX + 1)
    assert len(list(plain_requests(data, 0))) == RUN_REQUESTS_MAX


def test_requests_in_a_row_are_answered_in_their_order_among_other_packets() -> None:
    node, peer = node_with_peer(b"a")
    for number in (1, 2):
        node.create_vbucket(number)
        node.write(number, b"k")
    row = [
        dcp.StreamRequest(vbucket=0, opaque=1),
        dcp.StreamRequest(vbucket=0, opaque=2),
        dcp.StreamRequest(vbucket=9, opaque=3),
        dcp.StreamRequest(vbucket=1, opaque=4, start_seqno=1, snapshot_start=1, snapshot_end=1, vbucket_uuid=77),
        dcp.StreamRequest(vbucket=1, opaque=5, start_seqno=3, end_seqno=2),
        dcp.Noop(opaque=6),
        dcp.StreamRequest(vbucket=2, opaque=7, flags=dcp.StreamFlag.STRICT_UUID, vbucket_uuid=uuid_of(node)),
        dcp.StreamRequest(vbucket=2, opaque=8),
    ]
    peer.put(*row)
    node.settle()
    messages = peer.take()
    answers = [(each.opaque, each.status.name) for each in messages if isinstance(each, Response)]
    assert answers == [
        (1, "SUCCESS"),
        (2, "KEY_EEXISTS"),
        (3, "NOT_MY_VBUCKET"),
        (4, "ROLLBACK"),
        (5, "ERANGE"),
        (6, "SUCCESS"),
        (7, "ROLLBACK"),
        (8, "SUCCESS"),
    ]
    assert {"a@1", "k@1"} <= set(brief([each for each in messages if not isinstance(each, Response)]))
    assert brief(ask(peer, vbucket=1)) == ["success", "(0,1]", "k@1"]
