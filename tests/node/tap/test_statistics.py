"""The group `tap` of the statistics: its names, and that its numbers add up."""

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_peer import ACK, BACKFILL, LIST, REGISTERED, TapPeer, connect
from upriver.node.tap.statistics import tap_statistics
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import Control

ADDED = ("total_backlog_size", "rec_fetched", "qlen", "items_sent", "bytes_sent", "unacked", "retry_later")


@pytest.fixture
def node() -> InMemoryNode:
    made = InMemoryNode(tap_settings=TapSettings(ack_interval=1, window_messages_max=4))
    for vbucket in (1, 2):
        made.bucket.create_vbucket(vbucket)
        made.write(vbucket, *(b"k%d" % i for i in range(10)))
    return made


def of(node: InMemoryNode) -> dict[str, str]:
    peer = node.connect()
    answers = peer.send(memcached.Stat(key=b"tap"))
    assert all(isinstance(answer, memcached.StatResponse) for answer in answers)
    return {
        answer.key.decode(): answer.value.decode() for answer in answers if isinstance(answer, memcached.StatResponse)
    }


def test_every_client_and_peer_counts_once(node: InMemoryNode) -> None:
    assert of(node)["ep_tap_count"] == "0"
    plain = TapPeer(node, connect(b"plain", BACKFILL))
    slow = TapPeer(node, connect(b"slow", BACKFILL | ACK | LIST | REGISTERED, vbuckets=(2,)))
    slow.judge = lambda _: None
    gone = TapPeer(node, connect(b"gone", ACK))
    for peer in (plain, slow, gone):
        peer.run()
    gone.leave()
    node.connect("sender").send(tap.Mutation(vbucket=1, key=b"k", cas=1, rev_seqno=1, nru=0))
    found = of(node)
    assert found["ep_tap_count"] == "4"

    assert found["eq_tapq:plain:type"] == "producer"
    assert found["eq_tapq:plain:vb_filter"] == "{ 1 2 }"
    assert found["eq_tapq:plain:rec_fetched"] == "21"
    assert found["eq_tapq:plain:total_backlog_size"] == "0"
    assert found["eq_tapq:plain:flags"] == str(BACKFILL)
    assert found["eq_tapq:plain:connected"] == "true"
    assert found["eq_tapq:plain:created"] == str(int(node.clock()))

    assert found["eq_tapq:slow:vb_filter"] == "{ 2 }"
    assert found["eq_tapq:slow:ack_window_full"] == "true"
    assert found["eq_tapq:slow:registered"] == "true"
    assert found["eq_tapq:slow:unacked"] == "4"
    assert int(found["eq_tapq:slow:rec_fetched"]) + int(found["eq_tapq:slow:total_backlog_size"]) == 10
    assert found["eq_tapq:slow:qlen"] == found["eq_tapq:slow:total_backlog_size"]

    assert found["eq_tapq:gone:connected"] == "false"
    assert found["eq_tapq:gone:reconnects"] == "0"

    assert found["eq_tapq:sender:type"] == "consumer"
    assert (found["eq_tapq:sender:num_messages"], found["eq_tapq:sender:num_changes"]) == ("1", "1")
    assert found["eq_tapq:sender:vb_filter"] == "{ 1 }"


def test_what_a_peer_that_sends_has_announced(node: InMemoryNode) -> None:
    sender = node.connect("sender")

    def told(*controls: Control) -> dict[str, str]:
        sender.send(*(tap.Opaque(control=control, vbucket=1) for control in controls))
        begin = "eq_tapq:sender:"
        return {name.removeprefix(begin): value for name, value in of(node).items() if name.startswith(begin)}

    found = told(Control.ENABLE_AUTO_NACK, Control.INITIAL_VBUCKET_STREAM)
    assert (found["peer_nacks"], found["peer_sends_checkpoints"]) == ("true", "false")
    assert (found["backfilling"], found["finished"]) == ("{ 1 }", "false")
    sender.send(tap.CheckpointStart(vbucket=1, checkpoint=7))
    found = told(Control.ENABLE_CHECKPOINT_SYNC, Control.CLOSE_BACKFILL, Control.CLOSE_TAP_STREAM)
    assert (found["peer_sends_checkpoints"], found["backfilling"], found["finished"]) == ("true", "{  }", "true")
    assert found["vb_1:checkpoint"] == "7"


@pytest.mark.shows("open_issues:statistics")
def test_the_numbers_add_up(node: InMemoryNode) -> None:
    refused = [Status.ETMPFAIL] * 2
    peers = [TapPeer(node, connect(b"c%d" % i, BACKFILL | (ACK if i else 0))) for i in range(3)]
    peers[1].judge = lambda m: refused.pop() if refused and isinstance(m, tap.Mutation) else Status.SUCCESS
    peers[2].judge = lambda _: None
    for peer in peers:
        peer.run()
    node.write(1, b"new")
    for peer in peers:
        peer.run()
    found = of(node)
    for name in ADDED:
        assert int(found[f"ep_tap_{name}"]) == sum(int(found[f"eq_tapq:c{i}:{name}"]) for i in range(3)), name
    for i in range(3):
        for total, each in (("rec_fetched", "items_sent"), ("total_backlog_size", "backlog")):
            parts = sum(int(found[f"eq_tapq:c{i}:vb_{vbucket}:{each}"]) for vbucket in (1, 2))
            waiting = int(found[f"eq_tapq:c{i}:retry_later"]) if each == "backlog" else 0
            assert int(found[f"eq_tapq:c{i}:{total}"]) == parts + waiting
    assert int(found["ep_tap_rec_fetched"]) == sum(isinstance(m, tap.Mutation) for peer in peers for m in peer.received)
    assert int(found["ep_tap_items_sent"]) == sum(len(peer.received) for peer in peers)


def test_a_client_that_is_away_counts_with_what_it_got_and_what_waits_for_it(node: InMemoryNode) -> None:
    peer = TapPeer(node, connect(b"gone", BACKFILL | ACK | REGISTERED))
    there = TapPeer(node, connect(b"there", BACKFILL))
    for each in (peer, there):
        each.run()
    peer.leave()
    node.write(1, b"new0", b"new1", b"new2")
    there.run()
    found = of(node)
    assert {name: found[f"eq_tapq:gone:{name}"] for name in (*ADDED, "ack_window_full", "connected")} == {
        "total_backlog_size": "3",
        "qlen": "3",
        "rec_fetched": "20",
        "items_sent": str(len(peer.received)),
        "bytes_sent": str(sum(len(message.encode()) for message in peer.received)),
        "unacked": "0",
        "retry_later": "0",
        "ack_window_full": "false",
        "connected": "false",
    }
    for name in ADDED:
        assert int(found[f"ep_tap_{name}"]) == sum(int(found[f"eq_tapq:{who}:{name}"]) for who in ("gone", "there"))
    node.bucket.vbucket(1).flush()  # its place is no more: everything waits for it
    node.write(1, b"a")
    assert of(node)["eq_tapq:gone:qlen"] == "1"


@pytest.mark.shows("open_issues:idle-backlog")
def test_what_waits_is_counted_in_changes(node: InMemoryNode) -> None:
    peer = TapPeer(node, connect(b"c", BACKFILL | ACK | LIST, vbuckets=(1,)))
    peer.judge = lambda m: Status.ETMPFAIL if isinstance(m, tap.Mutation) else Status.SUCCESS
    peer.run()
    found = of(node)
    assert (found["eq_tapq:c:retry_later"], found["eq_tapq:c:qlen"]) == ("4", "6")
    assert found["eq_tapq:c:total_backlog_size"] == "10"


def test_a_reconnect_is_counted(node: InMemoryNode) -> None:
    for _ in range(3):
        TapPeer(node, connect(b"c", ACK)).run()
    assert of(node)["eq_tapq:c:reconnects"] == "2"


def test_a_node_without_tap_has_no_connections() -> None:
    assert dict(tap_statistics(None)) == {"ep_tap_count": 0}
