"""The groups `dcp` and `upr`."""

from tests.node.laboratory import Laboratory, Peer
from tests.protocol.stage import ask, ask_upr, control, stage
from upriver.node.stream_statistics import stream_statistics
from upriver.wire import dcp, memcached, upr


def group(laboratory: Laboratory, name: bytes) -> dict[str, str]:
    answers = laboratory.connect().send(memcached.Stat(key=name))
    assert all(isinstance(answer, memcached.StatResponse) for answer in answers)
    return {answer.key.decode(): answer.value.decode() for answer in answers[:-1]}  # type: ignore[attr-defined]


def test_nothing_streams() -> None:
    laboratory = Laboratory()
    assert group(laboratory, b"dcp") == {"ep_dcp_count": "0"}
    assert group(laboratory, b"upr") == {"ep_upr_count": "0"}
    assert dict(stream_statistics(None, "dcp")) == {"ep_dcp_count": 0}


def test_a_stream_and_its_connection() -> None:
    laboratory, peer = stage(b"a", b"b", b"c", name=b"reader")
    control(peer, b"connection_buffer_size", b"5000")
    ask(peer, end=10, opaque=0x1234, flags=dcp.StreamFlag.ACTIVE_ONLY)
    laboratory.write(0, b"d")
    laboratory.settle()
    peer.send(dcp.BufferAck(bytes_processed=100))
    changes = 4 * (24 + 31 + 2) + 2 * 44
    answers = 24 + 24 + 40  # open, control, stream request
    assert group(laboratory, b"dcp") == {
        "ep_dcp_count": "1",
        "eq_dcpq:reader:type": "producer",
        "eq_dcpq:reader:created": str(int(laboratory.clock())),
        "eq_dcpq:reader:connected": "true",
        "eq_dcpq:reader:max_buffer_bytes": "5000",
        "eq_dcpq:reader:unacked_bytes": str(changes - 100),
        "eq_dcpq:reader:total_acked_bytes": "100",
        "eq_dcpq:reader:total_bytes_sent": str(changes + answers - 24),  # the open comes before the producer
        "eq_dcpq:reader:items_sent": "4",
        "eq_dcpq:reader:num_streams": "1",
        "eq_dcpq:reader:stream_0_opaque": str(0x1234),
        "eq_dcpq:reader:stream_0_start_seqno": "0",
        "eq_dcpq:reader:stream_0_end_seqno": "10",
        "eq_dcpq:reader:stream_0_state": "in a snapshot",
        "eq_dcpq:reader:stream_0_backfilled": "3",
        "eq_dcpq:reader:stream_0_items_sent": "4",
        "eq_dcpq:reader:stream_0_last_sent_seqno": "4",
        "eq_dcpq:reader:stream_0_flags": "16",
    }
    assert group(laboratory, b"upr") == {"ep_upr_count": "0"}


def opened(laboratory: Laboratory, name: bytes, flags: int = 1) -> Peer:
    return laboratory.connect().open(name, flags)


def test_each_connection_belongs_to_one_group() -> None:
    laboratory, old = stage(b"a", name=b"old")
    ask_upr(old)
    ask(opened(laboratory, b"new"))
    opened(laboratory, b"idle")
    opened(laboratory, b"taker", flags=0)
    opened(laboratory, b"bell", flags=2)
    upr_group, dcp_group = group(laboratory, b"upr"), group(laboratory, b"dcp")
    assert (upr_group["ep_upr_count"], dcp_group["ep_dcp_count"]) == ("1", "4")
    assert upr_group["eq_uprq:old:num_streams"] == "1"
    assert [dcp_group[f"eq_dcpq:{name}:type"] for name in ("new", "taker", "bell")] == [
        "producer",
        "consumer",
        "notifier",
    ]


def test_what_ended_streams_sent_still_counts() -> None:
    laboratory, peer = stage(b"a", b"b", name=b"x")
    ask(peer)
    peer.send(upr.CloseStream())
    ask(peer, end=2)
    numbers = group(laboratory, b"dcp")
    assert (numbers["eq_dcpq:x:items_sent"], numbers["eq_dcpq:x:num_streams"]) == ("4", "0")
