"""One stream, as its producer sends it.

Theory of operation. A stream alternates between a marker and the changes of the snapshot that it announces, until its
history ends. It sends one piece in each turn that the connection gives it. When it has nothing to send it subscribes to
its cursor, so an idle stream costs nothing.

A *takeover* stream goes further. When it has caught up it makes the consumer's copy pending. Once that is answered and
the backlog is small it makes its own copy dead, so that no client writes any more, and sends the rest. Only when the
dead state is on disk and every marker is acknowledged does it make the consumer's copy active. At every moment at most
one of the two is active. If the consumer is lost in between, the source stays dead, because the consumer may be active
already.
"""

from typing import TYPE_CHECKING, Any, Final

from upriver.errors import StatusError, StorageError
from upriver.model import INFLATION_MAX, NO_END, Snapshot, VbucketState, inflated_batch, plain
from upriver.protocol.producer.dialects import FAILED, StreamDialect, opaque_of
from upriver.protocol.producer.send_buffer import SendBuffer
from upriver.protocol.producer.source import SourceCursor, SourceVbucket, StreamOptions
from upriver.protocol.producer.stream_scheduler import FILTERED_BYTES_MAX
from upriver.protocol.producer.takeover import SourceTakeover
from upriver.protocol.stream_state import StreamEvent, StreamLife, StreamState
from upriver.wire import Message, Response, Status, dcp
from upriver.wire.codec import ChangeEncoder, expired_as_deleted

if TYPE_CHECKING:
    from upriver.protocol.producer.producer import Producer

TAKEOVER: Final = int(dcp.StreamFlag.TAKEOVER)
_NOTIFIER: Final = int(dcp.OpenFlag.NOTIFIER)
_MEMORY, _DISK, _CHECKPOINT, _ACK = map(
    int, (dcp.MarkerFlag.MEMORY, dcp.MarkerFlag.DISK, dcp.MarkerFlag.CHECKPOINT, dcp.MarkerFlag.ACK)
)
_HISTORY: Final = int(dcp.MarkerFlag.HISTORY | dcp.MarkerFlag.MAY_DUPLICATE_KEYS)
_DELETE_TIMES: Final = int(dcp.OpenFlag.DELETE_TIMES)

#: Near its end a takeover announces at most this many more snapshots before it waits for acknowledgements.
MARKERS_AHEAD: Final = 8


class ProducerStream:
    """The stream of one vbucket on one connection."""

    def __init__(
        self,
        connection: "Producer",
        vbucket: SourceVbucket,
        dialect: StreamDialect,
        request: Any,
        cursor: SourceCursor,
        options: StreamOptions,
        consistent_seqno: int,
        *,
        end_seqno: int,
        disk_only: bool = False,
    ) -> None:
        self.connection = connection
        self.vbucket = vbucket
        self.dialect = dialect
        self.opaque = opaque_of(request)
        self.start_seqno: int = request.start_seqno
        self.flags = int(getattr(request, "flags", 0))
        #: A name that consumers of the drafts give a stream.
        self.group_id: bytes | None = getattr(request, "group_id", None)
        self.cursor = cursor
        self.options = options
        self.end_seqno = end_seqno
        self.disk_only = disk_only
        self.life = StreamLife(vbucket.number)
        self.life.move(StreamEvent.ACCEPT)
        self.takeover = dialect.set_state is not None and bool(self.flags & TAKEOVER)
        #: After a snapshot there is nothing to decide before the next.
        self._just_goes_on = not (self.takeover or options.exact_end)
        self.filters = bool(options.key_filter or options.value_filter)
        #: How many bytes its filters have read in its last turn.
        self.filtered_bytes = 0
        self.notifier = bool(connection.flags & _NOTIFIER)
        self.last_sent_seqno = self.start_seqno
        self.changes_sent = 0
        #: How many of them belonged to the first snapshot.
        self.backfilled = 0
        #: Why the history could not be read, for the log.
        self.failure = ""
        #: It is in the connection's queue of streams that may have something to send.
        self.queued = False
        self._control: list[bytes] = []  # rarely more than one: a deque would be ten times as large
        #: It had more to send in its last turn.
        self.has_more = True
        self._subscribed_to: SourceCursor | None = None
        #: It is subscribed to later changes only.
        self._fresh_only = False
        self._snapshots = 0
        #: A consumer that was up to date has no backfill; everything it gets is live.
        self._was_behind = self.start_seqno < vbucket.high_seqno
        #: A consumer cut off mid-snapshot is consistent only at that snapshot's start, so the first marker repeats it.
        self._consistent_seqno = consistent_seqno
        self._last_change_seqno = self.start_seqno
        self._flags_of_all = (_ACK if self.takeover else 0) | (_HISTORY if options.history else 0)
        self._markers_unacked = 0
        #: Nothing more is sent until all markers are acknowledged.
        self._holds_back = False
        #: The opcode of a set vbucket state that is not answered yet.
        self._state_asked: int | None = None
        successor = connection.successor
        self._source_takeover = (
            SourceTakeover(connection.source, vbucket, successor, self._wake) if self.takeover else None
        )
        self._expirations = dialect.always_expires or connection.controls["enable_expiry_opcode"]
        self._marker = dialect.marker(vbucket.number, self.opaque)
        self._encoder = None if self._sends_frames else self._new_encoder()
        if dialect.start is not None:
            self.life.move(StreamEvent.START)
            self._queue(dialect.start())

    # Called by the connection

    @property
    def backfilling(self) -> bool:
        """Whether its first snapshot, which holds everything that existed at the request, is still being sent."""
        return self._was_behind and (not self._snapshots or (self._snapshots == 1 and self.cursor.snapshot is not None))

    @property
    def finished(self) -> bool:
        """Whether it has ended and its last message is sent."""
        return self.life.state is StreamState.ENDED and not self._control

    def turn(self, max_bytes: int, send_buffer: SendBuffer) -> int:
        """Send messages and changes, about this many bytes and at least one packet if there is one; return how many
        bytes.

        A filtered stream may stop earlier, even with nothing; it has more then.
        """
        self.has_more = True
        filtered_before = self.cursor.bytes_filtered if self.filters else 0
        before, size = send_buffer.size, 0
        # Stop at half: filling up the rest with many small pieces costs more than it brings.
        enough = max_bytes // 2 or 1
        while size < enough:
            try:
                if not self._control and self.cursor.snapshot is None:
                    self._go_on()
                if self._control:
                    self._put_control(max_bytes - size, send_buffer)
                elif self.cursor.snapshot is not None:
                    self._put_changes(max_bytes - size, send_buffer)
                else:
                    self._wait()
                    break
            except (StatusError, StorageError) as error:
                self.failure = str(error)
                self._end(FAILED)
                continue
            size = send_buffer.size - before
            if self.filters and self.cursor.undecided:
                self.has_more = False
                self.cursor.when_decided(self._wake)
                break
            if self._just_goes_on and self.cursor.snapshot is None and not self._control:
                # Subscribing tells whether there is more, and costs less than looking for a snapshot.
                self._wait()
                break
            if self.filters and self.cursor.bytes_filtered - filtered_before >= FILTERED_BYTES_MAX:
                break
        if self.filters:
            self.filtered_bytes = self.cursor.bytes_filtered - filtered_before
        return size

    def close(self, tell: str = "") -> bytes:
        """Stop sending. Return the last message: a stream end with this reason, if the dialect has it; else nothing."""
        self.cursor.close()
        self._control.clear()
        if not self.life.ended:
            self.life.move(StreamEvent.CLOSE)
        if tell and self.dialect.tells_close:
            self._queue(self.dialect.end(self.dialect.end_reasons[tell]))
        last = b"".join(self._control)
        self._control.clear()
        return last

    def lose(self) -> None:
        """The connection is lost."""
        self.cursor.close()
        if not self.life.ended:
            self.life.move(StreamEvent.LOSE)

    def answered(self, answer: Response) -> None:
        """The consumer has answered a marker or a set vbucket state."""
        if self.life.ended:
            return
        if self._state_asked is not None and answer.code == self._state_asked:
            self._state_asked = None
            self._state_answered(answer)
        elif answer.code == self.dialect.marker_answer:
            self._markers_unacked = max(0, self._markers_unacked - 1)
        self._wake()

    # Snapshots

    def _go_on(self) -> None:
        """Decide what comes next when no snapshot is being read."""
        state = self.life.state
        if state is StreamState.ENDED:
            return
        if self.cursor.end_reason is not None:
            self._finish(self.cursor.end_reason)
            return
        if state is StreamState.PENDING:
            return
        takeover = self._source_takeover
        if state is StreamState.ACTIVATING:
            if takeover is not None and takeover.over:
                self._end("ok")
            return
        self._holds_back = takeover is not None and not takeover.dead and self._nears_its_end(takeover)
        if self._holds_back:
            return
        snapshot = self.cursor.next_snapshot()
        if snapshot is not None and self.notifier:
            self._notify(snapshot)
        elif snapshot is not None:
            self._announce(snapshot)
        elif takeover is not None:
            self._hand_over(takeover)

    def _notify(self, snapshot: Snapshot) -> None:
        """End a notifier if there is a change beyond its start; otherwise leave the changes before it out."""
        if snapshot.end > self.start_seqno:
            self._end("ok")
        else:
            self.cursor.close()
            self.cursor = self.connection.open_cursor(self.vbucket, snapshot.end, NO_END, self.options)

    def _announce(self, snapshot: Snapshot) -> None:
        self.life.move(StreamEvent.MARKER)
        self._snapshots += 1
        if self._snapshots == 1 and self._consistent_seqno < snapshot.start:
            snapshot = Snapshot(self._consistent_seqno, snapshot.end)
        self._control.append(self._marker(snapshot, self._marker_flags))
        self._markers_unacked += self.takeover and self.dialect.marker_answer is not None

    def _marker_flags(self) -> int:
        """Memory or disk. As in the recordings, only a snapshot from memory says that it begins a checkpoint."""
        if self.disk_only or self.cursor.from_disk:
            flags = _DISK
        else:
            flags = _MEMORY | (_CHECKPOINT if self.cursor.begins_checkpoint else 0)
        return flags | self._flags_of_all

    def _put_changes(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        """Send the next changes of the announced snapshot; none if a filter let nothing pass."""
        cursor = self.cursor
        snapshot = cursor.snapshot
        assert snapshot is not None
        before = cursor.changes_read
        if self._encoder is not None:
            self._put_encoded(self._encoder, max_bytes, send_buffer)
        else:
            self._put_frames(max_bytes, send_buffer)
        count = cursor.changes_read - before
        if count:
            self.life.move(StreamEvent.CHANGE)
            self.changes_sent += count
            self.backfilled += count if self._snapshots == 1 else 0
        self.last_sent_seqno = cursor.seqno
        if cursor.snapshot is None and (
            self._last_change_seqno < snapshot.end or self.dialect.snapshot_end is not None
        ):
            self._complete(snapshot)

    def _complete(self, snapshot: Snapshot) -> None:
        """The snapshot is sent: say so if the dialect has a message for it."""
        dialect = self.dialect
        if dialect.advanced is not None and self._last_change_seqno < snapshot.end:
            # The last changes did not pass a filter; the consumer must still learn that it is at the end.
            self.life.move(StreamEvent.ADVANCE)
            self._queue(dialect.advanced(snapshot.end))
        if dialect.snapshot_end is not None:
            self.life.move(StreamEvent.SNAPSHOT_END)
            self._queue(dialect.snapshot_end())

    def _put_frames(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        """Send the store's own records, with few changes."""
        cursor = self.cursor
        expirations = cursor.expirations_read
        room = send_buffer.room[:max_bytes]
        count = 0 if self.filters else cursor.read_into(room, self.opaque)
        # A frame that does not fit, or that a filter must read first, is copied separately.
        apart = cursor.read(max_bytes, self.opaque) if not count and cursor.snapshot is not None else b""
        self._last_change_seqno = cursor.last_read_seqno
        if cursor.expirations_read != expirations and not self._expirations:
            apart, count = expired_as_deleted(apart or bytes(room[:count])), 0
        send_buffer.filled(count)
        if apart:
            send_buffer.put(apart)

    def _put_encoded(self, encoder: ChangeEncoder, max_bytes: int, send_buffer: SendBuffer) -> None:
        tells = self.dialect.tells_datatype
        batch = self.cursor.read_columns(max_bytes if tells else max_bytes // INFLATION_MAX or 1)
        if batch.num_rows:
            if not tells:
                batch = inflated_batch(batch, plain)
            self._last_change_seqno = batch["seqno"][-1].as_py()
            send_buffer.put(memoryview(encoder.encode(batch)).cast("B"))

    @property
    def _sends_frames(self) -> bool:
        return self.dialect.sends_records and not self.connection.flags & _DELETE_TIMES

    def _new_encoder(self) -> ChangeEncoder:
        return ChangeEncoder(
            self.dialect.wire,
            opaque=self.opaque,
            vbucket=self.vbucket.number,
            keys_only=self.options.keys_only,
            expirations=self._expirations,
            delete_times=bool(self.connection.flags & _DELETE_TIMES),
        )

    # The end

    def _finish(self, reason: str) -> None:
        if reason == "flushed" and self.dialect.flush is not None:
            self.life.move(StreamEvent.FLUSH)
            self._queue(self.dialect.flush())
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.cursor.close()
        self.life.move(StreamEvent.END)
        self._queue(self.dialect.end(self.dialect.end_reasons[reason]))

    # Takeover

    def _hand_over(self, takeover: SourceTakeover) -> None:
        """Everything is sent: take the next step, once all markers are acknowledged."""
        if self._markers_unacked:
            return
        if self.life.state in (StreamState.OPEN, StreamState.SNAPSHOT):
            self.life.move(StreamEvent.SET_PENDING)
            self._ask_for(VbucketState.PENDING)
        elif self.life.state is StreamState.DRAINING and takeover.durable:
            self.life.move(StreamEvent.SET_ACTIVE)
            self._ask_for(VbucketState.ACTIVE)

    def _ask_for(self, state: VbucketState) -> None:
        assert self.dialect.set_state is not None
        message = self.dialect.set_state(state)
        self._state_asked = message.code
        self._queue(message)

    def _state_answered(self, answer: Response) -> None:
        if answer.status is not Status.SUCCESS:
            self.failure = f"the consumer refused to change the role of its copy: {answer.status.label}"
            self._end("state changed")
        elif self.life.state is StreamState.PENDING:
            self.life.move(StreamEvent.PENDING_ANSWERED)
        elif self._source_takeover is not None and self.life.state is StreamState.ACTIVATING:
            self._source_takeover.confirm_takeover()

    def _nears_its_end(self, takeover: SourceTakeover) -> bool:
        """Take the next step when few changes are left, while clients still write. Return True if nothing else is sent
        before that step is done."""
        seqno = self.cursor.seqno
        if not takeover.is_near(seqno):
            return False
        if self.life.state is not StreamState.DRAINING:
            self._hand_over(takeover)
            holds = self._holds_back or self._markers_unacked >= MARKERS_AHEAD
            return self.life.state is StreamState.PENDING or holds
        self.cursor.close()
        takeover.make_dead()
        # The rest is read from a new position.
        self.cursor = self.connection.open_cursor(self.vbucket, seqno, NO_END, self.options)
        return False

    # Inside

    def _queue(self, message: Message) -> None:
        self._control.append(self.dialect.addressed(message, self.vbucket.number, self.opaque))

    def _put_control(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        control = self._control
        limit = send_buffer.size + max_bytes
        send_buffer.put(control.pop(0))
        while control and send_buffer.size + len(control[0]) <= limit:
            send_buffer.put(control.pop(0))

    def _wait(self) -> None:
        """Nothing to send: subscribe to the cursor."""
        self.has_more = False
        if self.life.state is StreamState.ENDED:
            return
        # While an answer is awaited, only the end of the history matters, not new changes.
        fresh_only = self.takeover and (
            self._holds_back or self.life.state in (StreamState.PENDING, StreamState.ACTIVATING)
        )
        if self._subscribed_to is self.cursor and (fresh_only or not self._fresh_only):
            return  # a subscription to later changes only may have missed some
        self._subscribed_to, self._fresh_only = self.cursor, fresh_only
        self.cursor.subscribe(self._called, fresh=fresh_only)

    def _called(self) -> None:
        self._subscribed_to = None
        self.connection.ready(self)

    def _wake(self) -> None:
        self.connection.ready(self)
