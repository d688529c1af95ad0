"""Three copies of one vbucket and five consumers, driven by small events, under the rules of docs/semantics.md.

Copies and three of the consumers follow a live cursor, which they read only when it has called; the others ask for
finite ranges with ``changes``, in all of its kinds, and may be stopped at any change. Some want certain keys only.

An event that makes no sense in the state that it meets is skipped, so any subset of a script is a script
again. After a script everything settles: one active, everybody connected and everything delivered. Then
every replica and every consumer must hold exactly the contents of the active, nothing missing and nothing
extra.
"""

import dataclasses
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tests.support.interrupted_storage import InterruptedStorage
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Cursor, CursorEnd, CursorEnded, KeyPattern, Options, Retention, Vbucket
from upriver.engine.cursor import SnapshotReader
from upriver.model import Change, Event, FailoverLog, Snapshot, StreamPosition, VbucketState, changes_in

Script = Sequence[tuple[Any, ...]]
Contents = dict[bytes, bytes]

#: Nothing is kept longer than asked for: the scripts say when to compact and to purge.
RETENTION = Retention(history_s=0, history_bytes=0, tombstone_s=0)


class Follower(Protocol):
    """A receiver of a stream."""

    stream: "Stream | Ranges | None"
    wants: Options

    @property
    def position(self) -> StreamPosition: ...

    def roll_back(self, seqno: int, source: "Copy") -> None: ...

    def accepted(self, source: "Copy") -> None: ...

    def marker(self, snapshot: Snapshot) -> None: ...

    def receive(self, change: Change) -> None: ...

    def advance(self, seqno: int) -> None: ...

    def clear(self) -> None: ...

    def contents(self) -> Contents: ...


class Stream:
    """One cursor of a copy, delivering to a follower one message at a time, whenever it says that there is more."""

    def __init__(self, source: "Copy", follower: Follower, mode: int, name: str) -> None:
        self.source, self.follower = source, follower
        options = dataclasses.replace(follower.wants, persisted_only=mode == 2)
        self.cursor: Cursor = source.vbucket.open_cursor(name, follower.position.seqno, options=options)
        self.announced: Snapshot | None = None
        self.awake = False
        self.cursor.subscribe(self.wake)

    def wake(self) -> None:
        self.awake = True

    @property
    def broken(self) -> bool:
        return self.cursor.ended is not None

    def step(self) -> bool:
        """Deliver the next message; False if there is none now."""
        if self.broken or not self.awake:
            return False
        if self.announced is None:
            self.announced = self.cursor.next_snapshot()
            if self.announced is None:
                self.awake = False
                self.cursor.subscribe(self.wake)
                return self.awake
            self.follower.marker(self.source.printed(self.announced))
            return True
        for change in changes_in(self.cursor.read_columns(1)):
            self.follower.receive(change)
        if self.cursor.snapshot is None:
            if self.follower.position.seqno < self.announced.end:
                self.follower.advance(self.announced.end)
            self.announced = None
        return True

    def close(self) -> None:
        self.cursor.close()


class Ranges:
    """One call of ``changes`` after the other, delivering to a follower one message at a time.

    mode: 0 everything, 1 every version, 2 what is on disk, 3 up to an exact end.
    """

    def __init__(self, source: "Copy", follower: Follower, mode: int) -> None:
        self.source, self.follower, self.mode = source, follower, mode
        self.broken = False
        self._snapshots: Iterator[SnapshotReader] | None = None
        self._snapshot: SnapshotReader | None = None
        self._changes: Iterator[Change] = iter(())

    def step(self) -> bool:
        """Deliver the next message; False if there is none now."""
        try:
            return not self.broken and self._step()
        except CursorEnded:
            self.broken = True
            return False

    def _step(self) -> bool:
        if self._snapshots is None and not self._ask():
            return False
        if self._snapshot is None:
            assert self._snapshots is not None
            self._snapshot = next(self._snapshots, None)
            if self._snapshot is None:
                self._snapshots = None
                return False
            self._changes = self._read(self._snapshot)
            self.follower.marker(self.source.printed(Snapshot(self._snapshot.start, self._snapshot.end)))
            return True
        change = next(self._changes, None)
        if change is not None:
            self.follower.receive(change)
            return True
        if self.follower.position.seqno < self._snapshot.end:
            self.follower.advance(self._snapshot.end)
        self._snapshot = None
        return True

    def _read(self, snapshot: SnapshotReader) -> Iterator[Change]:
        for batch in snapshot.batches(1):
            yield from changes_in(batch)

    def _ask(self) -> bool:
        """Every call is a request of its own, with what comes before one."""
        vbucket, position = self.source.vbucket, self.follower.position
        if vbucket.rollback_for(position) is not None:
            self.broken = True
            return False
        self.follower.accepted(self.source)
        end = None
        if self.mode == 3:
            end = vbucket.consistent_at_or_below(min(position.seqno + 2, vbucket.high_seqno))
            if end <= position.seqno:
                end = None
        options = dataclasses.replace(
            self.follower.wants, history=self.mode == 1, persisted_only=self.mode == 2, exact_end=end is not None
        )
        self._snapshots = vbucket.changes(position.seqno, end, options)
        return True

    def close(self) -> None:
        if isinstance(self._snapshots, Generator):
            self._snapshots.close()
        self.broken = True


def no_space() -> None:
    raise OSError("no space left")


class Copy:
    """One node's copy of the vbucket, in a bucket of its own."""

    def __init__(self, path: Path, clock: Clock, name: str) -> None:
        self.path, self.clock, self.name = path, clock, name
        self.stream: Stream | Ranges | None = None
        self.wants = Options()
        self.owner = self.down = False
        #: What its markers print as start, counted from the last seqno before the snapshot.
        self.prints = 0
        self.bucket = self._open()
        self.bucket.create_vbucket(0, VbucketState.REPLICA)
        self.bucket.flusher.step()

    def _open(self) -> Bucket:
        self.storage = InterruptedStorage(self.path)
        return Bucket(self.storage, vbuckets=1, clock=self.clock, retention=RETENTION, interval_s=0)

    @property
    def vbucket(self) -> Vbucket:
        return self.bucket.vbucket(0)

    @property
    def position(self) -> StreamPosition:
        return self.vbucket.position

    @property
    def role(self) -> str:
        return "down" if self.down else self.vbucket.state.value

    def printed(self, snapshot: Snapshot) -> Snapshot:
        """The marker: not everybody prints the start as we do."""
        return Snapshot(min(max(0, snapshot.start + self.prints), snapshot.end), snapshot.end)

    def crash(self) -> None:
        self.bucket.abandon()
        self.bucket = self._open()
        if self.owner:  # a promotion that never reached the disk is ordered again
            self.vbucket.set_state(VbucketState.ACTIVE)

    def restart(self) -> None:
        self.bucket.close()
        self.bucket = self._open()

    def roll_back(self, seqno: int, source: "Copy") -> None:
        assert self.vbucket.roll_back(seqno) <= seqno

    def accepted(self, source: "Copy") -> None:
        self.vbucket.replace_failover_log(source.vbucket.failover_log)

    def marker(self, snapshot: Snapshot) -> None:
        self.vbucket.begin_snapshot(snapshot.start, snapshot.end)

    def receive(self, change: Change) -> None:
        self.vbucket.apply(change)

    def advance(self, seqno: int) -> None:
        self.vbucket.advance(seqno)

    def clear(self) -> None:
        self.vbucket.clear()

    def contents(self) -> Contents:
        table = self.vbucket.table
        return {key: item.value for key in table.live_keys() if (item := table.find(key)) is not None}


class Consumer:
    """Without history. ``rewind`` starts over at a rollback, ``emit`` reads again what it holds above it."""

    def __init__(self, policy: str, *, asks: bool = False, wants: Options | None = None) -> None:
        self.policy, self.asks = policy, asks
        self.wants = wants or Options()
        self.stream: Stream | Ranges | None = None
        self.held: dict[bytes, tuple[int, bytes | None]] = {}
        self.log: FailoverLog | None = None
        self.filled: int | None = None
        self.doubt: set[bytes] = set()
        self.doubt_to, self.doubt_uuid = 0, 0
        self._position = StreamPosition.beginning()

    @property
    def position(self) -> StreamPosition:
        return self._position

    def _place(self, seqno: int) -> None:
        uuid = self.log.newest.vbucket_uuid if self.log else 0
        self._position = StreamPosition.at(uuid, seqno)

    def clear(self) -> None:
        self.held, self.doubt, self.filled = {}, set(), None
        self._place(0)

    def roll_back(self, seqno: int, source: Copy) -> None:
        if self.filled is None or seqno < self.filled:
            seqno = 0
        if self.policy == "rewind" or seqno == 0:
            self.clear()
            return
        self._reread({key for key, held in self.held.items() if held[0] > seqno} | self.doubt, source)
        self._place(seqno)

    def _reread(self, keys: set[bytes], source: Copy) -> None:
        for key in keys:
            self.held.pop(key, None)
            item = source.vbucket.table.find(key)
            if item is not None:
                self.held[key] = (item.seqno, item.value if item.event == Event.MUTATION else None)
        self.doubt = set(keys)
        self.doubt_to = source.vbucket.high_seqno
        self.doubt_uuid = source.vbucket.failover_log.newest.vbucket_uuid

    def accepted(self, source: Copy) -> None:
        self.log = source.vbucket.failover_log
        position = self._position
        self._position = StreamPosition(self.log.newest.vbucket_uuid, position.seqno, position.snapshot)
        if self.doubt and self.doubt_uuid != self.log.newest.vbucket_uuid:
            self._reread(self.doubt, source)

    def marker(self, snapshot: Snapshot) -> None:
        self._position = self._position.announced(snapshot)

    def receive(self, change: Change) -> None:
        self._position = self._position.advanced(change.seqno)
        self.held[change.key] = (change.seqno, change.value if change.event == Event.MUTATION else None)
        self._completed()

    def advance(self, seqno: int) -> None:
        self._position = self._position.advanced(seqno)
        self._completed()

    def _completed(self) -> None:
        position = self._position
        if position.seqno < position.snapshot.end:
            return
        self.filled = self.filled or position.seqno
        if position.seqno >= self.doubt_to and position.vbucket_uuid == self.doubt_uuid:
            self.doubt.clear()

    def contents(self) -> Contents:
        return {key: value for key, (_, value) in self.held.items() if value is not None}


class Cluster:
    """Nodes 0 to 2, consumers 3 (rewind) and 4 (emit); 5 and 6 ask for ranges, 6 and 7 want certain keys."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.clock = clock
        self.values = self.streams = 0
        self.nodes = [Copy(path / f"node{n}", clock, f"node{n}") for n in range(3)]
        self.nodes[0].vbucket.set_state(VbucketState.ACTIVE)
        self.nodes[0].bucket.flusher.step()
        self.nodes[0].owner = True
        self.consumers = [
            Consumer("rewind"),
            Consumer("emit"),
            Consumer("emit", asks=True),
            Consumer("rewind", asks=True, wants=Options(key_prefix=b"key1")),
            Consumer("emit", wants=Options(key_pattern=KeyPattern("[02]$"))),
        ]
        self.followers: list[Copy | Consumer] = [*self.nodes, *self.consumers]

    def close(self) -> None:
        for node in self.nodes:
            node.bucket.abandon()

    def active(self) -> Copy:
        return next(node for node in self.nodes if node.owner)

    def apply(self, event: tuple[Any, ...]) -> None:
        self.clock.pass_by(1)
        getattr(self, f"do_{event[0]}")(*event[1:])

    def cut(self, *, source: Copy | None = None, follower: Copy | Consumer | None = None) -> None:
        for f in self.followers:
            if f.stream is not None and (f is follower or f.stream.source is source):
                f.stream.close()
                f.stream = None

    def connect(self, follower: Copy | Consumer, source: Copy, mode: int, tries: int) -> bool:
        self.cut(follower=follower)
        for _ in range(tries):
            back = source.vbucket.rollback_for(follower.position)
            if back is None:
                follower.accepted(source)
                self.streams += 1
                if isinstance(follower, Consumer) and follower.asks:
                    follower.stream = Ranges(source, follower, mode)
                else:
                    follower.stream = Stream(source, follower, mode, f"stream-{self.streams}")
                return True
            follower.roll_back(back, source)
        return False

    def do_set(self, n: int, key: int) -> None:
        self.values += 1
        if self.nodes[n].role == "active":
            # Of different sizes, so that blocks hold now one change, now several.
            self.nodes[n].vbucket.set(b"key%d" % key, b"%*d" % (200 * (self.values % 2), self.values))

    def do_print(self, n: int, start: int) -> None:
        """start: 0 as we do, 1 the first seqno that is sent, less than 0 the start of an older snapshot."""
        self.nodes[n].prints = start

    def do_delete(self, n: int, key: int) -> None:
        node = self.nodes[n]
        if node.role == "active" and b"key%d" % key in node.vbucket.table.live_keys():
            node.vbucket.delete(b"key%d" % key)

    def do_connect(self, f: int, n: int, mode: int, tries: int) -> None:
        follower, node = self.followers[f], self.nodes[n]
        active = node.role == "active" and (node.owner or f >= 3)
        replica = f >= 3 and node.role == "replica" and node.vbucket.streamable
        receiving = not isinstance(follower, Copy) or follower.role == "replica"
        if (active or replica) and follower is not node and receiving:
            self.connect(follower, node, mode, tries)

    def do_deliver(self, f: int, count: int) -> None:
        for _ in range(count):
            stream = self.followers[f].stream
            if stream is None or not stream.step():
                return

    def do_cut(self, f: int) -> None:
        self.cut(follower=self.followers[f])

    def do_persist(self, n: int) -> None:
        self.nodes[n].bucket.flusher.step()

    def do_checkpoint(self, n: int) -> None:
        self.nodes[n].bucket.flusher.request_checkpoint()
        self.nodes[n].bucket.flusher.drain()

    def do_fail(self, n: int, behind: int) -> None:
        """A commit with a slice of a checkpoint fails, or fails though it took effect; the next ones succeed."""
        node = self.nodes[n]
        if node.down:
            return
        node.bucket.flusher.request_checkpoint()
        setattr(node.storage, "after_commit" if behind else "before_commit", no_space)
        with suppress(OSError):
            node.bucket.flusher.step()
        node.storage.before_commit = node.storage.after_commit = None  # where nothing was to be written
        node.bucket.flusher.request_compaction(node.vbucket)
        node.bucket.flusher.drain()

    def do_crash(self, n: int) -> None:
        self.cut(source=self.nodes[n])
        self.cut(follower=self.nodes[n])
        self.nodes[n].crash()

    def do_restart(self, n: int) -> None:
        self.cut(source=self.nodes[n])
        self.cut(follower=self.nodes[n])
        self.nodes[n].restart()

    def do_promote(self, n: int, old: int) -> None:
        """old: 0 unreachable, 1 goes on as an owner that was not told, 2 is told and ends its streams."""
        node, before = self.nodes[n], self.active()
        if node.role != "replica":
            return
        before.owner = False
        if old != 1:
            self.cut(source=before)
            if old == 0:
                before.down = True
            else:
                before.vbucket.set_state(VbucketState.REPLICA)
        self.cut(follower=node)
        self.cut(source=node)
        node.vbucket.set_state(VbucketState.ACTIVE)
        node.owner = True

    def do_back(self, n: int, crashed: int) -> None:
        node = self.nodes[n]
        if node.down or (node.role == "active" and not node.owner):
            self.cut(source=node)
            node.down = False
            if crashed:
                node.crash()
            node.vbucket.set_state(VbucketState.REPLICA)

    def do_takeover(self, n: int) -> None:
        node, before = self.nodes[n], self.active()
        stream = node.stream
        if node.role != "replica" or not isinstance(stream, Stream) or stream.source is not before or stream.broken:
            return
        while stream.step() or stream.cursor.backlog:
            before.bucket.flusher.step()  # a stream of persisted changes waits for the disk
        self.cut(follower=node)
        self.cut(source=before)
        before.vbucket.set_state(VbucketState.REPLICA)
        before.bucket.flusher.step()
        before.owner = False
        self.cut(source=node)
        node.vbucket.set_state(VbucketState.ACTIVE)
        node.owner = True
        node.bucket.flusher.step()

    def do_flush(self, told: int) -> None:
        node = self.active()
        listening = [
            (f, f.stream)
            for f in self.followers
            if isinstance(f.stream, Stream) and f.stream.source is node and not f.stream.broken
        ]
        node.vbucket.flush()
        node.bucket.flusher.step()
        for follower, stream in listening:
            assert stream.cursor.ended is CursorEnd.FLUSHED
            if told:
                follower.clear()
        self.cut(source=node)

    def do_purge(self, n: int, back: int) -> None:
        self._maintain(n, "purge")

    def do_compact(self, n: int, back: int) -> None:
        self._maintain(n, "compact")

    def _maintain(self, n: int, duty: str) -> None:
        node = self.nodes[n]
        if node.down:
            return
        node.bucket.flusher.request_checkpoint()
        node.bucket.flusher.drain()
        for _ in getattr(node.bucket.maintenance, duty)():
            pass
        node.bucket.flusher.request_compaction(node.vbucket)
        node.bucket.flusher.drain()

    def settle(self) -> None:
        """Everything heals, and then all hold the same."""
        owner = self.active()
        for n in range(3):
            self.do_back(n, 0)
        for follower in self.followers:
            if follower is owner:
                continue
            self._settle(follower, owner)
        expected = owner.contents()
        for follower in self.followers:
            wanted = {key: value for key, value in expected.items() if passes(follower.wants, key)}
            assert follower.contents() == wanted, f"{follower} differs from {owner.name}"
        for node in self.nodes:
            node.bucket.flusher.step()
            node.restart()
            assert node.contents() == expected, f"{node.name} differs after a restart"

    def _settle(self, follower: Copy | Consumer, owner: Copy) -> None:
        owner.bucket.flusher.step()
        for _ in range(3):  # who asks for ranges may be refused in the middle of one
            stream = follower.stream
            if stream is None or stream.source is not owner or stream.broken:
                assert self.connect(follower, owner, 0, 12), f"{follower} is never accepted"
            assert follower.stream is not None
            while follower.stream.step():
                pass
            if isinstance(follower.stream, Ranges):
                follower.stream.mode = 0  # the last one is neither short nor of the disk only
                while follower.stream.step():
                    pass


def passes(wanted: Options, key: bytes) -> bool:
    """Whether a follower wants changes of the key."""
    return key.startswith(wanted.key_prefix) and (wanted.key_pattern is None or wanted.key_pattern.passes(key))


FAULTS = (
    *("crash", "crash", "promote", "promote", "promote", "back", "takeover", "flush", "purge", "purge"),
    *("compact", "persist", "persist", "cut", "restart", "checkpoint", "fail", "fail"),
)


def mid_snapshot(
    rng: random.Random, do: Callable[..., None], keys: int, owner: int, replica: int, outside: int
) -> None:
    """What chance alone seldom brings together: a key that changes on both sides of where the disk ends, a
    replica cut off between the two, and then a loss, while somebody follows that replica."""
    twice, once = rng.sample(range(keys), 2)
    do("connect", replica, owner, 0, 9)
    do("deliver", replica, 20)
    if rng.random() < 0.5:
        do("connect", outside, owner, 0, 9)
        do("deliver", outside, 20)
    do("cut", replica)
    do("set", owner, twice)
    do("persist", owner)
    do("set", owner, once)
    do("set", owner, twice)
    do("connect", replica, owner, rng.randrange(2), 9)
    do("deliver", replica, 2)
    if rng.random() < 0.5:
        do("persist", replica)
    what = rng.randrange(3)
    if what == 0:
        do("crash", owner)
    elif what == 1:
        do("deliver", replica, rng.choice((0, 4)))
        do("promote", replica, rng.randrange(3))
        do("crash", replica)
    do("connect", outside, replica, rng.randrange(3), 9)
    do("deliver", outside, rng.choice((2, 3, 20)))


def filled_late(rng: random.Random, do: Callable[..., None], keys: int, outside: int) -> None:
    """A replica that never heard of a deletion takes over, and somebody comes back who had not heard of it either."""
    gone, other = rng.sample(range(keys), 2)
    do("set", 0, gone)
    do("connect", outside, 0, 0, 9)
    do("deliver", outside, 20)
    do("cut", outside)
    do("delete", 0, gone)
    for _ in range(rng.randint(1, 3)):
        do("set", 0, other)
    do("purge", 0, 0)
    do("connect", 1, 0, rng.randrange(2), 9)
    do("deliver", 1, 20)
    do("promote", 1, rng.randrange(3))
    do("connect", outside, 1, rng.randrange(2), 9)
    do("deliver", outside, 20)


def random_script(rng: random.Random, cluster: Cluster) -> list[tuple[Any, ...]]:
    """Writes, streams that get somewhere, and some sorts of faults, applied as they are made up."""
    script: list[tuple[Any, ...]] = []
    keys, nodes = rng.choice((2, 2, 2, 3)), rng.choice((2, 2, 3))
    outside = rng.choice(([3], [4], [4], [5], [5], [6], [7]))
    faults = rng.sample(FAULTS, rng.randrange(2, 5))
    rush, habit, patience = rng.choice((2, 3, 5)), rng.choice((0.1, 0.3, 0.6)), rng.choice((0.1, 0.5, 0.9))
    # How often a foreign consumer follows a replica, which may be in mid-snapshot itself.
    chained = rng.choice((0.1, 0.1, 0.8))

    def do(*event: Any) -> None:
        script.append(event)
        cluster.apply(event)

    for n in range(nodes):
        do("print", n, rng.choice((0, 0, 0, 1, 1, -1, -3)))
    if rng.random() < 0.7:
        # A common past: what follows then happens to copies that are consistent and not empty.
        for key in range(keys + 1):
            do("set", 0, key)
        for f in (*range(1, nodes), *outside):
            do("connect", f, 0, 0, 9)
            do("deliver", f, 20)
            if rng.random() < 0.5:
                do("persist", f if f < 3 else 0)
    elif rng.random() < 0.3:
        filled_late(rng, do, keys, rng.choice(outside))
    for _ in range(rng.randrange(5, 25)):
        owner = cluster.nodes.index(cluster.active())
        replicas = [n for n in range(nodes) if cluster.nodes[n].role == "replica"]
        turn = rng.random()
        if turn < 0.06 and replicas:
            mid_snapshot(rng, do, keys, owner, rng.choice(replicas), rng.choice(outside))
        elif turn < 0.35:
            writer = rng.choice([n for n in range(nodes) if cluster.nodes[n].role == "active"] or [owner])
            for _ in range(rng.randint(1, rush)):
                do(rng.choice(("set", "set", "delete")), writer, rng.randrange(keys))
                if rng.random() < habit / 2:
                    do(rng.choice(("persist", "checkpoint")), writer)
        elif turn < 0.7:
            f = rng.choice(replicas + outside + outside)
            if not cluster.followers[f].stream or rng.random() < 0.2:
                source = owner if rng.random() < 0.85 else rng.randrange(nodes)
                if f in outside and replicas and rng.random() < chained:
                    source = rng.choice(replicas)
                do("connect", f, source, rng.randrange(4), rng.choice((1, 9, 9)))
            do("deliver", f, rng.choice((1, 2, 2, 3, 4, 20)))
            if f < 3 and rng.random() < habit:
                do("persist", f)
            if rng.random() < patience:
                do("cut", f)
        else:
            fault = rng.choice(faults)
            if fault in ("promote", "takeover"):
                if replicas:
                    do(fault, rng.choice(replicas), *([rng.randrange(3)] if fault == "promote" else []))
            elif fault in ("back", "purge", "compact", "fail"):
                do(fault, rng.randrange(nodes), rng.randrange(2))
            elif fault == "cut":
                do(fault, rng.choice([*replicas, *outside, owner]))
            elif fault in ("crash", "restart"):
                do(fault, owner if rng.random() < 0.6 else rng.randrange(nodes))
            else:
                do(fault, rng.randrange(2) if fault == "flush" else rng.choice((owner, rng.randrange(nodes))))
    return script
