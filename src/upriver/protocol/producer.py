"""The producer's side of a connection: requests come in, streams go out.

Theory of operation. Answers to requests stand in a queue and go out first. Streams that have something to send take
turns: each turn sends at most one piece of a snapshot, so a backfill of millions of changes does not hold up a live
change on another stream. Nothing is read from the history before there is room for it, in the window that the consumer
granted and in the buffer that the shell hands out, so a consumer that does not read costs nothing but its cursor.

Which of `upr` and `dcp` a stream speaks follows from its request.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

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
from upriver.model import FailoverEntry, Snapshot, StreamPosition, VbucketState
from upriver.model.rollback import rollback_by_entry, rollback_by_snapshot
from upriver.protocol.controls import Controls
from upriver.protocol.flow_control import SendWindow
from upriver.protocol.liveness import NoopSender
from upriver.protocol.source import Source, SourceVbucket, StreamOptions
from upriver.protocol.stream_output import ProducerStream
from upriver.wire import AnyResponse, Message, Request, Response, dcp, memcached, upr
from upriver.wire.codes import Status

#: What a stream gets at least when its turn comes.
TURN_BYTES_MIN: Final = 4096
TURN_BYTES_MAX: Final = 256 * 1024


class Producer:
    """One open connection of the producer type."""

    def __init__(
        self, source: Source, name: str, flags: dcp.OpenFlag, now: float, on_ready: Callable[[], object] | None = None
    ) -> None:
        self.source = source
        self.name = name
        self.flags = flags
        self.created = now
        #: Called when there may be something to send that was not there before.
        self.on_ready = on_ready
        self.controls = Controls()
        self.window = SendWindow()
        self.noops = NoopSender(now)
        self.streams: dict[int, ProducerStream] = {}
        #: The connection is to be closed; why, for the log.
        self.closing = ""
        self.bytes_sent_total = 0
        self.items_sent_total = 0
        self._answers: deque[bytes] = deque()
        self._ready: deque[ProducerStream] = deque()
        self._noop_opaque = 0

    # Coming in

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it is none of a producer's, so that somebody else may answer it."""
        match message:
            case upr.StreamRequest() | dcp.StreamRequest():
                self._answer(message, self._request_stream)
            case upr.FailoverLogRequest():
                self._answer(message, self._failover_log)
            case upr.CloseStream():
                self._answer(message, self._close_stream)
            case dcp.Control():
                self._answer(message, self._control)
            case dcp.BufferAck():
                self.window.acked(message.bytes_processed)
            case dcp.Noop():
                self._send(AnyResponse(opcode=message.code, opaque=message.opaque))
            case dcp.Open() | upr.Open():
                self.closing = "a second open on the same connection"
            case upr.AddStream():
                self.closing = "add stream on a connection of the producer type"
            case Response():
                self._answered(message, now)
            case _:
                return False
        return True

    def _answer(self, request: Request, run: Callable[..., Response | None]) -> None:
        try:
            answer = run(request)
        except StatusError as error:
            text = (error.detail or error.text).encode()
            answer = AnyResponse(opcode=request.code, status=Status(error.status), opaque=request.opaque, value=text)
        if answer is not None:
            answer.opaque = request.opaque
            self._send(answer)

    def _send(self, message: Message) -> None:
        self._answers.append(message.encode())

    def _failover_log(self, request: upr.FailoverLogRequest) -> Response:
        return upr.FailoverLogResponse(log=_wire_log(self._vbucket(request.vbucket)))

    def _control(self, request: dcp.Control) -> Response:
        name = self.controls.set(request.key, request.value)
        if name == "connection_buffer_size":
            self.window.size_bytes = self.controls[name]
        elif name == "enable_noop":
            self.noops.enabled = self.controls[name]
        elif name == "set_noop_interval":
            self.noops.interval_s = self.controls[name]
        return AnyResponse(opcode=request.code)

    def _close_stream(self, request: upr.CloseStream) -> None:
        stream = self.streams.pop(request.vbucket, None)
        if stream is None:
            raise KeyNotFound("there is no stream for this vbucket", vbucket=request.vbucket)
        self._send(AnyResponse(opcode=request.code, opaque=request.opaque))
        stream.close(tell=self.controls["send_stream_end_on_client_close_stream"])
        self._answers.extend(stream.take_control())

    # Stream requests, in the order of checks of DESIGN §5

    def _request_stream(self, request: "upr.StreamRequest | dcp.StreamRequest") -> Response | None:
        vbucket = self._vbucket(request.vbucket)
        position = self._checked_position(request, vbucket)
        if request.vbucket in self.streams:
            raise KeyExists("there is a stream for this vbucket already", vbucket=request.vbucket)
        back = self._rollback(request, vbucket, position)
        if back is not None:
            return _rollback_answer(request, back)
        end = self._end_seqno(request, vbucket)
        options = self._options(request)
        history = self.source.history(
            vbucket.number, f"{self.name}:{vbucket.number}", request.start_seqno, end, options
        )
        stream = ProducerStream(self, vbucket, request, history, options)
        self.streams[vbucket.number] = stream
        self._send(upr.StreamRequestResponse(opaque=request.opaque, log=_wire_log(vbucket)))
        self.ready(stream)
        return None

    def _vbucket(self, number: int) -> SourceVbucket:
        vbucket = self.source.vbucket(number)
        if vbucket is None:
            raise NotMyVbucket(vbucket=number)
        return vbucket

    def _checked_position(
        self, request: "upr.StreamRequest | dcp.StreamRequest", vbucket: SourceVbucket
    ) -> StreamPosition | None:
        """Refuse what can be streamed from nowhere; the position of a `dcp` request."""
        modern = isinstance(request, dcp.StreamRequest)
        if modern and vbucket.state is not VbucketState.ACTIVE and not vbucket.streamable:
            raise TemporaryFailure("this copy has nothing to stream yet", vbucket=vbucket.number)
        if request.start_seqno > request.end_seqno:
            raise OutOfRange(f"start {request.start_seqno} lies beyond end {request.end_seqno}")
        if not isinstance(request, dcp.StreamRequest):
            return None
        if request.flags & dcp.StreamFlag.ACTIVE_ONLY and vbucket.state is not VbucketState.ACTIVE:
            raise NotMyVbucket("only an active vbucket was asked for", vbucket=vbucket.number)
        try:
            snapshot = Snapshot(request.snapshot_start, request.snapshot_end)
            return StreamPosition(request.vbucket_uuid, request.start_seqno, snapshot)
        except PositionError as error:
            raise OutOfRange(str(error)) from None

    def _rollback(
        self,
        request: "upr.StreamRequest | dcp.StreamRequest",
        vbucket: SourceVbucket,
        position: StreamPosition | None,
    ) -> int | None:
        log, high, purge = vbucket.failover_log, vbucket.high_seqno, vbucket.purge_seqno
        if position is None:
            assert isinstance(request, upr.StreamRequest)
            entry = FailoverEntry(request.vbucket_uuid, request.high_seqno)
            return rollback_by_entry(log, high, purge, request.start_seqno, entry, unknown_is_error=True)
        strict = isinstance(request, dcp.StreamRequest) and bool(request.flags & dcp.StreamFlag.STRICT_UUID)
        if strict and not position.seqno and position.vbucket_uuid and log.index(position.vbucket_uuid) is None:
            return 0
        return rollback_by_snapshot(log, high, purge, position)

    def _end_seqno(self, request: "upr.StreamRequest | dcp.StreamRequest", vbucket: SourceVbucket) -> int:
        if isinstance(request, dcp.StreamRequest) and request.flags & dcp.StreamFlag.TO_LATEST:
            return max(vbucket.high_seqno, request.start_seqno)
        return request.end_seqno

    def _options(self, request: "upr.StreamRequest | dcp.StreamRequest") -> StreamOptions:
        controls, modern = self.controls, isinstance(request, dcp.StreamRequest)
        return StreamOptions(
            keys_only=controls["keys_only"] or bool(self.flags & dcp.OpenFlag.NO_VALUE),
            key_filter=controls["key_filter"],
            value_filter=controls["value_filter"],
            persisted_only=controls["persisted_only"],
            # `upr` stops at the end; deployed `dcp` servers send the whole snapshot that holds it.
            exact_end=controls["exact_end"] or not modern,
            history=controls["history"],
            disk_only=modern and bool(request.flags & dcp.StreamFlag.DISK_ONLY),
        )

    # Answers from the consumer

    def _answered(self, answer: Response, now: float) -> None:
        if answer.code == dcp.Noop.declaration.opcode:
            self.noops.heard(now)
            return
        stream = next((s for s in self.streams.values() if s.opaque == answer.opaque), None)
        if stream is not None:
            stream.answered(answer)

    # Going out

    def ready(self, stream: ProducerStream) -> None:
        """The stream may have something to send."""
        if not stream.queued and self.streams.get(stream.vbucket.number) is stream:
            stream.queued = True
            self._ready.append(stream)
            if self.on_ready is not None:
                self.on_ready()

    def tick(self, now: float) -> None:
        """Time has passed: ask whether the consumer is there, or give up on it."""
        match self.noops.check(now):
            case "ask":
                self._noop_opaque += 1
                self._send(dcp.Noop(opaque=self._noop_opaque))
            case "dead":
                self.closing = f"no answer to a noop for {self.noops.interval_s:.0f} s"

    def produce(self, max_bytes: int = TURN_BYTES_MAX) -> bytes:
        """The next bytes to send, about as many as asked for; empty if there is nothing, or no room for it."""
        pieces: list[bytes] = []
        size = 0
        while self._answers and size < max_bytes:
            pieces.append(self._answers.popleft())
            size += len(pieces[-1])
        while self._ready and size < max_bytes:
            room = self.window.room_bytes
            if room == 0:
                break
            stream = self._ready.popleft()
            stream.queued = False
            share = max(TURN_BYTES_MIN, (max_bytes - size) // (len(self._ready) + 1))
            piece = stream.turn(share if room is None else min(share, room))
            self.window.sent(len(piece))
            size += len(piece)
            pieces.append(piece)
            if stream.life.ended:
                self.streams.pop(stream.vbucket.number, None)
            elif stream.has_more:
                self.ready(stream)
        self.bytes_sent_total += size
        return b"".join(pieces)

    def lose(self) -> None:
        """The connection is gone."""
        for stream in self.streams.values():
            stream.lose()
        self.streams.clear()


def _wire_log(vbucket: SourceVbucket) -> tuple[memcached.FailoverEntry, ...]:
    return tuple(
        memcached.FailoverEntry(vbucket_uuid=entry.vbucket_uuid, seqno=entry.seqno) for entry in vbucket.failover_log
    )


def _rollback_answer(request: "upr.StreamRequest | dcp.StreamRequest", seqno: int) -> Response:
    if isinstance(request, dcp.StreamRequest):
        return dcp.RollbackRequired(seqno=seqno)
    return upr.RollbackRequired(seqno=seqno)


def checked_name(name: bytes) -> str:
    """The name of a connection; an empty one is refused."""
    if not name:
        raise InvalidArguments("a connection needs a name")
    return name.decode(errors="replace")
