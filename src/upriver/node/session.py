"""One connection of the node, without I/O: received bytes in, bytes to send out.

Theory of operation. A session cuts received bytes into requests and answers them in order. Most answers are ready at
once. An answer that waits (for the disk, or for the delay after a failed login) takes its place in a queue and holds
back the answers behind it. A request whose answer would bypass that queue is held back too (see ``packet_handlers``).
Frequent requests never become objects: a compiled loop answers runs of them from the item tables and stops at the
first request that is not plain, which the session then handles.

A turn is bounded in requests, bytes of answers and time. At its end the session stops, even in the middle of an answer
of thousands of packets, keeps what it has received and is ``stalled``. Its connection calls ``resume`` in a later turn
and gives it no more bytes before.

The session has no socket, and its time comes from the node. Its connection moves the bytes, tells it when the peer
does not read, and closes when the session is ``finished``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    KeyExists,
    Locked,
    NotMyVbucket,
    StatusError,
    WireError,
)
from upriver.node.auth.sasl import SaslExchange
from upriver.node.auth.users import Role, User
from upriver.node.logs import ConnectionLog, of_connection
from upriver.node.options import ListenAddress
from upriver.node.packet_handlers import ConnectionFormat, SessionStream
from upriver.node.state import NodeState
from upriver.wire import (
    EXTENDED_REQUEST,
    MEMCACHED,
    AnyResponse,
    Buffer,
    Framing,
    Magic,
    Message,
    Request,
    Response,
    Status,
)
from upriver.wire.dialects.memcached import Feature

EVERYTHING: Final = Role.READ | Role.WRITE | Role.STREAM | Role.ADMIN
NOTHING: Final = Role(0)
#: The bits of a data type, and the feature that a client must have agreed on to use them.
DATATYPES: Final = {0x01: Feature.JSON, 0x02: Feature.SNAPPY}
_JSON: Final = 0x01
_NO_TERMS: Final = (None, None, (False, False, 0, False))
_LOG_IN_FIRST: Final = "Authenticate first"
_EXTENDED: Final = "requests with frame extras (durability levels, kept expiries) are not supported"
_HEADER_SIZE: Final = MEMCACHED.header_size
#: The type of the first record that a TLS client sends.
_TLS_HANDSHAKE: Final = 0x16


class Deferred:
    """The place of an answer that is not ready yet."""

    __slots__ = ("_session", "give_up", "packets")

    def __init__(self, session: "Session") -> None:
        self._session = session
        #: Refuses a request that may wait for long; None where the next commit to disk ends the wait.
        self.give_up: Callable[[], object] | None = None
        self.packets: bytes | None = None

    @property
    def ended(self) -> bool:
        """Whether it is answered."""
        return self.packets is not None

    def complete(self, *answers: Message) -> None:
        """Answer, unless it is answered already, and release the answers behind it."""
        if not self.ended:
            self.give_up = None
            self._session.hold(self, b"".join(answer.encode() for answer in answers))
            self._session.release_soon()

    def fail(self, request: Request, error: StatusError) -> None:
        """Refuse the request."""
        self.complete(refusal(request, error))


#: The result of a command: one answer, several, none (quiet forms), or one that comes later.
Answer = Response | Iterable[Response] | Deferred | None
Command = Callable[["Session", Request], Answer]


def refusal(request: Request, error: StatusError) -> AnyResponse:
    """The answer that refuses a request: CAS 0, no extras, always a text."""
    text = error.detail or error.text
    return AnyResponse(opcode=request.code, status=Status(error.status), opaque=request.opaque, value=text.encode())


class Session:
    """The state of one connection."""

    __slots__ = (
        "_held_back",
        "_needed",
        "_out",
        "_partial",
        "_partial_since",
        "_releasing",
        "_rest",
        "_terms",
        "_turn_end",
        "_waiting",
        "_waiting_bytes",
        "_work",
        "agent",
        "closing",
        "disk_waits",
        "exchange",
        "features",
        "format",
        "framing",
        "listen_address",
        "logging_in",
        "node",
        "on_output",
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
        #: Called when there is something to send.
        self.on_output = on_output
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
        self._partial = bytearray()
        #: When the first byte of the incomplete request came.
        self._partial_since = 0.0
        self._needed = 0
        #: The answer to the next request may overtake answers that wait.
        self._held_back = False
        self._work = 0
        self._turn_end = 0.0
        self._releasing = False
        #: The rest of an answer of many packets, of which each turn makes some.
        self._rest: Iterator[Response] | None = None
        #: The compiled loop's terms, and the user and features that they were derived from.
        self._terms: tuple[User | None, frozenset[Feature] | None, tuple[bool, bool, int, bool]] = _NO_TERMS
        self._out = bytearray()
        self._waiting: deque[Deferred] = deque()
        self._waiting_bytes = 0

    @property
    def log(self) -> ConnectionLog:
        """The node's log, with this connection's address in each line."""
        return of_connection(self.node.log, self.peer)

    # Bytes

    def receive(self, data: Buffer) -> None:
        """Take bytes and answer all complete requests."""
        if self._partial:
            self._partial += data
            if self.stalled or len(self._partial) < self._needed:
                self._hold_partial()
                return
            data, self._partial = bytes(self._partial), bytearray()
        at = self._answer_all(data)
        if at < len(data) and not self.closing:
            self._partial += data[at:]
            if at or self not in self.node.partial:
                self._partial_since = self.node.ticks()
        if self._partial or self in self.node.partial:
            self._hold_partial()

    def serve(self, buffer: Buffer, size: int) -> tuple[bytes | None, list[SessionStream]]:
        """Take received bytes; return the answers and the streams that the requests woke.

        The answers are None if the requests were not all plain: the session keeps its answers for ``data_to_send``.
        """
        return self.node.wake_queue.collect(self._answer_plain, buffer, size)

    def _answer_plain(self, buffer: Buffer, size: int) -> bytes | None:
        """Answer in one call if all requests are plain, as most are. Otherwise do as ``receive`` does; return None."""
        node = self.node
        if node.fast_path is None or self._partial or self._waiting or self._out or self.stalled or self.paused:
            self.receive(memoryview(buffer)[:size])
            return None
        if self.stream is not None or self.framing is not MEMCACHED:
            self.receive(memoryview(buffer)[:size])
            return None
        limits = node.limits
        at, answers = node.fast_path.serve(
            buffer, 0, size, *self._plain_terms(), limits.body_bytes_max, limits.unread_answer_bytes_max
        )
        if at == size:
            return answers
        self._out += answers
        if len(answers) >= limits.unread_answer_bytes_max:
            self._leave_for_later(memoryview(buffer)[at:size])
        else:
            self.receive(memoryview(buffer)[at:size])
        return None

    def _leave_for_later(self, data: Buffer) -> None:
        """End the turn before these requests."""
        self.stalled = True
        self._partial += data
        self._partial_since = self.node.ticks()
        self._hold_partial()

    def resume(self) -> None:
        """Continue with the received bytes: the peer reads again, or another turn begins."""
        self.paused = self.stalled = self._held_back = False
        data, self._partial = bytes(self._partial), bytearray()
        self._needed = 0
        self.receive(data)

    def _hold_partial(self) -> None:
        """Update the node's budget. If it is exceeded, refuse requests that held the most memory for the longest."""
        partial, limit = self.node.partial, self.node.limits.partial_bytes_max
        partial.hold(self, len(self._partial), self._partial_since)
        if partial.total_bytes > limit:
            for session in partial.too_much(limit, self.node.ticks(), Session._waits_for_its_peer):
                session._refuse_partial(limit)

    def _waits_for_its_peer(self) -> bool:
        """Whether the received bytes wait for the peer, and not for a turn or for the disk."""
        return self.paused or not self.stalled

    def _refuse_partial(self, limit: int) -> None:
        self.log.warning("closed: half-received requests of all connections take more than %d bytes", limit)
        if len(self._partial) >= _HEADER_SIZE and self.format is None:
            text = "too many requests are incomplete: send it again later"
            self.send(header_refusal(self._partial, 0, Status.ENOMEM, text))
        self._close()
        if self.on_output is not None:
            self.on_output()

    def _close(self) -> None:
        """Take nothing more, and drop the bytes that were not answered."""
        self.closing = True
        self._partial = bytearray()
        self.node.partial.release(self)

    def give_up(self) -> None:
        """Refuse all requests that may wait for long: the peer has half-closed, or the node stops."""
        for place in list(self._waiting):
            if place.give_up is not None:
                place.give_up()

    def end(self) -> None:
        """Drop everything: the connection is closed."""
        self.on_output = None
        self._close()
        self.give_up()
        self._rest = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def data_to_send(self) -> bytes:
        """Take the answers that are ready."""
        if not self._out:
            return b""
        out = bytes(self._out)
        self._out.clear()
        return out

    @property
    def unsent(self) -> int:
        """The number of bytes of answers that are ready and not taken yet."""
        return len(self._out)

    @property
    def unread(self) -> int:
        """The number of received bytes that are not answered yet."""
        return len(self._partial)

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes of answers that wait for one before them."""
        return self._waiting_bytes

    @property
    def held_bytes(self) -> int:
        """The number of bytes kept: requests that are not answered, and answers that are not sent."""
        return len(self._partial) + len(self._out) + self._waiting_bytes

    @property
    def blocked(self) -> bool:
        """Whether it cannot continue yet: the peer does not read, a login is under way, or too many answers wait."""
        limits = self.node.limits
        return (
            self.paused
            or self.logging_in
            or (self._held_back and bool(self._waiting))
            or (self.stream is not None and self.stream.full)
            or len(self._waiting) >= limits.waiting_answers_max
            or self._waiting_bytes >= limits.unread_answer_bytes_max
        )

    @property
    def waiting(self) -> int:
        """The number of answers in the queue."""
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether nothing more will be answered, so that the connection can close."""
        return self.closing and not self._waiting and self._rest is None

    def hold(self, place: Deferred, packets: bytes) -> None:
        """Keep an answer until those before it are sent."""
        self._waiting_bytes += len(packets) - len(place.packets or b"")
        place.packets = packets

    def release_soon(self) -> None:
        """Release answers once for all that are completed together: a commit to disk completes thousands."""
        if not self._releasing:
            self._releasing = True
            self.node.scheduler.from_thread(self.release)

    def release(self) -> None:
        """Move completed answers from the queue to the output."""
        self._releasing = False
        while self._waiting and (packets := self._waiting[0].packets) is not None:
            self._waiting.popleft()
            self._waiting_bytes -= len(packets)
            self._out += packets
        if self.on_output is not None:
            self.on_output()

    # Requests

    def _answer_all(self, data: Buffer) -> int:
        """Answer request by request; return the offset of the first byte that was not consumed."""
        at = self._work = self._needed = 0
        limits = self.node.limits
        self._turn_end = self.node.ticks() + limits.turn_s
        if self.framing is None and len(data):
            self._choose_framing(data[0])
        while self._answer_rest() and not self.closing and at < len(data):
            if (self._work and self._turn_is_over()) or self.blocked:
                self.stalled = True
                return at
            self._work += 1
            start, at = at, self._answer_run(data, at)
            if at == len(data):
                break
            if at > start and len(self._out) >= limits.unread_answer_bytes_max:
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
                self._needed = size or 0
                return at
            if self._waiting and self._may_overtake(data, at):
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
            or len(self._out) >= limits.unread_answer_bytes_max
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
        node = self.node
        if self.stream is not None:
            at = self.stream.receive_run(data, at)
        if node.fast_path is None or self._waiting or self.format is not None:
            return at
        limits = node.limits
        at, answers = node.fast_path.serve(
            data, at, len(data), *self._plain_terms(), limits.body_bytes_max, limits.unread_answer_bytes_max
        )
        self._out += answers
        return at

    def _plain_terms(self) -> tuple[bool, bool, int, bool]:
        """Whether the compiled loop may read and write for this user, and the agreed data types and tokens.

        The loop answers at once, so it does not write where answers wait for the disk.
        """
        user, features, terms = self._terms
        if features is not self.features or user is not self.user:
            roles = EVERYTHING if self.node.users is None else NOTHING if self.user is None else self.user.roles
            writes = Role.WRITE in roles and self.node.bucket.ack == "memory"
            terms = (Role.READ in roles, writes, self.datatypes, Feature.MUTATION_SEQNO in self.features)
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
        self.lose_place(error)

    def lose_place(self, error: WireError) -> None:
        """Close the connection: the bytes behind this error cannot be understood."""
        if self.format is not None:
            self.format.lose_place(self, error)
            return
        self.log.warning("closed: %s", error)
        self._close()

    def put(self, packets: bytes) -> None:
        """Send packets of a stream, which do not wait for earlier answers."""
        self._out += packets

    def _answer_packet(self, packet: bytes) -> None:
        if self.format is not None:
            self.format.handle(self, packet)
            return
        if self._needs_login and self._is_closed_before_login(packet):
            self.send(header_refusal(packet, 0, Status.AUTH_ERROR, _LOG_IN_FIRST))
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
        if self.node.users is None:
            return
        if self.user is None:
            raise AuthenticationFailed(_LOG_IN_FIRST)
        if role not in self.user.roles:
            lacking = str((role if role is Role.ADMIN else role & ~self.user.roles).name).lower()
            raise AccessDenied(f"the user {self.user.name} lacks the role {lacking}")

    def _deliver(self, answer: Answer) -> None:
        match answer:
            case None:
                return
            case Deferred():
                self._waiting.append(answer)
                if answer.packets is not None:
                    self.release()
            case Response():
                self.send(answer)
            case _:
                self._rest = iter(answer)

    def send(self, answer: Response) -> None:
        """Send an answer behind all answers to earlier requests."""
        if self._waiting:
            place = Deferred(self)
            self.hold(place, answer.encode())
            self._waiting.append(place)
        else:
            self._out += answer.encode()


def malformed(packet: bytes, error: WireError) -> AnyResponse:
    """The refusal of a packet with a valid header and an invalid body."""
    return header_refusal(packet, 0, Status.EINVAL, str(error))


def header_refusal(data: Buffer, at: int, status: Status, text: str) -> AnyResponse:
    """A refusal made from the header of the request only."""
    opaque = int.from_bytes(data[at + 12 : at + 16], "big")
    return AnyResponse(opcode=data[at + 1], status=status, opaque=opaque, value=text.encode())
