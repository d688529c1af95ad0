"""The table and its reference against the same expectations, and one against the other, byte for byte."""

import ctypes
import gc
import os
import queue
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import reference_table as reference
from tests.support.depth import examples, slow_except
from tests.support.manual_clock import Clock
from upriver.engine.table import _table as compiled
from upriver.engine.table import group_parts
from upriver.errors import (
    CorruptData,
    InvalidArguments,
    KeyNotFound,
    OutOfMemory,
    OutOfOrder,
    TemporaryFailure,
    UpriverError,
    WireError,
)
from upriver.model import Change, Event, change_batch, changes_in
from upriver.model.record import EVENTS, HEADER, OPCODES, PREFIX, SEQNO_OFFSET, Record, pack, size_at, unpack

BACKENDS = [reference, compiled]


@pytest.fixture(params=BACKENDS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


@pytest.fixture
def table(backend: ModuleType, clock: Clock) -> Any:
    made = backend.Table(3, backend.Ledger(clock))
    made.active = True
    return made


def seqnos(frames: bytes) -> list[int]:
    found, offset = [], 0
    while offset < len(frames):
        body = HEADER.unpack_from(frames, offset)[6]
        found.append(struct.unpack_from(">Q", frames, offset + SEQNO_OFFSET)[0])
        offset += HEADER.size + body
    return found


def sweep(table: Any, floor: int, purge_to: int, purge_before: int, evict_to: int) -> None:
    position, _ = table.sweep(0, floor, purge_to, purge_before, evict_to)
    while position:
        position, _ = table.sweep(position, floor, purge_to, purge_before, evict_to)


def test_the_end_of_a_range_that_delivers_few_changes(table: Any) -> None:
    """A key that changes again and again is delivered once, however many seqnos its changes take."""
    for n in range(5):
        table.set(b"k%d" % n, b"v")
    for _ in range(200):
        table.set(b"hot", b"v")
    table.set(b"last", b"v")
    assert table.visible_end(0, 206, 3, 1000) == (3, 3)
    assert table.visible_end(0, 206, 6, 1000) == (205, 6)
    assert table.visible_end(0, 206, 7, 1000) == (206, 7)
    assert table.visible_end(0, 100, 7, 1000) == (100, 6)
    assert table.visible_end(50, 206, 1, 1000) == (205, 1)
    assert table.visible_end(0, 206, 0, 1000) == (0, 0)
    assert table.visible_end(206, 206, 5, 1000) == (206, 0)
    assert table.visible_end(0, 206, 7, 50) == (50, 6)  # it has looked at enough
    assert table.visible_end(0, 206, 7, 0) == (0, 0)


def test_a_change_may_be_superseded_by_one_that_is_gone(table: Any) -> None:
    table.set(b"a", b"1")
    for _ in range(5):
        table.set(b"b", b"v")
    table.set(b"c", b"v")
    sweep(table, 5, 0, 0, 0)
    assert seqnos(table.read(0, 7, 7, 1 << 20, every=True)[0]) == [1, 5, 6, 7]
    assert [table.visible_end(0, 7, most, 100) for most in (1, 2, 3)] == [(4, 1), (6, 2), (7, 3)]


def highest_purgeable(table: Any, purge_to: int, purge_before: int) -> int:
    """Over all steps: how far one goes depends on the chunks."""
    highest, position = table.purgeable(0, purge_to, purge_before)
    while position:
        found, position = table.purgeable(position, purge_to, purge_before)
        highest = max(highest, found)
    return int(highest)


def test_a_change_supersedes_the_one_before(table: Any) -> None:
    for key in (b"a", b"b", b"a", b"c", b"a"):
        table.set(key, b"x")
    assert seqnos(table.read(0, 5, 5, 10**6)[0]) == [2, 4, 5]
    assert seqnos(table.read(0, 5, 5, 10**6, every=True)[0]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("at", "visible"), [(1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [2, 3, 4]), (5, [2, 4, 5])])
def test_every_past_state_can_be_read(table: Any, at: int, visible: list[int]) -> None:
    for key in (b"a", b"b", b"a", b"c", b"a"):
        table.set(key, b"x")
    assert seqnos(table.read(0, at, at, 10**6)[0]) == visible


def test_reading_goes_on_where_it_stopped(table: Any) -> None:
    for i in range(5000):
        table.set(b"key%d" % (i % 3000), b"value" * 20)
    found, position, reads = [], 0, 0
    while position < 5000:
        frames, count, position, *_ = table.read(position, 5000, 5000, 4000)
        assert count == len(seqnos(frames)) > 0
        found += seqnos(frames)
        reads += 1
    assert found == list(range(2001, 5001))
    assert reads > 50


def test_a_record_larger_than_the_limit_is_read_alone(table: Any) -> None:
    for size in (10, 1_000_000, 10):
        table.set(b"k%d" % table.high_seqno, bytes(size))
    assert seqnos(table.read(0, 3, 3, 1)[0]) == [1]
    assert seqnos(table.read(1, 3, 3, 1)[0]) == [2]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("limit", [1, 1000, 5000, 10**6, 10**9])
def test_many_changes_with_a_large_one_among_them(table: Any, limit: int, every: bool) -> None:
    for i in range(600):
        table.set(b"key%d" % (i % 200), bytes(20_000) if i == 450 else b"value%d" % i)
    found: list[int] = []
    position = 0
    while position < 600:
        frames, count, done, *_ = table.read(position, 600, 600, limit, 7, every)
        assert done > position
        assert count == len(seqnos(frames))
        assert count == 1 or len(frames) <= limit
        found += seqnos(frames)
        position = done
    assert found == list(range(1 if every else 401, 601))


def test_numbers_of_other_libraries_are_numbers_and_parts_of_numbers_are_none(table: Any) -> None:
    table.set(b"key", b"", np.uint32(2**32 - 1), np.int64(0), np.uint64(0), np.uint8(1))
    found = table.get(b"key")
    assert (found.flags, found.datatype) == (2**32 - 1, 1)
    with pytest.raises(InvalidArguments):
        table.set(b"key", b"", np.int64(-1))
    with pytest.raises(TypeError):
        table.set(b"key", b"", 3.0)


def test_reading_into_a_buffer(table: Any) -> None:
    for i in range(1000):
        table.set(b"key%d" % i, b"value%d" % i * 9)
    buffer, found, position = bytearray(5000), b"", 0
    while position < 1000:
        size, count, position, last, expirations = table.read_into(buffer, position, 1000, 1000, 7)
        assert 0 < size <= 5000
        read = seqnos(bytes(buffer[:size]))
        assert (count, last, expirations) == (len(read), read[-1], 0)
        found += buffer[:size]
    assert found == table.read(0, 1000, 1000, 10**9, 7)[0]
    assert table.read_into(bytearray(10), 0, 1000, 1000) == (0, 0, 0, 0, 0)
    assert table.read_into(bytearray(10), 1000, 1000, 1000) == (0, 0, 1000, 1000, 0)


def records_of(data: bytes) -> list[Record]:
    found, offset = [], 0
    while offset < len(data):
        found.append(unpack(data, offset))
        offset += size_at(data, offset)
    return found


def test_records_tell_what_frames_have_no_room_for(table: Any, clock: Clock) -> None:
    table.store(Event.MUTATION, b"a", b"old", ttl=9)
    clock.pass_by(10)
    table.store(Event.MUTATION, b"b", b"value", 1, 2, 1, ttl=7)
    table.store(Event.DELETION, b"c", b"")
    table.store(Event.MUTATION, b"a", b"new")
    data, count, done = table.read_records(0, 4, 4, 10**6)
    assert (count, done) == (3, 4)
    assert [(r.change.key, r.change.value, r.ttl, r.superseded_by) for r in records_of(data)] == [
        (b"b", b"value", 7, 0),
        (b"c", b"", 255, 0),
        (b"a", b"new", 255, 0),
    ]
    assert {record.time for record in records_of(data)} == {int(clock())}
    first, _, done = table.read_records(0, 4, 1, 1)
    assert [(r.change.value, r.ttl, r.superseded_by) for r in records_of(first)] == [(b"old", 9, 0)]
    without, _, _ = table.read_records(0, 4, 4, 10**6, True)
    assert [(r.change.key, r.change.value, r.change.datatype) for r in records_of(without)] == [
        (b"b", b"", 0),
        (b"c", b"", 0),
        (b"a", b"", 0),
    ]


def test_keys_only_and_prefix(table: Any) -> None:
    table.set(b"user:1", b"value", datatype=1)
    table.set(b"order:1", b"value")
    table.set(b"user:2", b"value")
    frames, count, done, *_ = table.read(0, 3, 3, 10**6, keys_only=True, prefix=b"user:")
    assert (count, done) == (2, 3)
    record = unpack(bytes(PREFIX.size) + frames)
    assert (record.change.key, record.change.value, record.change.datatype) == (b"user:1", b"", 0)
    batch, _ = table.read_columns(0, 3, 3, 10**6, keys_only=True, prefix=b"user:")
    assert batch["value"].to_pylist() == [b"", b""]


def test_the_opaque_and_the_rest_of_a_lock_are_filled_in(table: Any, clock: Clock) -> None:
    table.set(b"k", b"v")
    table.locks[b"k"] = (99, clock.now + 12.5)
    frames, *_ = table.read(0, 1, 1, 10**6, 0xDEADBEEF)
    assert HEADER.unpack_from(frames)[7] == 0xDEADBEEF
    assert unpack(bytes(PREFIX.size) + frames).change.lock_time == 13
    assert table.read_columns(0, 1, 1, 10**6)[0]["lock_time"].to_pylist() == [13]
    clock.pass_by(13)
    assert unpack(bytes(PREFIX.size) + table.read(0, 1, 1, 10**6)[0]).change.lock_time == 0


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("limit", [1, 1000, 10**6])
def test_a_read_tells_its_last_change_and_how_many_have_expired(table: Any, every: bool, limit: int) -> None:
    """Also where what follows the last change is superseded, so that the range reaches further."""
    for number in range(300):
        if number % 7:
            table.set(b"%d" % number, b"value")
        else:
            table.store(Event.EXPIRATION, b"%d" % number, b"", 0, 4321)
    for _ in range(50):
        table.set(b"again", b"value")
    position = 0
    while position < 350:
        frames, _, position, last, expirations = table.read(position, 350, 350, limit, every=every)
        assert last == seqnos(frames)[-1]
        assert expirations == sum(not (seqno - 1) % 7 for seqno in seqnos(frames) if seqno <= 300)
    assert table.read(300, 349, 350, limit)[3:] == (300, 0)


def test_columns_hold_what_the_frames_hold(table: Any, clock: Clock) -> None:
    table.set(b"a", b"1", 7, 1000, datatype=1)
    table.set(b"gone", b"2")
    table.delete(b"gone")
    table.store(Event.EXPIRATION, b"old", b"", 0, 4321)
    batch, done = table.read_columns(0, 4, 4, 10**6)
    frames, *_ = table.read(0, 4, 4, 10**6)
    assert done == 4
    offset = 0
    for change in changes_in(batch):
        body = HEADER.unpack_from(frames, offset)[6]
        record = unpack(bytes(PREFIX.size) + frames[offset : offset + HEADER.size + body])
        offset += HEADER.size + body
        if change.event is Event.DELETION:
            assert change.expiry == int(clock.now)  # a frame of a deletion has no time, its prefix has
        else:
            assert change == record.change
    assert offset == len(frames)


def test_truncation_restores_the_state(table: Any) -> None:
    states = {}
    for i in range(2000):
        key = b"key%d" % (i * 7 % 300)
        if i % 5 == 4 and table.find(key) is not None and table.find(key).event == Event.MUTATION:
            table.delete(key)
        else:
            table.set(key, b"%d" % i * 30)
        states[table.high_seqno] = table.high_seqno
    for at in (1999, 1500, 700, 1):
        before = table.read(0, at, at, 10**9)[0]
        table.truncate(at)
        assert table.read(0, at, at, 10**9)[0] == before
        assert table.high_seqno == at
        assert len(seqnos(before)) == table.items + table.tombstones
    table.clear()
    assert (table.items, table.tombstones, table.history_bytes, table.pending_bytes) == (0, 0, 0, 0)
    assert table.live_keys() == []
    table.set(b"again", b"")
    assert table.high_seqno == 1


def test_records_survive_the_disk(backend: ModuleType, table: Any, clock: Clock) -> None:
    for i in range(3000):
        table.set(b"key%d" % (i % 1000), b"value%d" % i * 10)
    table.delete(b"key5")
    pieces, position = [], 0
    while position < table.high_seqno:
        piece, position = table.records(position, table.high_seqno, 100_000)
        pieces.append(piece)
    assert len(pieces) > 3
    copy = backend.Table(3, backend.Ledger(clock))
    for piece in pieces:
        copy.load(piece)
        copy.load(piece)  # a second time changes nothing
    for name in ("high_seqno", "items", "tombstones", "history_bytes", "deleted_rev_seqno"):
        assert getattr(copy, name) == getattr(table, name), name
    assert copy.read(0, 3001, 3001, 10**9) == table.read(0, 3001, 3001, 10**9)
    assert copy.read(0, 1700, 1700, 10**9) == table.read(0, 1700, 1700, 10**9)


def test_damaged_records_are_refused(backend: ModuleType, table: Any, clock: Clock) -> None:
    table.set(b"key", b"value")
    good, _ = table.records(0, 1, 10**6)
    vbucket_of_another = bytearray(good)
    vbucket_of_another[PREFIX.size + 7] ^= 1
    opcode = bytearray(good)
    opcode[PREFIX.size + 1] = 0x10
    long = bytearray(good)
    long[PREFIX.size + 10] = 0xFF
    for damaged in (good[:-8], good[:20], bytes(vbucket_of_another), bytes(opcode), bytes(long)):
        with pytest.raises(CorruptData):
            backend.Table(3, backend.Ledger(clock)).load(damaged)


def test_eviction_keeps_what_was_read(table: Any) -> None:
    for i in range(5000):
        table.set(b"key%d" % i, b"value%d" % i * 20)
    blocks, _ = table.records(0, 5000, 10**9)
    table.get(b"key7")
    before = table.memory_bytes
    sweep(table, 0, 0, 0, 4000)
    assert table.memory_bytes < before - 4000 * 100
    assert (table.evicted, table.evicted_items) == (3999, 3999)
    assert table.first_evicted(0, 5000) == 1
    assert table.first_evicted(7, 8) == 0
    assert table.first_evicted(4000, 5000) == 0
    with pytest.raises(TemporaryFailure):
        table.get(b"key1")
    table.fetch = lambda seqno: b"from disk %d" % seqno
    assert table.get(b"key1").value == b"from disk 2"
    assert table.get(b"key7").value == b"value7" * 20
    with pytest.raises(CorruptData):
        table.read(0, 5000, 5000, 10**9)
    assert seqnos(table.read(0, 5000, 5000, 10**9, block=blocks)[0]) == list(range(1, 5001))
    assert table.read_columns(0, 5000, 5000, 10**8, block=blocks)[0]["value"].to_pylist() == [
        b"value%d" % i * 20 for i in range(5000)
    ]
    table.set(b"key1", b"new")
    assert (table.items, table.evicted_items, table.evicted) == (5000, 3998, 3999)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_room_of_an_evicted_large_value_is_filled(
    backend: ModuleType, table: Any, clock: Clock, loaded: bool
) -> None:
    source = backend.Table(3, backend.Ledger(clock))
    for filled in (table, source):
        filled.active = True
        filled.set(b"large", bytes(20 * 2**20))
        sweep(filled, 0, 0, 0, 1)
        assert filled.evicted == 1
    values = {b"key%d" % i: b"%d" % i * 50_000 for i in range(100)}
    for key, value in values.items():
        (source if loaded else table).set(key, value)
    if loaded:
        table.load(source.records(1, 101, 10**9)[0])
    assert table.items == 101
    assert {key: table.get(key).value for key in values} == values
    assert len(table.live_keys()) == 101


def test_sweeping_drops_what_no_retained_state_sees(table: Any, clock: Clock) -> None:
    for i in range(6000):
        table.set(b"key%d" % (i % 500), b"x" * 50)
    for i in range(100):
        table.delete(b"key%d" % i)
    clock.pass_by(1000)
    states = {at: table.read(0, at, at, 10**9)[0] for at in (5000, 5500, 6000)}
    sweep(table, 5000, 0, 0, 0)
    for at, state in states.items():
        assert table.read(0, at, at, 10**9)[0] == state
    assert table.items == 400
    assert len(seqnos(table.read(0, 6100, 6100, 10**9, every=True)[0])) == 500 + 1100
    assert highest_purgeable(table, 6050, int(clock.now)) == 6050
    sweep(table, 6050, 6050, int(clock.now), 0)
    assert (table.tombstones, table.purge_seqno, table.items) == (50, 6050, 400)
    assert table.find(b"key0") is None
    table.set(b"key0", b"back")
    assert table.find(b"key0").rev_seqno == 1 + table.deleted_rev_seqno


def test_the_last_change_is_never_purged(table: Any, clock: Clock) -> None:
    """A snapshot ends at the high seqno: its receiver must find a change there."""
    table.set(b"k", b"")
    table.delete(b"k")
    clock.pass_by(10)
    assert table.purgeable(0, 2, int(clock.now)) == (0, 0)
    table.sweep(0, 2, 2, int(clock.now), 0)
    assert table.tombstones == 1


def test_compaction_on_disk_keeps_what_memory_holds(backend: ModuleType, table: Any, clock: Clock) -> None:
    for i in range(1000):
        table.set(b"key%d" % (i % 100), b"x" * 20)
    table.delete(b"key7")
    table.set(b"key8", b"y")
    clock.pass_by(5)
    block, _ = table.records(0, 1002, 10**9)
    assert table.retain(block, 1002) == block
    sweep(table, 1001, 1001, int(clock.now), 0)
    assert table.find(b"key7") is None
    kept = table.retain(block, 1001)
    assert kept == table.records(0, 1002, 10**9)[0]
    with_tombstone = table.retain(block, 1000)
    assert len(with_tombstone) > len(kept)
    copy = backend.Table(3, backend.Ledger(clock))
    copy.load(with_tombstone)
    assert copy.find(b"key7").event == Event.DELETION


def fill(table: Any) -> None:
    for i in range(100):
        table.set(b"k%d" % i, b"x" * 50)


def test_the_queue_and_the_quota_are_bounds(backend: ModuleType, clock: Clock) -> None:
    ledger = backend.Ledger(clock, 0, 1000)
    table = backend.Table(0, ledger)
    table.active = True
    with pytest.raises(TemporaryFailure):
        fill(table)
    backend.collect(ledger.take_dirty())
    table.committed()
    assert ledger.pending_bytes == 0
    ledger.quota_bytes = ledger.memory_bytes + 500
    ledger.queue_bytes_max = 0
    with pytest.raises(OutOfMemory):
        fill(table)
    ledger.quota_bytes = ledger.memory_bytes
    table.delete(b"k1")  # deletions may go a little further
    ledger.quota_bytes = ledger.memory_bytes // 2
    with pytest.raises(OutOfMemory):
        table.delete(b"k2")
    ledger.quota_bytes = 0
    ledger.refusal = "because"
    with pytest.raises(TemporaryFailure, match="because"):
        table.delete(b"k1")


def test_a_discarded_table_gives_back_all_memory(backend: ModuleType, clock: Clock) -> None:
    ledger = backend.Ledger(clock)
    table = backend.Table(0, ledger)
    table.active = True
    for i in range(5000):
        table.set(b"k%d" % i, b"x" * 50)
    table.discard()
    assert (ledger.memory_bytes, ledger.pending_bytes, ledger.history_bytes) == (0, 0, 0)
    assert (table.memory_bytes, table.items) == (0, 0)
    assert table.find(b"k1") is None
    assert table.live_keys() == []


def test_looking_for_expired_items_drops_locks_that_have_ended(table: Any, clock: Clock) -> None:
    table.locks = {b"short": (1, clock.now + 5), b"long": (2, clock.now + 15)}
    clock.pass_by(5)
    table.expired(1)
    assert set(table.locks) == {b"short", b"long"}
    table.expired(0)
    assert set(table.locks) == {b"long"}


def test_a_group_lies_where_another_one_lay(backend: ModuleType, clock: Clock) -> None:
    ledger = backend.Ledger(clock)
    table = backend.Table(0, ledger)
    table.active = True
    room = bytearray()
    for count in (100, 3, 300, 1, 299):
        for i in range(count):
            table.set(b"key%d" % i, b"%d" % count)
        tables = ledger.take_dirty()
        alone = bytes(backend.collect(tables))
        group = backend.collect(tables, True, room)
        assert group == alone
        assert group.obj is room or len(room) < len(group) or backend is reference
        room = group.obj
        table.committed()


def test_groups_bring_tables_back(backend: ModuleType, clock: Clock) -> None:
    ledger = backend.Ledger(clock)
    writer, receiver = backend.Table(0, ledger), backend.Table(1, ledger)
    writer.active = True
    groups = []
    for round_ in range(5):
        for i in range(100):
            writer.set(b"key%d" % i, b"%d" % round_)
        receiver.snapshot_start, receiver.snapshot_end = round_ * 10, round_ * 10 + 10
        for seqno in range(round_ * 10 + 1, round_ * 10 + 11):
            receiver.store(Event.MUTATION, b"r%d" % seqno, b"", 0, 0, 0, 5, 6, seqno)
        receiver.consistent_seqnos.append(receiver.high_seqno)
        tables = ledger.take_dirty()
        assert len(tables) == 2
        groups.append(backend.collect(tables))
        for table in tables:
            table.committed()
    assert receiver.consistent_seqnos == []
    copies = [backend.Table(n, backend.Ledger(clock)) for n in (0, 1)]
    for number, group in enumerate(groups):
        backend.replay(number, group, [*copies])
    for table, copy in zip((writer, receiver), copies, strict=True):
        assert copy.read(0, 500, 500, 10**9, every=True) == table.read(0, 500, 500, 10**9, every=True)
    assert copies[1].consistent_seqnos == [10, 20, 30, 40, 50]
    assert (copies[1].snapshot_start, copies[1].snapshot_end) == (40, 50)
    for cut in (4, 20, 60, len(groups[0]) - 8):
        with pytest.raises(CorruptData):
            backend.replay(1, groups[0][:cut], [backend.Table(n, backend.Ledger(clock)) for n in (0, 1)])


def test_layout_is_the_models() -> None:
    assert {event: opcode - 0x56 for event, opcode in OPCODES.items()} == {event: event for event in EVENTS.values()}


# Parity: the same operations on both, the same answers from both.

KEYS = st.sampled_from([b"a", b"b", b"key-with-16-bytes", b"x" * 250])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=40), st.integers(0, 9), st.sampled_from([0, 0, 5, 2**31])),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("find"), KEYS, st.booleans()),
    st.tuples(st.just("expire"), KEYS),
    st.tuples(st.just("store"), st.integers(1, 3), KEYS, st.binary(max_size=9), st.just(0), st.integers(0, 99)),
    st.tuples(st.just("lock"), KEYS, st.integers(1, 20)),
    st.tuples(st.just("pass"), st.integers(1, 9)),
    st.tuples(st.just("truncate"), st.integers(0, 12)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("refuse"), st.sampled_from(["", "not now"])),
    st.tuples(st.just("sweep"), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("retain"), st.integers(0, 20)),
)
COUNTS: tuple[str, ...] = (
    "high_seqno",
    "persisted_seqno",
    "items",
    "tombstones",
    "evicted",
    "evicted_items",
    "history_bytes",
)
COUNTS += ("pending_bytes", "purge_seqno", "deleted_rev_seqno", "highest_rev_seqno")


class Twin:
    """One backend under the steps of a parity test."""

    def __init__(self, backend: ModuleType, clock: Clock) -> None:
        self.backend, self.clock = backend, clock
        self.ledger = backend.Ledger(clock)
        self.table = backend.Table(1, self.ledger)
        self.table.active = True
        self.table.fetch = lambda seqno: b"fetched %d" % seqno

    def do(self, step: tuple[Any, ...]) -> Any:
        name, *arguments = step
        try:
            answer = getattr(self, f"do_{name}", None)
            result = answer(*arguments) if answer else getattr(self.table, name)(*arguments)
        except UpriverError as error:
            return type(error), str(error)
        if isinstance(result, self.backend.StoredItem):
            return [getattr(result, field) for field in reference.StoredItem.__slots__]
        return result

    def do_lock(self, key: bytes, seconds: int) -> None:
        self.table.locks[key] = (7, self.clock.now + seconds)

    def do_refuse(self, why: str) -> None:
        self.ledger.refusal = why

    def do_truncate(self, back: int) -> None:
        self.table.truncate(max(0, self.table.high_seqno - back))

    def do_sweep(self, floor: int, purge: int, evict: int) -> None:
        # Nothing is dropped that is not on disk: that is the caller's duty.
        floor, evict = (min(seqno, self.table.persisted_seqno) for seqno in (floor, evict))
        self.table.sweep(0, floor, min(purge, floor), int(self.clock.now), evict)

    def do_flush(self) -> bytes:
        group = bytes(self.backend.collect(self.ledger.take_dirty()))
        self.table.committed()
        return group

    def do_retain(self, tombstones_to: int) -> bytes | None:
        if self.table.evicted:
            return None
        block, _ = self.table.records(0, self.table.high_seqno, 10**6)
        kept: bytes = self.table.retain(block, tombstones_to)
        return kept

    def state(self) -> list[Any]:
        table, high = self.table, self.table.high_seqno
        found: list[Any] = [getattr(table, name) for name in COUNTS]
        found += [self.ledger.last_cas, self.ledger.history_bytes, sorted(table.live_keys())]
        found += [table.first_evicted(0, high), table.seqno_before(int(self.clock.now) - 3, high)]
        found += [table.visible_end(after, high, most, 7) for after in (0, high // 2) for most in (0, 1, 3, 100)]
        for at in {high, max(0, high - 3)}:
            found.append(table.read(0, at, at, 10**6, 5, keys_only=True))
            found.append(table.read(0, at, at, 200, 5, every=True, keys_only=True))
            if not table.evicted:
                found.append(table.read(0, at, at, 10**6, 5))
                found.append(table.read_columns(0, at, at, 10**6)[0].to_pylist())
                found.append(table.records(0, at, 10**6))
        return found


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=examples(400), deadline=None)
def test_parity(steps: list[tuple[Any, ...]]) -> None:
    clock = Clock()
    twins = [Twin(backend, clock) for backend in BACKENDS]
    for step in steps:
        if step[0] == "pass":
            clock.pass_by(step[1])
            continue
        answers = [twin.do(step) for twin in twins]
        assert answers[0] == answers[1], step
        states = [twin.state() for twin in twins]
        assert states[0] == states[1], step


def test_parity_over_many_chunks(clock: Clock) -> None:
    twins = [Twin(backend, clock) for backend in BACKENDS]
    for twin in twins:
        rng = random.Random(5)
        for i in range(12_000):
            key = b"key-%d" % rng.randrange(3000)
            try:
                if rng.random() < 0.2:
                    twin.table.delete(key)
                else:
                    twin.table.set(key, bytes(rng.randrange(200)), expiry=rng.choice((0, 0, 2_000_000_000)))
            except KeyNotFound:
                pass
            if i == 6000:
                twin.do_flush()
                sweep(twin.table, 3000, 2500, int(clock.now) + 5, 5000)
    for back in (0, 1, 40, 150, 1500, 1, 4000, 100, 2000, 9999):
        for twin in twins:
            twin.do_truncate(back)
        high = twins[0].table.high_seqno
        for read in (
            lambda t, high=high: t.read(0, high, high, 10**9, keys_only=True),
            lambda t, high=high: t.read(0, high, max(0, high - 2000), 10**9, keys_only=True, every=True),
            lambda t, high=high: t.read(6001, high, high, 10**9),
            lambda t, high=high: t.records(6001, high, 50_000),
            lambda t: sorted(t.live_keys()),
            lambda t: [t.holds(b"key-%d" % i) for i in range(3000)],
            lambda t, high=high: t.first_evicted(0, high),
            lambda t: t.due(),
            lambda t: [getattr(t, name) for name in COUNTS],
        ):
            assert read(twins[0].table) == read(twins[1].table)
        for twin in twins:
            rng = random.Random(back)
            for i in range(500):
                twin.table.set(b"key-%d" % rng.randrange(3000), b"%d" % i, expiry=rng.choice((0, 100)))


def frame_of(change: Change, extras: bytes | None = None, meta: bytes = b"", **header: int) -> bytes:
    """A change frame as other nodes send it, with whatever is asked for in its header."""
    packed = pack(Record(change=change))[PREFIX.size :]
    size = HEADER.unpack_from(packed)[3]
    own, rest = bytearray(packed[HEADER.size : HEADER.size + size]), packed[HEADER.size + size :]
    if extras is not None:
        own = bytearray(extras)
    if meta:
        struct.pack_into(">H", own, 28 if change.event == Event.MUTATION else 16, len(meta))
    fields = {
        "magic": 0x80,
        "opcode": OPCODES[change.event],
        "key_length": len(change.key),
        "extras": len(own),
        "datatype": change.datatype,
        "vbucket": change.vbucket,
        "body": len(own) + len(rest) + len(meta),
        "opaque": 7,
        "cas": change.cas,
    } | header
    return HEADER.pack(*fields.values()) + bytes(own) + rest + meta


def mutation(seqno: int, key: bytes = b"k", value: bytes = b"v", **others: int) -> Change:
    return Change(vbucket=3, event=Event.MUTATION, seqno=seqno, rev_seqno=2, cas=90, key=key, value=value, **others)


def deletion(seqno: int, event: Event = Event.DELETION, expiry: int = 0) -> Change:
    return Change(vbucket=3, event=event, seqno=seqno, rev_seqno=3, cas=91, key=b"gone", expiry=expiry)


def test_a_group_is_one_moment_of_all_tables(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference table's writer is not kept from writing while the flusher's thread collects."""
    ledger = reference.Ledger(clock)
    first, last = reference.Table(0, ledger), reference.Table(1, ledger)
    records = first.records

    def records_and_more(*range_: int) -> tuple[bytes, int]:
        found = records(*range_)
        for table in (first, last):
            table.set(b"meanwhile", b"")
        return found

    for table in (first, last):
        table.active = True
        table.set(b"before", b"")
    monkeypatch.setattr(first, "records", records_and_more)
    for high in (1, 2):
        parts = group_parts(1, reference.collect([first, last]))
        assert [(each, reference.stored_record(stored, 0)[0].change.seqno) for _, each, stored in parts] == [
            (high, high)
        ] * 2
        for table in (first, last):
            table.committed()
            assert table.persisted_seqno == high


def test_what_a_sweep_moves_while_a_group_is_on_its_way_is_stored_once(backend: ModuleType, table: Any) -> None:
    for number in range(20):
        table.set(b"%d" % number, bytes(100))
    backend.collect([table])
    table.committed()
    table.set(b"on its way", b"")
    backend.collect([table])
    sweep(table, 0, 0, 0, 20)
    assert table.evicted == 20
    table.committed()
    table.set(b"next", b"")
    ((_, _, stored),) = group_parts(1, backend.collect([table]))
    assert reference.stored_record(stored, 0)[0].change.seqno == 22
    assert len(stored) == table.pending_bytes == reference.stored_record(stored, 0)[1]


def test_locks_end_some_at_a_time(table: Any, clock: Clock) -> None:
    for number in range(2 * reference.LOCKS_A_STEP):
        table.lock(b"%d" % number, 1, clock.now + (10 if number % 2 else 20))
    clock.pass_by(15)
    left = []
    for _ in range(3):
        table.end_locks()
        left.append(len(table.locks))
    assert left == [1.5 * reference.LOCKS_A_STEP, reference.LOCKS_A_STEP, reference.LOCKS_A_STEP]
    assert table.due() == clock.now + 5


@pytest.fixture
def receiving(table: Any) -> Any:
    table.active = False
    table.snapshot_end = 10**6
    return table


def test_a_run_of_frames_is_applied_in_one_call(receiving: Any, clock: Clock) -> None:
    told = []
    receiving.on_change = lambda: told.append(receiving.high_seqno)
    pair = struct.pack(">QQ", 6, 3)
    frames = [
        frame_of(mutation(2, b"a", b"one", flags=5, expiry=77, datatype=1)),
        frame_of(mutation(3, b"b", b"two", lock_time=9), meta=b"extended"),
        frame_of(deletion(4)),
        frame_of(deletion(5, expiry=55), extras=struct.pack(">QQIB", 5, 3, 55, 0)),
        frame_of(deletion(6), extras=pair + b"\0\2", meta=b"mm"),
        frame_of(deletion(7, Event.EXPIRATION, 66)),
        frame_of(deletion(8, Event.EXPIRATION), extras=struct.pack(">QQH", 8, 3, 0)),
    ]
    assert receiving.apply_frames(b"".join(frames), 4) == 7
    assert told == [8]
    batch, done = receiving.read_columns(0, 8, 8, 10**6, every=True)
    now = int(clock.now)
    assert done == 8
    assert [(c.event, c.seqno, c.flags, c.expiry, c.lock_time, c.datatype, c.value) for c in changes_in(batch)] == [
        (Event.MUTATION, 2, 5, 77, 0, 1, b"one"),
        (Event.MUTATION, 3, 0, 0, 9, 0, b"two"),
        (Event.DELETION, 4, 0, now, 0, 0, b""),
        (Event.DELETION, 5, 0, 55, 0, 0, b""),
        (Event.DELETION, 6, 0, now, 0, 0, b""),
        (Event.EXPIRATION, 7, 0, 66, 0, 0, b""),
        (Event.EXPIRATION, 8, 0, now, 0, 0, b""),
    ]
    records, _ = receiving.records(0, 8, 10**6)
    assert unpack(records).ttl == 4


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        (frame_of(mutation(3), magic=0x81), "expected the magic 0x80"),
        (frame_of(mutation(3), opcode=0x5A), "expected the opcode of a change"),
        (frame_of(mutation(3), extras=bytes(30)), "expected 31 bytes of extras"),
        (frame_of(deletion(3), extras=bytes(20)), "expected 18 or 21 bytes of extras"),
        (frame_of(deletion(3, Event.EXPIRATION), extras=bytes(21)), "expected 20 or 18 bytes of extras"),
        (frame_of(mutation(3), vbucket=4), "expected the number of this vbucket"),
        (frame_of(mutation(3), body=34), "expected a complete body"),
        (frame_of(mutation(3), body=2**32 - 1), "expected a complete body"),
        (frame_of(mutation(3), body=31), "expected a body that holds extras and key"),
        (frame_of(mutation(3, value=b""), meta=b"m", body=32), "expected a body that holds the extended metadata"),
        (frame_of(mutation(3))[:23], "expected a complete header"),
        (frame_of(mutation(2)), "it does not follow 2"),
        (frame_of(mutation(10**6 + 1)), "the snapshot ends at 1000000"),
        (frame_of(mutation(3, b"")), "a key has 1 to 250 bytes"),
        (frame_of(mutation(3, b"k" * 251)), "a key has 1 to 250 bytes"),
    ],
)
def test_a_bad_frame_stops_the_run_and_all_before_it_are_in(receiving: Any, frame: bytes, refusal: str) -> None:
    told = []
    receiving.on_change = lambda: told.append(receiving.high_seqno)
    good = frame_of(mutation(1, b"first")) + frame_of(mutation(2, b"second"))
    with pytest.raises(UpriverError) as caught:
        receiving.apply_frames(good + frame)
    assert refusal in str(caught.value)
    assert caught.value.__notes__ == ["2 changes before it were applied"]
    if isinstance(caught.value, WireError):
        assert len(good) <= caught.value.offset < len(good) + HEADER.size
    assert seqnos(receiving.read(0, 9, 9, 10**6)[0]) == [1, 2]
    assert (told, receiving.high_seqno) == ([2], 2)


def test_a_run_is_refused_where_there_is_no_room(backend: ModuleType, clock: Clock) -> None:
    table = backend.Table(3, backend.Ledger(clock, queue_bytes_max=300))
    table.snapshot_end = 100
    frames = b"".join(frame_of(mutation(i, b"key%d" % i)) for i in range(1, 11))
    with pytest.raises(TemporaryFailure, match="queue") as caught:
        table.apply_frames(frames)
    assert 1 < table.high_seqno < 10
    assert caught.value.__notes__ == [f"{table.high_seqno} changes before it were applied"]


def test_rows_are_applied_as_frames_are(backend: ModuleType, clock: Clock) -> None:
    changes = [mutation(i, b"key%d" % (i % 5), b"v" * i, lock_time=i % 2) for i in range(1, 20)]
    changes.append(deletion(20, Event.EXPIRATION, 77))
    both = [backend.Table(3, backend.Ledger(clock)) for _ in range(2)]
    for table in both:
        table.snapshot_end = 100
    batch = change_batch(changes)
    assert both[0].apply_frames(b"".join(map(frame_of, changes))) == 20
    assert both[1].apply_batch(batch.slice(0, 7)) + both[1].apply_batch(batch.slice(7)) == 20
    assert both[0].records(0, 99, 10**6) == both[1].records(0, 99, 10**6)
    assert both[0].locks == both[1].locks
    with pytest.raises(OutOfOrder, match="does not follow"):
        both[1].apply_batch(batch)


def test_rows_that_are_no_changes_of_ours(receiving: Any) -> None:
    for wrong in (Change(vbucket=4, event=Event.MUTATION, seqno=2, key=b"k"), flush_of(3)):
        receiving.truncate(0)
        receiving.snapshot_end = 9
        with pytest.raises(InvalidArguments, match="row 1 is event"):
            receiving.apply_batch(change_batch([mutation(1), wrong]))
        assert receiving.high_seqno == 1
    with pytest.raises(InvalidArguments, match="columns"):
        receiving.apply_batch(change_batch([mutation(2)]).drop_columns(["cas"]))


@pytest.mark.parametrize("column", ["key", "value"])
@pytest.mark.parametrize("ends", [(0, 2**30, 2), (0, 5, 2), (0, -3, 2)])
def test_rows_whose_ends_lie_elsewhere(receiving: Any, column: str, ends: tuple[int, ...]) -> None:
    """Nothing outside of the batch is read, and nothing of it is applied."""
    batch = change_batch([mutation(1, b"k", b"v"), mutation(2, b"l", b"w")])
    place = batch.schema.get_field_index(column)
    buffers = [None, pa.py_buffer(struct.pack("<3i", *ends)), batch.column(place).buffers()[2]]
    wrong = pa.Array.from_buffers(batch.schema.field(place).type, 2, buffers, null_count=0)
    columns = [*batch.columns[:place], wrong, *batch.columns[place + 1 :]]
    with pytest.raises(InvalidArguments, match="the batch is invalid"):
        receiving.apply_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
    assert receiving.high_seqno == 0


@pytest.mark.parametrize("ttl", [-1, 256])
def test_hops_that_a_record_cannot_hold(receiving: Any, ttl: int) -> None:
    with pytest.raises(InvalidArguments):
        receiving.store(Event.MUTATION, b"k", b"v", ttl=ttl)
    with pytest.raises(InvalidArguments):
        receiving.apply_frames(frame_of(mutation(1)), ttl)
    with pytest.raises(InvalidArguments):
        receiving.apply_batch(change_batch([mutation(1)]), ttl)
    assert receiving.high_seqno == 0


def flush_of(vbucket: int) -> Change:
    return Change(vbucket=vbucket, event=Event.FLUSH, seqno=2, key=b"")


@given(
    st.lists(
        st.tuples(st.sampled_from(list(OPCODES)), st.binary(min_size=1, max_size=9), st.binary(max_size=40)),
        max_size=40,
    ),
    st.binary(max_size=30),
    st.integers(0, 500),
)
def test_frames_of_any_kind_leave_both_tables_equal(
    rows: list[tuple[Event, bytes, bytes]], noise: bytes, place: int
) -> None:
    changes = [
        Change(vbucket=3, event=event, seqno=i + 1, rev_seqno=i, cas=i * 7, expiry=i % 3, key=key, value=value)
        for i, (event, key, value) in enumerate(rows)
    ]
    frames = b"".join(map(frame_of, changes))
    frames = frames[:place] + noise + frames[place + len(noise) :]
    clock, ends = Clock(), []
    for backend in (reference, compiled):
        table = backend.Table(3, backend.Ledger(clock))
        table.snapshot_end = 1000
        try:
            outcome = repr(table.apply_frames(frames))
        except UpriverError as error:
            outcome = f"{error!r} {error.__notes__}"
        ends.append((outcome, table.records(0, 2000, 10**6), table.locks, table.pending_bytes, table.ledger.last_cas))
    assert ends[0] == ends[1]


def test_keys_are_found_while_the_index_grows(table: Any) -> None:
    """A larger index is filled step by step: keys are read, replaced, deleted and purged meanwhile."""
    random_numbers = random.Random(4)
    held: dict[bytes, bytes] = {}
    for i in range(9000):
        table.set(b"key%d" % i, b"%d" % i)
        held[b"key%d" % i] = b"%d" % i
        key = b"key%d" % random_numbers.randrange(i + 1)
        if i % 3 == 0 and key in held:
            table.delete(key)
            del held[key]
        elif i % 3 == 1:
            table.set(key, b"again")
            held[key] = b"again"
        if i % 500 == 0:
            sweep(table, table.high_seqno, table.high_seqno, 2**32 - 1, 0)
        found = table.find(key)
        assert (found.value if found is not None and found.event == Event.MUTATION else None) == held.get(key)
        if i % 100 == 0:
            assert table.items == len(held)
            assert set(table.live_keys()) == held.keys()
            assert table.random_key() in held or not held
    assert {key: table.get(key).value for key in held} == held


@pytest.mark.parametrize(("written", "kept"), [(100, 100), (300, 300), (5000, 3)])
def test_a_random_key_is_each_with_the_same_chance(table: Any, written: int, kept: int) -> None:
    """Eight standard deviations from the mean nothing is ever seen."""
    for i in range(written):
        table.set(b"key%d" % i, b"")
    for i in range(kept, written):
        table.delete(b"key%d" % i)
    found = Counter(table.random_key() for _ in range(150 * kept))
    assert found.keys() == {b"key%d" % i for i in range(kept)}
    assert all(abs(count - 150) < 8 * 150**0.5 for count in found.values())


def test_no_random_key_among_the_expired(table: Any, clock: Clock) -> None:
    assert table.random_key() is None
    for i in range(100):
        table.set(b"key%d" % i, b"", expiry=10)
    clock.pass_by(11)
    assert table.random_key() is None
    table.set(b"k", b"")
    assert {table.random_key() for _ in range(20)} == {b"k"}


def test_sweeps_leave_every_retained_state_as_it_was(backend: ModuleType, clock: Clock) -> None:
    """What a sweep keeps moves between chunks; contents, order and index stay those of the reference table."""
    own, model = backend.Table(3, backend.Ledger(clock)), reference.Table(3, reference.Ledger(clock))
    random_numbers, held = random.Random(5), set[bytes]()
    for step in range(6):
        for _ in range(3000):
            key, size = b"key%d" % random_numbers.randrange(4000), random_numbers.choice((5, 90, 300))
            for each in (own, model):
                each.active = True
                if size == 5 and key in held:
                    each.delete(key)
                else:
                    each.set(key, bytes(size))
            held ^= {key} if size == 5 or key not in held else set()
        # All up to there is on disk, the rest is not.
        checkpointed = own.high_seqno - 1000
        before = own.memory_bytes
        sweep(own, checkpointed * (step % 2), checkpointed * (step // 3), 2**32 - 1, 0)
        sweep(model, checkpointed * (step % 2), checkpointed * (step // 3), 2**32 - 1, 0)
        assert own.memory_bytes <= before
        assert own.read(0, 10**6, 10**6, 10**9, every=True)[0] == model.read(0, 10**6, 10**6, 10**9, every=True)[0]
        assert sorted(own.live_keys()) == sorted(model.live_keys())
        assert own.history_bytes == model.history_bytes
    stored, _ = model.records(0, 10**6, 10**9)
    for _ in range(2):
        sweep(own, 0, 0, 0, own.high_seqno // 2)
        sweep(model, 0, 0, 0, own.high_seqno // 2)
    assert own.evicted == model.evicted > 100
    whole = own.read(0, 10**6, 10**6, 10**9, every=True, block=stored)[0]
    assert whole == model.read(0, 10**6, 10**6, 10**9, every=True, block=stored)[0]
    own.truncate(own.high_seqno // 3)
    model.truncate(model.high_seqno // 3)
    assert sorted(own.live_keys()) == sorted(model.live_keys())
    assert own.records(own.high_seqno, 10**6, 10) == model.records(own.high_seqno, 10**6, 10)


@pytest.mark.parametrize("seed", slow_except(range(2), range(5)))
def test_reads_go_on_where_they_stopped_whatever_moved_meanwhile(backend: ModuleType, clock: Clock, seed: int) -> None:
    """A read may remember where it ran out of room: what is swept, cut off or written since must not mislead it."""
    own, model = backend.Table(3, backend.Ledger(clock)), reference.Table(3, reference.Ledger(clock))
    own.active = model.active = True
    chance = random.Random(seed)
    for _ in range(60):
        for _ in range(chance.choice((1, 100, 600))):
            key, value = b"key%d" % chance.randrange(900), bytes(chance.choice((5, 90, 300)))
            own.set(key, value)
            model.set(key, value)
        position, high = chance.choice((0, chance.randrange(own.high_seqno))), own.high_seqno
        for _ in range(chance.randrange(4)):
            limit, every = chance.choice((300, 5000, 50_000)), chance.random() < 0.3
            rows, done = own.read_columns(position, high, high, limit, every)
            assert rows == model.read_columns(position, done, high, 10**9, every)[0]
            frames, count, done, *of_last = own.read(position, high, high, limit, 7, every)
            whole = model.read(position, done, high, 10**9, 7, every)
            assert (frames, count, *of_last) == (*whole[:2], *whole[3:])
            position = done
            match chance.randrange(8):
                case 0:
                    sweep(own, high // 2, 0, 0, 0)
                    sweep(model, high // 2, 0, 0, 0)
                case 1:
                    back = chance.randrange(high // 2, high + 1)
                    own.truncate(back)
                    model.truncate(back)
                    position, high = min(position, back), back


def test_where_a_copy_is_whole(table: Any) -> None:
    table.set(b"a", b"")
    table.set(b"b", b"")
    assert table.consistent_seqno == 2
    table.active = False
    table.snapshot_start, table.snapshot_end = 1, 3
    assert table.consistent_seqno == 1
    table.snapshot_end = 2
    assert table.consistent_seqno == 2


@pytest.mark.parametrize("later_key_bytes", [3, 16, 250])
@pytest.mark.parametrize("later_value_bytes", slow_except((0, 9000), (0, 100, 9000)))
def test_batches_hold_all_rows_whatever_the_first_made_expect(
    backend: ModuleType, clock: Clock, later_key_bytes: int, later_value_bytes: int
) -> None:
    """Room for a batch is taken when its first rows are known; more, smaller or larger ones may follow."""
    own, model = backend.Table(3, backend.Ledger(clock)), reference.Table(3, reference.Ledger(clock))
    for each in (own, model):
        each.active = True
        for i in range(700):
            early = i < 70
            key = (b"%03d" % i).ljust(16 if early else later_key_bytes, b".")
            each.set(key, bytes(100 if early else later_value_bytes))
        for i in range(0, 700, 13):
            each.delete((b"%03d" % i).ljust(16 if i < 70 else later_key_bytes, b"."))
        each.lock((b"%03d" % 650).ljust(later_key_bytes, b"."), 1, clock.now + 9)
    high = own.high_seqno
    for limit in (1, 20_000, 10**6):
        for at, every in ((high, False), (high - 20, False), (high, True)):
            position, rows = 0, []
            while position < at:
                batch, position = own.read_columns(position, at, at, limit, every)
                batch.validate(full=True)
                rows += batch.to_pylist()
            assert rows == model.read_columns(0, at, at, 10**9, every)[0].to_pylist()


def test_vbuckets_that_grow_alike_do_not_all_want_memory_at_once(clock: Clock) -> None:
    """What is made ready ahead of the writers is little beside a thousand large chunks."""
    ledger = compiled.Ledger(clock)
    tables = [compiled.Table(number, ledger) for number in range(8)]
    for table in tables:
        table.active = True
    grown = [0] * 10_000
    for i, _ in enumerate(grown):
        for table in tables:
            before = table.memory_bytes
            table.set(b"key%d" % (i % 100), bytes(200))
            grown[i] += table.memory_bytes - before
    assert max(grown) < 8 * 256 * 1024
    for table in tables:
        table.discard()


def test_a_read_takes_no_more_memory_than_there_is_to_read(clock: Clock) -> None:
    """A large block is mapped again each time, and the kernel clears it: small vbuckets took four times as long."""
    table = compiled.Table(0, compiled.Ledger(clock))
    table.active = True
    for i in range(200):
        table.set(b"key%d" % i, bytes(128))
    table.read(0, 200, 200, 1 << 20)
    tracemalloc.start()
    try:
        frames, count, *_ = table.read(0, 200, 200, 1 << 20)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 200
    assert most < 2 * len(frames)


def test_small_tables_do_not_take_the_memory_of_a_large_one(clock: Clock) -> None:
    """What a large one gave back comes in large pieces, and what is taken counts against the quota."""
    ledger = compiled.Ledger(clock)
    large = compiled.Table(0, ledger)
    large.active = True
    for i in range(60_000):
        large.set(b"key%d" % i, bytes(200))
    taken = ledger.memory_bytes
    large.discard()
    assert ledger.memory_bytes == 0
    small = [compiled.Table(number, ledger) for number in range(1024)]
    for table in small:
        table.active = True
        table.set(b"key", b"value")
    assert ledger.memory_bytes <= 1024 * (16 * 1024 + 128)
    for table in small:
        table.discard()
    for i in range(60_000):
        large.set(b"key%d" % i, bytes(200))
    assert ledger.memory_bytes <= taken * 1.1
    large.discard()


MEMORY_SCRIPT = """
import sys
from upriver.engine.table import _table

def resident():
    with open("/proc/self/status") as file:
        return int(file.read().split("RssAnon:")[1].split()[0]) * 1024

limit, vbuckets = 96 << 20, int(sys.argv[1])
ledger = _table.Ledger(lambda: 1e9)
tables = [_table.Table(number, ledger) for number in range(vbuckets)]
for table in tables:
    table.active = True
before, value, written, worst = resident(), bytes(700), 0, 0
while written < 360_000:
    table = tables[written % vbuckets]
    table.set(b"key-%012d" % written, value)
    written += 1
    while ledger.memory_bytes > limit:
        for each in tables:
            position = 1
            while position:
                position, _ = each.sweep(position if position > 1 else 0, 0, 0, 0, each.high_seqno)
        assert ledger.memory_bytes < limit * 0.95, ledger.memory_bytes
    if written % 2000 == 0:
        worst = max(worst, resident() - before)
print(worst / limit)
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps what is freed")
@pytest.mark.parametrize("vbuckets", [1, 64])
def test_memory_taken_stays_close_to_memory_counted(vbuckets: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(vbuckets)], check=True, capture_output=True, text=True, timeout=120
    )
    assert 0.8 < float(done.stdout) < 1.15


@pytest.mark.parametrize("length", [0, 1, 30, 31, 100, 2**31, 2**32 - 1])
def test_a_damaged_block_is_an_error_and_never_read_beyond(backend: ModuleType, clock: Clock, length: int) -> None:
    table = backend.Table(3, backend.Ledger(clock))
    table.active = True
    for i in range(4):
        table.set(b"key%d" % i, b"value" * 9)
    stored = bytearray(table.records(0, 4, 10**6)[0])
    sweep(table, 0, 0, 0, 4)
    assert table.evicted == 4
    second = len(stored) // 4
    struct.pack_into(">I", stored, second + PREFIX.size + 8, length)
    damaged, cut = bytes(stored), bytes(stored[: second - 8])
    with pytest.raises(CorruptData):
        backend.stored_value(damaged, 4)
    with pytest.raises(CorruptData):
        backend.stored_value(cut, 1)
    with pytest.raises(CorruptData):
        table.retain(damaged, 0)
    with pytest.raises(CorruptData):
        table.read(0, 4, 4, 10**6, block=damaged)
    with pytest.raises(CorruptData):
        table.read_columns(0, 4, 4, 10**6, block=damaged)


def test_locks_end_without_anybody_asking(table: Any, clock: Clock) -> None:
    table.set(b"k", b"v")
    table.locks[b"k"] = (5, clock.now + 10)
    table.end_locks()
    assert b"k" in table.locks
    clock.pass_by(11)
    table.end_locks()
    assert not table.locks


def test_the_smallest_keys_while_the_collector_runs(backend: ModuleType, clock: Clock) -> None:
    """What it ends may read other tables, or this one, at any point at which it runs."""
    tables = [backend.Table(number, backend.Ledger(clock)) for number in range(2)]
    for table, letter in zip(tables, (b"a", b"b"), strict=True):
        table.active = True
        for i in range(50):
            table.set(b"%s%03d" % (letter, i), b"v" * 50)

    def disturb(_: str, __: dict[str, int]) -> None:
        tables[1].smallest_keys(b"", 50)

    thresholds = gc.get_threshold()
    gc.callbacks.append(disturb)
    gc.set_threshold(1)
    try:
        found = [tables[0].smallest_keys(b"", 40) for _ in range(200)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(disturb)
    assert found == [[b"a%03d" % i for i in range(40)]] * 200


def test_a_table_that_the_collector_frees_writes_nowhere(clock: Clock) -> None:
    """It may free a table that is building a larger index, and first replaces its ledger by None."""

    def around_none() -> bytes:
        head = object.__basicsize__
        return ctypes.string_at(id(None) + head, compiled.Ledger.__basicsize__ - head)

    table = compiled.Table(3, compiled.Ledger(clock))
    table.active = True
    table.fetch = lambda seqno, table=table: table.find(b"%d" % seqno).value
    for number in range(1540):
        table.set(b"%d" % number, b"")
    gc.collect()
    before = around_none()
    del table
    assert gc.collect()
    assert around_none() == before


def test_a_lock_is_that_of_the_newest_version_also_where_values_are_read_back(table: Any, clock: Clock) -> None:
    for key, value in ((b"k", b"old"), (b"k", b"new"), (b"x", b"y")):
        table.store(Event.MUTATION, key, value)
    stored, _ = table.records(0, 3, 1 << 20)
    table.persisted_seqno = table.checkpointed_seqno = 3
    table.lock(b"k", table.find(b"k").cas, clock() + 10)
    table.sweep(0, 0, 0, 0, 3)
    assert table.evicted
    batch, _ = table.read_columns(0, 3, 3, 1 << 20, True, block=stored)
    assert batch.column("lock_time").to_pylist() == [0, 10, 0]


def test_a_batch_has_no_more_room_than_its_range_can_fill(clock: Clock) -> None:
    """A caller that keeps batches keeps their memory; all columns of a batch share one block of it."""
    table = compiled.Table(0, compiled.Ledger(clock))
    table.active = True
    for number in range(5000):
        table.set(b"key%05d" % number, b"value")
    batch, _ = table.read_columns(1000, 1070, 5000, 1 << 20)
    assert batch.num_rows == 70
    first, last = batch.column("vbucket").buffers()[1], batch.column("value").buffers()[2]
    assert last.address - first.address < 2 * batch.nbytes


def test_a_batch_looks_at_what_was_superseded_before_its_rows_once(clock: Clock) -> None:
    """A few keys that are written over and over leave all their rows at the end: of more than the first 64 too."""
    tables: list[Any] = []
    costs: tuple[list[float], list[float]] = ([], [])
    for keys in (60, 100):
        tables.append(table := compiled.Table(0, compiled.Ledger(clock)))
        table.active = True
        for number in range(100_000):
            table.set(b"%d" % (number % keys), b"")
    for _ in range(20):  # of which the fastest counts: by turns, so that others on the machine slow down both
        for table, cost in zip(tables, costs, strict=True):
            began = time.thread_time()
            table.read_columns(0, 100_000, 100_000, 10**6)
            cost.append(time.thread_time() - began)
    assert min(costs[1]) < 1.5 * min(costs[0])


#: Reads batches of 300 kB, of which the last few are held, with a C library that returns such blocks to the system at
#: once. Prints how many new pages two hundred of them needed, and how many bytes stay of a hundred that were held.
BATCHES = """
import resource, time
from upriver.engine.table._table import Ledger, Table

def read(held):
    batches = []
    for _ in range(200):
        batches.append(table.read_columns(0, 2000, 2000, 10**9)[0])
        del batches[:-held]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

table = Table(0, Ledger(time.time))
table.active = True
for number in range(2000):
    table.set(b"%d" % number, bytes(100))
read(5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
read(5)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = resident()
read(100)
print(faults, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer shall see what is given back")
def test_batches_lie_in_memory_that_was_used_before_but_little_is_kept_for_them() -> None:
    at_once = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", BATCHES]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, env=os.environ | at_once).stdout
    faults, kept = map(int, output.split())
    assert faults < 200  # else 200 times 60 of them
    assert kept < 10_000_000


def test_batches_that_are_held_stay_as_they_are_while_threads_give_others_back(clock: Clock) -> None:
    table = compiled.Table(0, compiled.Ledger(clock))
    table.active = True
    for number in range(3000):
        table.set(b"%d" % number, bytes(number % 300))
    wanted = {end: table.read_columns(0, end, end, 10**9)[0].to_pylist() for end in range(1000, 3001, 250)}

    def give_back() -> None:
        while (batch := returned.get()) is not None:
            del batch

    returned: queue.SimpleQueue[pa.RecordBatch | None] = queue.SimpleQueue()
    threads = [threading.Thread(target=give_back) for _ in range(3)]
    for thread in threads:
        thread.start()
    chance, held = random.Random(1), []
    for _ in range(400):
        end = chance.choice(list(wanted))
        held.append((end, table.read_columns(0, end, end, 10**9)[0]))
        if len(held) > 20:
            returned.put(held.pop(chance.randrange(20))[1])
    for _ in threads:
        returned.put(None)
    for thread in threads:
        thread.join()
    for end, batch in held:
        assert batch.to_pylist() == wanted[end]


def test_a_get_takes_no_keyword(table: Any) -> None:
    """The compiled one is called without the detour that they take."""
    with pytest.raises(TypeError):
        table.get(key=b"k")
