"""One stream, as its producer sends it.

Theory of operation. A stream alternates between a marker and the changes of the snapshot that it announces, until its
history says that it is over. A *takeover* stream goes further (DESIGN §5): when it has caught up it makes the consumer's
copy pending, makes its own copy dead so that nobody writes any more, sends what had come in between, and only when the
death is on disk and everything is acknowledged does it make the consumer's copy active. At every moment at most one of
the two is active; a consumer that is lost half-way leaves the source dead, because it may be active already.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from upriver.model import Snapshot, VbucketState
from upriver.protocol.source import History, SourceVbucket, StreamOptions
from upriver.protocol.streams import StreamEvent, StreamLife, StreamState
from upriver.wire import Message, Request, Response, dcp, upr
from upriver.wire.codes import Status
from upriver.wire.columns import ChangeEncoder

if TYPE_CHECKING:
    from upriver.protocol.producer import Producer

#: A history's end in the words of each dialect.
_DCP_REASONS: Final = {
    "ok": dcp.EndReason.OK,
    "closed": dcp.EndReason.CLOSED,
    "state changed": dcp.EndReason.STATE_CHANGED,
    "flushed": dcp.EndReason.STATE_CHANGED,
    "rolled back": dcp.EndReason.ROLLBACK,
    "too slow": dcp.EndReason.TOO_SLOW,
}


class ProducerStream:
    """The stream of one vbucket on one connection."""

    def __init__(
        self,
        connection: "Producer",
        vbucket: SourceVbucket,
        request: "upr.StreamRequest | dcp.StreamRequest",
        history: History,
        options: StreamOptions,
    ) -> None:
        self.connection = connection
        self.vbucket = vbucket
        self.opaque = request.opaque
        self.request = request
        self.options = options
        self.life = StreamLife(vbucket.number)
        self.life.move(StreamEvent.ACCEPT)
        self.modern = isinstance(request, dcp.StreamRequest)
        self.takeover = bool(int(request.flags) & dcp.StreamFlag.TAKEOVER)
        self.notifier = bool(connection.flags & dcp.OpenFlag.NOTIFIER)
        self.history = history
        self.last_sent_seqno = request.start_seqno
        self.changes_sent = 0
        #: It stands in the connection's queue of those that may have something to send.
        self.queued = False
        self._control: deque[Message] = deque()
        self._markers_unacked = 0
        self._waiting = False
        self._first = True
        self._encoder = None if self._sends_frames else self._new_encoder()

    # What the connection asks for

    @property
    def has_more(self) -> bool:
        """It did not run dry in its last turn."""
        return not self._waiting

    def turn(self, max_bytes: int) -> bytes:
        """Send a piece: control messages, a marker and changes, at most about so many bytes."""
        self._waiting = False
        self._go_on()
        out = self.take_control()
        if out:
            return b"".join(out)
        if self.life.ended or self.history.snapshot is None:
            self._wait()
            return b""
        return self._changes(max_bytes)

    def take_control(self) -> list[bytes]:
        """The control messages that are due, encoded."""
        packets = [message.encode() for message in self._control]
        self._control.clear()
        return packets

    def close(self, *, tell: bool) -> None:
        """The consumer wants no more."""
        self.history.close()
        self.life.move(StreamEvent.CLOSE)
        if tell and self.modern:
            self._queue(dcp.StreamEnd(reason=dcp.EndReason.CLOSED))

    def lose(self) -> None:
        """The connection is gone."""
        self.history.close()
        if not self.life.ended:
            self.life.move(StreamEvent.LOSE)

    def answered(self, answer: Response) -> None:
        """The consumer has answered a marker or a set vbucket state."""
        if answer.code == upr.SnapshotMarker.declaration.opcode:
            self._markers_unacked = max(0, self._markers_unacked - 1)
        elif answer.code == upr.SetVbucketState.declaration.opcode:
            self._state_answered(answer)
        self._wake()

    # Snapshots

    def _go_on(self) -> None:
        """Decide what comes next, if nothing is being read."""
        if self.life.ended or self.history.snapshot is not None:
            return
        snapshot = self.history.next_snapshot()
        if snapshot is not None and self.notifier:
            self._end("ok")
        elif snapshot is not None:
            self._announce(snapshot)
        elif self.history.end_reason is not None and self.life.state in (StreamState.OPEN, StreamState.SNAPSHOT):
            self._finish(self.history.end_reason)
        elif self.takeover:
            self._hand_over()

    def _announce(self, snapshot: Snapshot) -> None:
        self.life.move(StreamEvent.MARKER)
        if self.modern:
            self._queue(dcp.SnapshotMarker(start_seqno=snapshot.start, end_seqno=snapshot.end, flags=self._flags()))
            self._markers_unacked += self.takeover
        else:
            self._queue(upr.SnapshotMarker())
        self._first = False

    def _flags(self) -> dcp.MarkerFlag:
        flags = dcp.MarkerFlag.DISK if self.history.from_disk else dcp.MarkerFlag.MEMORY
        if self._first and self.request.start_seqno == 0:
            flags |= dcp.MarkerFlag.CHECKPOINT
        if self.takeover:
            flags |= dcp.MarkerFlag.ACK
        if self.options.history:
            flags |= dcp.MarkerFlag.HISTORY | dcp.MarkerFlag.MAY_DUPLICATE_KEYS
        return flags

    def _changes(self, max_bytes: int) -> bytes:
        snapshot = self.history.snapshot
        assert snapshot is not None
        before = self.changes_sent
        if self._encoder is None:
            out = self.history.read(max_bytes, self.opaque)
            self.changes_sent += 1 if out else 0
        else:
            batch = self.history.read_columns(max_bytes)
            self.changes_sent += batch.num_rows
            out = bytes(self._encoder.encode(batch))
        self.last_sent_seqno = self.history.seqno
        if self.changes_sent > before:
            self.life.move(StreamEvent.CHANGE)
        if self.history.snapshot is None and self.modern and self.options.filtered:
            # The last changes may not have passed: the consumer must know how far it stands all the same.
            self.life.move(StreamEvent.ADVANCE)
            out += dcp.SeqnoAdvanced(vbucket=self.vbucket.number, opaque=self.opaque, by_seqno=snapshot.end).encode()
        return out

    @property
    def _sends_frames(self) -> bool:
        """The store's own records are just what this stream sends."""
        connection = self.connection
        return (
            self.modern
            and connection.controls["enable_expiry_opcode"]
            and not connection.flags & dcp.OpenFlag.DELETE_TIMES
        )

    def _new_encoder(self) -> ChangeEncoder:
        connection = self.connection
        return ChangeEncoder(
            dcp.dcp if self.modern else upr.upr,
            opaque=self.opaque,
            vbucket=self.vbucket.number,
            keys_only=self.options.keys_only,
            expirations=not self.modern or connection.controls["enable_expiry_opcode"],
            delete_times=bool(connection.flags & dcp.OpenFlag.DELETE_TIMES),
        )

    # The end

    def _finish(self, reason: str) -> None:
        if reason == "flushed":
            self.life.move(StreamEvent.FLUSH)
            self._queue(upr.Flush())
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.history.close()
        self.life.move(StreamEvent.END)
        if self.modern:
            self._queue(dcp.StreamEnd(reason=_DCP_REASONS[reason]))
        else:
            ok = reason == "ok"
            self._queue(upr.StreamEnd(reason=upr.EndReason.OK if ok else upr.EndReason.STATE_CHANGED))

    # Takeover

    def _hand_over(self) -> None:
        """Everything is sent: the next step, once what was sent is acknowledged."""
        if self._markers_unacked:
            return
        if self.life.state in (StreamState.OPEN, StreamState.SNAPSHOT):
            self.life.move(StreamEvent.SET_PENDING)
            self._queue(upr.SetVbucketState(state=upr.VbucketState.PENDING))
        elif self.life.state is StreamState.DRAINING and self._death_is_durable:
            self.life.move(StreamEvent.SET_ACTIVE)
            self._queue(upr.SetVbucketState(state=upr.VbucketState.ACTIVE))

    _death_is_durable = False

    def _state_answered(self, answer: Response) -> None:
        if answer.status is not Status.SUCCESS:
            self._end("state changed")
        elif self.life.state is StreamState.PENDING:
            self._die()
        elif self.life.state is StreamState.ACTIVATING:
            self._end("ok")

    def _die(self) -> None:
        """Nobody may write any more; what had come in between is sent from a history of its own."""
        self.life.move(StreamEvent.PENDING_ANSWERED)
        position = self.history.seqno
        self.history.close()
        self.vbucket.set_state(VbucketState.DEAD)
        name = f"{self.connection.name}:{self.vbucket.number}:rest"
        self.history = self.connection.source.history(
            self.vbucket.number, name, position, self.request.end_seqno, self.options
        )
        self.connection.source.when_durable(self._died)

    def _died(self) -> None:
        self._death_is_durable = True
        self._wake()

    # Inside

    def _queue(self, message: Request) -> None:
        message.vbucket = self.vbucket.number
        message.opaque = self.opaque
        self._control.append(message)

    def _wait(self) -> None:
        """Nothing to send: wake up when the history goes on."""
        self._waiting = True
        if not self.life.ended and self.history.end_reason is None:
            self.history.subscribe(self._wake)

    def _wake(self) -> None:
        self._waiting = False
        self.connection.ready(self)
