"""The engine against plain dictionaries: every operation, stop and duty in random order."""

import copy
import os
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.support.depth import by_depth, slow_except
from tests.support.interrupted_storage import InterruptedStorage
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Cursor, CursorEnd, Options, Retention, StoredItem, Vbucket
from upriver.errors import KeyExists, KeyNotFound, NotANumber, NotStored, OutOfOrder, StatusError
from upriver.model import Change, Event, FailoverEntry, FailoverLog, VbucketState, change_batch, changes_in
from upriver.model.position import NO_END
from upriver.model.record import PREFIX, Record, pack

pytestmark = pytest.mark.usefixtures("small_blocks")

RETENTION = Retention(history_s=20, history_bytes=100, tombstone_s=40)
#: Most happens to one of them, so that its history gets long.
VBUCKETS = st.sampled_from([0, 0, 0, 1])
KEYS = st.sampled_from([b"a", b"b", b"c", b"long" * 20])
VALUES = st.sampled_from([b"", b"1", b"41", b"text", b"x" * 300])
IDLE = st.sampled_from([VbucketState.REPLICA, VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD])
EXPIRIES = st.sampled_from([0, 0, 0, 5, 30])
#: What a producer may send: event, value, expiry and lock time.
KINDS = [
    (Event.MUTATION, b"41", 0, 0),
    (Event.MUTATION, b"x" * 300, 0, 0),
    (Event.MUTATION, b"", 5, 0),
    (Event.MUTATION, b"text", 0, 5),
    (Event.DELETION, b"", 0, 0),
    (Event.EXPIRATION, b"", 0, 0),
]
#: Such a change, of which key, and how far behind the last one. To draw all at once is cheaper.
RECEIVED = st.sampled_from([*product(KINDS, [b"a", b"b", b"c"], [1, 2, 3])])
RUNS = st.lists(RECEIVED, min_size=1, max_size=3)
MEANWHILE = st.sampled_from(
    [
        *("nothing", "set", "delete", "receive", "announce", "advance", "roll back", "flush", "promote"),
        *("delete vbucket", "create vbucket again", "checkpoint", "compact"),
    ]
)
#: A commit fails, or fails though it took effect; or the world ends before or behind it.
FAILURES = st.sampled_from(["", "", "", "commit", "behind the commit", "before", "after"])


@dataclass
class Version:
    """One change, as the model remembers it."""

    seqno: int
    key: bytes
    event: Event
    value: bytes
    rev_seqno: int
    flags: int
    expiry: int
    time: int


@dataclass
class Model:
    """One vbucket made of a list and a few numbers."""

    state: VbucketState = VbucketState.ACTIVE
    history: list[Version] = field(default_factory=list)
    high: int = 0
    start: int = 0
    end: int = 0
    consistent: set[int] = field(default_factory=lambda: {0})
    log: list[tuple[int, int]] = field(default_factory=list)
    deleted_rev: int = 0
    #: A copy that was filled from nothing never heard of the deletions up to here.
    filled: int = 0
    #: key -> (the owner's CAS, when it ends)
    locks: dict[bytes, tuple[int, float]] = field(default_factory=dict)

    @property
    def consistent_seqno(self) -> int:
        if self.state is VbucketState.ACTIVE or self.high >= self.end:
            return self.high
        return self.start

    def newest(self, at: int | None = None) -> dict[bytes, Version]:
        return {v.key: v for v in self.history if at is None or v.seqno <= at}

    def alive(self, key: bytes) -> Version | None:
        version = self.newest().get(key)
        return version if version is not None and version.event is Event.MUTATION else None

    def write(
        self,
        key: bytes,
        event: Event,
        value: bytes,
        flags: int,
        expiry: int,
        now: float,
        seqno: int = 0,
        rev: int = 0,
        forgotten: bool = False,
    ) -> None:
        """``forgotten``: the tombstone that the key had may have been purged, and its revision with it."""
        before = self.newest().get(key)
        self.high = seqno or self.high + 1
        if self.state is VbucketState.ACTIVE:
            self.start = self.end = self.high
            self.consistent.add(self.high)
        rev = rev or 1 + (before.rev_seqno if before and not forgotten else self.deleted_rev)
        if event is not Event.MUTATION:
            self.deleted_rev = max(self.deleted_rev, rev)
        self.locks.pop(key, None)
        self.history.append(Version(self.high, key, event, value, rev, flags, expiry, int(now)))

    def announced(self, start: int, end: int, floor: int) -> bool:
        """After a marker, which is refused if it ends before what is here; states below ``floor`` are gone.

        The kept start is not behind the last consistent state, and is one itself. A snapshot of which something has
        come must still be completed, so its end is not moved forward.
        """
        consistent = self.consistent_seqno
        kept = end if consistent == self.high else max(end, self.end)
        if start > end or kept < self.high:
            return False
        if self.high == 0 and end < NO_END:  # without an end it is known when it is there
            self.filled = end
        if start < consistent:
            consistent = max((s for s in self.consistent if floor <= s <= start), default=0)
        self.start, self.end = consistent, kept
        return True

    def arrived(self) -> None:
        """A copy that receives its history is consistent at the end of a snapshot."""
        if self.high == self.end:
            self.consistent.add(self.high)

    def clear(self) -> None:
        self.truncate(0)
        self.filled = 0

    def truncate(self, seqno: int) -> None:
        self.history = [v for v in self.history if v.seqno <= seqno]
        self.consistent = {s for s in self.consistent if s <= seqno}
        self.high = self.start = self.end = seqno
        self.locks.clear()


class Stop(BaseException):
    """The world ends here."""


@dataclass
class Reading:
    """An open cursor that is read a piece at a time, and what it has shown so far."""

    number: int
    cursor: Cursor
    held: dict[bytes, tuple[int, bytes]]


class CopyMachine(RuleBasedStateMachine):
    """Drives a bucket on disk and a model of it side by side: writing, receiving, roles, the disk and readers."""

    def __init__(self) -> None:
        super().__init__()
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.path = tempfile.mkdtemp(prefix="upriver-machine-", dir=root)
        self.clock = Clock()
        self.models: dict[int, Model] = {}
        self.cursors: list[Reading] = []
        self.bucket = self.open()
        for number in range(2):
            self.pair(number)
        self.bucket.flusher.step()
        self.on_disk = copy.deepcopy(self.models)

    def open(self) -> Bucket:
        self.cursors = []
        self.storage = InterruptedStorage(self.path)
        return Bucket(self.storage, vbuckets=4, clock=self.clock, retention=RETENTION, slice_bytes=500)

    def teardown(self) -> None:
        self.bucket.abandon()
        shutil.rmtree(self.path)

    @staticmethod
    def log(vbucket: Vbucket) -> list[tuple[int, int]]:
        return [(entry.vbucket_uuid, entry.seqno) for entry in vbucket.failover_log]

    def pair(self, number: int) -> tuple[Vbucket, Model]:
        """The vbucket and its model; one that was deleted is created again."""
        if number not in self.models:
            self.models[number] = Model(log=self.log(self.bucket.create_vbucket(number)))
        return self.bucket.vbucket(number), self.models[number]

    def forgotten(self, vbucket: Vbucket, key: bytes) -> bool:
        """Whether the engine knows nothing of the key: at most a tombstone of it, and that was purged."""
        if vbucket.table.find(key) is not None:
            return False
        version = self.models[vbucket.number].newest().get(key)
        if version is not None:
            assert version.event is not Event.MUTATION
            assert version.seqno <= vbucket.purge_seqno
        return True

    def locked(self, model: Model, key: bytes, call: Any, *arguments: Any) -> bool:
        """Only its owner changes a locked item; returns whether it is locked."""
        if key in model.locks and model.locks[key][1] <= self.clock.now:
            del model.locks[key]
        if key not in model.locks:
            return False
        with pytest.raises(StatusError):
            call(*arguments)
        return True

    def expire(self, model: Model, key: bytes) -> None:
        """A command that finds an expired item turns it into an expiration."""
        version = model.alive(key)
        if version is not None and 0 < version.expiry <= self.clock.now:
            model.write(key, Event.EXPIRATION, b"", 0, 0, self.clock.now)

    def absolute(self, expiry: int) -> int:
        return expiry + int(self.clock.now) if expiry else 0

    def refused(self, vbucket: Vbucket, model: Model, *calls: Any) -> bool:
        """A vbucket that is not active refuses; says whether it did."""
        if model.state is VbucketState.ACTIVE:
            return False
        for call, *arguments in calls:
            with pytest.raises(StatusError):
                call(*arguments)
        return True

    # Clients.

    @rule(number=VBUCKETS, key=KEYS, value=VALUES, flags=st.integers(0, 3), expiry=EXPIRIES)
    def set(self, number: int, key: bytes, value: bytes, flags: int, expiry: int) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.set, key, value)):
            return
        self.expire(model, key)
        if self.locked(model, key, vbucket.set, key, value):
            return
        forgotten = self.forgotten(vbucket, key)
        vbucket.set(key, value, flags, expiry)
        model.write(key, Event.MUTATION, value, flags, self.absolute(expiry), self.clock.now, forgotten=forgotten)

    @rule(number=VBUCKETS, key=KEYS)
    def delete(self, number: int, key: bytes) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.delete, key)):
            return
        self.expire(model, key)
        if self.locked(model, key, vbucket.delete, key):
            return
        if model.alive(key) is None:
            with pytest.raises(KeyNotFound):
                vbucket.delete(key)
        else:
            vbucket.delete(key)
            model.write(key, Event.DELETION, b"", 0, 0, self.clock.now)

    # Roles.

    @rule(number=VBUCKETS, how=st.sampled_from(["flush", "delete", "read and delete"]))
    def empty(self, number: int, how: str) -> None:
        if how == "flush":
            self.flush(number)
        else:
            self.delete_vbucket(number, read=how.startswith("read"))

    def delete_vbucket(self, number: int, read: bool = False) -> None:
        if number in self.models:
            if read:  # a node deletes only what was made dead before, and between the two others may begin to read it
                self.demote(number, VbucketState.DEAD)
                self.open_cursor(number, fresh=True, persisted=False)
            self.bucket.delete_vbucket(number)
            del self.models[number]
            # Also of one that was dead before: what is missing must not look as if it was never there.
            assert all(reading.cursor.ended for reading in self.cursors if reading.number == number)

    def create_again(self, number: int) -> None:
        self.delete_vbucket(number)
        self.pair(number)

    @rule(number=VBUCKETS, state=IDLE)
    def demote(self, number: int, state: VbucketState) -> None:
        vbucket, model = self.pair(number)
        vbucket.set_state(state)
        model.state = state

    def receiving(self, number: int) -> tuple[Vbucket, Model]:
        """The same as ``pair``, in whatever state but active: to the engine all others are alike."""
        if self.pair(number)[1].state is VbucketState.ACTIVE:
            self.demote(number, VbucketState.REPLICA)
        return self.pair(number)

    @rule(number=VBUCKETS)
    def promote(self, number: int) -> None:
        vbucket, model = self.pair(number)
        if model.state is not VbucketState.ACTIVE:
            branch = model.consistent_seqno
            vbucket.set_state(VbucketState.ACTIVE)
            model.log = [(self.log(vbucket)[0][0], branch), *model.log][:25]
            model.state = VbucketState.ACTIVE
            model.start = model.end = model.high
            model.consistent.add(model.high)
            model.filled = min(model.filled, model.high)

    @rule(number=VBUCKETS, begins=st.integers(-6, 1), ahead=st.sampled_from([-1, 0, 1, 2, 2, 4, 4, NO_END]))
    def announce(self, number: int, begins: int, ahead: int) -> None:
        """A marker, also before the last snapshot is complete, with whatever start a producer may print.

        That is where the copy stands or, as deployed servers have it, the first seqno that they send; or far before,
        where the producer's own snapshot began.
        """
        vbucket, model = self.receiving(number)
        start, end = max(0, model.high + begins), min(NO_END, model.high + ahead)
        marker = (start, end) if end < NO_END else (start, end, vbucket.purge_seqno)
        if model.announced(start, end, vbucket.floor_seqno):
            vbucket.begin_snapshot(*marker)
        else:
            with pytest.raises(OutOfOrder):
                vbucket.begin_snapshot(*marker)

    # Three rules and not one, so that histories grow faster than they are lost.

    @rule(number=VBUCKETS, changes=RUNS, more=st.integers(0, 2))
    def receive(self, number: int, changes: list[tuple[Any, ...]], more: int) -> None:
        self.receive_run(number, changes, more, lambda vbucket, sent: deque(map(vbucket.apply, sent), 0))

    @rule(number=VBUCKETS, changes=RUNS, more=st.integers(0, 2))
    def receive_frames(self, number: int, changes: list[tuple[Any, ...]], more: int) -> None:
        def apply(vbucket: Vbucket, sent: list[Change]) -> None:
            vbucket.apply_frames(b"".join(pack(Record(change=change))[PREFIX.size :] for change in sent))

        self.receive_run(number, changes, more, apply)

    @rule(number=VBUCKETS, changes=RUNS, more=st.integers(0, 2))
    def receive_rows(self, number: int, changes: list[tuple[Any, ...]], more: int) -> None:
        self.receive_run(number, changes, more, lambda vbucket, sent: vbucket.apply_batch(change_batch(sent)))

    def receive_run(
        self, number: int, changes: list[tuple[Any, ...]], more: int, apply: Callable[[Vbucket, list[Change]], object]
    ) -> None:
        """Some changes of the snapshot under way, or of a new one that may go on behind them."""
        vbucket, model = self.receiving(number)
        if model.high == model.end:
            end = model.high + sum(gap for _, _, gap in changes) + more
            vbucket.begin_snapshot(model.high, end)
            model.announced(model.high, end, vbucket.floor_seqno)
        sent, refused = [], False
        for (event, value, expiry, lock_time), key, gap in changes:
            refused = model.high == model.end
            seqno = model.high + 1 if refused else min(model.high + gap, model.end)
            before = model.newest().get(key)
            rev = 1 + (before.rev_seqno if before else model.deleted_rev)
            flags, expiry = int(event is Event.MUTATION), self.absolute(expiry)
            fields = {"flags": flags, "expiry": expiry, "lock_time": lock_time, "key": key, "value": value}
            sent.append(Change(vbucket=number, event=event, seqno=seqno, rev_seqno=rev, cas=9, **fields))
            if refused:
                break
            model.write(key, event, value, flags, expiry, self.clock.now, seqno, rev)
            if lock_time:
                model.locks[key] = (9, self.clock.now + lock_time)
            model.arrived()
        if refused:
            with pytest.raises(OutOfOrder):
                apply(vbucket, sent)
        else:
            apply(vbucket, sent)

    @rule(number=VBUCKETS, gap=st.integers(0, 4))
    def advance(self, number: int, gap: int) -> None:
        """Nothing more comes up to this seqno, of the current snapshot or of a new one."""
        vbucket, model = self.receiving(number)
        if model.high == model.end:
            vbucket.begin_snapshot(model.high, model.high + 2)
            model.announced(model.high, model.high + 2, vbucket.floor_seqno)
        seqno = model.high + gap
        if model.high < seqno <= model.end:
            vbucket.advance(seqno)
            model.high = seqno
            model.arrived()
        else:
            with pytest.raises(OutOfOrder):
                vbucket.advance(seqno)

    @precondition(lambda self: any(model.end == NO_END for model in self.models.values()))
    @rule()
    def complete(self) -> None:
        """A producer whose markers tell no end says that here is one."""
        for number, model in self.models.items():
            if model.end == NO_END:
                if model.start == 0:
                    model.filled = max(model.filled, model.high)
                self.bucket.vbucket(number).complete_snapshot()
                model.end = model.high
                model.arrived()

    @rule(number=VBUCKETS, back=st.sampled_from([0, 1, 1, 2, 2, 3, 5, 8]))
    def roll_back(self, number: int, back: int) -> None:
        vbucket, model = self.receiving(number)
        to = max(0, model.high - back)
        if to == model.high == model.consistent_seqno:
            assert vbucket.roll_back(to) == to
            return
        expected = max((s for s in model.consistent if s <= to), default=0)
        if expected < vbucket.floor_seqno:
            expected = 0
        assert vbucket.roll_back(to) == expected
        if expected == 0:
            self.cleared(vbucket, model)
        else:
            model.truncate(expected)

    def cleared(self, vbucket: Vbucket, model: Model) -> None:
        """Revisions go on above all that there were, also above those that were undone if the engine remembers them."""
        seen = max((version.rev_seqno for version in model.newest().values()), default=0)
        assert vbucket.table.deleted_rev_seqno >= max(seen, model.deleted_rev)
        model.deleted_rev = vbucket.table.deleted_rev_seqno
        model.clear()

    @rule(number=VBUCKETS, uuid=st.integers(1, 2**48 - 1))
    def take_over_a_log(self, number: int, uuid: int) -> None:
        vbucket, model = self.pair(number)
        if model.state is not VbucketState.ACTIVE:
            if model.state is VbucketState.PENDING and uuid != model.log[0][0]:
                model.state = VbucketState.REPLICA
            model.log = [(uuid, model.consistent_seqno), *model.log][:25]
            vbucket.replace_failover_log(FailoverLog(tuple(FailoverEntry(*entry) for entry in model.log)))

    def flush(self, number: int) -> None:
        """Of its own, or that of the producer, whose log follows later."""
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.flush,)):
            vbucket.clear()
            self.cleared(vbucket, model)
            return
        vbucket.flush()
        self.cleared(vbucket, model)
        model.log = [(self.log(vbucket)[0][0], 0)]

    # The disk and the clock.

    @rule()
    def persist(self) -> None:
        self.bucket.flusher.step()
        self.on_disk = copy.deepcopy(self.models)

    @rule()
    def checkpoint(self) -> None:
        self.bucket.flusher.request_checkpoint()
        self.bucket.flusher.drain()
        self.on_disk = copy.deepcopy(self.models)

    @rule()
    def restart(self) -> None:
        self.bucket.close()
        self.bucket = self.open()
        for model in self.models.values():
            model.locks.clear()
        self.on_disk = copy.deepcopy(self.models)

    @rule(persisted=st.sampled_from([True, True, False]))
    def crash(self, persisted: bool = False) -> None:
        if persisted:
            self.persist()
        self.bucket.abandon()
        self.bucket = self.open()
        self.models = copy.deepcopy(self.on_disk)
        for number, model in self.models.items():
            model.locks.clear()
            if model.state is VbucketState.ACTIVE:
                model.log = [(self.log(self.bucket.vbucket(number))[0][0], model.high), *model.log][:25]
        self.on_disk = copy.deepcopy(self.models)

    @rule(number=VBUCKETS, key=KEYS, what=MEANWHILE, fails=FAILURES, restarts=st.booleans())
    def commit_in_flight(self, number: int, key: bytes, what: str, fails: str, restarts: bool) -> None:
        """Something happens between gathering and committing; then the commit fails, or the process is killed."""
        gathered: list[dict[int, Model]] = []

        def meanwhile() -> None:
            gathered.append(copy.deepcopy(self.models))
            happenings: dict[str, Callable[[], object]] = {
                "nothing": lambda: None,
                "set": lambda: self.set(number, key, b"meanwhile", 0, 0),
                "delete": lambda: self.delete(number, key),
                "receive": lambda: self.receive_frames(number, [(KINDS[0], key, 1)], 1),
                "announce": lambda: self.announce(number, -2, 3),
                "advance": lambda: self.advance(number, 1),
                "roll back": lambda: self.roll_back(number, 2),
                "flush": lambda: self.flush(number),
                "promote": lambda: self.promote(number),
                "delete vbucket": lambda: self.delete_vbucket(number),
                "create vbucket again": lambda: self.create_again(number),
                "checkpoint": self.bucket.flusher.request_checkpoint,
                "compact": lambda: self.drop_the_past("compact", late=False),
            }
            happenings[what]()
            if fails == "commit":
                raise OSError("no space left")
            if fails == "before":
                raise Stop

        def end() -> None:
            if fails == "behind the commit":
                raise OSError("no space left")
            if fails == "after":
                raise Stop

        self.storage.before_commit, self.storage.after_commit = meanwhile, end
        try:
            self.bucket.flusher.step()
        except (OSError, Stop):
            # Until a write succeeds there are no others; here the next one does, with everything in it.
            if "commit" in fails:
                assert self.bucket.ledger.refusal
                if restarts:
                    self.restart()
                else:
                    self.persist()
                return
        if gathered and fails != "before":
            self.on_disk = gathered[0]
        if gathered and fails:
            self.crash()
        self.storage.before_commit = self.storage.after_commit = None

    # Readers.

    @rule(number=VBUCKETS, fresh=st.booleans(), persisted=st.booleans())
    def open_cursor(self, number: int, fresh: bool, persisted: bool) -> None:
        vbucket, model = self.pair(number)
        if len(self.cursors) >= 3 or not (vbucket.streamable or model.state is VbucketState.ACTIVE):
            return
        start = 0 if fresh else vbucket.persisted_seqno
        start = start if start in model.consistent and start >= vbucket.purge_seqno else 0
        cursor = vbucket.open_cursor(f"cursor-{secrets.token_hex(4)}", start, options=Options(persisted_only=persisted))
        if cursor.ended is None:
            self.cursors.append(Reading(number, cursor, self.living(model, start)))

    @staticmethod
    def living(model: Model, at: int) -> dict[bytes, tuple[int, bytes]]:
        newest = model.newest(at).values()
        return {v.key: (v.seqno, v.value) for v in newest if v.event is Event.MUTATION}

    @rule(which=st.integers(0, 2), pieces=st.integers(1, 3))
    def read_a_piece(self, which: int, pieces: int) -> None:
        """At the end of each snapshot it has shown exactly the state there, whatever happened since it began."""
        if which >= len(self.cursors):
            return
        reading = self.cursors[which]
        cursor = reading.cursor
        for _ in range(pieces):
            if cursor.ended is not None:
                assert cursor.ended is not CursorEnd.OK
                self.cursors.remove(reading)
                return
            snapshot = cursor.next_snapshot()
            if snapshot is None:
                return
            for change in changes_in(cursor.read_columns(1)):
                if change.event is Event.MUTATION:
                    reading.held[change.key] = (change.seqno, change.value)
                else:
                    reading.held.pop(change.key, None)
            if cursor.snapshot is None:
                assert reading.held == self.living(self.models[reading.number], snapshot.end)
                assert snapshot.end in self.models[reading.number].consistent

    @rule(seconds=st.sampled_from([1, 10, 50]))
    def pass_time(self, seconds: int) -> None:
        self.clock.pass_by(seconds)

    @rule()
    def page_expired(self) -> None:
        for _ in self.bucket.maintenance.expire():
            pass
        for number, model in self.models.items():
            due = [
                v.key for v in model.newest().values() if v.event is Event.MUTATION and 0 < v.expiry <= self.clock.now
            ]
            if model.state is VbucketState.ACTIVE:
                # The pager goes by seqno.
                for key in sorted(due, key=lambda k: model.newest()[k].seqno):
                    self.expire(model, key)
            assert self.bucket.vbucket(number).high_seqno == model.high

    @rule(duty=st.sampled_from(["purge", "compact"]), late=st.booleans())
    def drop_the_past(self, duty: str, late: bool) -> None:
        if late:  # what has gone by is old, and in blocks
            self.pass_time(50)
            self.checkpoint()
        for _ in getattr(self.bucket.maintenance, duty)():
            pass
        for vbucket in self.bucket:
            self.bucket.flusher.request_compaction(vbucket)

    @rule()
    def sweep(self) -> None:
        """Whatever was dropped before, and came back by a restart or was spared for a cursor, goes."""
        for _ in self.bucket.maintenance.sweep():
            pass
        for vbucket in self.bucket:
            if not vbucket.cursors:
                later: dict[bytes, int] = {}
                high = vbucket.high_seqno
                versions, _ = vbucket.table.read_columns(0, high, high, 10**9, every=True, keys_only=True)
                for version in reversed(versions.to_pylist()):
                    assert later.get(version["key"], high + 1) > vbucket.floor_seqno
                    later[version["key"]] = version["seqno"]

    @rule()
    def evict(self) -> None:
        for vbucket in self.bucket:
            position = 0
            while True:
                to = vbucket.table.checkpointed_seqno
                position, _ = vbucket.table.sweep(position, 0, 0, 0, to)
                if not position:
                    break

    # What must hold after every step.

    @invariant()
    def agree(self) -> None:
        for number, model in self.models.items():
            vbucket = self.bucket.vbucket(number)
            assert vbucket.state is model.state
            assert vbucket.high_seqno == model.high
            assert vbucket.consistent_seqno == model.consistent_seqno
            assert self.log(vbucket) == model.log
            assert vbucket.purge_seqno >= model.filled
            assert vbucket.purge_seqno <= model.high or model.state is not VbucketState.ACTIVE
            self.agree_on_state(vbucket, model, vbucket.consistent_seqno)
            if vbucket.consistent_seqno > vbucket.floor_seqno:
                earlier = vbucket.consistent_at_or_below(vbucket.consistent_seqno - 1)
                if earlier:
                    assert earlier in model.consistent
                    self.agree_on_state(vbucket, model, earlier)
            self.agree_on_items(vbucket, model)

    def agree_on_state(self, vbucket: Vbucket, model: Model, at: int) -> None:
        """A snapshot up to ``at`` holds what was current then."""
        expected = model.newest(at)
        found = {}
        if at:
            for snapshot in vbucket.changes(0, at, Options(exact_end=True)):
                assert (snapshot.start, snapshot.end) == (0, at)
                for change in snapshot:
                    assert change.key not in found
                    found[change.key] = change
        for key, version in expected.items():
            if key not in found:
                assert version.event is not Event.MUTATION, f"{key!r} is missing"
                assert version.seqno <= vbucket.purge_seqno
                continue
            change = found.pop(key)
            assert (change.seqno, change.event, change.value) == (version.seqno, version.event, version.value)
            assert change.rev_seqno == version.rev_seqno
            if version.event is Event.MUTATION:
                assert (change.flags, change.expiry) == (version.flags, version.expiry)
        assert not found

    def agree_on_items(self, vbucket: Vbucket, model: Model) -> None:
        newest = model.newest()
        living = {key for key, v in newest.items() if v.event is Event.MUTATION}
        table = vbucket.table
        assert table.items == len(living)
        assert table.tombstones <= len(newest) - len(living)
        assert set(table.live_keys()) == {key for key in living if not 0 < newest[key].expiry <= self.clock.now}

    @precondition(lambda self: self.bucket.ledger.pending_bytes == 0)
    @invariant()
    def sums_agree(self) -> None:
        statistics, parts = self.bucket.statistics(), self.bucket.vbucket_statistics()
        assert statistics.history_bytes == sum(part.history_bytes for part in parts)
        assert statistics.memory_bytes == sum(part.memory_bytes for part in parts)
        assert statistics.queue_bytes == sum(part.queue_bytes for part in parts) == 0


class EngineMachine(CopyMachine):
    """The same with everything that clients do, so that each of the rest comes less often."""

    @rule(number=VBUCKETS, key=KEYS, value=VALUES)
    def set_with_cas(self, number: int, key: bytes, value: bytes) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.get, key)):
            return
        self.expire(model, key)
        version = model.alive(key)
        if version is None:
            with pytest.raises(KeyNotFound):
                vbucket.set(key, value, cas=1)
            return
        cas = vbucket.get(key).cas
        if self.locked(model, key, vbucket.set, key, value, 0, 0, cas):
            cas = model.locks[key][0]
        with pytest.raises(StatusError):
            vbucket.set(key, value, cas=cas + 1)
        vbucket.set(key, value, cas=cas)
        model.write(key, Event.MUTATION, value, 0, 0, self.clock.now)

    @rule(number=VBUCKETS, key=KEYS)
    def get(self, number: int, key: bytes) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.get, key)):
            return
        self.expire(model, key)
        version = model.alive(key)
        if version is None:
            with pytest.raises(KeyNotFound):
                vbucket.get(key)
        else:
            item = vbucket.get(key)
            assert (item.value, item.flags, item.seqno) == (version.value, version.flags, version.seqno)

    @rule(number=VBUCKETS, key=KEYS, value=VALUES, kind=st.sampled_from(["add", "replace", "append", "prepend"]))
    def store(self, number: int, key: bytes, value: bytes, kind: str) -> None:
        vbucket, model = self.pair(number)
        operation = getattr(vbucket, kind)
        if self.refused(vbucket, model, (operation, key, value)):
            return
        self.expire(model, key)
        version = model.alive(key)
        if (version is None) != (kind == "add"):
            with pytest.raises((KeyExists, KeyNotFound, NotStored)):
                operation(key, value)
            return
        if self.locked(model, key, operation, key, value):
            return
        forgotten = self.forgotten(vbucket, key)
        operation(key, value)
        flags, expiry = 0, 0
        if version is not None and kind != "replace":
            flags, expiry = version.flags, version.expiry
            value = version.value + value if kind == "append" else value + version.value
        model.write(key, Event.MUTATION, value, flags, expiry, self.clock.now, forgotten=forgotten)

    @rule(number=VBUCKETS, key=KEYS, delta=st.integers(0, 5), up=st.booleans())
    def count(self, number: int, key: bytes, delta: int, up: bool) -> None:
        vbucket, model = self.pair(number)
        operation = vbucket.increment if up else vbucket.decrement
        if self.refused(vbucket, model, (operation, key)):
            return
        self.expire(model, key)
        version = model.alive(key)
        if version is None:
            forgotten = self.forgotten(vbucket, key)
            assert operation(key, delta, 7)[0] == 7
            model.write(key, Event.MUTATION, b"7", 0, 0, self.clock.now, forgotten=forgotten)
        elif self.locked(model, key, operation, key, delta):
            return
        elif not version.value.isdigit():
            with pytest.raises(NotANumber):
                operation(key, delta)
        else:
            result = max(0, int(version.value) + (delta if up else -delta))
            assert operation(key, delta)[0] == result
            model.write(key, Event.MUTATION, b"%d" % result, version.flags, version.expiry, self.clock.now)

    @rule(number=VBUCKETS, key=KEYS, expiry=EXPIRIES)
    def touch(self, number: int, key: bytes, expiry: int) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.touch, key, expiry)):
            return
        self.expire(model, key)
        version = model.alive(key)
        if version is None:
            with pytest.raises(KeyNotFound):
                vbucket.touch(key, expiry)
        elif not self.locked(model, key, vbucket.touch, key, expiry):
            vbucket.touch(key, expiry)
            model.write(key, Event.MUTATION, version.value, version.flags, self.absolute(expiry), self.clock.now)

    @rule(number=VBUCKETS, key=KEYS, seconds=st.sampled_from([5, 20]))
    def lock(self, number: int, key: bytes, seconds: int) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.get_and_lock, key, seconds)):
            return
        self.expire(model, key)
        if model.alive(key) is None:
            with pytest.raises(KeyNotFound):
                vbucket.get_and_lock(key, seconds)
        elif not self.locked(model, key, vbucket.get_and_lock, key, seconds):
            model.locks[key] = (vbucket.get_and_lock(key, seconds).cas, self.clock.now + seconds)

    @rule(number=VBUCKETS, key=KEYS)
    def unlock(self, number: int, key: bytes) -> None:
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.unlock, key, 1)):
            return
        self.expire(model, key)
        if self.locked(model, key, vbucket.unlock, key, 1):
            vbucket.unlock(key, model.locks.pop(key)[0])
        else:
            with pytest.raises(StatusError):
                vbucket.unlock(key, 1)

    @rule(
        number=VBUCKETS,
        key=KEYS,
        value=VALUES,
        ahead=st.integers(-1, 4),
        deletion=st.booleans(),
        expiry=EXPIRIES,
        force=st.booleans(),
    )
    def with_meta(
        self, number: int, key: bytes, value: bytes, ahead: int, deletion: bool, expiry: int, force: bool
    ) -> None:
        """A version made elsewhere: it wins by revision, then CAS, expiry, flags, and if need be by what it says."""
        vbucket, model = self.pair(number)
        if self.refused(vbucket, model, (vbucket.get_meta, key)):
            return
        self.expire(model, key)
        vbucket.table.expire(key)
        ours, expiry = vbucket.table.find(key), self.absolute(expiry)
        rev = max(1, (ours.rev_seqno if ours else model.deleted_rev) + ahead)
        meta: dict[str, Any] = {"cas": 7, "rev_seqno": rev, "expiry": expiry, "force": force}
        call = partial(vbucket.delete_with_meta if deletion else vbucket.set_with_meta, key, **meta)
        call = call if deletion else partial(call, value)
        if self.locked(model, key, call):
            return
        theirs = (rev, 7, 0, 0, True, b"") if deletion else (rev, 7, expiry, 0, False, value)
        if ours is not None and not force and theirs <= self.rank(ours):
            with pytest.raises(KeyExists):
                call()
            return
        call()
        event = Event.DELETION if deletion else Event.MUTATION
        model.write(key, event, b"" if deletion else value, 0, expiry, self.clock.now, rev=rev)

    @staticmethod
    def rank(item: StoredItem) -> tuple[object, ...]:
        deleted = item.event != Event.MUTATION
        shown = (0, 0, True, b"") if deleted else (item.expiry, item.flags, False, item.value)
        return item.rev_seqno, item.cas, *shown


# Parts, so that one worker's timeout holds for each; each a class of its own, or where examples are derived from the
# test, as in CI, all would run the same ones.
@pytest.mark.parametrize("part", slow_except([0], range(3)))
@pytest.mark.parametrize("machine", [EngineMachine, CopyMachine])
def test_state_machine(machine: type[CopyMachine], part: int) -> None:
    machine = type(f"{machine.__name__}{part}", (machine,), {})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=by_depth(quick=120, deep=340), stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.parametrize("machine", [EngineMachine, CopyMachine])
def test_state_machine_for_long(machine: type[CopyMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=by_depth(quick=500, deep=10_000), stateful_step_count=50, deadline=None)
    )
