import dataclasses
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.manual_clock import Clock
from upriver.engine import Bucket, CursorEnd, Vbucket
from upriver.errors import InvalidArguments, KeyExists, NotMyVbucket, OutOfOrder, OutOfRange, TemporaryFailure
from upriver.model import (
    Change,
    Event,
    FailoverEntry,
    FailoverLog,
    Snapshot,
    StreamPosition,
    VbucketState,
    change_batch,
    changes_in,
)
from upriver.model.position import NO_END
from upriver.model.record import PREFIX, Record, pack


def change(seqno: int, key: bytes, value: bytes = b"", **others: int) -> Change:
    return Change(vbucket=1, event=Event.MUTATION, seqno=seqno, key=key, value=value, **others)


def deletion(seqno: int, key: bytes) -> Change:
    return Change(vbucket=1, event=Event.DELETION, seqno=seqno, rev_seqno=4, cas=9, key=key, expiry=50)


@pytest.fixture
def replica(bucket: Bucket) -> Vbucket:
    return bucket.create_vbucket(1, VbucketState.REPLICA)


def held(vbucket: Vbucket) -> dict[bytes, bytes]:
    table = vbucket.table
    return {key: item.value for key in table.live_keys() if (item := table.find(key)) is not None}


def test_a_new_active_vbucket_has_one_entry_at_0(bucket: Bucket) -> None:
    log = bucket.vbucket(0).failover_log
    assert len(log) == 1
    assert log.newest.seqno == 0
    assert 0 < log.newest.vbucket_uuid < 2**48


def test_becoming_active_branches_at_the_high_seqno(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    for i in range(5):
        vbucket.set(b"%d" % i, b"")
    vbucket.set_state(VbucketState.DEAD)
    assert len(vbucket.failover_log) == 1
    vbucket.set_state(VbucketState.ACTIVE)
    assert [entry.seqno for entry in vbucket.failover_log] == [5, 0]
    vbucket.set_state(VbucketState.ACTIVE)
    assert len(vbucket.failover_log) == 2


def test_a_replica_keeps_what_it_is_given(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 9)
    replica.apply(change(3, b"k", b"v", cas=77, rev_seqno=6, flags=1, expiry=3, datatype=2))
    item = replica.table.find(b"k")
    assert item is not None
    assert (item.cas, item.rev_seqno, item.flags, item.expiry, item.datatype) == (77, 6, 1, 3, 2)
    replica.apply(change(4, b"zero"))
    item = replica.table.find(b"zero")
    assert item is not None
    assert (item.cas, item.rev_seqno) == (0, 0)
    replica.apply(deletion(5, b"k"))
    item = replica.table.find(b"k")
    assert item is not None
    assert (item.event, item.time) == (Event.DELETION, 50)


def test_order_and_bounds_are_enforced(replica: Vbucket) -> None:
    with pytest.raises(OutOfOrder, match="snapshot ends at 0"):
        replica.apply(change(1, b"k"))
    replica.begin_snapshot(0, 5)
    replica.apply(change(3, b"k"))
    for seqno in (1, 3):
        with pytest.raises(OutOfOrder, match="does not follow"):
            replica.apply(change(seqno, b"k"))
    with pytest.raises(OutOfOrder, match="snapshot ends at 5"):
        replica.apply(change(6, b"k"))
    with pytest.raises(OutOfOrder):
        replica.advance(3)
    assert replica.high_seqno == 3


def test_a_snapshot_that_ends_before_what_is_held_is_refused(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 5)
    replica.apply(change(5, b"k"))
    with pytest.raises(OutOfOrder):
        replica.begin_snapshot(0, 4)


def frames_of(changes: list[Change]) -> bytes:
    return b"".join(pack(Record(change=each))[PREFIX.size :] for each in changes)


@given(data=st.data())
def test_a_run_has_the_effect_of_its_changes_one_by_one(data: st.DataObject) -> None:
    with Bucket.open(None, vbuckets=4, clock=Clock(), background=False) as bucket:
        single, frames, rows = (bucket.create_vbucket(1 + i, VbucketState.REPLICA) for i in range(3))
        high = 0
        for _ in range(data.draw(st.integers(1, 4))):
            end = high + data.draw(st.integers(1, 12))
            seqnos = sorted(data.draw(st.sets(st.integers(high + 1, end + 1), max_size=9)))
            events = [data.draw(st.sampled_from([Event.MUTATION, Event.DELETION, Event.EXPIRATION])) for _ in seqnos]
            changes = [
                Change(
                    vbucket=0,
                    event=event,
                    seqno=seqno,
                    rev_seqno=data.draw(st.integers(0, 5)),
                    cas=data.draw(st.integers(0, 2**64 - 1)),
                    # The short form of a deletion has no room for its time.
                    expiry=data.draw(st.integers(0, 3)) if event is not Event.DELETION else 0,
                    lock_time=data.draw(st.integers(0, 2)),
                    key=data.draw(st.sampled_from([b"a", b"b", b"c"])),
                    value=data.draw(st.binary(max_size=3)),
                )
                for seqno, event in zip(seqnos, events, strict=True)
            ]
            outcomes = []
            for vbucket, apply in (
                (single, lambda own: deque(map(single.apply, own), 0)),
                (frames, lambda own: frames.apply_frames(frames_of(own), 255)),
                (rows, lambda own: rows.apply_batch(change_batch(own))),
            ):
                vbucket.begin_snapshot(high, end)
                try:
                    apply([dataclasses.replace(each, vbucket=vbucket.number) for each in changes])
                    outcomes.append("")
                except OutOfOrder as error:
                    outcomes.append(error.why)
            assert len(set(outcomes)) == 1
            high = single.high_seqno
            for other in (frames, rows):
                assert other.position.snapshot == single.position.snapshot
                assert (other.high_seqno, other.consistent_points.ranges) == (high, single.consistent_points.ranges)
                assert other.table.locks == single.table.locks
                assert other.table.consistent_seqnos == single.table.consistent_seqnos
                assert history(other) == history(single)
            if outcomes[0]:
                break


def history(vbucket: Vbucket) -> list[Change]:
    batch, _ = vbucket.table.read_columns(0, 100, 100, 10**6, every=True)
    return [dataclasses.replace(each, vbucket=0) for each in changes_in(batch)]


def test_an_active_or_deleted_vbucket_receives_no_runs(bucket: Bucket, replica: Vbucket) -> None:
    own = bucket.vbucket(0)
    with pytest.raises(OutOfOrder, match="active"):
        own.apply_frames(frames_of([dataclasses.replace(change(1, b"k"), vbucket=0)]))
    bucket.delete_vbucket(1)
    with pytest.raises(NotMyVbucket):
        replica.apply_batch(change_batch([change(1, b"k")]))


def test_an_active_vbucket_receives_nothing(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    with pytest.raises(OutOfOrder):
        vbucket.begin_snapshot(0, 5)
    with pytest.raises(OutOfOrder):
        vbucket.apply(change(1, b"k"))
    with pytest.raises(KeyExists):
        vbucket.roll_back(0)
    with pytest.raises(KeyExists):
        vbucket.replace_failover_log(FailoverLog.fresh(1))


def test_kept_bounds_after_a_resume_in_mid_snapshot(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 10)
    replica.apply(change(4, b"a"))
    replica.begin_snapshot(4, 7)
    assert replica.position.snapshot == Snapshot(0, 10)
    replica.apply(change(7, b"b"))
    assert replica.consistent_seqno == 0
    replica.begin_snapshot(7, 12)
    replica.apply(change(12, b"c"))
    assert replica.consistent_seqno == 12


def test_promotion_in_mid_snapshot_branches_at_the_kept_start(replica: Vbucket) -> None:
    replica.replace_failover_log(FailoverLog((FailoverEntry(5, 0),)))
    replica.begin_snapshot(0, 10)
    replica.apply(change(10, b"a"))
    replica.begin_snapshot(10, 20)
    replica.apply(change(15, b"b"))
    replica.set_state(VbucketState.ACTIVE)
    assert [entry.seqno for entry in replica.failover_log] == [10, 0]
    assert replica.set(b"c", b"")[1] == 16
    assert replica.consistent_seqno == 16
    # A consumer at 15 in the same snapshot goes back to where all was shared.
    assert replica.rollback_for(StreamPosition(5, 15, Snapshot(10, 20))) == 10
    assert replica.rollback_for(StreamPosition(5, 10, Snapshot(10, 10))) is None


def test_rollback_restores_a_whole_state_and_never_a_mixture(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 10)
    replica.apply(change(3, b"k", b"old"))
    replica.apply(change(10, b"j", b"1"))
    replica.begin_snapshot(10, 80)
    replica.apply(change(70, b"k", b"new"))
    replica.apply(change(80, b"j", b"2"))
    # At 75 we would hold k@70 without knowing what k was at 20: not a state that anybody had.
    assert replica.roll_back(75) == 10
    assert held(replica) == {b"k": b"old", b"j": b"1"}
    assert replica.position == StreamPosition.at(replica.failover_log.newest.vbucket_uuid, 10)
    assert replica.roll_back(9) == 0
    assert held(replica) == {}


def test_own_history_can_be_rolled_back_to_any_seqno(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    states: list[dict[bytes, bytes]] = [{}]
    for i in range(20):
        vbucket.set(b"key%d" % (i % 3), b"%d" % i)
        states.append(held(vbucket))
    vbucket.set_state(VbucketState.REPLICA)
    for seqno in (17, 16, 5, 1, 0):
        assert vbucket.roll_back(seqno) == seqno
        assert held(vbucket) == states[seqno]


def test_rollback_above_everything_changes_nothing_unless_in_mid_snapshot(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 5)
    replica.apply(change(5, b"k"))
    assert replica.roll_back(9) == 5
    replica.begin_snapshot(5, 9)
    replica.apply(change(7, b"j"))
    assert replica.roll_back(7) == 5


def test_there_is_no_state_before_nothing(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 5)
    replica.apply(change(5, b"k"))
    with pytest.raises(OutOfRange):
        replica.roll_back(-1)
    assert held(replica) == {b"k": b""}


def test_nothing_below_the_floor_is_restored(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    for i in range(10):
        vbucket.set(b"k", b"%d" % i)
    vbucket.floor_seqno = 5
    vbucket.set_state(VbucketState.REPLICA)
    assert vbucket.roll_back(4) == 0
    assert vbucket.high_seqno == 0


def test_every_state_is_exact_from_where_the_copy_wrote_itself(bucket: Bucket, replica: Vbucket) -> None:
    """Readers of ranges conclude that the state at each later seqno was one that the source had."""
    for end in (5, 9):
        replica.begin_snapshot(replica.high_seqno, end)
        replica.apply(change(end, b"k"))
    replica.set_state(VbucketState.ACTIVE)
    assert replica.exact_from == 9
    for _ in range(3):
        replica.set(b"k", b"v")
    assert replica.exact_from == 9
    assert [replica.consistent_at_or_below(seqno) for seqno in (7, 9, 10, 11)] == [5, 9, 10, 11]
    own = bucket.vbucket(0)
    for _ in range(3):
        own.set(b"k", b"v")
    assert own.exact_from == 0
    own.floor_seqno = 2
    assert own.exact_from == 2


def test_a_marker_that_begins_before_a_consistent_state_shows_no_mixture(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 10)
    replica.apply(change(10, b"a"))
    replica.begin_snapshot(10, 50)
    replica.apply(change(20, b"b"))
    replica.apply(change(50, b"k"))  # an older version of it was left out
    replica.begin_snapshot(49, 80)
    assert replica.consistent_seqno == 10
    assert [(each.end, [found.key for found in each]) for each in replica.changes()] == [(10, [b"a"])]
    replica.apply(change(80, b"z"))
    assert replica.consistent_seqno == 80
    assert [found.key for each in replica.changes() for found in each] == [b"a", b"b", b"k", b"z"]


def test_a_copy_filled_from_0_inherits_a_purge_seqno_whatever_start_is_printed(replica: Vbucket) -> None:
    replica.begin_snapshot(1, 10)  # as deployed servers print it: the first seqno that follows
    assert replica.purge_seqno == 10


@pytest.mark.parametrize("purge_seqno", [-1, 2**64])
def test_a_purge_seqno_that_is_none_is_refused(replica: Vbucket, purge_seqno: int) -> None:
    before = replica.position
    with pytest.raises(InvalidArguments):
        replica.begin_snapshot(0, 10, purge_seqno)
    assert replica.position == before


def test_a_copy_filled_from_0_inherits_a_purge_seqno(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 10)
    assert replica.purge_seqno == 10
    replica.clear()
    replica.begin_snapshot(0, 10, purge_seqno=4)
    assert replica.purge_seqno == 4
    replica.apply(change(10, b"k"))
    replica.begin_snapshot(10, 20)
    assert replica.purge_seqno == 4


def test_a_snapshot_that_never_began_leaves_no_purge_seqno(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 10)
    replica.begin_snapshot(0, NO_END)  # of another producer, whose history is shorter
    replica.apply(change(3, b"k"))
    replica.complete_snapshot()
    assert replica.purge_seqno == replica.high_seqno == 3
    assert replica.rollback_for(replica.position) is None


def test_flush_starts_over_under_a_new_log(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"v")
    before = vbucket.failover_log.newest.vbucket_uuid
    cursor = vbucket.open_cursor("stream")
    vbucket.flush()
    assert cursor.ended is CursorEnd.FLUSHED
    assert (vbucket.high_seqno, held(vbucket), len(vbucket.failover_log)) == (0, {}, 1)
    assert vbucket.failover_log.newest != FailoverEntry(before, 0)
    assert vbucket.rollback_for(StreamPosition.at(before, 1)) == 0
    vbucket.set_state(VbucketState.REPLICA)
    with pytest.raises(NotMyVbucket):
        vbucket.flush()


def test_a_copy_is_flushed_with_its_peer(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    with pytest.raises(OutOfOrder):
        vbucket.flush_copy(9, 7)
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.receive(Event.MUTATION, b"k", b"v")
    cursor, before = vbucket.open_cursor("stream"), vbucket.failover_log.newest.vbucket_uuid
    vbucket.flush_copy(9, 7)
    assert cursor.ended is CursorEnd.FLUSHED
    assert (vbucket.high_seqno, vbucket.flush_ttl, list(vbucket.flush_marks)) == (0, 9, [7])
    assert vbucket.failover_log.newest != FailoverEntry(before, 0)


def test_revisions_go_on_after_a_flush(bucket: Bucket) -> None:
    """What was written elsewhere before must not win over what is written here since."""
    vbucket = bucket.vbucket(0)
    for value in (b"1", b"2", b"3"):
        vbucket.set(b"k", value)
    vbucket.flush()
    vbucket.set(b"k", b"since")
    assert vbucket.get(b"k").rev_seqno == 4
    with pytest.raises(KeyExists, match="our version wins"):
        vbucket.set_with_meta(b"k", b"before", cas=2**62, rev_seqno=3)
    assert vbucket.get(b"k").value == b"since"


@pytest.mark.parametrize("clear", [Vbucket.clear, Vbucket.start_over, lambda replica: replica.roll_back(0)])
def test_revisions_go_on_in_a_copy_that_was_cleared(replica: Vbucket, clear: Callable[[Vbucket], object]) -> None:
    replica.begin_snapshot(0, 2)
    replica.apply(change(1, b"j", cas=5, rev_seqno=9))
    replica.apply_batch(change_batch([change(2, b"k", cas=6, rev_seqno=7)]))
    clear(replica)
    replica.set_state(VbucketState.ACTIVE)
    replica.set(b"k", b"since")
    assert replica.get(b"k").rev_seqno == 10


def test_a_replica_that_never_heard_anything_has_nothing_to_stream(replica: Vbucket) -> None:
    with pytest.raises(TemporaryFailure):
        replica.open_cursor("stream")
    replica.begin_snapshot(0, 5)
    replica.open_cursor("stream").close()


def test_state_changes_and_rollbacks_end_streams(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"1")
    vbucket.set(b"k", b"2")
    told = []
    cursor = vbucket.open_cursor("stream", 2)
    cursor.subscribe(lambda: told.append(cursor.ended))
    vbucket.set_state(VbucketState.REPLICA)
    assert told == [CursorEnd.STATE_CHANGED]
    cursor = vbucket.open_cursor("stream", 0)
    vbucket.roll_back(1)
    assert cursor.ended is CursorEnd.ROLLED_BACK
    assert vbucket.cursors == {}


def test_another_log_ends_the_streams_that_knew_the_old_one(replica: Vbucket) -> None:
    replica.replace_failover_log(FailoverLog.fresh(5))
    replica.begin_snapshot(0, 1)
    replica.apply(change(1, b"k"))
    cursor = replica.open_cursor("chained")
    replica.replace_failover_log(FailoverLog.fresh(5))
    assert cursor.ended is None
    replica.replace_failover_log(FailoverLog.fresh(5).branch(6, 1))
    assert cursor.ended is CursorEnd.STATE_CHANGED


def test_a_copy_promoted_in_its_first_snapshot_lets_its_own_consumers_resume(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 9)
    replica.apply(change(1, b"k"))
    assert replica.purge_seqno == 9
    replica.set_state(VbucketState.ACTIVE)
    assert replica.purge_seqno == 1
    uuid = replica.failover_log.newest.vbucket_uuid
    assert replica.rollback_for(StreamPosition.at(uuid, 1)) is None


def test_the_rest_of_a_lock_is_replicated(bucket: Bucket, replica: Vbucket, clock: Clock) -> None:
    source = bucket.vbucket(0)
    source.set(b"k", b"v")
    source.get_and_lock(b"k", 20)
    clock.pass_by(5)
    (sent,) = [change for snapshot in source.changes() for change in snapshot]
    assert sent.lock_time == 15
    replica.begin_snapshot(0, 1)
    with pytest.raises(InvalidArguments, match="the change belongs to vbucket 0"):
        replica.apply(sent)
    replica.apply(dataclasses.replace(sent, vbucket=1))
    replica.set_state(VbucketState.ACTIVE)
    assert replica.get(b"k").cas == 2**64 - 1
    clock.pass_by(16)
    replica.set(b"k", b"w")


@pytest.mark.parametrize(("passed_s", "sent_s"), [(0.25, 20), (19.0, 1), (19.75, 1), (0.0, 20)])
def test_a_lock_ends_nowhere_earlier_than_at_its_source(
    bucket: Bucket, clock: Clock, passed_s: float, sent_s: int
) -> None:
    source = bucket.vbucket(0)
    source.set(b"k", b"v")
    source.get_and_lock(b"k", 20)
    clock.pass_by(passed_s)
    (sent,) = [change for snapshot in source.changes() for change in snapshot]
    assert sent.lock_time == sent_s


def test_waiters_for_a_change_find_the_lock_that_came_with_it(replica: Vbucket, clock: Clock) -> None:
    """A copy passes on what it receives the moment that it comes."""
    told: list[int] = []

    def look() -> None:
        told.extend(c.lock_time for c in changes_in(replica.table.read_columns(0, 9, 9, 2**20)[0]))
        replica.when_changed(look)

    replica.when_changed(look)
    replica.begin_snapshot(0, 2)
    assert told == []
    replica.apply(change(1, b"k", cas=5, lock_time=20))
    replica.apply(change(2, b"k", cas=6))
    assert told == [20, 0]


def test_a_received_change_that_finds_no_room_leaves_the_lock(replica: Vbucket, clock: Clock) -> None:
    replica.begin_snapshot(0, 3)
    replica.apply(change(1, b"k", cas=5, lock_time=20))
    locks = dict(replica.table.locks)
    replica.table.ledger.refusal = "full"
    with pytest.raises(TemporaryFailure):
        replica.apply(change(2, b"k", cas=6, lock_time=9))
    with pytest.raises(TemporaryFailure):
        replica.receive(Event.MUTATION, b"k")
    assert replica.table.locks == locks


def test_no_history_gets_to_the_end_of_all_seqnos(replica: Vbucket) -> None:
    """A copy with such a change could not number the next one."""
    far = dataclasses.replace(change(2**63, b"k"), cas=5, rev_seqno=1)
    replica.begin_snapshot(0, 2**64 - 1)
    for attempt in (
        lambda: replica.apply(far),
        lambda: replica.apply_batch(change_batch([far])),
        lambda: replica.apply_frames(pack(Record(change=far))[PREFIX.size :]),
        lambda: replica.advance(2**63),
    ):
        with pytest.raises(OutOfOrder, match="seqnos end at"):
            attempt()
    replica.set_state(VbucketState.ACTIVE)
    assert replica.set(b"k", b"v")[1] == 1


def test_advance_completes_a_snapshot_whose_last_change_was_left_out(replica: Vbucket) -> None:
    replica.begin_snapshot(0, 9)
    replica.apply(change(4, b"k"))
    replica.advance(9)
    assert (replica.high_seqno, replica.consistent_seqno) == (9, 9)


def test_a_copy_without_seqnos_from_its_peer_counts_for_itself(replica: Vbucket) -> None:
    assert replica.receive(Event.MUTATION, b"k", b"v", cas=77, rev_seqno=6, flags=1, expiry=3, ttl=9) == 1
    assert replica.receive(Event.MUTATION, b"plain", b"v") == 2
    assert replica.receive(Event.DELETION, b"k") == 3
    assert replica.streamable
    assert (replica.consistent_seqno, replica.position.snapshot) == (3, Snapshot(3, 3))
    deleted, plain = replica.table.find(b"k"), replica.table.find(b"plain")
    assert deleted is not None
    assert plain is not None
    assert (deleted.event, deleted.rev_seqno) == (Event.DELETION, 7)
    assert plain.rev_seqno == 1
    assert plain.cas
    assert replica.roll_back(2) == 2
    item = replica.table.find(b"k")
    assert item is not None
    assert (item.value, item.cas, item.rev_seqno, item.flags, item.expiry) == (b"v", 77, 6, 1, 3)


def test_an_active_vbucket_takes_no_change_of_a_peer(bucket: Bucket) -> None:
    with pytest.raises(OutOfOrder):
        bucket.vbucket(0).receive(Event.MUTATION, b"k")


def test_without_room_a_received_change_leaves_no_trace(replica: Vbucket) -> None:
    replica.receive(Event.MUTATION, b"k", b"v")
    replica.table.ledger.refusal = "full"
    with pytest.raises(TemporaryFailure):
        replica.receive(Event.MUTATION, b"k", b"w")
    replica.table.ledger.refusal = ""
    assert (replica.high_seqno, replica.position.snapshot) == (1, Snapshot(1, 1))
    assert replica.receive(Event.MUTATION, b"k", b"w") == 2


def test_starting_over_means_another_history(replica: Vbucket) -> None:
    replica.receive(Event.MUTATION, b"k", b"v")
    before = replica.position
    cursor = replica.open_cursor("stream")
    replica.start_over()
    assert (held(replica), replica.high_seqno, cursor.ended) == ({}, 0, CursorEnd.STATE_CHANGED)
    assert replica.rollback_for(before) == 0
    replica.receive(Event.MUTATION, b"other", b"v")
    assert replica.rollback_for(before) == 0


def test_a_copy_that_starts_over_before_it_was_told_anything_can_be_read_too(replica: Vbucket) -> None:
    told: list[int] = []
    replica.on_role_change = told.append
    assert not replica.streamable
    replica.start_over()
    assert (replica.streamable, told) == (True, [replica.number])
    replica.receive(Event.MUTATION, b"k", b"v")
    assert [change.key for snapshot in replica.changes() for change in snapshot] == [b"k"]


def test_a_consumer_that_must_start_over_finds_the_new_log(replica: Vbucket) -> None:
    """A consumer that asks again at once, with the old log, must not count as one that has all of the new history."""
    replica.receive(Event.MUTATION, b"k", b"v")
    before, found = replica.failover_log, []
    cursor = replica.open_cursor("stream", 1)
    cursor.subscribe(lambda: found.append((cursor.ended, replica.high_seqno, replica.failover_log)))
    replica.start_over()
    assert found == [(CursorEnd.STATE_CHANGED, 0, replica.failover_log)]
    assert replica.failover_log != before


def test_a_snapshot_without_known_bounds_is_whole_when_told(replica: Vbucket) -> None:
    vbucket = replica
    vbucket.begin_snapshot(0, NO_END)
    assert vbucket.purge_seqno == 0, "it follows when the end is known"
    vbucket.apply(Change(vbucket=1, event=Event.MUTATION, seqno=3, key=b"k", cas=1, rev_seqno=1))
    assert vbucket.consistent_seqno == 0
    vbucket.complete_snapshot()
    assert vbucket.consistent_seqno == vbucket.consistent_at_or_below(9) == 3
    # It was filled from nothing: what was deleted before, it never heard of.
    assert vbucket.purge_seqno == 3
    vbucket.begin_snapshot(3, NO_END)
    vbucket.apply(Change(vbucket=1, event=Event.MUTATION, seqno=4, key=b"k", cas=2, rev_seqno=2))
    assert vbucket.consistent_seqno == 3
    vbucket.complete_snapshot()
    assert (vbucket.consistent_seqno, vbucket.purge_seqno) == (4, 3)
    vbucket.set_state(VbucketState.ACTIVE)
    with pytest.raises(OutOfOrder):
        vbucket.complete_snapshot()


def test_a_pending_copy_waits_for_the_branch_that_it_is_on(bucket: Bucket) -> None:
    copy = bucket.create_vbucket(1, VbucketState.REPLICA)
    roles: list[VbucketState] = []
    copy.on_role_change = lambda number: roles.append(copy.state)
    copy.replace_failover_log(FailoverLog.fresh(5))
    copy.set_state(VbucketState.PENDING)
    copy.replace_failover_log(FailoverLog.fresh(4).branch(5, 3))
    assert roles == [VbucketState.PENDING], "its producer remembers more of the same"
    copy.replace_failover_log(FailoverLog.fresh(5).branch(6, 3))
    assert roles == [VbucketState.PENDING, VbucketState.REPLICA]
    copy.set_state(VbucketState.DEAD)
    copy.replace_failover_log(FailoverLog.fresh(7))
    assert copy.state is VbucketState.DEAD
