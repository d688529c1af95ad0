"""One stream, as its producer sends it.

Theory of operation. A stream alternates between a marker and the changes of the snapshot that it announces, until its
history says that it is over. It sends when the connection gives it a turn, one piece in each, and subscribes to its
history when it has run dry; so a stream with nothing to say costs nothing.

A *takeover* stream goes further. When it has caught up it makes the consumer's copy pending; once that is
answered and the backlog is small it makes its own copy dead, so that nobody writes any more, sends what had come in
between, and only when the death is on disk and every marker is acknowledged does it make the consumer's copy active.
At every moment at most one of the two is active; a consumer that is lost half-way leaves the source dead, because it
may be active already.
"""

from typing import TYPE_CHECKING, Any, Final

from upriver.errors import StatusError, StorageError
from upriver.model import INFLATION_MAX, NO_END, Snapshot, VbucketState, inflated_batch, plain
from upriver.protocol.producer.dialects import FAILED, StreamDialect, opaque_of
from upriver.protocol.producer.send_buffer import SendBuffer
from upriver.protocol.producer.source import History, SourceVbucket, StreamOptions
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

#: Near its end a takeover announces so many more snapshots of what keeps coming, then it waits for acknowledgements.
MARKERS_AHEAD: Final = 8


class ProducerStream:
    """The stream of one vbucket on one connection."""

    def __init__(
        self,
        connection: "Producer",
        vbucket: SourceVbucket,
        dialect: StreamDialect,
        request: Any,
        history: History,
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
        #: A name that the drafts' consumers give a stream.
        self.group_id: bytes | None = getattr(request, "group_id", None)
        self.history = history
        self.options = options
        self.end_seqno = end_seqno
        self.disk_only = disk_only
        self.life = StreamLife(vbucket.number)
        self.life.move(StreamEvent.ACCEPT)
        self.takeover = dialect.set_state is not None and bool(self.flags & TAKEOVER)
        #: When a snapshot is sent nothing has to be decided before the next.
        self._just_goes_on = not (self.takeover or options.exact_end)
        self.filters = bool(options.key_filter or options.value_filter)
        #: How many bytes its filters have looked at in its last turn.
        self.filtered_bytes = 0
        self.notifier = bool(connection.flags & _NOTIFIER)
        self.last_sent_seqno = self.start_seqno
        self.changes_sent = 0
        #: How many of them belonged to the first snapshot.
        self.backfilled = 0
        #: Why the history could not be read, for the log.
        self.failure = ""
        #: It stands in the connection's queue of those that may have something to send.
        self.queued = False
        self._control: list[bytes] = []  # hardly ever more than one: a deque would be ten times as large
        #: It did not run dry in its last turn.
        self.has_more = True
        self._subscribed_to: History | None = None
        #: It is called back for what is new only, not for what was there.
        self._fresh_only = False
        self._snapshots = 0
        #: Who had everything when it asked has no backfill: whatever comes is live.
        self._was_behind = self.start_seqno < vbucket.high_seqno
        #: Who was cut off in the middle of a snapshot is whole at its start only. The first marker says so, as deployed
        #: servers do: whoever keeps a marker's bounds as they are, and is cut off again, must not lose that.
        self._consistent_seqno = consistent_seqno
        self._last_change_seqno = self.start_seqno
        self._flags_of_all = (_ACK if self.takeover else 0) | (_HISTORY if options.history else 0)
        self._markers_unacked = 0
        #: The history goes on, but nothing is sent of it until all markers are acknowledged.
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

    # What the connection asks for

    @property
    def backfilling(self) -> bool:
        """Its first snapshot, which holds all that was there when it was asked for, is not sent to its end."""
        return self._was_behind and (
            not self._snapshots or (self._snapshots == 1 and self.history.snapshot is not None)
        )

    @property
    def finished(self) -> bool:
        """It has ended, and its last message is sent."""
        return self.life.state is StreamState.ENDED and not self._control

    def turn(self, max_bytes: int, send_buffer: SendBuffer) -> int:
        """Send messages and changes, about so many bytes, and at least one packet if there is one; how many they are.

        If filters let little pass it ends before, maybe with nothing: there is more then.
        """
        self.has_more = True
        filtered_before = self.history.bytes_filtered if self.filters else 0
        before, size = send_buffer.size, 0
        # Half of it is enough: the rest would be many small pieces, which cost more than they bring.
        enough = max_bytes // 2 or 1
        while size < enough:
            try:
                if not self._control and self.history.snapshot is None:
                    self._go_on()
                if self._control:
                    self._put_control(max_bytes - size, send_buffer)
                elif self.history.snapshot is not None:
                    self._put_changes(max_bytes - size, send_buffer)
                else:
                    self._wait()
                    break
            except (StatusError, StorageError) as error:
                self.failure = str(error)
                self._end(FAILED)
                continue
            size = send_buffer.size - before
            if self._just_goes_on and self.history.snapshot is None and not self._control:
                # To subscribe tells whether there is more, at less than it costs to look for a snapshot.
                self._wait()
                break
            if self.filters and self.history.bytes_filtered - filtered_before >= FILTERED_BYTES_MAX:
                break
        if self.filters:
            self.filtered_bytes = self.history.bytes_filtered - filtered_before
        return size

    def close(self, tell: str = "") -> bytes:
        """Send no more: nothing follows, except an end that tells why if it shall be told, and the dialect has it."""
        self.history.close()
        self._control.clear()
        if not self.life.ended:
            self.life.move(StreamEvent.CLOSE)
        if tell and self.dialect.tells_close:
            self._queue(self.dialect.end(self.dialect.end_reasons[tell]))
        last = b"".join(self._control)
        self._control.clear()
        return last

    def lose(self) -> None:
        """The connection is gone."""
        self.history.close()
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
        """Decide what comes next when nothing is being read."""
        state = self.life.state
        if state is StreamState.ENDED:
            return
        if self.history.end_reason is not None:
            self._finish(self.history.end_reason)
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
        snapshot = self.history.next_snapshot()
        if snapshot is not None and self.notifier:
            self._end("ok")
        elif snapshot is not None:
            self._announce(snapshot)
        elif takeover is not None:
            self._hand_over(takeover)

    def _announce(self, snapshot: Snapshot) -> None:
        self.life.move(StreamEvent.MARKER)
        self._snapshots += 1
        if self._snapshots == 1 and self._consistent_seqno < snapshot.start:
            snapshot = Snapshot(self._consistent_seqno, snapshot.end)
        self._control.append(self._marker(snapshot, self._marker_flags))
        self._markers_unacked += self.takeover and self.dialect.marker_answer is not None

    def _marker_flags(self) -> int:
        """Memory or disk, and as the recordings show: a checkpoint's first snapshot says so, one from disk does not."""
        if self.disk_only or self.history.from_disk:
            flags = _DISK
        else:
            flags = _MEMORY | (_CHECKPOINT if self.history.begins_checkpoint else 0)
        return flags | self._flags_of_all

    def _put_changes(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        """The next changes of the announced snapshot; none if a filter let nothing pass."""
        history = self.history
        snapshot = history.snapshot
        assert snapshot is not None
        before = history.changes_read
        if self._encoder is not None:
            self._put_encoded(self._encoder, max_bytes, send_buffer)
        else:
            self._put_frames(max_bytes, send_buffer)
        count = history.changes_read - before
        if count:
            self.life.move(StreamEvent.CHANGE)
            self.changes_sent += count
            self.backfilled += count if self._snapshots == 1 else 0
        self.last_sent_seqno = history.seqno
        if history.snapshot is None and (
            self._last_change_seqno < snapshot.end or self.dialect.snapshot_end is not None
        ):
            self._complete(snapshot)

    def _complete(self, snapshot: Snapshot) -> None:
        """The snapshot is sent: say so where the dialect does."""
        dialect = self.dialect
        if dialect.advanced is not None and self._last_change_seqno < snapshot.end:
            # The last changes did not pass a filter: the consumer must know that it stands at the end all the same.
            self.life.move(StreamEvent.ADVANCE)
            self._queue(dialect.advanced(snapshot.end))
        if dialect.snapshot_end is not None:
            self.life.move(StreamEvent.SNAPSHOT_END)
            self._queue(dialect.snapshot_end())

    def _put_frames(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        """The store's own records are what the stream sends, or nearly so."""
        history = self.history
        expirations = history.expirations_read
        room = send_buffer.room[:max_bytes]
        count = 0 if self.filters else history.read_into(room, self.opaque)
        # What has no room, or must be looked at first, is made by itself.
        apart = history.read(max_bytes, self.opaque) if not count and history.snapshot is not None else b""
        self._last_change_seqno = history.last_read_seqno
        if history.expirations_read != expirations and not self._expirations:
            apart, count = expired_as_deleted(apart or bytes(room[:count])), 0
        send_buffer.filled(count)
        if apart:
            send_buffer.put(apart)

    def _put_encoded(self, encoder: ChangeEncoder, max_bytes: int, send_buffer: SendBuffer) -> None:
        tells = self.dialect.tells_datatype
        batch = self.history.read_columns(max_bytes if tells else max_bytes // INFLATION_MAX or 1)
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
        self.history.close()
        self.life.move(StreamEvent.END)
        self._queue(self.dialect.end(self.dialect.end_reasons[reason]))

    # Takeover

    def _hand_over(self, takeover: SourceTakeover) -> None:
        """Everything is sent: the next step, once what was sent is acknowledged."""
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
            self.failure = f"the consumer refused a vbucket state: {answer.status.label}"
            self._end("state changed")
        elif self.life.state is StreamState.PENDING:
            self.life.move(StreamEvent.PENDING_ANSWERED)
        elif self._source_takeover is not None and self.life.state is StreamState.ACTIVATING:
            self._source_takeover.confirm_takeover()

    def _nears_its_end(self, takeover: SourceTakeover) -> bool:
        """While writes go on: near the end of them take the next step; True if nothing else is sent before that."""
        seqno = self.history.seqno
        if not takeover.is_near(seqno):
            return False
        if self.life.state is not StreamState.DRAINING:
            self._hand_over(takeover)
            holds = self._holds_back or self._markers_unacked >= MARKERS_AHEAD
            return self.life.state is StreamState.PENDING or holds
        self.history.close()
        takeover.make_dead()
        # What had come in between is read from a place of its own.
        self.history = self.connection.open_history(self.vbucket, seqno, NO_END, self.options)
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
        """Nothing to send: wake up when the history goes on."""
        self.has_more = False
        if self.life.state is StreamState.ENDED:
            return
        # While an answer is awaited new changes are no news; that the history has ended is.
        fresh_only = self.takeover and (
            self._holds_back or self.life.state in (StreamState.PENDING, StreamState.ACTIVATING)
        )
        if self._subscribed_to is self.history and (fresh_only or not self._fresh_only):
            return  # but who was fresh_only may have missed what was there meanwhile
        self._subscribed_to, self._fresh_only = self.history, fresh_only
        self.history.subscribe(self._called, fresh=fresh_only)

    def _called(self) -> None:
        self._subscribed_to = None
        self.connection.ready(self)

    def _wake(self) -> None:
        self.connection.ready(self)
