"""The consumer's side of a connection: streams come in and go to a sink.

Theory of operation. Changes do not become objects: a run of changes of one stream goes to the sink as received bytes.
All other messages are handled one by one. An unexpected message is answered with an error, so that the producer knows,
and ends at most its stream.

Before its first stream a consumer sends its settings: the size of the window, and that it wants noops. It acknowledges
bytes when a part of the window was processed, or after some quiet seconds.

The caller decides which streams to add: a mover does so for the node's replicas (``replica``), a client for itself.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    PositionError,
    ProtocolViolation,
    StatusError,
    TemporaryFailure,
)
from upriver.model import EVENTS, NO_END, FailoverLog, VbucketState
from upriver.protocol.consumer.consumer_stream import ConsumerStream, Run
from upriver.protocol.consumer.negotiation import DIALECTS, Negotiation
from upriver.protocol.consumer.sink import Sink, SinkVbucket
from upriver.protocol.flow_control import ReceiveWindow
from upriver.protocol.liveness import NOOP_INTERVAL_S, SilenceWatch
from upriver.protocol.stream_state import StreamEvent
from upriver.wire import (
    MEMCACHED,
    AnyResponse,
    Buffer,
    Message,
    Request,
    Response,
    Status,
    dcp,
    u16_at,
    upr,
    upr_draft3,
)

#: The default of deployed consumers.
WINDOW_BYTES: Final = 10 * 1024 * 1024
#: Processed bytes are acknowledged after this time, however few they are.
ACK_INTERVAL_S: Final = 5.0

_HEADER_BYTES: Final = MEMCACHED.header_size
_VBUCKET_AT: Final = MEMCACHED.at("vbucket")
_OPAQUE_AT: Final = MEMCACHED.at("opaque")
_MARKER: Final = upr.SnapshotMarker.declaration.opcode
_ASKED: Final = frozenset((dcp.StreamRequest.declaration.opcode, upr.FailoverLogRequest.declaration.opcode))
_CONTROL: Final = dcp.Control.declaration.opcode

#: A producer's messages that belong to a stream. All of them count for flow control. The drafts have messages for the
#: start of a stream and the end of a snapshot; their other messages are translated to `upr`.
StreamMessage = (
    dcp.SnapshotMarker
    | upr.SnapshotMarker
    | upr_draft3.StreamStart
    | upr_draft3.SnapshotEnd
    | dcp.Mutation
    | upr.Mutation
    | dcp.Deletion
    | upr.Deletion
    | dcp.Expiration
    | dcp.SeqnoAdvanced
    | upr.Flush
    | upr.SetVbucketState
    | dcp.StreamEnd
    | upr.StreamEnd
)

#: Called when a stream request is answered: with the stream, and with the refusal if there is one.
Answered = Callable[[ConsumerStream, StatusError | None], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """What a consumer asks of its producer."""

    #: The size of the window; 0 for no limit.
    window_bytes: int = WINDOW_BYTES
    #: The interval of noops; 0 for none.
    noop_interval_s: float = NOOP_INTERVAL_S
    #: Receive expirations as such, not as deletions.
    expirations: bool = True
    #: The dialects to try, in this order.
    dialects: Sequence[str] = DIALECTS
    #: The start of a marker is the first seqno of the snapshot, as on deployed servers.
    starts_inclusive: bool = False
    #: Changes are acknowledged when the caller says so (``processed``), not when they are received.
    acks_late: bool = False
    #: Further settings for the producer.
    controls: Mapping[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, str]:
        """The settings to send, in their order."""
        wanted: dict[str, str] = {}
        if self.window_bytes:
            wanted["connection_buffer_size"] = str(self.window_bytes)
        if self.noop_interval_s:
            wanted["enable_noop"] = "true"
            wanted["set_noop_interval"] = f"{self.noop_interval_s:g}"
        if self.expirations:
            wanted["enable_expiry_opcode"] = "true"
        return {**wanted, **self.controls}


class ConsumerConnection:
    """The streams of one connection."""

    def __init__(
        self,
        sink: Sink,
        now: float,
        options: ConsumerOptions | None = None,
        *,
        on_output: Callable[[], object] | None = None,
        on_end: Callable[[ConsumerStream], object] | None = None,
    ) -> None:
        self.sink = sink
        self.options = options or ConsumerOptions()
        #: Called when there is something to send that no received message caused.
        self.on_output = on_output
        #: Called when an accepted stream ends, for any reason.
        self.on_end = on_end
        #: Streams by vbucket, including ended ones until they are closed or replaced.
        self.streams: dict[int, ConsumerStream] = {}
        self.window = ReceiveWindow()
        self.silence = SilenceWatch(0.0, now)
        #: There was no room for the last run: the caller waits, calls ``go_on`` and gives the rest again.
        self.full = False
        #: Why the connection is to be closed, for the log; empty if it is not.
        self.closing = ""
        #: The dialect of its first stream.
        self.dialect = ""
        self.bytes_received_total = 0
        #: Changes of streams that were replaced or closed since.
        self._changes_of_ended = 0
        self._out: deque[bytes] = deque()
        #: Vbuckets whose stream we left while the producer may still have it open.
        self._left: set[int] = set()
        self._opaque = 0
        self._settings_sent = False
        self._asking: dict[int, tuple[Negotiation, ConsumerStream, Answered]] = {}
        self._controls: dict[int, str] = {}
        self._acked_at = now

    @property
    def changes_received(self) -> int:
        """How many changes all streams have received."""
        return self._changes_of_ended + sum(stream.changes_received for stream in self.streams.values())

    # Asking

    def add_stream(self, vbucket: int, done: Answered, *, flags: int = 0, end_seqno: int = NO_END) -> ConsumerStream:
        """Request a stream; raises a StatusError if that is impossible."""
        old = self.streams.get(vbucket)
        if old is not None and not old.life.ended:
            raise KeyExists("the vbucket has a stream on this connection already", vbucket=vbucket)
        copy = self.sink.open(vbucket)
        self._check_may_feed(copy, flags)
        self.forget(vbucket)
        opaque = self._next_opaque()
        stream = ConsumerStream(copy, opaque, flags=flags, starts_inclusive=self.options.starts_inclusive)
        self.streams[vbucket] = stream
        self._send_settings()
        if vbucket in self._left:  # the producer accepts no second stream before this
            self._left.discard(vbucket)
            self._send(upr.CloseStream(vbucket=vbucket, opaque=self._next_opaque()))
        negotiation = Negotiation(copy, opaque, flags=flags, end_seqno=end_seqno, dialects=self.options.dialects)
        self._asking[opaque] = negotiation, stream, done
        self._send(negotiation.first())
        return stream

    @staticmethod
    def _check_may_feed(copy: SinkVbucket, flags: int) -> None:
        """A pending copy waits for its takeover, and for nothing else."""
        if copy.state is VbucketState.PENDING and not flags & dcp.StreamFlag.TAKEOVER:
            copy.close()
            raise InvalidArguments(
                "the copy is pending and accepts only a takeover: make it a replica first", vbucket=copy.number
            )

    def close_stream(self, vbucket: int, *, told: bool = False) -> None:
        """Leave a stream; raises a StatusError if there is none.

        Pass ``told`` if the caller closes it at the producer too; otherwise that is done before the next request.
        """
        stream = self.streams.get(vbucket)
        if stream is None:
            raise KeyNotFound("the vbucket has no stream on this connection", vbucket=vbucket)
        asking = self._asking.pop(stream.opaque, None)
        self.forget(vbucket)
        if told:
            self._left.discard(vbucket)
        if asking is not None:
            asking[2](stream, KeyNotFound("the stream was closed before its producer answered", vbucket=vbucket))

    def role_changed(self, vbucket: int) -> None:
        """A copy changed role: if it no longer accepts the stream, close it at the producer, which may be idle."""
        stream = self.streams.get(vbucket)
        if stream is None:
            return
        try:
            stream.check_role()
        except StatusError as error:
            if stream.opaque in self._asking:  # the next attempt may find it in a role in which it receives
                self._abandon(stream, TemporaryFailure(error.detail, vbucket=vbucket))
            else:
                self._abandon(stream, error)
                # The stream's own opaque tells a mover that it is not closed to make room for another.
                self._send(upr.CloseStream(vbucket=vbucket, opaque=stream.opaque))
                self._left.discard(vbucket)
            self._tell_output()

    def forget(self, vbucket: int) -> None:
        """Drop a stream; later messages for it are refused."""
        stream = self.streams.pop(vbucket, None)
        if stream is not None:
            self._changes_of_ended += stream.changes_received
            self._close(stream, stream.close)

    def _send_settings(self) -> None:
        if self._settings_sent:
            return
        self._settings_sent = True
        for name, value in self.options.settings().items():
            opaque = self._next_opaque()
            self._controls[opaque] = name
            self._send(dcp.Control(key=name.encode(), value=value.encode(), opaque=opaque))
        # The producer counts from when it has read the setting.
        self.window.size_bytes = self.options.window_bytes

    def _next_opaque(self) -> int:
        self._opaque = self._opaque % 0xFFFFFFFF + 1
        return self._opaque

    # Coming in

    def receive_runs(self, data: Buffer, at: int, now: float) -> tuple[int, list[Run]]:
        """Take the changes that start at ``at``: where they end, and the runs that were taken, one stream each."""
        runs: list[Run] = []
        while len(data) - at > _HEADER_BYTES and data[at + 1] in EVENTS:
            stream = self.streams.get(u16_at(data, at + _VBUCKET_AT))
            if stream is None or stream.opaque != int.from_bytes(data[at + _OPAQUE_AT : at + _OPAQUE_AT + 4], "big"):
                break
            before = stream.changes_received
            try:
                end = stream.run(data, at)
            except StatusError as error:
                self._abandon(stream, error)
                break
            if end > at:
                runs.append(Run(stream.vbucket, stream.changes_received - before, stream.position))
                self.silence.heard(now)
                if self.options.acks_late:
                    self.bytes_received_total += end - at
                else:
                    self._processed(end - at, now)
                self._answer_marker(stream)
            if stream.full:
                stream.full, self.full = False, True
                return end, runs
            if end == at:
                break
            at = end
        return at, runs

    def go_on(self) -> None:
        """There may be room again."""
        self.full = False

    def receive(self, message: Message, now: float, size_bytes: int = 0) -> bool:
        """Take a message; False if it does not belong to streams, so that the caller may answer it.

        Pass the size in bytes if it is known, which saves encoding the message again.
        """
        self.silence.heard(now)
        match message:
            case dcp.Noop():
                self._send(AnyResponse(opcode=message.code, opaque=message.opaque))
            case Response():
                self._answered(message, now)
            case _ if isinstance(message, StreamMessage):
                self._receive_of_stream(message)
                self._processed(size_bytes or len(message.encode()), now)
            case _:
                return False
        return True

    def _receive_of_stream(self, message: StreamMessage) -> None:
        stream = self.streams.get(message.vbucket)
        if stream is None or stream.life.ended or stream.opaque != message.opaque:
            self._refuse(message, KeyNotFound("there is no such stream on this connection", vbucket=message.vbucket))
            return
        try:
            if stream.opaque in self._asking:
                raise InvalidArguments(
                    f"{message.title()} came before the answer to the request", vbucket=stream.vbucket
                )
            self._move(stream, message)
        except ProtocolViolation as error:
            self._refuse(message, InvalidArguments(str(error), vbucket=stream.vbucket))
            self._abandon(stream, InvalidArguments(str(error), vbucket=stream.vbucket))
        except StatusError as error:
            self._refuse(message, error)
            self._abandon(stream, error)

    def _move(self, stream: ConsumerStream, message: StreamMessage) -> None:
        match message:
            case dcp.SnapshotMarker() if stream.speaks_dcp:
                stream.marker(message.start_seqno, message.end_seqno, int(message.flags))
                self._answer_marker(stream)
            case upr.SnapshotMarker() if not stream.speaks_dcp:
                stream.unbounded_marker()
            case upr_draft3.StreamStart():
                stream.life.move(StreamEvent.START)
            case upr_draft3.SnapshotEnd():
                stream.snapshot_end()
            case dcp.SeqnoAdvanced():
                stream.advance(message.by_seqno)
                self._answer_marker(stream)
            case upr.Flush():
                stream.flush()
            case upr.SetVbucketState():
                self._hand_over(stream, message)
            case dcp.StreamEnd() | upr.StreamEnd():
                reason = message.reason if stream.speaks_dcp else upr.EndReason(int(message.reason))
                self._close(stream, lambda: stream.end(reason))
                self._left.discard(stream.vbucket)
            case dcp.SnapshotMarker() | upr.SnapshotMarker():
                raise InvalidArguments("the marker is in another dialect than the stream", vbucket=stream.vbucket)
            case _:
                self._change(stream, message)

    def _change(self, stream: ConsumerStream, message: Request) -> None:
        """A change that was not applied as part of a run."""
        packet = message.encode()
        if stream.run(packet, 0) == len(packet):
            self._answer_marker(stream)
            return
        if stream.full:
            raise TemporaryFailure("there is no room for the change", vbucket=stream.vbucket)
        error = stream.refuse(message.by_seqno)  # type: ignore[attr-defined]
        self._refuse(message, error)
        if stream.life.ended:
            self._tell_end(stream)

    def _hand_over(self, stream: ConsumerStream, message: upr.SetVbucketState) -> None:
        if not message.state.known:
            raise InvalidArguments(f"unknown vbucket state {int(message.state)}", vbucket=stream.vbucket)
        state = VbucketState[message.state.name]
        if not stream.is_takeover:  # the vbucket was not offered, and another node may be active
            self._refuse(
                message,
                InvalidArguments(f"only a takeover can make the copy {state.value}", vbucket=stream.vbucket),
            )
            return
        stream.handed_over(state)

        def done() -> None:
            if stream.life.ended:
                return
            now = stream.copy.state
            if not stream.has_given_role:  # it was changed meanwhile, and the source must not rely on it
                error = InvalidArguments(f"the copy became {now.value}, not {state.value}", vbucket=stream.vbucket)
                self._refuse(message, error)
                self._abandon(stream, error)
                self._tell_output()
                return
            if state is VbucketState.PENDING:
                stream.pending_answered()
            self._send(AnyResponse(opcode=message.code, opaque=message.opaque))
            self._tell_output()

        self.sink.set_state(stream.vbucket, state, done)

    def _refuse(self, message: Request, error: StatusError) -> None:
        text = (error.detail or error.text).encode()
        status = Status(error.status)
        self._send(AnyResponse(opcode=message.code, opaque=message.opaque, status=status, value=text))

    def _answer_marker(self, stream: ConsumerStream) -> None:
        if stream.take_marker_answer():
            self._send(AnyResponse(opcode=_MARKER, opaque=stream.opaque))

    # Answers of the producer

    def _answered(self, answer: Response, now: float) -> None:
        if answer.code in _ASKED and answer.opaque in self._asking:
            self._negotiate(answer)
        elif answer.code == _CONTROL:
            self._control_answered(self._controls.pop(answer.opaque, ""), answer, now)

    def _negotiate(self, answer: Response) -> None:
        negotiation, stream, done = self._asking[answer.opaque]
        try:
            following = negotiation.answered(answer)
            if not isinstance(following, FailoverLog):
                self._send(following)
                return
            stream.accept(following, speaks_dcp=negotiation.speaks_dcp, end_seqno=negotiation.end_seqno)
        except (StatusError, PositionError) as error:
            del self._asking[answer.opaque]
            if answer.status is Status.SUCCESS and answer.code == dcp.StreamRequest.declaration.opcode:
                self._left.add(stream.vbucket)  # the producer has it open, and we do not want it
            refusal = error if isinstance(error, StatusError) else InvalidArguments(str(error), vbucket=stream.vbucket)
            self._drop(stream, refusal)
            done(stream, refusal)
            return
        del self._asking[answer.opaque]
        self.dialect = self.dialect or stream.dialect.name
        done(stream, None)

    def _drop(self, stream: ConsumerStream, error: StatusError) -> None:
        """The stream was not opened."""
        if self.streams.get(stream.vbucket) is stream:
            del self.streams[stream.vbucket]
        if not stream.life.ended:
            stream.refused(error)

    def _control_answered(self, name: str, answer: Response, now: float) -> None:
        accepted = answer.status is Status.SUCCESS
        if name == "connection_buffer_size" and not accepted:
            self.window.size_bytes = 0
        elif name == "enable_noop" and accepted:
            self.silence = SilenceWatch(self.options.noop_interval_s, now)

    # Flow control and time

    def _processed(self, size_bytes: int, now: float) -> None:
        self.bytes_received_total += size_bytes
        self.processed(size_bytes, now)

    def processed(self, size_bytes: int, now: float) -> None:
        """This many bytes are processed; to be called only with ``acks_late``."""
        due = self.window.processed(size_bytes)
        if due:
            self._acknowledge(due, now)

    def _acknowledge(self, size_bytes: int, now: float) -> None:
        self._acked_at = now
        self._send(dcp.BufferAck(bytes_processed=size_bytes, opaque=self._next_opaque()))

    @property
    def deadline(self) -> float | None:
        """When to call ``tick``; None for never."""
        acks = self._acked_at + ACK_INTERVAL_S if self.window.unacked_bytes else None
        return min((at for at in (acks, self.silence.deadline) if at is not None), default=None)

    def tick(self, now: float) -> None:
        """Time has passed: acknowledge what is left, or give up on the producer."""
        if self.silence.is_dead(now):
            self.closing = f"the producer sent nothing for {2 * self.silence.interval_s:g} s"
        elif self.window.unacked_bytes and now >= self._acked_at + ACK_INTERVAL_S:
            self._acknowledge(self.window.flush(), now)

    # Going out

    def _send(self, message: Message) -> None:
        self._out.append(message.encode())

    def _tell_output(self) -> None:
        if self.on_output is not None:
            self.on_output()

    def data_to_send(self) -> bytes:
        """The bytes to send; each is returned once."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    # The end

    def _abandon(self, stream: ConsumerStream, error: StatusError) -> None:
        asking = self._asking.pop(stream.opaque, None)
        if asking is None:
            self._close(stream, lambda: stream.abandon(error))
            return
        self._left.add(stream.vbucket)  # the answer of the producer is not awaited any more
        self._drop(stream, error)
        asking[2](stream, error)

    def _close(self, stream: ConsumerStream, close: Callable[[], object]) -> None:
        was_over = stream.life.ended
        close()
        if not was_over:
            self._tell_end(stream)

    def _tell_end(self, stream: ConsumerStream) -> None:
        self._left.add(stream.vbucket)
        if self.on_end is not None:
            self.on_end(stream)

    def lose(self) -> None:
        """The connection is lost."""
        for _, stream, done in self._asking.values():
            done(stream, KeyNotFound("the connection was lost before the producer answered", vbucket=stream.vbucket))
        self._asking.clear()
        for stream in list(self.streams.values()):
            self._close(stream, stream.lose)
        self._out.clear()
