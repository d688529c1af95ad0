"""The groups `dcp` and `upr`."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.depth import examples
from tests.support.in_memory_node import InMemoryNode, Peer, node_with_peer
from tests.support.stat_groups import stat_group
from tests.support.stream_requests import ask, ask_upr, control
from upriver.node.streams.statistics import stream_statistics
from upriver.wire import Response, dcp, upr


def test_nothing_streams() -> None:
    node = InMemoryNode()
    assert stat_group(node, b"dcp") == {"ep_dcp_count": "0"}
    assert stat_group(node, b"upr") == {"ep_upr_count": "0"}
    assert dict(stream_statistics(None, "dcp")) == {"ep_dcp_count": 0}


def test_a_stream_and_its_connection() -> None:
    node, peer = node_with_peer(b"a", b"b", b"c", name=b"reader")
    control(peer, b"connection_buffer_size", b"5000")
    ask(peer, end=10, opaque=0x1234, flags=dcp.StreamFlag.ACTIVE_ONLY)
    node.write(0, b"d")
    node.settle()
    peer.send(dcp.BufferAck(bytes_processed=100))
    changes = 4 * (24 + 31 + 2) + 2 * 44
    assert stat_group(node, b"dcp") == {
        "ep_dcp_count": "1",
        "eq_dcpq:reader:type": "producer",
        "eq_dcpq:reader:created": str(int(node.clock())),
        "eq_dcpq:reader:connected": "true",
        "eq_dcpq:reader:max_buffer_bytes": "5000",
        "eq_dcpq:reader:unacked_bytes": str(changes - 100),
        "eq_dcpq:reader:total_acked_bytes": "100",
        "eq_dcpq:reader:total_bytes_sent": str(changes),
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
    assert stat_group(node, b"upr") == {"ep_upr_count": "0"}


def opened(node: InMemoryNode, name: bytes, flags: int = 1) -> Peer:
    return node.connect().open(name, flags)


def test_each_connection_belongs_to_one_group() -> None:
    node, old = node_with_peer(b"a", name=b"old")
    ask_upr(old)
    ask(opened(node, b"new"))
    opened(node, b"idle")
    opened(node, b"taker", flags=0)
    opened(node, b"bell", flags=2)
    upr_group, dcp_group = stat_group(node, b"upr"), stat_group(node, b"dcp")
    assert (upr_group["ep_upr_count"], dcp_group["ep_dcp_count"]) == ("1", "4")
    assert upr_group["eq_uprq:old:num_streams"] == "1"
    assert [dcp_group[f"eq_dcpq:{name}:type"] for name in ("new", "taker", "bell")] == [
        "producer",
        "consumer",
        "notifier",
    ]


@pytest.mark.shows("open_issues:statistics")
def test_what_ended_streams_sent_still_counts() -> None:
    node, peer = node_with_peer(b"a", b"b", name=b"x")
    ask(peer)
    peer.send(upr.CloseStream())
    ask(peer, end=2)
    numbers = stat_group(node, b"dcp")
    assert (numbers["eq_dcpq:x:items_sent"], numbers["eq_dcpq:x:num_streams"]) == ("4", "0")


@pytest.mark.shows("open_issues:statistics")
@settings(max_examples=examples(25), deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"])), max_size=30),
    asked=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    closed=st.sets(st.integers(0, 3)),
    window=st.sampled_from([0, 200, 100_000]),
)
def test_they_add_up(
    writes: list[tuple[int, bytes]], asked: list[tuple[int, bool]], closed: set[int], window: int
) -> None:
    node = InMemoryNode(vbuckets=4)
    node.bucket.create_vbuckets()
    peer = opened(node, b"x")
    bystander = opened(node, b"bystander")
    received = []
    if window:
        received += peer.send(dcp.Control(key=b"connection_buffer_size", value=b"%d" % window))
    for vbucket, key in writes[::2]:
        node.write(vbucket, key)
    for vbucket, old in asked:
        message = upr.StreamRequest if old else dcp.StreamRequest
        received += peer.send(message(vbucket=vbucket, opaque=vbucket))
    for vbucket, key in writes[1::2]:
        node.write(vbucket, key)
    node.settle()
    for vbucket in closed:
        received += peer.send(upr.CloseStream(vbucket=vbucket))
    acked = sum(len(message.encode()) for message in received) // 2
    received += peer.send(dcp.BufferAck(bytes_processed=acked))
    old_group, new_group = stat_group(node, b"upr"), stat_group(node, b"dcp")
    assert int(old_group["ep_upr_count"]) + int(new_group["ep_dcp_count"]) == 2
    name, numbers = ("upr", old_group) if asked[0][1] else ("dcp", new_group)
    mine = {key.removeprefix(f"eq_{name}q:x:"): value for key, value in numbers.items() if "q:x:" in key}
    changes = [message for message in received if hasattr(message, "by_seqno")]
    streams = [key.split("_")[1] for key in mine if key.endswith("_opaque")]
    still_there = {int(number) for number in streams}
    assert int(mine["total_bytes_sent"]) == sum(
        len(message.encode()) for message in received if not isinstance(message, Response)
    )
    assert int(mine["items_sent"]) == len(changes)
    assert int(mine["num_streams"]) == len(streams)
    assert sum(int(mine[f"stream_{number}_items_sent"]) for number in streams) == sum(
        message.vbucket in still_there and message.vbucket not in closed  # type: ignore[attr-defined]
        for message in changes
    )
    if window:
        of_streams = sum(len(message.encode()) for message in received if not isinstance(message, Response))
        assert int(mine["unacked_bytes"]) + int(mine["total_acked_bytes"]) == of_streams
    assert bystander.session.stream is not None
