"""The producer's side of a TAP connection: one connect comes in, messages go out until either side closes it.

Theory of operation. Streams, one for each vbucket, take turns as on other connections. Their messages get consecutive
numbers. A consumer that supports acknowledgements is asked for one with every control message, with every n-th message
and at the end of each piece, so that nothing stays unanswered when there is nothing more to send. No more is sent than
the window allows. A refused message is sent again, stops its vbucket or closes the connection, depending on its status.
"""

import struct
from collections import ChainMap, deque
from collections.abc import Callable, Container, Mapping
from typing import Final

from upriver.errors import NotMyVbucket, StatusError
from upriver.model import VbucketState
from upriver.protocol.liveness import NoopSender, Verdict
from upriver.protocol.producer.source import Source, SourceVbucket, StreamOptions
from upriver.protocol.producer.stream_scheduler import StreamScheduler
from upriver.protocol.tap.acknowledgements import AckWindow, Piece, key_of, messages_in
from upriver.protocol.tap.connect_plan import TapPlan, TapSettings
from upriver.protocol.tap.flush_mark import marked
from upriver.protocol.tap.position import TapPosition
from upriver.protocol.tap.producer_stream import TapProducerStream
from upriver.protocol.tap.retry_queue import Retry, RetryQueue
from upriver.wire import Magic, Message, Request, Response, Status, memcached, tap
from upriver.wire.dialects.tap import Control, TapFlag

#: The default size of one call of ``produce``; the window may be exceeded by as much.
PIECE_BYTES: Final = 256 * 1024
#: Statuses of a temporary refusal.
TEMPORARY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
_OPAQUES: Final = 2**32
_MAY_EMPTY: Final = (tap.Flush.declaration.opcode, tap.Opaque.declaration.opcode)
_NO_LIMIT: Final = 2**31
#: The uuid, seqno and purge seqno of a vbucket that does not exist.
_NOT_THERE: Final = 0, 0, 0
_OPAQUE: Final = struct.Struct(">BBHBBHIIQHHB3xI")
_OPAQUE_BEGIN: Final = (Magic.REQUEST, tap.Opaque.declaration.opcode, 0, 8, 0)
#: This many streams are begun in a turn, unless as many have something to send.
BEGIN_MAX: Final = 32
#: This many vbuckets are named in a log line.
LEFT_OUT_SHOWN: Final = 20


def check_takeover(source: Source, plan: TapPlan, successor: str) -> None:
    """Refuse a takeover if none of its vbuckets can be handed over to this successor."""
    if not plan.takeover:
        return
    states = (VbucketState.ACTIVE,) if plan.vbuckets is None else (VbucketState.ACTIVE, VbucketState.DEAD)
    found = [source.vbucket(number) for number in plan.vbuckets or source.vbuckets()]
    if not any(v is not None and v.state in states and v.may_hand_over_to(successor) for v in found):
        raise NotMyVbucket("none of these vbuckets can be handed over from this node")


class TapProducer:
    """One connection on which a node sends TAP messages."""

    def __init__(
        self,
        source: Source,
        cursor_name: str,
        plan: TapPlan,
        settings: TapSettings,
        now: float,
        *,
        successor: str = "",
        positions: Mapping[int, TapPosition] | None = None,
        elsewhere: TapPosition | None = None,
        checkpoints: Mapping[int, int] | None = None,
        on_ready: Callable[[], object] | None = None,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.source = source
        self.cursor_name = cursor_name
        #: The successor of vbuckets that are handed over here.
        self.successor = successor
        self.plan = plan
        #: The same for all of its streams.
        self.options = StreamOptions(keys_only=plan.keys_only)
        self.settings = settings
        self.warn = warn
        #: Called when there may be something new to send.
        self.on_ready = on_ready
        self.window = AckWindow(settings.window_messages_max, settings.window_bytes_max)
        self.noops = NoopSender(now)
        self.noops.enabled, self.noops.interval_s = bool(settings.noop_interval_s), settings.noop_interval_s
        self.streams: dict[int, TapProducerStream] = {}
        #: Why the connection is to be closed, for the log; empty if it is not.
        self.closing = ""
        #: Everything that was asked for is sent, and acknowledged if the consumer does so.
        self.done = False
        self.messages_sent = 0
        self.bytes_sent_total = 0
        #: Changes that were left out because they have no hops left.
        self.tired = 0
        #: How many bytes the present ``produce`` has so far.
        self.size = 0
        self._out: list[bytes] = []
        self._retries = RetryQueue()
        self._scheduler: StreamScheduler[TapProducerStream] = StreamScheduler()
        self._changes_of_ended = 0
        self._noop_opaque = 0
        #: The number of the next message when the last noop was sent.
        self._numbered_at_noop = 1
        self._now = now
        self._close_sent = False
        #: The positions of the client at the connect, and the one for vbuckets that did not exist when it left.
        self._positions: ChainMap[int, TapPosition] = ChainMap({}, positions or {})  # type: ignore[arg-type]
        self._elsewhere = elsewhere
        #: Uuid, consistent seqno and purge seqno of each vbucket: at the connect if the client asked for live changes
        #: only, else when the stream begins. Later changes are new.
        self._began_at: dict[int, tuple[int, int, int]] = {}
        if plan.future_only:
            self._began_at = {number: self._now_at(number) for number in plan.vbuckets or source.vbuckets()}
        #: Where the newest checkpoint begins that the client has, if it says so; None if we no longer have it.
        self._checkpoint_starts = {} if plan.copies or plan.future_only else self._starts_of(checkpoints or {})
        #: None for all.
        self._wanted = None if plan.vbuckets is None else frozenset(plan.vbuckets)
        #: The vbuckets whose streams have not begun yet.
        self._unbegun = deque(plan.vbuckets or source.vbuckets())
        self._warned: set[int] = set()
        #: The requested vbuckets that cannot be sent, by the reason.
        self._left_out: dict[str, list[int]] = {}
        #: The vbuckets that messages were sent for.
        self._named: set[int] = set()
        self._begin()

    def _now_at(self, number: int) -> tuple[int, int, int]:
        vbucket = self.source.vbucket(number)
        if vbucket is None:
            return _NOT_THERE
        return vbucket.failover_log.newest.vbucket_uuid, vbucket.consistent_seqno, vbucket.purge_seqno

    def _began(self, number: int) -> tuple[int, int, int]:
        if number not in self._began_at:
            if self.plan.future_only:
                return _NOT_THERE
            self._began_at[number] = self._now_at(number)
        return self._began_at[number]

    def _begin(self) -> None:
        if self.plan.acks:
            self.send(tap.Opaque(control=Control.ENABLE_AUTO_NACK))
        if self.plan.checkpoints:
            self.send(tap.Opaque(control=Control.ENABLE_CHECKPOINT_SYNC))

    @property
    def beginning(self) -> bool:
        """Whether some of the requested streams have not begun yet."""
        return bool(self._unbegun)

    @property
    def may_begin(self) -> bool:
        """Whether more streams can begin: not while many have something to send."""
        return bool(self._unbegun) and len(self._scheduler) < BEGIN_MAX

    def begin_some(self) -> None:
        """Begin some more streams. A thousand streams take time and memory, so each turn begins a few."""
        for _ in range(min(BEGIN_MAX - len(self._scheduler), len(self._unbegun))):
            number = self._unbegun.popleft()
            if number not in self.streams:
                self._follow(number)
        if not self._unbegun:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        """Log what is not sent, with one line for each reason."""
        for why, numbers in self._left_out.items():
            shown = ", ".join(map(str, numbers[:LEFT_OUT_SHOWN]))
            more = f" and {len(numbers) - LEFT_OUT_SHOWN} more" if len(numbers) > LEFT_OUT_SHOWN else ""
            self.warn(f"vbucket {shown} is {why}" if len(numbers) == 1 else f"vbuckets {shown}{more} are {why}")
        self._left_out.clear()

    # Which vbuckets

    def _follow(self, number: int) -> None:
        """Begin the stream of a vbucket: in any role if it was named, only an active one if all were requested."""
        vbucket = self.source.vbucket(number)
        named = self.plan.vbuckets is not None
        active = vbucket is not None and vbucket.state is VbucketState.ACTIVE
        if vbucket is None or not (active or (named and vbucket.streamable)):
            if named and self.plan.ends:
                self._leave_out(number, "not sent: no data on this node")
            return  # it may appear later
        if self.plan.takeover and vbucket.state in (VbucketState.REPLICA, VbucketState.PENDING):
            self._leave_out(number, f"not handed over: a {vbucket.state.value} copy")
            return
        if self.plan.takeover and not vbucket.may_hand_over_to(self.successor):
            self._leave_out(number, f"not handed over again: {vbucket.successor!r} may own it now")
            return
        before = self.streams.get(number)
        tap_position = self._position_at_connect(number) if before is None else before.tap_position
        try:
            stream = TapProducerStream(self, vbucket, tap_position, began=self._began(number)[1])
        except StatusError as error:
            if number not in self._warned:
                self._warned.add(number)
                self._leave_out(number, f"not sent: {error.detail or error.text}")
                if not self._unbegun:
                    self._tell_left_out()
            return
        if before is not None:
            self._changes_of_ended += before.changes_sent
        self.streams[number] = stream
        self.ready(stream)

    def _leave_out(self, number: int, why: str) -> None:
        self._left_out.setdefault(why, []).append(number)

    def role_changed(self, number: int) -> None:
        """A vbucket was created or changed role: begin its stream, if it was requested and could not begin before."""
        if self.plan.ends or not (self._wanted is None or number in self._wanted):
            return
        known = self.streams.get(number)
        if known is None or (known.ended and known.vbucket is not self.source.vbucket(number)):
            self._follow(number)

    @property
    def changes_sent(self) -> int:
        """How many changes were sent, of all vbuckets."""
        return self._changes_of_ended + sum(stream.changes_sent for stream in self.streams.values())

    @property
    def queued(self) -> int:
        """The maximum number of changes that are not sent yet."""
        return sum(stream.backlog for stream in self.streams.values())

    @property
    def backlog(self) -> int:
        """The same, and the messages that wait to be sent again."""
        return self.queued + len(self._retries)

    @property
    def retrying(self) -> int:
        """How many messages wait to be sent again."""
        return len(self._retries)

    @property
    def positions(self) -> dict[int, TapPosition]:
        """The position in each vbucket at which a reconnect resumes, or would begin if its stream has not begun."""
        begun = {number: stream.tap_position for number, stream in self.streams.items()}
        wanted = self.plan.vbuckets or self.source.vbuckets()
        return {number: self._position_at_connect(number) for number in wanted if number not in begun} | begun

    @property
    def elsewhere(self) -> TapPosition | None:
        """The position in a vbucket that does not exist yet, if the client asks for all vbuckets or did so before."""
        if self.plan.vbuckets is not None:
            return self._elsewhere
        return self._position(self._elsewhere, *_NOT_THERE)

    def _starts_of(self, checkpoints: Mapping[int, int]) -> dict[int, int | None]:
        found = {number: self.source.vbucket(number) for number in checkpoints}
        return {number: v.checkpoint_start(checkpoints[number]) for number, v in found.items() if v is not None}

    def continues_checkpoint(self, number: int) -> bool:
        """Whether the client has a checkpoint of this vbucket that we still have."""
        return self._checkpoint_starts.get(number) is not None

    def _position_at_connect(self, number: int) -> TapPosition:
        known, began = self._positions.get(number, self._elsewhere), self._began(number)
        if number not in self._checkpoint_starts:
            return self._position(known, *began)
        start = self._checkpoint_starts[number]
        by_checkpoint = TapPosition.at_checkpoint(self.plan, start, *began)
        if start is None or known is None or not known.acks:
            return by_checkpoint
        # Unacknowledged changes are sent again, whatever checkpoint the client names.
        known = known.under(self.plan, began[1])
        is_comparable = known.position.vbucket_uuid == by_checkpoint.position.vbucket_uuid
        return by_checkpoint if is_comparable and start <= known.position.seqno else known

    def _position(self, known: TapPosition | None, vbucket_uuid: int, seqno: int, purge_seqno: int) -> TapPosition:
        if known is None:
            return TapPosition.first(self.plan, vbucket_uuid, seqno, purge_seqno)
        return known.under(self.plan, seqno)

    # Coming in

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it does not belong to TAP, so that the caller may answer it."""
        self._now = now
        self.noops.heard()
        if not isinstance(message, Response):
            return False
        if message.code == memcached.Noop.declaration.opcode:
            return True
        status = message.status
        if not self.plan.acks:
            if status is not Status.SUCCESS:
                self.closing = f"the consumer refused a message: {status.label}"
            return True
        number = self.window.number_of(message.opaque)
        if number is not None:
            self._answered(number, status)
        return True

    def _answered(self, number: int, status: Status) -> None:
        piece = self.window.piece_of(number)
        covered = self.window.covered(number)
        for each in covered:
            if each.stream is not None and not (each is piece and status is not Status.SUCCESS):
                each.stream.acked(each)
        if status is not Status.SUCCESS and piece is not None:
            self._refused(piece, number, status, whole=piece in covered)
        if self.on_ready is not None:
            self.on_ready()

    def _refused(self, piece: Piece, number: int, status: Status, *, whole: bool) -> None:
        stream, empties = piece.stream, _empties(piece.message(number))
        if empties:
            for each in self.streams.values():
                each.not_told(number)
        if status is Status.NOT_MY_VBUCKET and stream is not None:
            self._drop_retries(stream)
            stream.stop("the consumer answered NOT_MY_VBUCKET")
        elif empties and (status in TEMPORARY or status is Status.NOT_MY_VBUCKET):
            # Sending it again would also drop what was sent after it. The client reconnects and starts there.
            self.closing = f"the consumer refused to start over: {status.label}"
        elif status in TEMPORARY:
            self._try_again(piece, number, whole=whole)
        elif status is Status.KEY_EEXISTS and stream is not None and stream.refused_as_active(piece):
            pass
        elif status is Status.NOT_MY_VBUCKET:
            self.warn(
                "the consumer answered NOT_MY_VBUCKET to a message that belongs to no vbucket; the stream continues"
            )
        else:
            self.closing = f"the consumer refused a message: {status.label}"

    def _try_again(self, piece: Piece, number: int, *, whole: bool) -> None:
        """Send the message again after a while, unless a newer one with its key was sent meanwhile.

        The same message may be refused repeatedly before a later one is answered; it is sent again once.
        """
        message, stream = piece.message(number), piece.stream
        key = key_of(message)
        needless = stream is not None and (stream.stopped or (key is not None and self.window.sent_since(number, key)))
        needless = not piece.refuse(number) or needless
        if stream is not None and whole:
            stream.answered(piece)
        if needless:
            return
        if stream is not None:
            stream.hold(piece.before_seqno)
        self._retries.add(Retry(message, stream, piece.before_seqno, self._now + self.settings.backoff_s))

    def awaits_answers(self, stream: TapProducerStream) -> bool:
        """Whether a message of this stream is unanswered, or waits to be sent again."""
        return self.window.holds_of(stream) or self._retries.holds_of(stream)

    def _drop_retries(self, stream: TapProducerStream) -> None:
        self._retries.drop(stream)

    # Going out

    @property
    def room(self) -> int:
        """How many more messages may be sent now."""
        return self.window.room_beside(len(self._retries), self._retries.bytes) if self.plan.acks else _NO_LIMIT

    @property
    def changes_max(self) -> int:
        """How many changes fit in one piece, whose last one asks for an acknowledgement."""
        return min(self.room, self.settings.ack_interval) if self.plan.acks else _NO_LIMIT

    @property
    def next_opaque(self) -> int:
        """The number of the next message."""
        return self.window.next_number % _OPAQUES

    def send(self, message: Request, stream: TapProducerStream | None = None) -> int:
        """Send a control message; return its number."""
        number = self.window.take_numbers(1)
        message.opaque = number % _OPAQUES
        if self.plan.acks:
            message.tap_flags = TapFlag.ACK  # type: ignore[attr-defined]
        at = 0 if stream is None else stream.seqno
        self._put(Piece(number, 1, packed(message), stream, at, at))
        if stream is not None:
            self._named.add(stream.number)
        return number

    def send_changes(self, stream: TapProducerStream, messages: bytes, count: int, before_seqno: int) -> None:
        """Send changes that were encoded with the next numbers."""
        if self._retries:
            self._forget_overtaken(messages)
        self._put(Piece(self.window.take_numbers(count), count, messages, stream, before_seqno, stream.seqno))
        self._named.add(stream.number)

    def _put(self, piece: Piece) -> None:
        self._out.append(piece.data)
        self.size += len(piece.data)
        self.messages_sent += piece.count
        if self.plan.acks:
            self.window.sent(piece)

    def _forget_overtaken(self, messages: bytes) -> None:
        """Drop waiting messages that these changes replace."""
        for retry in self._retries.overtaken({key_of(message) for message in messages_in(messages)}):
            if retry.stream is not None:
                retry.stream.let_go(retry.before_seqno)

    def ready(self, stream: TapProducerStream) -> None:
        """The stream may have something to send."""
        if self.streams.get(stream.number) is stream and self._scheduler.wake(stream) and self.on_ready is not None:
            self.on_ready()

    @property
    def has_output(self) -> bool:
        """Whether ``produce`` may return something."""
        return bool(self._unbegun) or self.can_send

    @property
    def can_send(self) -> bool:
        """Whether ``produce`` may return something without beginning more streams."""
        if self._out:
            return True
        return (bool(self._scheduler) and self.room > 0) or self._has_due or self._finishing

    @property
    def _has_due(self) -> bool:
        due = self._retries.next_due
        return due is not None and due <= self._now

    def produce(self, max_bytes: int = PIECE_BYTES, *, begin: bool = True) -> bytes:
        """The next bytes to send, about as many as asked for; ``begin`` lets more streams begin."""
        if self.closing:
            return b""
        if begin and self._unbegun:
            self.begin_some()
        if self._retries:
            self._send_retries(max_bytes)
        # Stop at half: filling up the rest with many small pieces costs more than it saves.
        enough = max_bytes // 2 or 1
        while self.size < enough and self.room:
            stream = self._scheduler.next()
            if stream is None:
                break
            stream.turn(self._scheduler.share(max_bytes - self.size))
            if stream.stopped:
                self._drop_retries(stream)
            elif stream.has_more and not stream.ended:
                self._scheduler.again(stream)
        if self._finishing:
            self._finish()
        return self._take()

    def _take(self) -> bytes:
        out = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self.size = 0
        self.bytes_sent_total += len(out)
        return out

    def _send_retries(self, max_bytes: int) -> None:
        """Send again what is due. There is room, because waiting messages count as unacknowledged."""
        while self.size < max_bytes and (retry := self._retries.take_due(self._now)) is not None:
            number = self.window.take_numbers(1)
            seqno = retry.before_seqno
            self._put(Piece(number, 1, retry.numbered(number), retry.stream, seqno, seqno, again=True))

    # Flush

    def flushed(self) -> None:
        """The vbuckets of some streams were flushed. Handle all of them at once, before anything new is sent.

        To other engines a flush message means everything. So it is sent only if nothing else was sent; otherwise the
        consumer starts over with the flushed vbuckets. A flush without hops left is not passed on either.
        """
        flushed = {s: None for s in self.streams.values() if not s.ended and s.cursor.end_reason == "flushed"}
        for stream in flushed:
            self._drop_retries(stream)
        is_all = self._is_all(flushed)
        number = self._send_flush(list(flushed)) if is_all else 0
        for stream in flushed:
            self.restart(stream, flushed=is_all, told_by=number)

    def _is_all(self, flushed: Container[TapProducerStream]) -> bool:
        """Whether everything is empty that the consumer holds, or will hold, because of this connection.

        An ended stream was received too. A vbucket that is handed over may be owned by the consumer, with new writes.
        """
        if self.plan.takeover or not self._named <= self.streams.keys():
            return False
        if not all(s in flushed or not (s.ended or s.vbucket.high_seqno) for s in self.streams.values()):
            return False
        unbegun = [vbucket for number in self._unbegun if (vbucket := self.source.vbucket(number)) is not None]
        return not any(v.high_seqno and (v.state is VbucketState.ACTIVE or self._wanted is not None) for v in unbegun)

    def _send_flush(self, streams: list[TapProducerStream]) -> int:
        """Send one message for each new flush, usually one; return the number of the last, 0 if there is none."""
        flushes: dict[int, list[SourceVbucket]] = {}
        for stream in streams:
            if stream.vbucket.flush_ttl:
                flushes.setdefault(stream.vbucket.flush_marks[-1], []).append(stream.vbucket)
        number = 0
        for mark, vbuckets in flushes.items():
            listed = marked(mark, (vbucket.number for vbucket in vbuckets))
            number = self.send(tap.Flush(ttl=vbuckets[-1].flush_ttl, private=listed))
        return number

    def was_answered(self, number: int) -> bool:
        """Whether the consumer has answered this message, or a later one."""
        return self.plan.acks and number < self.window.oldest

    def restart(self, stream: TapProducerStream, *, flushed: bool = False, told_by: int = 0) -> None:
        """Begin a vbucket again: answers to what was sent before no longer count."""
        before = stream.tap_position
        stream.stopped = True
        stream.end()
        self._drop_retries(stream)
        self._changes_of_ended += stream.changes_sent
        try:
            self.streams[stream.number] = TapProducerStream(
                self,
                stream.vbucket,
                before,
                broken=True,
                flushed=flushed,
                told_by=told_by,
                announced=stream.announced,
            )
        except StatusError as error:
            self.warn(f"vbucket {stream.number} is no longer sent: {error}")
            del self.streams[stream.number]
            self._positions[stream.number] = before
            return
        self.ready(self.streams[stream.number])

    # The end

    @property
    def _finishing(self) -> bool:
        """Whether everything is sent and answered, so that the stream can be closed."""
        if not self.plan.ends or self.done or self._scheduler or self._unbegun:
            return False
        if not all(stream.ended for stream in self.streams.values()):
            return False
        return not (self.window.messages or self._retries)

    def _finish(self) -> None:
        if not self._close_sent:
            self._close_sent = True
            self.send(tap.Opaque(control=Control.CLOSE_TAP_STREAM))
        self.done = not (self.window.messages or self._retries)

    def close_message(self) -> bytes:
        """Return the message that nothing more comes, whatever is left to send."""
        self.send(tap.Opaque(control=Control.CLOSE_TAP_STREAM))
        return self._take()

    # Time

    @property
    def deadline(self) -> float | None:
        """When to call ``tick``; None for never."""
        due = self._retries.next_due
        times = [] if due is None or due <= self._now else [due]  # messages that are due already wait for a turn
        if self.noops.deadline is not None:
            times.append(self.noops.deadline)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Time has passed: send again what is due, and send a noop or give up on the consumer."""
        self._now = now
        if not self._owes_answers:
            self.noops.heard()
        match self.noops.check(now):
            case Verdict.ASK:
                self._noop_opaque += 1
                self._numbered_at_noop = self.window.next_number
                self._out.append(memcached.Noop(opaque=self._noop_opaque).encode())
            case Verdict.DEAD:
                self.closing = f"the peer acknowledged nothing for {self.noops.interval_s:g} s"
        if self.has_output and self.on_ready is not None:
            self.on_ready()

    @property
    def _owes_answers(self) -> bool:
        """Whether a message from before the last noop is not acknowledged. Many clients never answer noops, so only
        this shows that a client is gone."""
        return self.plan.acks and self.window.oldest < self._numbered_at_noop

    def lose(self) -> None:
        """The connection is lost."""
        for stream in self.streams.values():
            stream.cursor.close()
        self._scheduler.clear()


def packed(message: Request) -> bytes:
    """A message as bytes. A thousand streams send two control messages each, so those are packed here; a test
    compares."""
    if type(message) is not tap.Opaque:
        return message.encode()
    assert message.control is not None
    flags, control = int(message.tap_flags), int(message.control)
    return _OPAQUE.pack(
        *_OPAQUE_BEGIN, message.vbucket, 12, message.opaque, message.cas, 4, flags, message.ttl, control
    )


def _empties(message: bytes) -> bool:
    """Whether the message makes a consumer drop what it holds."""
    if message[1] not in _MAY_EMPTY:
        return False
    found = tap.tap.decode(message)
    return isinstance(found, tap.Flush) or (
        isinstance(found, tap.Opaque) and found.control is Control.INITIAL_VBUCKET_STREAM and not found.cas
    )
