"""One connection of the node, without I/O: received bytes in, bytes to send out.

Theory of operation. A session cuts received bytes into requests and answers them in order. Most answers are ready at
once. An answer that waits holds back the answers behind it (see ``answer_queue``). A request whose answer would bypass
them is held back too (see ``packet_handlers``).
Frequent requests never become objects: a compiled loop answers runs of them from the item tables and stops at the
first request that is not plain, which the session then handles.

A turn is bounded in requests, bytes of answers and time. At its end the session stops, even in the middle of an answer
of thousands of packets, keeps what it has received and is ``stalled``. Its connection calls ``resume`` in a later turn
and gives it no more bytes before.

The session has no socket, and its time comes from the node. Its connection moves the bytes, tells it when the peer
does not read, and closes when the session is ``finished``.
"""

from collections.abc import Callable, Iterator
from typing import Final

from upriver.errors import KeyExists, Locked, NotMyVbucket, StatusError, WireError
from upriver.node.auth.permissions import LOG_IN_FIRST, authorize, roles_of
from upriver.node.auth.sasl import SaslExchange
from upriver.node.auth.users import Role, User
from upriver.node.logs import ConnectionLog, of_connection
from upriver.node.options import ListenAddress
from upriver.node.packet_handlers import ConnectionFormat, SessionStream
from upriver.node.session.answer_queue import Answer, AnswerQueue, Deferred
from upriver.node.session.refusals import header_refusal, refusal
from upriver.node.session.request_buffer import RequestBuffer
from upriver.node.state import NodeState
from upriver.wire import (
    EXTENDED_REQUEST,
    MEMCACHED,
    AnyResponse,
    Buffer,
    Framing,
    Magic,
    Request,
    Response,
    Status,
)
from upriver.wire.dialects.memcached import Feature

#: The bits of a data type, and the feature that a client must have agreed on to use them.
DATATYPES: Final = {0x01: Feature.JSON, 0x02: Feature.SNAPPY}
_JSON: Final = 0x01
#: Further arguments of the compiled loop: see ``_plain_terms``.
_Terms = tuple[bool, bool, int, bool, int, int]
_NO_TERMS: Final = (None, None, (False, False, 0, False, 0, 0))
_EXTENDED: Final = "requests with frame extras (durability levels, kept expiries) are not supported"
_HEADER_SIZE: Final = MEMCACHED.header_size
#: The type of the first record that a TLS client sends.
_TLS_HANDSHAKE: Final = 0x16
#: The letters with which the commands of memcached's text protocol begin, and what such a client is told.
_TEXT_COMMANDS: Final = range(ord("a"), ord("z") + 1)
_BINARY_REQUIRED: Final = b"CLIENT_ERROR the memcached binary protocol is required here\r\n"


Command = Callable[["Session", Request], Answer]


class Session:
    """The state of one connection."""

    __slots__ = (
        "_held_back",
        "_received",
        "_rest",
        "_terms",
        "_turn_end",
        "_understands",
        "_work",
        "agent",
        "answers",
        "closing",
        "disk_waits",
        "exchange",
        "features",
        "format",
        "framing",
        "listen_address",
        "logging_in",
        "node",
        "paused",
        "peer",
        "selected",
        "stalled",
        "stream",
        "user",
    )

    def __init__(
        self,
        node: NodeState,
        peer: str,
        on_output: Callable[[], object] | None = None,
        listen_address: ListenAddress = ListenAddress(),  # noqa: B008 (it never changes)
    ) -> None:
        self.node = node
        self.peer = peer
        #: The listener that accepted it.
        self.listen_address = listen_address
        #: The header of its packets; None until the first byte has come.
        self.framing: Framing | None = None
        #: Set if a handler claimed the connection, whose packets then have another header than memcached's.
        self.format: ConnectionFormat | None = None
        self.answers = AnswerQueue(node.scheduler, on_output)
        self.user: User | None = None
        self.exchange: SaslExchange | None = None
        self.features: frozenset[Feature] = frozenset()
        self.agent = ""
        #: Its streams, once a handler has attached them.
        self.stream: SessionStream | None = None
        #: The connection closes once everything is sent.
        self.closing = False
        #: A login is under way: the requests behind it wait for its outcome.
        self.logging_in = False
        #: The peer does not read: the session answers nothing until it does.
        self.paused = False
        #: Requests are left for a later turn.
        self.stalled = False
        #: The client has selected the bucket, so it understands a cluster map.
        self.selected = False
        #: The number of answers that wait for a seqno to reach the disk.
        self.disk_waits = 0
        self._received = RequestBuffer()
        #: The client has sent a packet, so it speaks the binary protocol.
        self._understands = False
        #: The answer to the next request may overtake answers that wait.
        self._held_back = False
        self._work = 0
        self._turn_end = 0.0
        #: The rest of an answer of many packets, of which each turn makes some.
        self._rest: Iterator[Response] | None = None
        #: The compiled loop's terms, and the user and features that they were derived from.
        self._terms: tuple[User | None, frozenset[Feature] | None, _Terms] = _NO_TERMS

    @property
    def log(self) -> ConnectionLog:
        """The node's log, with this connection's address in each line."""
        return of_connection(self.node.log, self.peer, self.node.log_limit)

    @property
    def on_output(self) -> Callable[[], object] | None:
        """Called when there is something to send."""
        return self.answers.on_output

    @on_output.setter
    def on_output(self, callback: Callable[[], object] | None) -> None:
        self.answers.on_output = callback

    # Bytes

    def receive(self, data: Buffer) -> None:
        """Take bytes and answer all complete requests."""
        received = self._received
        if received.data:
            received.data += data
            if self.stalled or len(received.data) < received.needed:
                received.hold(self)
                return
            data = received.take()
        at = self._answer_all(data)
        if at < len(data) and not self.closing:
            received.data += data[at:]
            if at or not received.is_held:
                received.since = self.node.ticks()
        if received.data or received.is_held:
            received.hold(self)

    def serve(self, buffer: Buffer, size: int) -> tuple[bytes | None, list[SessionStream]]:
        """Take received bytes; return the answers and the streams that the requests woke.

        The answers are None if the requests were not all plain: the session keeps its answers for ``data_to_send``.
        """
        return self.node.wake_queue.collect(self._answer_plain, buffer, size)

    def _answer_plain(self, buffer: Buffer, size: int) -> bytes | None:
        """Answer in one call if all requests are plain, as most are. Otherwise do as ``receive`` does; return None."""
        node, answers = self.node, self.answers
        if node.fast_path is None or self._received.data or answers.waiting or answers.ready_bytes:
            self.receive(memoryview(buffer)[:size])
            return None
        if self.stalled or self.paused or self.stream is not None or self.framing is not MEMCACHED:
            self.receive(memoryview(buffer)[:size])
            return None
        at, packets = node.fast_path.serve(buffer, 0, size, *self._plain_terms())
        self._understands = self._understands or at > 0
        if at == size:
            return packets
        answers.add(packets)
        if len(packets) >= node.limits.unread_answer_bytes_max:
            self.stalled = True  # the turn ends before these requests
            self._received.keep(self, memoryview(buffer)[at:size])
        else:
            self.receive(memoryview(buffer)[at:size])
        return None

    def resume(self) -> None:
        """Continue with the received bytes: the peer reads again, or another turn begins."""
        self.paused = self.stalled = self._held_back = False
        self._received.needed = 0
        self.receive(self._received.take())

    def refuse_partial(self, limit: int) -> None:
        """Refuse the incomplete request and close the connection, because all of them together take too much memory."""
        self.log.warning("closed: half-received requests of all connections take more than %d bytes", limit)
        self._received.refuse(self)
        self._close()
        if self.on_output is not None:
            self.on_output()

    def _close(self) -> None:
        """Take nothing more, and drop the bytes that were not answered."""
        self.closing = True
        self._received.drop(self)

    def log_out(self) -> None:
        """Forget the user. Everything that began under the user's roles ends, and later requests need a new login."""
        self.user = None
        self.end_stream()

    def end_stream(self) -> None:
        """End the connection's streams. The connection itself is then like one that has never streamed."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.end()
            self.paused = self.paused or stream.blocked

    def give_up(self) -> None:
        """Refuse all requests that may wait for long: the peer has half-closed, or the node stops."""
        self.answers.give_up()

    def end(self) -> None:
        """Drop everything: the connection is closed."""
        self._close()
        self.answers.drop()
        self._rest = None

    def data_to_send(self) -> bytes:
        """Take the answers that are ready."""
        return self.answers.take()

    @property
    def unsent(self) -> int:
        """The number of bytes of answers that are ready and not taken yet."""
        return self.answers.ready_bytes

    @property
    def unread(self) -> int:
        """The number of received bytes that are not answered yet."""
        return len(self._received.data)

    @property
    def held_bytes(self) -> int:
        """The number of bytes kept: requests that are not answered, and answers that are not sent."""
        return len(self._received.data) + self.answers.ready_bytes + self.answers.waiting_bytes

    @property
    def blocked(self) -> bool:
        """Whether it cannot continue yet: the peer does not read, a login is under way, or too many answers wait."""
        limits, answers = self.node.limits, self.answers
        return (
            self.paused
            or self.logging_in
            or (self._held_back and bool(answers.waiting))
            or (self.stream is not None and self.stream.full)
            or len(answers.waiting) >= limits.waiting_answers_max
            or answers.waiting_bytes >= limits.unread_answer_bytes_max
        )

    @property
    def waiting(self) -> int:
        """The number of answers in the queue."""
        return len(self.answers.waiting)

    @property
    def finished(self) -> bool:
        """Whether nothing more will be answered, so that the connection can close."""
        return self.closing and not self.answers.waiting and self._rest is None

    # Requests

    def _answer_all(self, data: Buffer) -> int:
        """Answer request by request; return the offset of the first byte that was not consumed."""
        at = self._work = self._received.needed = 0
        limits, answers = self.node.limits, self.answers
        self._turn_end = self.node.ticks() + limits.turn_s
        if self.framing is None and len(data):
            self._choose_framing(data[0])
        while self._answer_rest() and not self.closing and at < len(data):
            if (self._work and self._turn_is_over()) or self.blocked:
                self.stalled = True
                return at
            self._work += 1
            start, at = at, self._answer_run(data, at)
            self._understands = self._understands or at > 0
            if at == len(data):
                break
            if at > start and answers.ready_bytes >= limits.unread_answer_bytes_max:
                self.stalled = True
                return at
            if self.stream is not None and self.stream.full:
                self.stalled = True
                return at
            try:
                size = self._packet_size(data, at)
            except WireError as error:
                self._refuse_frame(data, at, error.shifted(-at))
                return at
            if size is None or len(data) - at < size:
                self._received.needed = size or 0
                return at
            if answers.waiting and self._may_overtake(data, at):
                self.stalled = self._held_back = True
                return at
            self._answer_packet(bytes(data[at : at + size]))
            at += size
        return at

    def _choose_framing(self, first_byte: int) -> None:
        for handler in self.node.handlers:
            self.format = handler.claim(self, first_byte)
            if self.format is not None:
                break
        self.framing = MEMCACHED if self.format is None else self.format.framing

    def _may_overtake(self, data: Buffer, at: int) -> bool:
        """Whether the answer to this request may go out before those that wait."""
        if data[at] != Magic.REQUEST:
            return False
        return any(handler.may_overtake(self, data[at + 1]) for handler in self.node.handlers)

    def _turn_is_over(self) -> bool:
        limits = self.node.limits
        return (
            self._work >= limits.turn_work_max
            or self.answers.ready_bytes >= limits.unread_answer_bytes_max
            or self.node.ticks() >= self._turn_end
        )

    def _answer_rest(self) -> bool:
        """Continue an answer of many packets within this turn; return True if it is complete."""
        while self._rest is not None:
            if (self._work and self._turn_is_over()) or self.blocked:
                self.stalled = True
                return False
            try:
                packet = next(self._rest, None)
            except Exception:
                self.log.exception("closed: an answer failed half-way")
                self._rest = None
                self._close()
                break
            self._work += 1
            if packet is None:
                self._rest = None
            else:
                self.send(packet)
        return True

    def _answer_run(self, data: Buffer, at: int) -> int:
        """Let the compiled loop answer plain requests; return the offset where it stopped."""
        node, answers = self.node, self.answers
        if self.stream is not None:
            at = self.stream.receive_run(data, at)
        if node.fast_path is None or answers.waiting or self.format is not None:
            return at
        at, packets = node.fast_path.serve(data, at, len(data), *self._plain_terms())
        answers.add(packets)
        return at

    def _plain_terms(self) -> _Terms:
        """Whether the compiled loop may read and write for this user, the agreed data types and tokens, and limits.

        The loop answers at once, so it does not write where answers wait for the disk.
        """
        user, features, terms = self._terms
        if features is not self.features or user is not self.user:
            roles = roles_of(self.user, self.node.users)
            writes = Role.WRITE in roles and self.node.bucket.ack == "memory"
            tokens, limits = Feature.MUTATION_SEQNO in self.features, self.node.limits
            terms = (
                Role.READ in roles,
                writes,
                self.datatypes,
                tokens,
                limits.body_bytes_max,
                limits.unread_answer_bytes_max,
            )
            self._terms = (self.user, self.features, terms)
        return terms

    def _packet_size(self, data: Buffer, at: int) -> int | None:
        framing = self.framing or MEMCACHED
        if self.format is not None or data[at] != EXTENDED_REQUEST:
            framing.check_first_byte(data, at)
        if len(data) - at < framing.header_size:
            return None
        return framing.header_size + framing.body_length(data, at, self._body_bytes_max)

    @property
    def _body_bytes_max(self) -> int:
        limits = self.node.limits
        return min(limits.login_bytes_max, limits.body_bytes_max) if self._needs_login else limits.body_bytes_max

    @property
    def _needs_login(self) -> bool:
        """Whether the client must log in and has not."""
        return self.user is None and self.node.users is not None

    def charge(self, work: int) -> None:
        """Count a request that costs more than others, so that the turn ends sooner."""
        self._work += work

    def _refuse_frame(self, data: Buffer, at: int, error: WireError) -> None:
        """Refuse a frame that cannot be cut, if it has a request's header, and close the connection."""
        if self.format is None and data[at] == Magic.REQUEST and len(data) - at >= _HEADER_SIZE:
            length = int.from_bytes(data[at + 8 : at + 12], "big")
            status = Status.E2BIG if length > self._body_bytes_max else Status.EINVAL
            self.send(header_refusal(data, at, status, str(error)))
        if data[at] == _TLS_HANDSHAKE:
            error = WireError(error.offset, error.expected, f"{error.found} (a TLS client on a plain port?)")
        if data[at] in _TEXT_COMMANDS and not self._understands and self.format is None:
            self.put(_BINARY_REQUIRED)
            error = WireError(error.offset, error.expected, f"{error.found} (a client of memcached's text protocol?)")
        self.close_on_wire_error(error)

    def close_on_wire_error(self, error: WireError) -> None:
        """Close the connection: the bytes behind this error cannot be understood."""
        if self.format is not None:
            self.format.close_on_wire_error(self, error)
            return
        self.log.warning("closed: %s", error)
        self._close()

    def put(self, packets: bytes) -> None:
        """Send packets of a stream, which do not wait for earlier answers."""
        self.answers.add(packets)

    def _answer_packet(self, packet: bytes) -> None:
        self._understands = True
        if self.format is not None:
            self.format.handle(self, packet)
            return
        if self._needs_login and self._is_closed_before_login(packet):
            self.send(header_refusal(packet, 0, Status.AUTH_ERROR, LOG_IN_FIRST))
            return
        if packet[0] == EXTENDED_REQUEST:
            self.send(header_refusal(packet, 0, Status.NOT_SUPPORTED, _EXTENDED))
            return
        for handler in self.node.handlers:
            if handler.handle(self, packet):
                return

    def _is_closed_before_login(self, packet: bytes) -> bool:
        """Whether the packet needs a login, whatever its dialect and body."""
        if packet[0] == Magic.RESPONSE:
            return False
        return packet[0] == EXTENDED_REQUEST or packet[1] not in self.node.open_opcodes

    def run(self, request: Request, command: "Command") -> None:
        """Run a command for one request, and send its answer or its refusal."""
        try:
            self._deliver(command(self, request))
        except StatusError as error:
            self._deliver(self._refusal(request, self._understood(error)))
        except Exception:
            self.log.exception("%s failed", request.title())
            self._deliver(
                AnyResponse(
                    opcode=request.code, status=Status.EINTERNAL, opaque=request.opaque, value=b"Internal error"
                )
            )

    def _refusal(self, request: Request, error: StatusError) -> AnyResponse:
        """The refusal. A client that has selected the bucket gets the cluster map, which names the owner."""
        answer = refusal(request, error)
        if self.selected and isinstance(error, NotMyVbucket):
            answer.value = self.node.cluster.encoded()
            answer.datatype = _JSON & self.datatypes
        return answer

    @property
    def datatypes(self) -> int:
        """The bits of the data types that the client has agreed on."""
        return sum(bit for bit, feature in DATATYPES.items() if feature in self.features)

    def _understood(self, error: StatusError) -> StatusError:
        """The error as the client understands it: without extended errors there is no status for locks."""
        if isinstance(error, Locked) and Feature.XERROR not in self.features:
            return KeyExists(error.detail or error.text, vbucket=error.vbucket)
        return error

    def authorize(self, role: Role) -> None:
        """Refuse a user who lacks the role. Without a users file everything is allowed."""
        authorize(self.user, self.node.users, role)

    def _deliver(self, answer: Answer) -> None:
        match answer:
            case None:
                return
            case Deferred():
                self.answers.append(answer)
            case Response():
                self.send(answer)
            case _:
                self._rest = iter(answer)

    def send(self, answer: Response) -> None:
        """Send an answer behind all answers to earlier requests."""
        answers = self.answers
        if answers.waiting:
            answers.append_packets(answer.encode())
        else:
            answers.add(answer.encode())
