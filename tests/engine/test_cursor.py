import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.manual_clock import Clock
from upriver.engine import Bucket, CursorEnd, CursorEnded, KeyPattern, Options, ValueFilter, Vbucket
from upriver.engine import cursor as cursor_module
from upriver.engine.cursor import FILTERED_BYTES, FILTERED_S
from upriver.errors import KeyExists, NotMyVbucket, NotSupported, OutOfRange, RollbackRequired, TemporaryFailure
from upriver.model import Change, Event, Snapshot, VbucketState
from upriver.model.record import HEADER, PREFIX, Record, pack, size_at


@pytest.fixture
def vbucket(bucket: Bucket) -> Vbucket:
    return bucket.vbucket(0)


def write(vbucket: Vbucket, *keys: bytes) -> None:
    for key in keys:
        vbucket.set(key, b"value of " + key)


def read(vbucket: Vbucket, start: int = 0, end: int | None = None, **options: Any) -> list[tuple[int, bytes]]:
    return [
        (change.seqno, change.key)
        for snapshot in vbucket.changes(start, end, Options(**options))
        for change in snapshot
    ]


def test_a_snapshot_holds_each_key_once(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b", b"a", b"c", b"b")
    (snapshot,) = vbucket.changes()
    assert (snapshot.start, snapshot.end) == (0, 5)
    assert read(vbucket) == [(3, b"a"), (4, b"c"), (5, b"b")]
    assert read(vbucket, 3) == [(4, b"c"), (5, b"b")]


def test_a_snapshot_is_fixed_when_it_is_announced(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b", b"c")
    cursor = vbucket.open_cursor("stream")
    assert cursor.next_snapshot() == Snapshot(0, 3)
    first = cursor.read_columns(1)
    write(vbucket, b"a", b"b")
    rest = [cursor.read_columns(1)["key"].to_pylist() for _ in range(2)]
    assert [first["key"].to_pylist(), *rest] == [[b"a"], [b"b"], [b"c"]]
    assert cursor.snapshot is None
    assert cursor.next_snapshot() == Snapshot(3, 5)


def test_frames_are_those_of_the_columns(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    cursor = vbucket.open_cursor("stream")
    cursor.next_snapshot()
    frames = cursor.read(opaque=9)
    assert HEADER.unpack_from(frames)[7] == 9
    assert frames.count(b"value of ") == 2
    assert cursor.changes_read == 2


def test_a_buffer_is_used_again(vbucket: Vbucket) -> None:
    write(vbucket, *(b"key%03d" % i for i in range(100)))
    cursor, buffer, found = vbucket.open_cursor("stream"), bytearray(1000), b""
    whole = vbucket.open_cursor("whole")
    whole.next_snapshot()
    cursor.next_snapshot()
    assert cursor.read_into(bytearray(20)) == 0
    assert cursor.seqno == 0
    while cursor.snapshot is not None:
        found += buffer[: cursor.read_into(buffer, 3)]
    assert found == whole.read(10**6, 3)
    assert cursor.changes_read == 100
    filtered = vbucket.open_cursor("filtered", options=Options(key_pattern=KeyPattern("x")))
    filtered.next_snapshot()
    with pytest.raises(NotSupported):
        filtered.read_into(buffer)


def test_records_hold_the_frames(vbucket: Vbucket) -> None:
    write(vbucket, *(b"key%03d" % i for i in range(100)))
    cursor, whole = vbucket.open_cursor("stream"), vbucket.open_cursor("whole")
    cursor.next_snapshot()
    whole.next_snapshot()
    found = b""
    while cursor.snapshot is not None:
        data, at = cursor.read_records(1000), 0
        while at < len(data):
            size = size_at(data, at)
            found += data[at + PREFIX.size : at + size]
            at += size
    assert found == whole.read(10**6)
    assert cursor.changes_read == 100
    for options in (Options(key_pattern=KeyPattern("x")), Options(history=True), Options(key_prefix=b"k")):
        with vbucket.open_cursor("other", options=options) as other:
            other.next_snapshot()
            with pytest.raises(NotSupported):
                other.read_records()


def test_exact_end_gives_the_version_that_was_current(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b", b"a", b"a")
    assert read(vbucket, 0, 3, exact_end=True) == [(2, b"b"), (3, b"a")]
    assert read(vbucket, 0, 3) == [(2, b"b"), (4, b"a")]
    vbucket.floor_seqno = 4
    with pytest.raises(OutOfRange):
        read(vbucket, 0, 3, exact_end=True)


def test_a_cursor_starts_in_the_history(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    for start in (-1, 3):
        with pytest.raises(OutOfRange):
            vbucket.open_cursor("one", start)
    assert not vbucket.cursors


def test_history_gives_every_version(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b", b"a", b"a")
    assert read(vbucket, history=True) == [(1, b"a"), (2, b"b"), (3, b"a"), (4, b"a")]
    assert read(vbucket, 1, 3, history=True, exact_end=True) == [(2, b"b"), (3, b"a")]


def test_keys_only(vbucket: Vbucket) -> None:
    write(vbucket, b"a")
    cursor = vbucket.open_cursor("stream", options=Options(keys_only=True))
    cursor.next_snapshot()
    assert cursor.read_columns()["value"].to_pylist() == [b""]


def test_filters_by_prefix_pattern_and_value(vbucket: Vbucket) -> None:
    for number, city in enumerate((b"Oslo", b"Bern", b"Oslo")):
        vbucket.set(b"user:%d" % number, b'{"city": "%s", "tags": ["x%d"]}' % (city, number))
    vbucket.set(b"order:1", b"not json")
    assert read(vbucket, key_prefix=b"order") == [(4, b"order:1")]
    assert read(vbucket, key_pattern=KeyPattern(r":[12]$")) == [(2, b"user:1"), (3, b"user:2"), (4, b"order:1")]
    oslo = ValueFilter(("city",), equals="Oslo")
    assert read(vbucket, value_filter=oslo) == [(1, b"user:0"), (3, b"user:2")]
    assert read(vbucket, value_filter=ValueFilter(("tags",), contains="x1")) == [(2, b"user:1")]
    both = Options(value_filter=oslo, keys_only=True)
    cursor = vbucket.open_cursor("frames", options=both)
    cursor.next_snapshot()
    frames = cursor.read()
    assert b"Oslo" not in frames
    assert len(frames) == 2 * (HEADER.size + 31 + len(b"user:0"))
    columns = vbucket.open_cursor("columns", options=both)
    columns.next_snapshot()
    assert columns.read_columns()["value"].to_pylist() == [b"", b""]


def test_a_filtered_cursor_still_advances(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    cursor = vbucket.open_cursor("stream", options=Options(key_prefix=b"nothing"))
    cursor.next_snapshot()
    assert cursor.read() == b""
    assert cursor.seqno == 2


def test_persisted_only_waits_for_the_disk(bucket: Bucket, vbucket: Vbucket) -> None:
    write(vbucket, b"a")
    bucket.flusher.step()
    write(vbucket, b"b")
    told: list[int] = []
    cursor = vbucket.open_cursor("stream", options=Options(persisted_only=True))
    # The first snapshot reaches what was there at the request, so it is not announced yet.
    assert cursor.next_snapshot() is None
    cursor.subscribe(lambda: told.append(1))
    write(vbucket, b"c")
    assert told == []
    bucket.flusher.step()
    assert told == [1]
    assert cursor.next_snapshot() == Snapshot(0, 3)


def test_subscription_wakes_up_once(vbucket: Vbucket) -> None:
    told: list[int] = []
    cursor = vbucket.open_cursor("stream")
    other = vbucket.open_cursor("other")
    cursor.subscribe(lambda: told.append(1))
    other.subscribe(lambda: told.append(2))
    assert told == []
    write(vbucket, b"a", b"b")
    assert told == [1, 2]
    cursor.subscribe(lambda: told.append(3))
    assert told == [1, 2, 3]
    cursor.close()
    cursor.subscribe(lambda: told.append(4))
    assert told[-1] == 4


@pytest.mark.parametrize("how", ["batches", "frames"])
def test_a_snapshot_that_is_cut_short_does_not_look_whole(vbucket: Vbucket, how: str) -> None:
    write(vbucket, *(b"%d" % number for number in range(100)))
    snapshots = vbucket.changes()
    reader = next(snapshots)
    pieces: Iterator[object] = reader.batches(200) if how == "batches" else reader.frames(200)
    next(pieces)
    vbucket.set_state(VbucketState.REPLICA)
    with pytest.raises(CursorEnded, match="state changed"):
        list(pieces)


def test_a_snapshot_that_was_left_behind_does_not_look_empty(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    for reader in list(vbucket.changes()):
        with pytest.raises(OutOfRange, match="before asking for the next"):
            list(reader)


def test_a_copy_inside_a_snapshot_has_nothing_more_to_show(bucket: Bucket) -> None:
    copy = bucket.create_vbucket(3, VbucketState.REPLICA)
    copy.begin_snapshot(0, 9)
    for seqno in (2, 4):
        copy.apply(Change(vbucket=3, event=Event.MUTATION, seqno=seqno, key=b"k%d" % seqno, cas=1, rev_seqno=1))
    assert list(copy.changes(3)) == []
    with pytest.raises(OutOfRange):
        list(copy.changes(5))


@pytest.mark.parametrize("persisted", [False, True])
def test_a_closed_cursor_is_neither_called_nor_kept(bucket: Bucket, vbucket: Vbucket, persisted: bool) -> None:
    told: list[int] = []
    cursor = vbucket.open_cursor("stream", options=Options(persisted_only=persisted))
    cursor.subscribe(lambda: told.append(1))
    reference = weakref.ref(cursor)
    cursor.close()
    del cursor
    gc.collect()
    assert reference() is None
    write(vbucket, b"a")
    bucket.flusher.step()
    assert told == []


def test_a_cursor_ends(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b", b"c")
    cursor = vbucket.open_cursor("stream", 0, 2)
    assert cursor.next_snapshot() == Snapshot(0, 3)
    cursor.read()
    assert cursor.ended is CursorEnd.OK
    assert cursor.next_snapshot() is None
    assert "stream" not in vbucket.cursors
    cursor = vbucket.open_cursor("stream", 3, 3)
    assert cursor.ended is CursorEnd.OK
    cursor = vbucket.open_cursor("stream")
    cursor.close()
    assert cursor.next_snapshot() is None
    with pytest.raises(CursorEnded) as caught:
        cursor.read()
    assert caught.value.reason is CursorEnd.CLOSED
    assert str(caught.value) == "cursor 'stream' has ended: closed"


def test_impossible_requests(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    with pytest.raises(OutOfRange):
        vbucket.open_cursor("x", 2, 1)
    with pytest.raises(OutOfRange):
        vbucket.open_cursor("x", 3)
    vbucket.table.purge_seqno = 2
    with pytest.raises(RollbackRequired) as caught:
        vbucket.open_cursor("x", 1)
    assert caught.value.seqno == 0
    vbucket.open_cursor("x", 0)
    with pytest.raises(KeyExists):
        vbucket.open_cursor("x", 0)


def test_a_replica_ends_snapshots_only_where_it_is_whole(bucket: Bucket, clock: Clock) -> None:
    replica = bucket.create_vbucket(1, VbucketState.REPLICA)

    def apply(seqno: int, key: bytes) -> None:
        replica.apply(Change(vbucket=1, event=Event.MUTATION, seqno=seqno, key=key, cas=1, rev_seqno=1))

    replica.begin_snapshot(0, 10)
    apply(4, b"a")
    cursor = replica.open_cursor("stream")
    assert cursor.next_snapshot() is None
    told: list[int] = []
    cursor.subscribe(lambda: told.append(1))
    apply(10, b"b")
    assert told == [1]
    replica.begin_snapshot(10, 20)
    apply(15, b"c")
    assert cursor.next_snapshot() == Snapshot(0, 10)
    cursor.read()
    assert cursor.next_snapshot() is None


def test_what_was_not_read_is_skipped(vbucket: Vbucket) -> None:
    write(vbucket, b"a", b"b")
    snapshots = list(vbucket.changes())
    assert len(snapshots) == 1
    assert vbucket.cursors == {}
    (snapshot,) = [list(s.frames(1)) for s in vbucket.changes()]
    assert len(snapshot) == 2


def test_persisted_only_changes_end_at_what_is_on_disk(quick_disk: Path, clock: Clock) -> None:
    with Bucket.open(quick_disk, vbuckets=2, clock=clock, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        options = Options(persisted_only=True)
        vbucket.set(b"a", b"1")
        assert list(vbucket.changes(options=options)) == []
        vbucket.set(b"b", b"1")
        bucket.flusher.step()
        vbucket.set(b"a", b"2")
        found = [[(each.seqno, each.key) for each in reader] for reader in vbucket.changes(options=options)]
        assert found == [[(1, b"a"), (2, b"b")]]
        assert list(vbucket.changes(2, options=options)) == []


def test_only_a_later_snapshot_ends_with_a_checkpoint(vbucket: Vbucket) -> None:
    """The first one reaches what there was at its opening: with less, a consumer can mistake a mixture for a state."""
    write(vbucket, b"a", b"b")
    first = vbucket.checkpoints.open_id
    vbucket.checkpoints.create()
    write(vbucket, b"a")
    cursor = vbucket.open_cursor("stream")
    assert (cursor.checkpoint, cursor.in_open_checkpoint) == (first, False)
    assert cursor.next_snapshot() == Snapshot(0, 3)
    assert cursor.begins_checkpoint
    cursor.read()
    assert (cursor.checkpoint, cursor.in_open_checkpoint) == (first + 1, True)
    write(vbucket, b"a", b"b")
    vbucket.checkpoints.create()
    write(vbucket, b"c")
    assert cursor.next_snapshot() == Snapshot(3, 5)
    assert not cursor.begins_checkpoint
    assert cursor.read_columns()["seqno"].to_pylist() == [4, 5]
    vbucket.checkpoints.create()
    vbucket.floor_seqno = 7  # versions below are gone, so a state in between cannot be shown
    write(vbucket, b"a", b"b")
    assert cursor.next_snapshot() == Snapshot(5, 8)
    assert cursor.begins_checkpoint
    late = vbucket.open_cursor("late", 3)
    assert late.next_snapshot() == Snapshot(3, 8)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("pattern", ["a[ab]{150}b$", "ab$"])
def test_a_pattern_that_takes_long_looks_at_few_keys_in_one_read(
    vbucket: Vbucket, monkeypatch: pytest.MonkeyPatch, pattern: str, rows: bool
) -> None:
    """It takes linear time, but maybe many steps for each byte: others want their turn in between."""
    ticks = itertools.count()
    monkeypatch.setattr("upriver.engine.cursor.perf_counter", lambda: next(ticks) * FILTERED_S / 5)
    write(vbucket, *(b"%03d" % number + b"ab" * 100 for number in range(100)))
    cursor = vbucket.open_cursor("c", options=Options(key_pattern=KeyPattern(pattern)))
    cursor.next_snapshot()
    counts = []
    while cursor.snapshot is not None:
        read, looked_at = cursor.changes_read, cursor.bytes_filtered
        (cursor.read_columns if rows else cursor.read)()
        counts.append(cursor.changes_read - read)
        if counts[-1] == 6:
            assert cursor.bytes_filtered - looked_at == FILTERED_BYTES, "it had its turn"
    assert sum(counts) == 100
    assert (max(counts) <= 7) is (pattern != "ab$")


@pytest.mark.parametrize("keys_only", [False, True])
def test_a_filtered_cursor_reads_as_little_as_it_is_asked_for(vbucket: Vbucket, keys_only: bool) -> None:
    for number in range(2000):
        vbucket.set(b"key-%d" % number, b'{"city": "%s"}' % (b"Oslo", b"Bern")[number % 50 > 0], datatype=1)
    options = Options(value_filter=ValueFilter(("city",), equals="Oslo"), keys_only=keys_only)
    frames, rows = (vbucket.open_cursor(name, options=options) for name in ("frames", "rows"))
    for cursor in (frames, rows):
        cursor.next_snapshot()
    seqnos: list[int] = []
    while rows.snapshot is not None:
        looked_at, batch = rows.bytes_filtered, rows.read_columns(1)
        assert batch.num_rows <= 1
        assert rows.bytes_filtered - looked_at < 2 * FILTERED_BYTES
        assert batch["value"].to_pylist() == [b"" if keys_only else b'{"city": "Oslo"}'] * batch.num_rows
        seqnos += batch["seqno"].to_pylist()
    assert seqnos == list(range(1, 2001, 50))
    sizes = []
    while frames.snapshot is not None:
        sizes.append(len(frames.read(300)))
    assert max(sizes) <= 300
    assert (frames.changes_read, rows.changes_read, frames.seqno) == (40, 40, 2000)


@pytest.mark.parametrize("pattern", ["^user:", "^user:[0-9]*$"])
def test_keys_without_the_prefix_of_a_filter_take_turns_too(
    vbucket: Vbucket, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """The table leaves them out, and looks at a limited number of them in one read."""
    monkeypatch.setattr(cursor_module, "PREFIXED_SEQNOS", 100)
    write(vbucket, *(b"order:%d" % number for number in range(550)), b"user:1", b"user:2")
    cursor = vbucket.open_cursor("c", options=Options(key_pattern=KeyPattern(pattern)))
    cursor.next_snapshot()
    sizes = []
    while cursor.snapshot is not None:
        before = cursor.bytes_filtered, cursor.seqno
        sizes.append(len(cursor.read()))
        assert cursor.seqno - before[1] <= 100
        assert cursor.bytes_filtered > before[0]
    assert [bool(size) for size in sizes] == [False] * 5 + [True]
    assert (cursor.changes_read, cursor.seqno) == (2, 552)


def wanted(changes: list[Change], start: int, end: int, options: Options) -> list[Change]:
    """What a cursor with these options should read, from every change there was."""
    found = [change for change in changes if start < change.seqno <= end]
    if not options.history:
        newest = {change.key: change.seqno for change in found}
        found = [change for change in found if newest[change.key] == change.seqno]
    found = [
        change
        for change in found
        if change.key.startswith(options.key_prefix)
        and (options.key_pattern is None or options.key_pattern.passes(change.key))
        and (options.value_filter is None or change.event != Event.MUTATION or b"Oslo" in change.value)
    ]
    return [replace(change, value=b"", datatype=0) for change in found] if options.keys_only else found


@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("exact_end", [False, True])
@pytest.mark.parametrize("persisted_only", [False, True])
@pytest.mark.parametrize(
    ("filters", "pattern"), [(filters, "1$") for filters in range(8)] + [(2, "^user"), (3, "^user:1"), (6, "^user:1$")]
)
def test_options_in_every_combination(
    bucket: Bucket,
    vbucket: Vbucket,
    filters: int,
    pattern: str,
    persisted_only: bool,
    exact_end: bool,
    history: bool,
    keys_only: bool,
) -> None:
    options = Options(
        keys_only=keys_only,
        history=history,
        exact_end=exact_end,
        persisted_only=persisted_only,
        key_prefix=b"user" if filters & 1 else b"",
        key_pattern=KeyPattern(pattern) if filters & 2 else None,
        value_filter=ValueFilter(("city",), equals="Oslo") if filters & 4 else None,
    )
    for number in range(24):
        key = (b"user:%d" if number % 3 else b"order:%d") % (number % 4)
        vbucket.set(key, b'{"city": "%s"}' % (b"Oslo", b"Bern")[number % 5 < 2], datatype=1)
        if number % 7 == 6:
            vbucket.delete(key)
        if number == 15:
            bucket.flusher.step()
    on_disk, high = vbucket.persisted_seqno, vbucket.high_seqno
    assert 0 < on_disk < high
    everything = [change for snapshot in vbucket.changes(options=Options(history=True)) for change in snapshot]
    assert [change.seqno for change in everything] == list(range(1, high + 1))
    for start, end in ((0, None), (5, None), (5, 12), (12, 13)):
        reached = on_disk if persisted_only else high
        expected = wanted(everything, start, end if exact_end and end is not None else reached, options)
        read = [change for snapshot in vbucket.changes(start, end, options) for change in snapshot]
        assert read == expected
        for size in (1, 300, 2**20):
            frames = b"".join(f for snapshot in vbucket.changes(start, end, options) for f in snapshot.frames(size))
            assert frames == b"".join(pack(Record(change=change))[PREFIX.size :] for change in expected)


def test_a_copy_without_history_is_not_taken_for_empty(bucket: Bucket) -> None:
    """A consumer of a copy that was never filled, or that is gone, must not end with an empty vbucket."""
    replica, gone = bucket.create_vbucket(1, VbucketState.REPLICA), bucket.vbucket(0)
    gone.set(b"k", b"v")
    bucket.delete_vbucket(0)
    asks: list[Callable[[Vbucket], object]] = [lambda v: list(v.changes()), lambda v: v.open_cursor("stream")]
    for ask in asks:
        with pytest.raises(TemporaryFailure, match="nothing to stream yet"):
            ask(replica)
        with pytest.raises(NotMyVbucket):
            ask(gone)
    replica.begin_snapshot(0, 5)
    assert list(replica.changes()) == []
