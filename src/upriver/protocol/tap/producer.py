"""The producer's side of a TAP connection: one connect came in, messages go out until somebody hangs up.

Theory of operation. Streams, one for each vbucket, take turns as on every other connection. What they send gets
consecutive numbers. A consumer that supports acknowledgements is asked for them with every control message, with every
n-th message and at the end of whatever was read in one go, so that nothing stays unanswered when the queue has drained;
and no more is sent than the window has room for. A refused message is sent again, stops its vbucket, or ends the
connection, as its status says.
"""

import struct
from collections import deque
from collections.abc import Callable, Container
from typing import Final

from upriver.errors import NotMyVbucket, StatusError
from upriver.model import VbucketState
from upriver.protocol.liveness import NoopSender, Verdict
from upriver.protocol.producer.source import Source, StreamOptions
from upriver.protocol.producer.stream_scheduler import StreamScheduler
from upriver.protocol.tap.ack_window import AckWindow, Piece, key_of, messages_in
from upriver.protocol.tap.connect_plan import TapPlan, TapSettings
from upriver.protocol.tap.consumer import FLUSH_MARK_SIZE
from upriver.protocol.tap.position import TapPosition
from upriver.protocol.tap.producer_stream import TapProducerStream
from upriver.protocol.tap.retry_queue import Retry, RetryQueue
from upriver.wire import Magic, Message, Request, Response, Status, memcached, tap
from upriver.wire.dialects.tap import Control, TapFlag

#: What one call hands out unless told otherwise: the window of what is not answered may be overrun by as much.
PIECE_BYTES: Final = 256 * 1024
#: The consumer could not take a message for the moment.
TEMPORARY: Final = frozenset({Status.ETMPFAIL, Status.EBUSY, Status.ENOMEM})
_OPAQUES: Final = 2**32
_MAY_EMPTY: Final = (tap.Flush.declaration.opcode, tap.Opaque.declaration.opcode)
_NO_LIMIT: Final = 2**31
#: The uuid, seqno and purge seqno of a vbucket that does not exist.
_NOT_THERE: Final = 0, 0, 0
_OPAQUE: Final = struct.Struct(">BBHBBHIIQHHB3xI")
_OPAQUE_BEGIN: Final = (Magic.REQUEST, tap.Opaque.declaration.opcode, 0, 8, 0)
#: So many streams are begun in a turn, as long as there are fewer that have something to send.
BEGIN_MAX: Final = 64
#: So many numbers stand in a line of the log.
LEFT_OUT_SHOWN: Final = 20


def check_takeover(source: Source, plan: TapPlan, successor: str) -> None:
    """Refuse a takeover of which nothing can be handed over to this successor."""
    if not plan.takeover:
        return
    states = (VbucketState.ACTIVE,) if plan.vbuckets is None else (VbucketState.ACTIVE, VbucketState.DEAD)
    found = [source.vbucket(number) for number in plan.vbuckets or source.vbuckets()]
    if not any(v is not None and v.state in states and v.may_hand_over_to(successor) for v in found):
        raise NotMyVbucket("none of these vbuckets can be handed over from here")


class TapProducer:
    """One connection that a node sends TAP messages on."""

    def __init__(
        self,
        source: Source,
        cursor_name: str,
        plan: TapPlan,
        settings: TapSettings,
        now: float,
        *,
        successor: str = "",
        places: dict[int, TapPosition] | None = None,
        elsewhere: TapPosition | None = None,
        on_ready: Callable[[], object] | None = None,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.source = source
        self.cursor_name = cursor_name
        #: For whom a vbucket dies that is handed over here.
        self.successor = successor
        self.plan = plan
        #: The same for all of its streams.
        self.options = StreamOptions(keys_only=plan.keys_only)
        self.settings = settings
        self.warn = warn
        #: Called when there may be something to send that was not there before.
        self.on_ready = on_ready
        self.window = AckWindow(settings.window_messages_max, settings.window_bytes_max)
        self.noops = NoopSender(now)
        self.noops.enabled, self.noops.interval_s = bool(settings.noop_interval_s), settings.noop_interval_s
        self.streams: dict[int, TapProducerStream] = {}
        #: The connection is to be closed; why, for the log.
        self.closing = ""
        #: Everything that was asked for is sent, and acknowledged if that was agreed on.
        self.done = False
        self.messages_sent = 0
        self.bytes_sent_total = 0
        #: Changes that were left out because they may make no more hops.
        self.tired = 0
        #: How many bytes the present ``produce`` hands out so far.
        self.size = 0
        self._out: list[bytes] = []
        self._retries = RetryQueue()
        self._scheduler: StreamScheduler[TapProducerStream] = StreamScheduler()
        self._changes_of_ended = 0
        self._noop_opaque = 0
        self._now = now
        self._said_goodbye = False
        #: Where the client stood, and where in a vbucket that was not there when it left, should it have asked for all.
        self._places = dict(places or {})
        self._elsewhere = elsewhere
        #: Where each vbucket stood at the connect, what comes later is new; and up to where it was purged.
        self._began_at = {
            number: (vbucket.failover_log.newest.vbucket_uuid, vbucket.consistent_seqno, vbucket.purge_seqno)
            for number in plan.vbuckets or source.vbuckets()
            if (vbucket := source.vbucket(number)) is not None
        }
        #: None for all.
        self._wanted = None if plan.vbuckets is None else frozenset(plan.vbuckets)
        #: What was asked for and is not followed yet.
        self._unbegun = deque(plan.vbuckets or source.vbuckets())
        self._warned: set[int] = set()
        #: The vbuckets that were asked for and cannot be sent, by the reason.
        self._left_out: dict[str, list[int]] = {}
        #: The vbuckets that something was said about.
        self._named: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        if self.plan.acks:
            self.send(tap.Opaque(control=Control.ENABLE_AUTO_NACK))
        if self.plan.checkpoints:
            self.send(tap.Opaque(control=Control.ENABLE_CHECKPOINT_SYNC))

    @property
    def beginning(self) -> bool:
        """Some of the vbuckets that were asked for are not followed yet."""
        return bool(self._unbegun)

    def _begin_some(self) -> None:
        """Follow some more. A thousand streams take their time and memory, so each turn begins a few of them."""
        for _ in range(min(BEGIN_MAX - len(self._scheduler), len(self._unbegun))):
            number = self._unbegun.popleft()
            if number not in self.streams:
                self._follow(number)
        if not self._unbegun:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        """Say once what is not sent, and not for each of a thousand vbuckets."""
        for why, numbers in self._left_out.items():
            shown = ", ".join(map(str, numbers[:LEFT_OUT_SHOWN]))
            more = f" and {len(numbers) - LEFT_OUT_SHOWN} more" if len(numbers) > LEFT_OUT_SHOWN else ""
            self.warn(f"vbucket {shown} is {why}" if len(numbers) == 1 else f"vbuckets {shown}{more} are {why}")
        self._left_out.clear()

    # Which vbuckets

    def _follow(self, number: int) -> None:
        """Begin to send a vbucket. Who names it gets it in whatever state, who asks for all gets the active ones."""
        vbucket = self.source.vbucket(number)
        named = self.plan.vbuckets is not None
        active = vbucket is not None and vbucket.state is VbucketState.ACTIVE
        if vbucket is None or not (active or (named and vbucket.streamable)):
            if named and self.plan.ends:
                self._leave_out(number, "not sent: there is nothing of it here")
            return  # it may come to be
        if self.plan.takeover and vbucket.state in (VbucketState.REPLICA, VbucketState.PENDING):
            self._leave_out(number, f"not handed over: a {vbucket.state.value} copy")
            return
        if self.plan.takeover and not vbucket.may_hand_over_to(self.successor):
            self._leave_out(number, f"not handed over: died for {vbucket.successor!r}, who may own it")
            return
        before = self.streams.get(number)
        place = self._place_at_connect(number) if before is None else before.place
        try:
            stream = TapProducerStream(self, vbucket, place, began=self._began_at.get(number, _NOT_THERE)[1])
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
        """A vbucket was made, or has another role: follow it, if it was asked for and could not be followed before."""
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
        """How many changes are not sent yet, at most."""
        return sum(stream.backlog for stream in self.streams.values())

    @property
    def backlog(self) -> int:
        """The same, and what waits for a second try."""
        return self.queued + len(self._retries)

    @property
    def retrying(self) -> int:
        """How many messages wait for a second try."""
        return len(self._retries)

    @property
    def places(self) -> dict[int, TapPosition]:
        """Where each vbucket goes on when the client comes back; one that is not followed, where it would begin."""
        begun = {number: stream.place for number, stream in self.streams.items()}
        wanted = self.plan.vbuckets or self.source.vbuckets()
        return {number: self._place_at_connect(number) for number in wanted if number not in begun} | begun

    @property
    def elsewhere(self) -> TapPosition | None:
        """Where the client goes on in a vbucket that is not there yet, if it asks for all or did so before."""
        if self.plan.vbuckets is not None:
            return self._elsewhere
        return self._place(self._elsewhere, *_NOT_THERE)

    def _place_at_connect(self, number: int) -> TapPosition:
        return self._place(self._places.get(number, self._elsewhere), *self._began_at.get(number, _NOT_THERE))

    def _place(self, known: TapPosition | None, vbucket_uuid: int, seqno: int, purge_seqno: int) -> TapPosition:
        if known is None:
            return TapPosition.first(self.plan, vbucket_uuid, seqno, purge_seqno)
        return known.under(self.plan, seqno)

    # Coming in

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it is none of a TAP connection's, so that somebody else may answer it."""
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
            stream.stop("the consumer says that it does not own it")
        elif empties and (status in TEMPORARY or status is Status.NOT_MY_VBUCKET):
            # A second try would take with it what went out behind the first: the client comes back and begins there.
            self.closing = f"the consumer could not start over: {status.label}"
        elif status in TEMPORARY:
            self._try_again(piece, number, whole=whole)
        elif status is Status.KEY_EEXISTS and stream is not None and stream.refused_as_active(piece):
            pass
        elif status is Status.NOT_MY_VBUCKET:
            self.warn("the consumer refused a message that belongs to no vbucket: NOT_MY_VBUCKET; the rest goes on")
        else:
            self.closing = f"the consumer refused a message: {status.label}"

    def _try_again(self, piece: Piece, number: int, *, whole: bool) -> None:
        """Send the message again after a while, unless a newer one with its key has gone out meanwhile.

        It may be refused over and over, until something behind it is answered; that is one second try.
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
        """Was anything of this stream not answered yet, or refused for the moment?"""
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
        """How many changes may go out in one piece, whose last one asks for an acknowledgement."""
        return min(self.room, self.settings.ack_interval) if self.plan.acks else _NO_LIMIT

    @property
    def next_opaque(self) -> int:
        """The number of the next message."""
        return self.window.next_number % _OPAQUES

    def send(self, message: Request, stream: TapProducerStream | None = None) -> int:
        """Send a control message; its number."""
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
        """Send changes that were laid out under the next numbers."""
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
        """What goes out now is newer than what waits under the same key."""
        for retry in self._retries.overtaken({key_of(message) for message in messages_in(messages)}):
            if retry.stream is not None:
                retry.stream.let_go(retry.before_seqno)

    def ready(self, stream: TapProducerStream) -> None:
        """The stream may have something to send."""
        if self.streams.get(stream.number) is stream and self._scheduler.wake(stream) and self.on_ready is not None:
            self.on_ready()

    @property
    def has_output(self) -> bool:
        """Would ``produce`` hand out something, as far as one can know before trying?"""
        if self._out or self._unbegun:
            return True
        return (bool(self._scheduler) and self.room > 0) or self._has_due or self._finishing

    @property
    def _has_due(self) -> bool:
        due = self._retries.next_due
        return due is not None and due <= self._now

    def produce(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """The next bytes to send, about as many as asked for."""
        if self.closing:
            return b""
        if self._unbegun:
            self._begin_some()
        if self._retries:
            self._send_retries(max_bytes)
        # Half of it is enough: the rest would be many small pieces, which cost more than they bring.
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
        """Send again what is due. There is room for it, because what waits counts as not acknowledged."""
        while self.size < max_bytes and (retry := self._retries.take_due(self._now)) is not None:
            number = self.window.take_numbers(1)
            seqno = retry.before_seqno
            self._put(Piece(number, 1, retry.numbered(number), retry.stream, seqno, seqno, again=True))

    # Flush

    def flushed(self) -> None:
        """The vbuckets of some streams were emptied. All of them at once, before anything new of them is sent.

        The message means everything that came over the connection, which must have been named for that. So it is sent
        only if nothing else has come over it; otherwise the consumer starts over with the flushed ones. A flush that
        has made all its hops is not told either.
        """
        flushed = {s: None for s in self.streams.values() if not s.ended and s.history.end_reason == "flushed"}
        for stream in flushed:
            self._drop_retries(stream)
        is_all = self._is_all(flushed)
        number = self._send_flush(list(flushed)) if is_all else 0
        for stream in flushed:
            self.restart(stream, flushed=is_all, told_by=number)

    def _is_all(self, flushed: Container[TapProducerStream]) -> bool:
        """Is everything empty now that the consumer may hold, or will, because of this connection?

        What has ended it holds too, and of what is handed over it may be the owner by now, with writes of its own.
        """
        if self.plan.takeover or not self._named <= self.streams.keys():
            return False
        if not all(s in flushed or not (s.ended or s.vbucket.high_seqno) for s in self.streams.values()):
            return False
        unbegun = [vbucket for number in self._unbegun if (vbucket := self.source.vbucket(number)) is not None]
        return not any(v.high_seqno and (v.state is VbucketState.ACTIVE or self._wanted is not None) for v in unbegun)

    def _send_flush(self, streams: list[TapProducerStream]) -> int:
        """One for each flush that is news, which as a rule is one; the number of the last, 0 if there is none."""
        marks = {s.vbucket.flush_marks[-1]: s.vbucket.flush_ttl for s in streams if s.vbucket.flush_ttl}
        number = 0
        for stream in streams if marks else ():
            if stream.number not in self._named:
                self.send(tap.Opaque(control=Control.CLOSE_BACKFILL, vbucket=stream.number))
        for mark, ttl in marks.items():
            number = self.send(tap.Flush(ttl=ttl, private=mark.to_bytes(FLUSH_MARK_SIZE, "big")))
        return number

    def was_answered(self, number: int) -> bool:
        """Has the consumer answered this message, or one behind it?"""
        return self.plan.acks and number < self.window.oldest

    def restart(self, stream: TapProducerStream, *, flushed: bool = False, told_by: int = 0) -> None:
        """Begin with a vbucket again: answers to what was sent before count no more."""
        before = stream.place
        stream.stopped = True
        stream.end()
        self._drop_retries(stream)
        self._changes_of_ended += stream.changes_sent
        try:
            self.streams[stream.number] = TapProducerStream(
                self, stream.vbucket, before, broken=True, flushed=flushed, told_by=told_by
            )
        except StatusError as error:
            self.warn(f"vbucket {stream.number} is not sent any more: {error}")
            del self.streams[stream.number]
            self._places[stream.number] = before
            return
        self.ready(self.streams[stream.number])

    # The end

    @property
    def _finishing(self) -> bool:
        """Everything that was asked for is sent and taken: there is a step to take, to say so or to go."""
        if not self.plan.ends or self.done or self._scheduler or self._unbegun:
            return False
        if not all(stream.ended for stream in self.streams.values()):
            return False
        return not (self.window.messages or self._retries)

    def _finish(self) -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            self.send(tap.Opaque(control=Control.CLOSE_TAP_STREAM))
        self.done = not (self.window.messages or self._retries)

    def farewell(self) -> bytes:
        """Tell the consumer that nothing more comes, whatever there is to send."""
        self.send(tap.Opaque(control=Control.CLOSE_TAP_STREAM))
        return self._take()

    # Time

    @property
    def deadline(self) -> float | None:
        """When to look at the time again."""
        due = self._retries.next_due
        times = [] if due is None or due <= self._now else [due]  # what is due already waits for its turn
        if self.noops.deadline is not None:
            times.append(self.noops.deadline)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Time has passed: send again what is due, and ask whether the consumer is there."""
        self._now = now
        if not self.plan.acks:
            self.noops.heard()  # who acknowledges nothing may not answer noops either
        match self.noops.check(now):
            case Verdict.ASK:
                self._noop_opaque += 1
                self._out.append(memcached.Noop(opaque=self._noop_opaque).encode())
            case Verdict.DEAD:
                self.closing = f"nothing was heard since a noop {self.noops.interval_s:g} s ago"
        if self.has_output and self.on_ready is not None:
            self.on_ready()

    def lose(self) -> None:
        """The connection is gone."""
        for stream in self.streams.values():
            stream.history.close()
        self._scheduler.clear()


def packed(message: Request) -> bytes:
    """A message as bytes. A thousand streams say two things each: those are packed here, and a test compares."""
    if type(message) is not tap.Opaque:
        return message.encode()
    flags, control = int(message.tap_flags), int(message.control)
    return _OPAQUE.pack(*_OPAQUE_BEGIN, message.vbucket, 12, message.opaque, 0, 4, flags, message.ttl, control)


def _empties(message: bytes) -> bool:
    """Does the message make a consumer drop what it holds?"""
    if message[1] not in _MAY_EMPTY:
        return False
    found = tap.tap.decode(message)
    return isinstance(found, tap.Flush) or (
        isinstance(found, tap.Opaque) and found.control is Control.INITIAL_VBUCKET_STREAM
    )
