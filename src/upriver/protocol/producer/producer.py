"""The producer's side of a connection: requests come in, streams go out.

Theory of operation. Answers to requests have a queue of their own and go out first. Streams that have something to send
take turns: each turn sends at most one piece of a snapshot, so a backfill of millions of changes does not delay a live
change on another stream. Settings of the consumer change that: a higher priority sends larger pieces, and in sequential
order one backfill is finished before the next begins; live changes go before both. Nothing is read from the history
before there is room for it, in the consumer's window and in the send buffer. So a consumer that does not read costs
nothing but its position in the history.

The dialect of a stream supplies the messages. An opened connection speaks `upr` and `dcp`, according to each stream
request; a connection of a draft speaks only that draft.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    NotMyVbucket,
    OutOfRange,
    PositionError,
    StatusError,
    TemporaryFailure,
)
from upriver.model import (
    NO_END,
    FailoverEntry,
    Snapshot,
    StreamPosition,
    VbucketState,
    rollback_by_entry,
    rollback_by_snapshot,
)
from upriver.protocol.flow_control import SendWindow
from upriver.protocol.liveness import NoopSender, Verdict
from upriver.protocol.producer.controls import Controls
from upriver.protocol.producer.dialects import OPENED, StreamDialect, opaque_of, put_opaque, wire_log
from upriver.protocol.producer.fast_requests import REQUEST_BYTES, plain_requests
from upriver.protocol.producer.producer_stream import TAKEOVER, ProducerStream
from upriver.protocol.producer.send_buffer import SendBuffer
from upriver.protocol.producer.source import Source, SourceCursor, SourceVbucket, StreamOptions
from upriver.protocol.producer.stream_scheduler import FILTERED_BYTES_MAX, PIECE_BYTES, TURN_BYTES, StreamScheduler
from upriver.wire import AnyResponse, Buffer, Message, Response, dcp, upr

#: The share of a turn that each priority gets.
SHARES: Final = {"low": 0.25, "medium": 1.0, "high": 2.0}
#: A group id may be as long as a key.
GROUP_ID_BYTES_MAX: Final = 250

# Plain integers: combining flags is slow, and a connection may request a thousand streams at once.
_NO_VALUE: Final = int(dcp.OpenFlag.NO_VALUE)
_NOTIFIER: Final = int(dcp.OpenFlag.NOTIFIER)
_DISK_ONLY: Final = int(dcp.StreamFlag.DISK_ONLY)
_TO_LATEST: Final = int(dcp.StreamFlag.TO_LATEST)
_ACTIVE_ONLY: Final = int(dcp.StreamFlag.ACTIVE_ONLY)
_STRICT_UUID: Final = int(dcp.StreamFlag.STRICT_UUID)

#: Settings that leave changes or values out.
_LEAVING_OUT: Final = ("key_filter", "value_filter", "keys_only")

#: Requests of every dialect have the same field names.
_StreamRequest = Any


class Producer:
    """One open connection of the producer type."""

    def __init__(
        self,
        source: Source,
        name: str,
        flags: dcp.OpenFlag,
        now: float,
        on_ready: Callable[[], object] | None = None,
        speaks: tuple[StreamDialect, ...] = OPENED,
        check_takeover: Callable[[], object] = lambda: None,
        *,
        successor: str = "",
    ) -> None:
        self.source = source
        #: Raises a StatusError if the peer may not take vbuckets over.
        self._check_takeover = check_takeover
        self.name = name
        #: The successor of vbuckets that are handed over.
        self.successor = successor or name
        self.flags = int(flags)
        #: Called when there may be something new to send.
        self.on_ready = on_ready
        self.controls = Controls()
        self.window = SendWindow()
        self.noops = NoopSender(now)
        #: How many bytes it may send in a turn. Connections take turns, so this is its share.
        self.turn_bytes = int(TURN_BYTES * SHARES[self.controls["set_priority"]])
        #: How many bytes filters have read for the last piece.
        self.filtered_bytes = 0
        #: One backfill is finished before the next begins.
        self.sequential = False
        self.streams: dict[int, ProducerStream] = {}
        #: Why the connection is to be closed, for the log; empty if it is not.
        self.closing = ""
        #: The dialect of its first stream request; known from the start if it speaks only one.
        self.dialect = speaks[0].name if len(speaks) == 1 else ""
        self._by_request = {dialect.request: dialect for dialect in speaks}
        self._by_log_request = {dialect.failover_log_request: dialect for dialect in speaks}
        #: Messages of these types that are not expected end the connection.
        self._of_streams = frozenset(message for dialect in speaks for message in dialect.wire.stream_messages())
        self._last_asked: int | None = None
        #: The options of streams that are requested now.
        self._options_now: dict[tuple[str, bool], StreamOptions] = {}
        self.bytes_sent_total = 0
        #: Bytes of streams, which count for flow control; answers and noops do not.
        self.stream_bytes_total = 0
        #: Changes that ended streams have sent.
        self._changes_of_ended = 0
        self._answers: deque[bytes] = deque()
        self._scheduler: StreamScheduler[ProducerStream] = StreamScheduler()
        self._noop_opaque = 0

    @property
    def changes_sent(self) -> int:
        """How many changes all streams have sent."""
        return self._changes_of_ended + sum(stream.changes_sent for stream in self.streams.values())

    # Coming in

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it does not belong to streams, so that the caller may answer it."""
        self.noops.heard()
        kind = type(message)
        if (dialect := self._by_request.get(kind)) is not None:
            self._answer(dialect, message, self._request_stream)
        elif (dialect := self._by_log_request.get(kind)) is not None:
            self._answer(dialect, message, self._failover_log)
        elif isinstance(message, Response):
            self._answered(message)
        elif kind in self._of_streams:
            self._receive_other(message, now)
        else:
            return False
        return True

    def receive_run(self, data: Buffer, at: int) -> int:
        """Take a run of plain stream requests at ``at``; return where it ends."""
        dialect = self._by_request.get(dcp.StreamRequest)
        if dialect is None:
            return at
        request: _StreamRequest
        for request in plain_requests(data, at):
            try:
                answer = self._request_stream(dialect, request)
            except StatusError as error:
                answer = dialect.refusal(request, error)
            if answer is not None:
                put_opaque(answer, request.opaque)
                self._send(answer)
            at += REQUEST_BYTES
        self.noops.heard()
        return at

    def _receive_other(self, message: Message, now: float) -> None:
        """Messages that only an opened connection has. The other messages of the dialect are for producers to send."""
        dialect = next(iter(self._by_request.values()))
        match message:
            case upr.CloseStream():
                self._answer(dialect, message, self._close_stream)
            case dcp.Control():
                self._answer(dialect, message, lambda _, request: self._control(request, now))
            case dcp.BufferAck():
                self.window.acked(message.bytes_processed)
            case dcp.Noop():
                self._send(AnyResponse(opcode=message.code, opaque=message.opaque))
            case dcp.Open() | upr.Open():
                self.closing = "the connection was opened twice"
            case _:
                self.closing = f"a producer does not accept {message.title()}"

    def _answer(
        self, dialect: StreamDialect, request: Message, run: Callable[[StreamDialect, Any], Message | None]
    ) -> None:
        try:
            answer = run(dialect, request)
        except StatusError as error:
            answer = dialect.refusal(request, error)
        if answer is not None:
            put_opaque(answer, opaque_of(request))
            self._send(answer)

    def _send(self, message: Message) -> None:
        self._answers.append(message.encode())

    def _failover_log(self, dialect: StreamDialect, request: _StreamRequest) -> Message:
        """The first two drafts may leave the vbucket out: then it is that of the last stream request."""
        number = self._last_asked if request.vbucket is None else request.vbucket
        if number is None:
            raise NotMyVbucket("the request names no vbucket and there was no stream request before it")
        return dialect.failover_log(wire_log(self._vbucket(number).failover_log))

    def _control(self, request: dcp.Control, now: float) -> Response:
        name, value = self.controls.read(request.key, request.value)
        if name in ("key_filter", "value_filter"):
            self.source.check(StreamOptions(**{name: value}))
        self.controls.set(name, value)
        self._options_now.clear()
        if name == "set_priority":
            self.turn_bytes = int(TURN_BYTES * SHARES[value])
        elif name == "connection_buffer_size":
            self.window.resize(value)
        elif name == "backfill_order":
            self.sequential = value == "sequential"
        elif name == "enable_noop":
            self.noops.enabled = value
            self.noops.restart(now)
        elif name == "set_noop_interval":
            self.noops.interval_s = value
            self.noops.restart(now)
        return AnyResponse(opcode=request.code)

    def _close_stream(self, _: StreamDialect, request: upr.CloseStream) -> None:
        stream = self.streams.get(request.vbucket)
        if stream is None:
            raise KeyNotFound("the vbucket has no stream on this connection", vbucket=request.vbucket)
        self._forget(stream)
        self._send(AnyResponse(opcode=request.code, opaque=request.opaque))
        told = self.controls["send_stream_end_on_client_close_stream"]
        self._send_last(stream.close("closed" if told else ""))

    def _send_last(self, end: bytes) -> None:
        """Send the end of a stream without a turn. The consumer acknowledges it like every packet of the stream."""
        self.window.sent(len(end))
        self.stream_bytes_total += len(end)
        self._answers.append(end)

    # Stream requests: the order of the checks is a rule (docs/semantics.md)

    def _request_stream(self, dialect: StreamDialect, request: _StreamRequest) -> Message | None:
        self.dialect = self.dialect or dialect.name
        self._last_asked = request.vbucket
        if len(getattr(request, "group_id", b"")) > GROUP_ID_BYTES_MAX:
            raise InvalidArguments(f"the group id is longer than {GROUP_ID_BYTES_MAX} bytes")
        vbucket = self._vbucket(request.vbucket)
        flags = int(request.flags) if dialect.by_snapshot else 0
        takeover = dialect.set_state is not None and bool(int(request.flags) & TAKEOVER)
        notifier = bool(self.flags & _NOTIFIER)
        # A notifier receives nothing. So on deployed servers neither its end nor its snapshot counts, and it may start
        # beyond the high seqno; it hears of the first change beyond its start.
        notified = notifier and dialect.by_snapshot
        consistent_seqno = start = min(request.start_seqno, vbucket.high_seqno) if notified else request.start_seqno
        if takeover:
            self._check_takeover()
        _check_state(vbucket, active_only=bool(flags & _ACTIVE_ONLY), takeover=takeover)
        if takeover:
            self._check_successor(vbucket)
        if dialect.by_snapshot and not (
            request.start_seqno or request.snapshot_start or request.snapshot_end or flags & _STRICT_UUID
        ):  # an empty consumer cannot have a wrong position; a thousand streams may start like that
            self._check_free(dialect, request, takeover=takeover)
        else:
            position = (
                StreamPosition.at(request.vbucket_uuid, start)
                if notified
                else _checked_position(dialect, request, endless=notifier)
            )
            self._check_free(dialect, request, takeover=takeover)
            back = _rollback(dialect, request, vbucket, position, strict=bool(flags & _STRICT_UUID))
            if back is not None:
                return dialect.rollback(back)
            if position is not None:
                consistent_seqno = position.consistent_seqno
        # As on deployed servers, the end in the request does not count for takeovers and notifiers.
        end = NO_END if takeover or notifier else _end_seqno(request, vbucket, flags)
        disk_only = bool(flags & _DISK_ONLY)
        options = self._options_now.get((dialect.name, disk_only))
        if options is None:  # the same for all streams, until a setting changes
            options = self._options_now[dialect.name, disk_only] = self._options(dialect, persisted_only=disk_only)
        cursor = self.open_cursor(vbucket, start, end, options)
        stream = ProducerStream(
            self, vbucket, dialect, request, cursor, options, consistent_seqno, end_seqno=end, disk_only=disk_only
        )
        self.streams[vbucket.number] = stream
        self._answers.append(dialect.accepted(vbucket.failover_log, stream.opaque))
        self.ready(stream)
        return None

    def _check_successor(self, vbucket: SourceVbucket) -> None:
        if not vbucket.may_hand_over_to(self.successor):
            raise NotMyVbucket(
                f"it was already handed over to {vbucket.successor!r}, which may own it now",
                vbucket=vbucket.number,
            )

    def _check_free(self, dialect: StreamDialect, request: _StreamRequest, *, takeover: bool) -> None:
        """One stream per vbucket; and one per request id where only the request id tells streams apart."""
        if request.vbucket in self.streams:
            raise KeyExists("the vbucket has a stream on this connection already", vbucket=request.vbucket)
        if dialect.by_request_id and any(stream.opaque == request.request_id for stream in self.streams.values()):
            raise KeyExists(f"request id {request.request_id} is in use by another stream")
        if takeover:
            self._check_whole_takeover(request)

    def _check_whole_takeover(self, request: _StreamRequest) -> None:
        """A takeover sends everything, and its answers must tell which takeover they belong to."""
        if any(stream.takeover and stream.opaque == request.opaque for stream in self.streams.values()):
            raise KeyExists(f"opaque {request.opaque} is in use by another takeover", vbucket=request.vbucket)
        if any(self.controls[name] for name in _LEAVING_OUT) or self.flags & (_NO_VALUE | _NOTIFIER):
            raise InvalidArguments(
                f"a takeover hands over everything: open a connection without {', '.join(_LEAVING_OUT)}"
                " and without the flags no-value and notifier",
                vbucket=request.vbucket,
            )

    def open_cursor(self, vbucket: SourceVbucket, start: int, end: int, options: StreamOptions) -> SourceCursor:
        """A cursor of a vbucket, named after this connection."""
        return self.source.cursor(vbucket.number, f"{self.name}:{vbucket.number}", start, end, options)

    def _vbucket(self, number: int) -> SourceVbucket:
        vbucket = self.source.vbucket(number)
        if vbucket is None:
            raise NotMyVbucket(vbucket=number)
        return vbucket

    def _options(self, dialect: StreamDialect, *, persisted_only: bool) -> StreamOptions:
        controls = self.controls
        return StreamOptions(
            keys_only=controls["keys_only"] or bool(self.flags & _NO_VALUE),
            key_filter=controls["key_filter"],
            value_filter=controls["value_filter"],
            persisted_only=persisted_only or controls["persisted_only"],
            exact_end=controls["exact_end"] or dialect.exact_end,
            history=controls["history"],
        )

    # Answers from the consumer

    def _answered(self, answer: Response) -> None:
        """An answer names no vbucket: it belongs to the takeover with its opaque."""
        for stream in self.streams.values():
            if stream.takeover and stream.opaque == answer.opaque:
                stream.answered(answer)
                return

    # Going out

    def ready(self, stream: ProducerStream) -> None:
        """The stream may have something to send. In sequential order a backfill waits for those before it."""
        if stream.queued or self.streams.get(stream.vbucket.number) is not stream:
            return
        self._scheduler.wake(stream, last=self.sequential and stream.backfilling)
        if self.on_ready is not None:
            self.on_ready()

    def tick(self, now: float) -> None:
        """Time has passed: send a noop, or give up on the consumer."""
        match self.noops.check(now):
            case Verdict.ASK:
                self._noop_opaque += 1
                self._send(dcp.Noop(opaque=self._noop_opaque))
            case Verdict.DEAD:
                self.closing = f"the peer did not answer a noop for {self.noops.interval_s:g} s"

    def answers(self) -> bytes:
        """Answers and noops that are due: they wait for no window and no turn."""
        if not self._answers:
            return b""
        out = b"".join(self._answers)
        self._answers.clear()
        self.bytes_sent_total += len(out)
        return out

    @property
    def has_output(self) -> bool:
        """Whether ``produce`` may return something."""
        return bool(self._answers) or (bool(self._scheduler) and self.window.room_bytes != 0)

    def produce(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """The next bytes to send, about as many as asked for.

        Empty if there is nothing or no room for it; or if filters have let nothing pass yet, and then it
        ``has_output``.
        """
        send_buffer = SendBuffer(min(max_bytes, PIECE_BYTES))
        self.put(max_bytes, send_buffer)
        return bytes(send_buffer.take())

    def put(self, max_bytes: int, send_buffer: SendBuffer) -> None:
        """The same into an empty send buffer, for connections that send a lot."""
        if self._answers:
            send_buffer.put(self.answers())
        size = send_buffer.size
        window, scheduler = self.window, self._scheduler
        # Stop at half: another large piece behind the first would cost more than it brings.
        enough = max_bytes // 2 or 1
        filtered = 0
        while size < enough and filtered < FILTERED_BYTES_MAX:
            room = window.room_bytes
            stream = None if room == 0 else scheduler.next()
            if stream is None:
                break
            share = scheduler.share(max_bytes - size)
            sent = stream.turn(share if room is None or room > share else room, send_buffer)
            if room is not None:
                window.sent(sent)
            self.bytes_sent_total += sent
            self.stream_bytes_total += sent
            size += sent
            if stream.filters:
                filtered += stream.filtered_bytes
            if stream.finished:
                self._forget(stream)
            elif stream.has_more:
                scheduler.again(stream, first=self.sequential and stream.backfilling)
            if not scheduler:
                break
        self.filtered_bytes = filtered

    def _forget(self, stream: ProducerStream) -> None:
        self._scheduler.remove(stream)
        if self.streams.get(stream.vbucket.number) is stream:
            del self.streams[stream.vbucket.number]
            self._changes_of_ended += stream.changes_sent

    def end_streams(self) -> None:
        """The node stops: end the streams. A takeover is cut instead, because both sides can recover from that."""
        for stream in list(self.streams.values()):
            if not stream.takeover:
                self._send_last(stream.close("disconnected"))
                self._forget(stream)

    def lose(self) -> None:
        """The connection is lost."""
        for stream in list(self.streams.values()):
            stream.lose()
            self._forget(stream)
        self._scheduler.clear()


def _check_state(vbucket: SourceVbucket, *, active_only: bool, takeover: bool) -> None:
    """Refuse a copy that has nothing to stream, or is not in a role that was asked for."""
    active = vbucket.state is VbucketState.ACTIVE
    if active_only and not active:
        raise NotMyVbucket(f"the copy here is {vbucket.state.value}, not active", vbucket=vbucket.number)
    if not active and not vbucket.streamable:
        raise TemporaryFailure("the copy here has nothing to stream yet: retry later", vbucket=vbucket.number)
    # Another node may have the active copy. A dead copy may come from an interrupted takeover.
    if takeover and vbucket.state in (VbucketState.REPLICA, VbucketState.PENDING):
        raise NotMyVbucket(
            f"the copy here is {vbucket.state.value}: only an active or dead copy can be taken over",
            vbucket=vbucket.number,
        )


def _checked_position(dialect: StreamDialect, request: _StreamRequest, *, endless: bool) -> StreamPosition | None:
    """Refuse a position outside its range. Return the position of a request with snapshot bounds."""
    if request.start_seqno > request.end_seqno and not endless:
        raise OutOfRange(f"start seqno {request.start_seqno} is greater than end seqno {request.end_seqno}")
    if not dialect.by_snapshot:
        return None
    try:
        snapshot = Snapshot(request.snapshot_start, request.snapshot_end)
        return StreamPosition(request.vbucket_uuid, request.start_seqno, snapshot)
    except PositionError as error:
        raise OutOfRange(str(error)) from None


def _rollback(
    dialect: StreamDialect,
    request: _StreamRequest,
    vbucket: SourceVbucket,
    position: StreamPosition | None,
    *,
    strict: bool,
) -> int | None:
    """The seqno that the consumer must roll back to; None if it may continue."""
    log, high, purge = vbucket.failover_log, vbucket.high_seqno, vbucket.purge_seqno
    if position is None:
        entry = FailoverEntry(request.vbucket_uuid, request.high_seqno)
        return rollback_by_entry(log, high, purge, request.start_seqno, entry, with_errors=dialect.rollback_errors)
    if strict and not position.seqno and position.vbucket_uuid and log.index(position.vbucket_uuid) is None:
        return 0
    return rollback_by_snapshot(log, high, purge, position)


def _end_seqno(request: _StreamRequest, vbucket: SourceVbucket, flags: int) -> int:
    """Where the stream ends. As in the recordings, *disk only* ends at what is on disk, whatever end was requested."""
    start: int = request.start_seqno
    end: int = request.end_seqno
    if flags & _DISK_ONLY:
        return max(vbucket.persisted_seqno, start)
    return max(vbucket.high_seqno, start) if flags & _TO_LATEST else end
