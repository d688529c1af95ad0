"""Ways to break the rules on purpose: each must be found, or the simulation is too weak.

A mutation replaces something in the project while it lasts. It is named for what it does, and says which rule of
docs/semantics.md it breaks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from upriver.engine import Bucket, StoredItem, Vbucket
from upriver.engine.consistent_points import ConsistentPoints
from upriver.engine.cursor import NO_END, Cursor
from upriver.engine.flusher import Flusher
from upriver.engine.maintenance import Maintenance
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.model import rollback as rules
from upriver.node.auth import login_queue
from upriver.node.commands import vbuckets
from upriver.node.session import Session
from upriver.node.streams.engine_sink import EngineSink
from upriver.node.streams.engine_source import EngineSource
from upriver.node.tap.engine_sink import EngineTapSink
from upriver.protocol.consumer import negotiation as negotiations
from upriver.protocol.consumer.consumer import ConsumerConnection
from upriver.protocol.consumer.consumer_stream import ConsumerStream
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.move.mover import Goal, MoverSteps, Phase
from upriver.protocol.producer import producer as producers
from upriver.protocol.producer.takeover import SourceTakeover
from upriver.protocol.stream_state import StreamEvent
from upriver.protocol.tap.flush_mark import FlushMark
from upriver.protocol.tap.producer_stream import TapProducerStream
from upriver.wire.framing import MEMCACHED

#: Replaces one thing: (object or module, attribute, the replacement).
Change = tuple[Any, str, Any]
MUTATIONS: Final[dict[str, Callable[[], list[Change]]]] = {}


def mutation(make: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a mutation under its name."""
    MUTATIONS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def broken(name: str) -> Iterator[None]:
    """While this lasts, the rule is broken; no name, nothing broken."""
    with ExitStack() as stack:
        for target, attribute, instead in MUTATIONS[name]() if name else []:
            stack.enter_context(patch.object(target, attribute, instead))
        yield


def _open_below_purge() -> Change:
    """The engine looks at the purge seqno once more; that would hide what the producer does wrong."""
    start = Cursor.__init__

    def open_anyway(self: Cursor, vbucket: Vbucket, *rest: Any) -> None:
        purge, vbucket.table.purge_seqno = vbucket.table.purge_seqno, 0
        try:
            start(self, vbucket, *rest)
        finally:
            vbucket.table.purge_seqno = purge

    return Cursor, "__init__", open_anyway


# The producer's answers.


@mutation
def skip_rollback() -> list[Change]:
    """Every consumer may resume, whatever branch it comes from."""
    return [(producers, "_rollback", lambda *_args, **_options: None), _open_below_purge()]


@mutation
def ignore_snapshot_bounds() -> list[Change]:
    """A consumer in mid-snapshot counts as consistent at its seqno."""

    def instead(log: FailoverLog, high: int, purge: int, position: StreamPosition) -> int | None:
        consistent = StreamPosition.at(position.vbucket_uuid, position.seqno)
        return rules.rollback_by_snapshot(log, high, purge, consistent)

    # A copy looks once more before it becomes active; that would hide what the producer does wrong.
    return [(producers, "rollback_by_snapshot", instead), (ConsumerStream, "_check_consistent", lambda self: None)]


@mutation
def only_next_entry_counts() -> list[Change]:
    """The shared history ends with the next newer entry, not with the smallest of all newer ones."""

    def upper(self: FailoverLog, place: int, high_seqno: int) -> int:
        return min(high_seqno, self.entries[place - 1].seqno) if place else high_seqno

    return [(FailoverLog, "upper", upper)]


@mutation
def upper_above_high() -> list[Change]:
    """A consumer may be beyond what the producer itself holds."""

    def upper(self: FailoverLog, place: int, high_seqno: int) -> int:
        newer = [entry.seqno for entry in self.entries[:place]]
        return min(newer) if newer else high_seqno

    return [(FailoverLog, "upper", upper)]


@mutation
def ignore_purge() -> list[Change]:
    """A consumer below the purge seqno may resume, without the deletions that it missed."""

    def by_snapshot(log: FailoverLog, high: int, purge: int, position: StreamPosition) -> int | None:
        return rules.rollback_by_snapshot(log, high, 0, position)

    def by_entry(log: FailoverLog, high: int, purge: int, *rest: Any, **options: Any) -> int | None:
        return rules.rollback_by_entry(log, high, 0, *rest, **options)

    return [
        (producers, "rollback_by_snapshot", by_snapshot),
        (producers, "rollback_by_entry", by_entry),
        _open_below_purge(),
    ]


# Snapshots.


@mutation
def inclusive_marker_start() -> list[Change]:
    """A snapshot's start counts as its first change, as deployed servers print it; a torn copy is consistent there."""

    def of_position(self: StreamPosition) -> int:
        return self.seqno if self.seqno == self.snapshot.end else min(self.snapshot.start + 1, self.seqno)

    def of_copy(self: Vbucket) -> int:
        return self.high_seqno if self.state is VbucketState.ACTIVE else self.position.consistent_seqno

    return [
        (StreamPosition, "consistent_seqno", property(of_position)),
        (Vbucket, "consistent_seqno", property(of_copy)),
    ]


@mutation
def forget_unfinished_end() -> list[Change]:
    """A receiver in mid-snapshot takes the end of the next marker, though the older one reached further."""

    def announced(self: StreamPosition, marker: Snapshot) -> StreamPosition:
        start = min(marker.start, self.consistent_seqno)
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(start, marker.end))

    return [(StreamPosition, "announced", announced)]


@mutation
def forget_kept_start() -> list[Change]:
    """A receiver in mid-snapshot takes the start of the next marker, though it was last consistent before it."""

    def announced(self: StreamPosition, marker: Snapshot) -> StreamPosition:
        end = marker.end if self.consistent_seqno == self.seqno else max(marker.end, self.snapshot.end)
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(min(marker.start, self.seqno), end))

    return [(StreamPosition, "announced", announced)]


@mutation
def snapshots_end_where_copy_is_torn() -> list[Change]:
    """A copy sends on what it has received of a snapshot, as if it were all."""
    return [(Vbucket, "consistent_seqno", property(lambda self: self.high_seqno))]


# Branches.


@mutation
def branch_at_high_seqno() -> list[Change]:
    """A copy that is promoted in mid-snapshot says that it shares all that it holds."""
    branch = Vbucket._branch

    return [(Vbucket, "_branch", lambda self, _seqno: branch(self, self.high_seqno))]


@mutation
def no_branch_after_crash() -> list[Change]:
    """An active vbucket goes on under its old uuid after an unclean stop."""
    return [(Vbucket, "branch_after_crash", lambda self: None)]


@mutation
def no_branch_on_promotion() -> list[Change]:
    """A copy that becomes active goes on under the uuid of the old one."""
    branch = Vbucket._branch

    def instead(self: Vbucket, seqno: int) -> None:
        log, streamable = self.failover_log, self.streamable
        branch(self, seqno)
        if streamable:
            self.failover_log = log

    return [(Vbucket, "_branch", instead)]


@mutation
def flush_keeps_the_log() -> list[Change]:
    """A consumer that was away does not learn of a flush."""
    flush = Vbucket.flush

    def instead(self: Vbucket) -> None:
        log = self.failover_log
        flush(self)
        self.failover_log = log

    return [(Vbucket, "flush", instead)]


@mutation
def log_replaced_under_open_streams() -> list[Change]:
    """A copy goes on streaming under a log that it no longer has."""

    def instead(self: Vbucket, log: FailoverLog) -> None:
        with self.journal.lock:
            self.failover_log = log
            self.journal.change(self.number)

    return [(Vbucket, "replace_failover_log", instead)]


@mutation
def streams_outlive_the_deleted() -> list[Change]:
    """A consumer of a dead copy is not told that it is deleted: what is missing looks as if it was never there."""
    delete = Bucket.delete_vbucket

    def instead(self: Bucket, number: int) -> None:
        self.vbucket(number).cursors = {}
        delete(self, number)

    return [(Bucket, "delete_vbucket", instead)]


# Rollback.


@mutation
def roll_back_to_a_mixture() -> list[Change]:
    """A copy cuts its history at exactly the seqno that it was told, consistent or not."""

    def at_or_below(_self: Any, seqno: int, floor: int) -> int:
        return seqno if seqno >= floor else 0

    return [(ConsistentPoints, "at_or_below", at_or_below)]


@mutation
def roll_back_below_the_floor() -> list[Change]:
    """A state below the floor is restored, though versions of it were dropped."""
    found = ConsistentPoints.at_or_below
    return [(ConsistentPoints, "at_or_below", lambda self, seqno, _floor: found(self, seqno, 0))]


@mutation
def rollback_not_on_disk_with_the_log() -> list[Change]:
    """The producer's log reaches the disk, the rollback before it does not."""
    gather = Flusher._gather_trim

    def later(self: Flusher, gathered: Any, number: int, seqno: int) -> None:
        if seqno and not getattr(self, "_put_off", False):
            self._put_off = True  # type: ignore[attr-defined]
            self.journal.trims[number] = seqno
            return
        self._put_off = False  # type: ignore[attr-defined]
        gather(self, gathered, number, seqno)

    return [(Flusher, "_gather_trim", later)]


# Purge and compaction.


@mutation
def filled_copy_without_purge_seqno() -> list[Change]:
    """A copy that was filled from nothing vouches for deletions that it never heard of."""
    begin = Vbucket.begin_snapshot

    def instead(self: Vbucket, start: int, end: int, purge_seqno: int | None = None) -> None:
        begin(self, start, end, 0)

    return [(Vbucket, "begin_snapshot", instead)]


@mutation
def purge_past_open_streams() -> list[Change]:
    """Tombstones go though a stream has not read them."""
    return [(Maintenance, "_slowest", lambda self, vbucket: NO_END)]


@mutation
def compact_announced_snapshots() -> list[Change]:
    """Versions go though an announced snapshot shows them."""
    return [(Maintenance, "_pinned", lambda self, cursor: NO_END)]


@mutation
def purge_without_telling() -> list[Change]:
    """Tombstones go and the purge seqno stays."""
    announce, sweep = Maintenance._raise_floor, Maintenance._sweep

    def raise_floor(self: Maintenance, vbucket: Vbucket, floor: int, purge_to: int = 0) -> bool:
        return announce(self, vbucket, floor)

    def quietly(self: Maintenance, vbucket: Vbucket, *rest: Any) -> Iterator[None]:
        told = vbucket.table.purge_seqno
        for _ in sweep(self, vbucket, *rest):
            vbucket.table.purge_seqno = told
            yield
        vbucket.table.purge_seqno = told

    return [(Maintenance, "_raise_floor", raise_floor), (Maintenance, "_sweep", quietly)]


# Disk.


@mutation
def acknowledge_before_commit() -> list[Change]:
    """A write counts as on disk when it is only on its way."""

    def instead(self: Flusher, vbucket: Vbucket, seqno: int, callback: Callable[[], object]) -> None:
        callback()

    return [(Flusher, "when_persisted", instead)]


# Takeover.


@mutation
def source_lives_on() -> list[Change]:
    """The destination becomes active while the source still is."""

    def make_dead(self: SourceTakeover) -> None:
        self.dead = self.durable = True

    return [(SourceTakeover, "make_dead", make_dead)]


@mutation
def dead_state_not_on_disk() -> list[Change]:
    """The destination is made active before it is on disk that the source is dead."""
    return [(EngineSource, "when_durable", lambda self, callback: callback())]


@mutation
def source_does_not_await_its_dead_state() -> list[Change]:
    """The same, of the source alone."""

    def make_dead(self: SourceTakeover) -> None:
        self._source.set_state(self._vbucket.number, VbucketState.DEAD, successor=self._successor)
        self.dead = self.durable = True

    return [(SourceTakeover, "make_dead", make_dead)]


@mutation
def destination_answers_before_disk() -> list[Change]:
    """The destination says that it is active before its disk knows that, and all that it has received."""
    set_state = EngineSink.set_state

    def instead(self: EngineSink, number: int, state: VbucketState, done: Callable[[], object]) -> None:
        if state is VbucketState.ACTIVE:
            self._source.set_state(number, state)
            done()
        else:
            set_state(self, number, state, done)

    return [(EngineSink, "set_state", instead)]


@mutation
def mover_forgets_to_undo() -> list[Change]:
    """A mover says undone, and the source stays dead."""
    return [(MoverSteps, "_revive", lambda self, move, destination: self._set(move, Phase.UNDONE))]


@mutation
def takeover_without_log() -> list[Change]:
    """The copy that takes over keeps its own failover log instead of the source's."""
    return [(Vbucket, "replace_failover_log", lambda self, log: None)]


@mutation
def undo_without_asking() -> list[Change]:
    """An interrupted takeover is undone though the state of the destination is unknown."""
    decide = MoverSteps._decide

    def instead(self: MoverSteps, move: Any, source: Any, destination: Any) -> None:
        known = destination if move.goal is not Goal.UNDO else VbucketState.PENDING
        decide(self, move, source, known)

    def unasked(self: MoverSteps, move: Any, then: Callable[[], object]) -> None:
        then()

    return [(MoverSteps, "_decide", instead), (MoverSteps, "_when_never_active", unasked)]


@mutation
def undo_what_was_active_since() -> list[Change]:
    """A takeover is undone though its destination was active since, and may have handed on what it wrote. The
    destination knows it by its log, the source because it was told: neither is asked."""
    return [
        (MoverSteps, "_when_never_active", lambda self, move, then: then()),
        (Vbucket, "confirm_takeover", lambda self, successor: None),
    ]


@mutation
def movers_need_not_ask_again() -> list[Change]:
    """A node does what a mover says, whatever role the copy has by now and whatever its successor is."""
    return [(vbuckets, "_check_mover", lambda *_arguments: None)]


@mutation
def replication_takes_over() -> list[Change]:
    """A mover that shall only replicate asks for a takeover."""
    add = MoverSteps._add_stream

    def instead(self: MoverSteps, move: Any) -> None:
        goal, move.goal = move.goal, Goal.TAKE_OVER
        add(self, move)
        move.goal = goal

    return [(MoverSteps, "_add_stream", instead)]


@mutation
def feed_any_dead_copy() -> list[Change]:
    """A mover makes a dead copy a replica whatever it holds: a given-up source rolls back what a takeover has left."""
    return [(MoverSteps, "_when_nothing_is_lost", lambda self, move, then: then())]


@mutation
def forget_the_successor() -> list[Change]:
    """A source does not remember its successor: another takeover goes on with it."""
    set_state = Vbucket.set_state

    def instead(self: Vbucket, state: VbucketState, *, successor: str = "") -> None:
        set_state(self, state)

    return [(Vbucket, "set_state", instead)]


@mutation
def takeovers_are_never_over() -> list[Change]:
    """When its successor is pending again, and fed by a third, a takeover is repeated: a source forgets that it was
    active, and a pending copy accepts every stream and is not told apart by its branch."""
    replace = Vbucket.replace_failover_log

    def instead(self: Vbucket, log: FailoverLog) -> None:
        was = self.state
        replace(self, log)
        self.state = was

    return [
        (Vbucket, "confirm_takeover", lambda self, successor: None),
        (Vbucket, "replace_failover_log", instead),
        (Vbucket, "check_failover_log", lambda self, log: None),
        (ConsumerConnection, "_check_may_feed", lambda self, copy, flags: None),
    ]


@mutation
def demoted_copy_becomes_active() -> list[Change]:
    """A takeover goes on though an operator has made the destination a replica again."""
    handed_over = ConsumerStream.handed_over

    def instead(self: ConsumerStream, state: VbucketState) -> None:
        if state is VbucketState.ACTIVE and self.copy.state is VbucketState.REPLICA:
            self.life.move(StreamEvent.SET_ACTIVE)
            return
        handed_over(self, state)

    return [(ConsumerStream, "handed_over", instead)]


@mutation
def stale_and_new_share_a_uuid() -> list[Change]:
    """New branches get the same uuid on every machine, so a stale copy cannot be told from the new owner."""
    branch = Vbucket._branch

    def instead(self: Vbucket, seqno: int) -> None:
        known = self.failover_log
        branch(self, seqno)
        if len(self.failover_log.entries) > 1:
            uuid = known.newest.vbucket_uuid + (1 << 40)
            self.failover_log = known.branch(uuid, seqno)

    return [(Vbucket, "_branch", instead)]


@mutation
def takeovers_forget_locks() -> list[Change]:
    """The successor does not get the locks of the source."""
    return [(Vbucket, "publish_locks", lambda self: None)]


@mutation
def locks_keep_the_cas_of_the_item() -> list[Change]:
    """The successor gets the locks, but not with the CAS that their holders know."""
    publish = Vbucket._publish_lock

    def instead(self: Vbucket, key: bytes, item: StoredItem, cas: int, lock: tuple[int, float] | None) -> None:
        publish(self, key, item, item.cas if lock else cas, (item.cas, lock[1]) if lock else None)

    return [(Vbucket, "_publish_lock", instead)]


# The drafts.


@mutation
def drafts_share_a_successor() -> list[Change]:
    """Any connection of a draft goes on with what has another successor."""
    begin = producers.Producer.__init__

    def instead(self: producers.Producer, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if self.dialect.startswith("upr_draft"):
            self.successor = self.dialect

    return [(producers.Producer, "__init__", instead)]


@mutation
def drafts_skip_rollback() -> list[Change]:
    """A consumer of a draft may resume, whatever branch it comes from."""
    decide = producers._rollback

    def instead(dialect: Any, *rest: Any, **options: Any) -> int | None:
        return None if dialect.name.startswith("upr_draft") else decide(dialect, *rest, **options)

    return [(producers, "_rollback", instead), _open_below_purge()]


@mutation
def drafts_trust_the_compared_log() -> list[Change]:
    """A consumer of a draft takes the log that it asked for before its request for the log of its stream."""
    confirmed = DraftTranslator._confirmed

    def instead(self: DraftTranslator, answer: Any, opaque: int) -> list[Any]:
        answer.log = self._logs.get(opaque, ())
        return confirmed(self, answer, opaque)

    return [(DraftTranslator, "_confirmed", instead)]


# TAP.


@mutation
def tap_counts_what_was_sent() -> list[Change]:
    """A TAP client that comes back gets what was not sent yet, not what it had not acknowledged."""
    return [(TapProducerStream, "tap_position", property(lambda self: self._position_at(self.seqno)))]


@mutation
def pending_copies_take_foreign_data() -> list[Change]:
    """A pending copy takes data of any TAP peer, and continues under a branch of its own."""
    return [(EngineTapSink, "_awaits_another", lambda self, vbucket, peer: False)]


@mutation
def foreign_flushes_are_taken_for_known_ones() -> list[Change]:
    """A flush of a TAP peer empties nothing that was flushed before: its bytes are taken for a mark."""
    flush = EngineTapSink.flush

    def instead(self: EngineTapSink, mark: FlushMark | None, spared: frozenset[int], ttl: int, peer: object) -> None:
        for vbucket in self._node.bucket:
            vbucket.flush_marks.append(1)
        flush(self, mark or FlushMark(1, frozenset(self._node.bucket.numbers())), spared, ttl, peer)

    return [(EngineTapSink, "flush", instead)]


# Roles.


@mutation
def streams_outlive_a_login() -> list[Change]:
    """A connection that logs in again keeps what runs under its old roles."""

    def instead(self: Session) -> None:
        self.user = None

    return [(Session, "log_out", instead)]


@mutation
def failed_logins_keep_the_user() -> list[Change]:
    """A login in vain ends the streams, but later requests use the old roles."""
    return [(Session, "log_out", Session.end_stream)]


@mutation
def lost_roles_end_nothing() -> list[Change]:
    """The streams of a user who loses a role, or is removed, go on."""
    return [(login_queue, "_why_not", lambda session, before: "")]


# Evicted values.


@mutation
def evict_what_is_not_in_blocks() -> list[Change]:
    """Values leave memory though they cannot be read back."""

    def evict(self: Maintenance) -> Iterator[None]:
        for vbucket in self.vbuckets():
            vbucket.table.sweep(0, 0, 0, 0, vbucket.high_seqno)
            yield

    return [(Maintenance, "evict", evict)]


# The consumer.


@mutation
def upr_resumes_in_mid_snapshot() -> list[Change]:
    """After a failover an `upr` consumer resumes at its seqno, not where it was last consistent."""

    def instead(position: StreamPosition, ours: FailoverLog, theirs: FailoverLog) -> tuple[FailoverEntry, int]:
        entry, _ = rules.resume_by_entry(position, ours, theirs)
        shared = any(theirs.index(own.vbucket_uuid) is not None for own in ours)
        return entry, position.seqno if shared else 0

    return [(negotiations, "resume_by_entry", instead)]


@mutation
def answers_are_about_any_branch() -> list[Change]:
    """A copy that was active for a moment takes the answer to what it had asked before."""
    return [(negotiations.Negotiation, "_check_unmoved", lambda self: None)]


@mutation
def streams_outlive_an_interlude() -> list[Change]:
    """A stream goes on into a copy that was active for a moment, behind what it wrote then."""

    def state_only(self: ConsumerStream) -> bool:
        return self.copy.state not in (VbucketState.ACTIVE, VbucketState.DEAD)

    return [(ConsumerStream, "_may_receive", property(state_only))]


@mutation
def role_changes_go_unnoticed() -> list[Change]:
    """A receiver is not told that its copy has another role: it waits until its source says something."""
    return [(ConsumerConnection, "role_changed", lambda self, vbucket: None)]


@mutation
def datatype_lost() -> list[Change]:
    """A copy takes every value for bytes of no special kind."""
    apply_frames = Vbucket.apply_frames

    def instead(self: Vbucket, frames: Any, *rest: Any) -> Any:
        plain, at = bytearray(frames), 0
        while at < len(plain):
            plain[at + 5] = 0
            at += MEMCACHED.header_size + int.from_bytes(plain[at + 8 : at + 12])
        return apply_frames(self, bytes(plain), *rest)

    return [(Vbucket, "apply_frames", instead)]


@mutation
def upr_first_marker_proves() -> list[Change]:
    """The first marker of a stream that was resumed inside a snapshot counts as its end."""
    accept = ConsumerStream.accept

    def instead(self: ConsumerStream, *arguments: Any, **options: Any) -> None:
        accept(self, *arguments, **options)
        self._resumed_inside = False

    return [(ConsumerStream, "accept", instead)]
