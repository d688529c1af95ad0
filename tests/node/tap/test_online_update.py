"""Nothing is written while an online update runs, and all of it can be taken back."""

import logging
from pathlib import Path

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_peer import brief
from upriver.engine import Bucket
from upriver.errors import InvalidArguments, TemporaryFailure
from upriver.model import StreamPosition, VbucketState
from upriver.node.tap.online_update import OnlineUpdate
from upriver.wire import tap
from upriver.wire.dialects.tap import Control, TapFlag


@pytest.fixture
def node() -> InMemoryNode:
    made = InMemoryNode()
    made.bucket.create_vbucket(1)
    made.write(1, b"a", b"b")
    made.settle()
    return made


def value(node: InMemoryNode, key: bytes, vbucket: int = 1) -> bytes | None:
    found = node.bucket.vbucket(vbucket)
    return found.get(key).value if key in found.table.live_keys() else None


@pytest.mark.shows("tap:opaque-start", "tap:opaque-stop", "tap:opaque-tests-only")
def test_nothing_is_written_until_it_stops(node: InMemoryNode, caplog: pytest.LogCaptureFixture) -> None:
    update, vbucket = node.tap.online_update, node.bucket.vbucket(1)
    with caplog.at_level(logging.WARNING):
        update.control(Control.START_ONLINEUPDATE)
        update.control(Control.START_ONLINEUPDATE)
        node.settle()
        node.write(1, b"c")
        node.settle()
        assert (vbucket.high_seqno, vbucket.persisted_seqno, update.running) == (3, 2, True)
        update.control(Control.STOP_ONLINEUPDATE)
        node.settle()
        assert (vbucket.persisted_seqno, update.running) == (3, False)
    assert len(caplog.records) == 2
    assert all("use it in tests only" in record.getMessage() for record in caplog.records)


def test_what_came_before_is_written_and_answered(node: InMemoryNode) -> None:
    peer, vbucket = node.connect(), node.bucket.vbucket(1)
    change = tap.Mutation(vbucket=1, key=b"c", tap_flags=TapFlag.ACK)
    start = tap.Opaque(control=Control.START_ONLINEUPDATE, tap_flags=TapFlag.ACK)
    assert brief(peer.send(change, start)) == ["success", "success"]
    assert vbucket.persisted_seqno == 3
    assert brief(peer.send(change)) == ["success"]
    assert (vbucket.high_seqno, vbucket.persisted_seqno) == (4, 3)


@pytest.mark.parametrize("end", [Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE])
def test_one_that_ends_before_the_disk_has_caught_up_pauses_nothing(node: InMemoryNode, end: Control) -> None:
    update = node.tap.online_update
    node.write(1, b"c")
    update.control(Control.START_ONLINEUPDATE)
    update.control(end)
    node.settle()
    node.write(1, b"d")
    node.settle()
    assert node.bucket.vbucket(1).persisted_seqno == 4


@pytest.mark.shows("tap:opaque-revert")
def test_all_that_came_since_can_be_taken_back(node: InMemoryNode) -> None:
    update, vbucket = node.tap.online_update, node.bucket.vbucket(1)
    update.control(Control.START_ONLINEUPDATE)
    node.write(1, b"c", b"a", value=b"other")
    vbucket.delete(b"b")
    node.bucket.create_vbucket(2)
    node.write(2, b"d")
    seen = StreamPosition.at(vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno)
    update.control(Control.REVERT_ONLINEUPDATE)
    assert [value(node, key) for key in (b"a", b"b", b"c")] == [b"v", b"v", None]
    assert value(node, b"d", 2) is None
    assert vbucket.state is VbucketState.ACTIVE
    assert vbucket.rollback_for(seen) == 2  # a consumer that has seen it learns that it is gone
    node.write(1, b"e")
    node.settle()
    assert vbucket.persisted_seqno == vbucket.high_seqno == 3


def test_what_cannot_be_taken_back_stays_whole(node: InMemoryNode) -> None:
    update = node.tap.online_update
    update.control(Control.START_ONLINEUPDATE)
    node.bucket.flush()
    node.write(1, b"x", b"y", b"z")
    with pytest.raises(TemporaryFailure, match="stop it"):
        update.control(Control.REVERT_ONLINEUPDATE)
    assert value(node, b"x") == b"v"
    update.control(Control.STOP_ONLINEUPDATE)
    node.settle()
    assert node.bucket.vbucket(1).persisted_seqno == 3


@pytest.mark.parametrize("control", [Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE])
def test_there_must_be_one_to_end(node: InMemoryNode, control: Control) -> None:
    with pytest.raises(InvalidArguments):
        node.tap.online_update.control(control)


def test_a_clean_stop_writes_everything_all_the_same(tmp_path: Path) -> None:
    node = InMemoryNode()
    with Bucket.open(tmp_path / "data", vbuckets=4) as bucket:
        node.state.bucket = bucket
        bucket.create_vbucket(1)
        update = OnlineUpdate(node.state)
        update.start()
        bucket.vbucket(1).set(b"k", b"v")
    with Bucket.open(tmp_path / "data", vbuckets=4) as bucket:
        assert bucket.vbucket(1).get(b"k").value == b"v"
