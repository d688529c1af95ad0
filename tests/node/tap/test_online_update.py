"""Nothing is written while an online update runs, and all of it can be taken back."""

import logging
from pathlib import Path

import pytest

from tests.support.in_memory_node import Laboratory
from tests.support.tap_peer import brief
from upriver.engine import Bucket
from upriver.errors import InvalidArguments, TemporaryFailure
from upriver.model import StreamPosition, VbucketState
from upriver.node.tap.online_update import OnlineUpdate
from upriver.wire import tap
from upriver.wire.dialects.tap import Control, TapFlag


@pytest.fixture
def laboratory() -> Laboratory:
    made = Laboratory()
    made.bucket.create_vbucket(1)
    made.write(1, b"a", b"b")
    made.settle()
    return made


def value(laboratory: Laboratory, key: bytes, vbucket: int = 1) -> bytes | None:
    found = laboratory.bucket.vbucket(vbucket)
    return found.get(key).value if key in found.table.live_keys() else None


def test_nothing_is_written_until_it_stops(laboratory: Laboratory, caplog: pytest.LogCaptureFixture) -> None:
    update, vbucket = laboratory.tap.online_update, laboratory.bucket.vbucket(1)
    with caplog.at_level(logging.WARNING):
        update.control(Control.START_ONLINEUPDATE)
        update.control(Control.START_ONLINEUPDATE)
        laboratory.settle()
        laboratory.write(1, b"c")
        laboratory.settle()
        assert (vbucket.high_seqno, vbucket.persisted_seqno, update.running) == (3, 2, True)
        update.control(Control.STOP_ONLINEUPDATE)
        laboratory.settle()
        assert (vbucket.persisted_seqno, update.running) == (3, False)
    assert len(caplog.records) == 2
    assert all("for tests" in record.getMessage() for record in caplog.records)


def test_what_came_before_is_written_and_answered(laboratory: Laboratory) -> None:
    peer, vbucket = laboratory.connect(), laboratory.bucket.vbucket(1)
    change = tap.Mutation(vbucket=1, key=b"c", tap_flags=TapFlag.ACK)
    start = tap.Opaque(control=Control.START_ONLINEUPDATE, tap_flags=TapFlag.ACK)
    assert brief(peer.send(change, start)) == ["success", "success"]
    assert vbucket.persisted_seqno == 3
    assert brief(peer.send(change)) == ["success"]
    assert (vbucket.high_seqno, vbucket.persisted_seqno) == (4, 3)


@pytest.mark.parametrize("end", [Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE])
def test_one_that_ends_before_the_disk_has_caught_up_pauses_nothing(laboratory: Laboratory, end: Control) -> None:
    update = laboratory.tap.online_update
    laboratory.write(1, b"c")
    update.control(Control.START_ONLINEUPDATE)
    update.control(end)
    laboratory.settle()
    laboratory.write(1, b"d")
    laboratory.settle()
    assert laboratory.bucket.vbucket(1).persisted_seqno == 4


def test_all_that_came_since_can_be_taken_back(laboratory: Laboratory) -> None:
    update, vbucket = laboratory.tap.online_update, laboratory.bucket.vbucket(1)
    update.control(Control.START_ONLINEUPDATE)
    laboratory.write(1, b"c", b"a", value=b"other")
    vbucket.delete(b"b")
    laboratory.bucket.create_vbucket(2)
    laboratory.write(2, b"d")
    seen = StreamPosition.at(vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno)
    update.control(Control.REVERT_ONLINEUPDATE)
    assert [value(laboratory, key) for key in (b"a", b"b", b"c")] == [b"v", b"v", None]
    assert value(laboratory, b"d", 2) is None
    assert vbucket.state is VbucketState.ACTIVE
    assert vbucket.rollback_for(seen) == 2  # whoever has seen it learns that it is gone
    laboratory.write(1, b"e")
    laboratory.settle()
    assert vbucket.persisted_seqno == vbucket.high_seqno == 3


def test_what_cannot_be_taken_back_stays_whole(laboratory: Laboratory) -> None:
    update = laboratory.tap.online_update
    update.control(Control.START_ONLINEUPDATE)
    laboratory.bucket.flush()
    laboratory.write(1, b"x", b"y", b"z")
    with pytest.raises(TemporaryFailure, match="stop it"):
        update.control(Control.REVERT_ONLINEUPDATE)
    assert value(laboratory, b"x") == b"v"
    update.control(Control.STOP_ONLINEUPDATE)
    laboratory.settle()
    assert laboratory.bucket.vbucket(1).persisted_seqno == 3


@pytest.mark.parametrize("control", [Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE])
def test_there_must_be_one_to_end(laboratory: Laboratory, control: Control) -> None:
    with pytest.raises(InvalidArguments):
        laboratory.tap.online_update.control(control)


def test_a_clean_stop_writes_everything_all_the_same(tmp_path: Path) -> None:
    laboratory = Laboratory()
    with Bucket.open(tmp_path / "data", vbuckets=4) as bucket:
        laboratory.node.bucket = bucket
        bucket.create_vbucket(1)
        update = OnlineUpdate(laboratory.node)
        update.start()
        bucket.vbucket(1).set(b"k", b"v")
    with Bucket.open(tmp_path / "data", vbuckets=4) as bucket:
        assert bucket.vbucket(1).get(b"k").value == b"v"
