"""One connection of the node, without I/O: received bytes in, bytes to send out.

Theory of operation. A session cuts what it receives into requests and answers them in their order. Most answers are
there at once; one that has to wait (for the disk, for a failed login's delay) takes its place in the queue and holds
back those behind it until it is complete; what only a stream can answer is not even looked at before. Frequent requests
never become objects: a compiled loop answers runs of them straight from the item tables and stops at the first request
that is anything but plain, which then comes here.

A turn is bounded: after so many requests, bytes of answers or milliseconds the session stops, also in the middle of an
answer that consists of thousands of packets, keeps what it has received and says that it is ``stalled``. Whoever runs
it calls ``resume`` in a later turn, and gives it nothing more to receive before.

The session knows no socket, and of time only what it is given. Its shell moves the bytes, tells it when the peer does
not read, and closes the connection when it is ``finished``.
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
_STRANGER: Final = "Authenticate first"
_EXTENDED: Final = "requests with frame extras (durability levels, kept expiries) are not understood here"
_HEADER_SIZE: Final = MEMCACHED.header_size
#: The type of the record that a TLS client greets with.
_TLS_HANDSHAKE: Final = 0x16


class Deferred:
    """The place of an answer that is not there yet."""

    __slots__ = ("_session", "give_up", "packets")

    def __init__(self, session: "Session") -> None:
        self._session = session
        #: Refuses now what may otherwise wait for long; None where the next commit to disk ends the wait by itself.
        self.give_up: Callable[[], object] | None = None
        self.packets: bytes | None = None

    @property
    def ended(self) -> bool:
        """It is answered, or nobody is there any more who wants to know."""
        return self.packets is not None

    def complete(self, *answers: Message) -> None:
        """Answer, unless that has happened. Whoever waited behind goes out too."""
        if not self.ended:
            self.give_up = None
            self._session.hold(self, b"".join(answer.encode() for answer in answers))
            self._session.release_soon()

    def fail(self, request: Request, error: StatusError) -> None:
        """Answer with a refusal."""
        self.complete(refusal(request, error))


#: What a command gives back: one answer, several, none (quiet forms), or one that comes later.
Answer = Response | Iterable[Response] | Deferred | None
Command = Callable[["Session", Request], Answer]


def refusal(request: Request, error: StatusError) -> AnyResponse:
    """The answer that says why not: CAS 0, no extras, and never without a text."""
    text = error.detail or error.text
    return AnyResponse(opcode=request.code, status=Status(error.status), opaque=request.opaque, value=text.encode())


class Session:
    """What the node knows of one connection."""

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
        #: The listener that it came through.
        self.listen_address = listen_address
        #: The header of its packets; None until the first byte has come.
        self.framing: Framing | None = None
        #: Set if a handler claimed the connection, whose packets then have another header than memcached's.
        self.format: ConnectionFormat | None = None
        #: Called when an answer that was waiting can go out.
        self.on_output = on_output
        self.user: User | None = None
        self.exchange: SaslExchange | None = None
        self.features: frozenset[Feature] = frozenset()
        self.agent = ""
        #: What an open has made of it, if one came.
        self.stream: SessionStream | None = None
        #: The connection is to be closed once everything is sent.
        self.closing = False
        #: A login is under way: what stands behind it waits for its outcome.
        self.logging_in = False
        #: The peer does not read: nothing more is answered until it does.
        self.paused = False
        #: Requests were left for a later turn.
        self.stalled = False
        #: The bucket was selected: who does so knows what a cluster map is.
        self.selected = False
        #: How many answers wait for a seqno to reach the disk.
        self.disk_waits = 0
        self._partial = bytearray()
        #: When what is held of a request began to come.
        self._partial_since = 0.0
        self._needed = 0
        #: The next request is a stream's, and answers before it wait.
        self._held_back = False
        self._work = 0
        self._turn_end = 0.0
        self._releasing = False
        #: What is left of an answer of many packets: they are made some in each turn.
        self._rest: Iterator[Response] | None = None
        #: What follows for the compiled loop from a user and the features agreed on.
        self._terms: tuple[User | None, frozenset[Feature] | None, tuple[bool, bool, int, bool]] = _NO_TERMS
        self._out = bytearray()
        self._waiting: deque[Deferred] = deque()
        self._waiting_bytes = 0

    @property
    def log(self) -> ConnectionLog:
        """The node's log, whose lines name this connection."""
        return of_connection(self.node.log, self.peer)

    # Bytes

    def receive(self, data: Buffer) -> None:
        """Take bytes and answer all requests that are whole."""
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
        """The turn ends before these."""
        self.stalled = True
        self._partial += data
        self._partial_since = self.node.ticks()
        self._hold_partial()

    def resume(self) -> None:
        """The peer reads again, or another turn begins: go on with what was received meanwhile."""
        self.paused = self.stalled = self._held_back = False
        data, self._partial = bytes(self._partial), bytearray()
        self._needed = 0
        self.receive(data)

    def _hold_partial(self) -> None:
        """Keep the node's sum; if all connections together keep too much, who has kept most for longest is refused."""
        partial, limit = self.node.partial, self.node.limits.partial_bytes_max
        partial.hold(self, len(self._partial), self._partial_since)
        if partial.total_bytes > limit:
            for session in partial.too_much(limit, self.node.ticks(), Session._waits_for_its_peer):
                session._refuse_partial(limit)

    def _waits_for_its_peer(self) -> bool:
        """What it has received is not just waiting for its turn, or for the disk."""
        return self.paused or not self.stalled

    def _refuse_partial(self, limit: int) -> None:
        self.log.warning("closed: half-received requests of all connections take more than %d bytes", limit)
        if len(self._partial) >= _HEADER_SIZE and self.format is None:
            text = "too many requests are half received: send it again later"
            self.send(header_refusal(self._partial, 0, Status.ENOMEM, text))
        self._close()
        if self.on_output is not None:
            self.on_output()

    def _close(self) -> None:
        """Take nothing more, and keep nothing of what was not answered."""
        self.closing = True
        self._partial = bytearray()
        self.node.partial.release(self)

    def give_up(self) -> None:
        """End all waits that may last: the peer has said everything, or the node stops."""
        for place in list(self._waiting):
            if place.give_up is not None:
                place.give_up()

    def end(self) -> None:
        """The connection is gone: whatever waits for it need not."""
        self.on_output = None
        self._close()
        self.give_up()
        self._rest = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def data_to_send(self) -> bytes:
        """The answers that are ready; each is given once."""
        if not self._out:
            return b""
        out = bytes(self._out)
        self._out.clear()
        return out

    @property
    def unsent(self) -> int:
        """How many bytes of answers are ready and not taken yet."""
        return len(self._out)

    @property
    def unread(self) -> int:
        """How many bytes of a request wait for the rest of it."""
        return len(self._partial)

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of answers wait for one before them."""
        return self._waiting_bytes

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept: requests that are not answered and answers that are not sent."""
        return len(self._partial) + len(self._out) + self._waiting_bytes

    @property
    def blocked(self) -> bool:
        """Going on makes no sense yet: the peer does not read, logs in, or too many answers wait."""
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
        """How many answers have a place and are not sent."""
        return len(self._waiting)

    @property
    def finished(self) -> bool:
        """Nothing more will be answered: the connection is to be closed."""
        return self.closing and not self._waiting and self._rest is None

    def hold(self, place: Deferred, packets: bytes) -> None:
        """Keep the answer until those before it are sent."""
        self._waiting_bytes += len(packets) - len(place.packets or b"")
        place.packets = packets

    def release_soon(self) -> None:
        """Release once for all answers that are completed together, as a commit to disk completes thousands."""
        if not self._releasing:
            self._releasing = True
            self.node.scheduler.from_thread(self.release)

    def release(self) -> None:
        """Move answers that are complete from the queue to the output."""
        self._releasing = False
        while self._waiting and (packets := self._waiting[0].packets) is not None:
            self._waiting.popleft()
            self._waiting_bytes -= len(packets)
            self._out += packets
        if self.on_output is not None:
            self.on_output()

    # Requests

    def _answer_all(self, data: Buffer) -> int:
        """Answer request by request; where the first byte stands that was not consumed."""
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
        """Go on with an answer of many packets, as far as this turn goes; True if nothing is left of it."""
        while self._rest is not None:
            if (self._work and self._turn_is_over()) or self.blocked:
                self.stalled = True
                return False
            try:
                packet = next(self._rest, None)
            except Exception:
                self.log.exception("closed: an answer could not be finished")
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
        """Let the compiled loop answer what is plain; where it stopped."""
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
        """Whether the compiled loop may read and write for this user, and the data types and tokens agreed on. It
        answers at once, so it does not write where answers have to wait for the disk."""
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
        return min(limits.login_bytes_max, limits.body_bytes_max) if self._is_stranger else limits.body_bytes_max

    @property
    def _is_stranger(self) -> bool:
        """It has to log in, and has not."""
        return self.user is None and self.node.users is not None

    def charge(self, work: int) -> None:
        """The request costs more than others: so much sooner this turn ends."""
        self._work += work

    def _refuse_frame(self, data: Buffer, at: int, error: WireError) -> None:
        """A frame that cannot be: who sent a request's header is told, and nothing behind it can be understood."""
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
        """Send packets that wait for no answer before them: a stream's."""
        self._out += packets

    def _answer_packet(self, packet: bytes) -> None:
        if self.format is not None:
            self.format.handle(self, packet)
            return
        if self._is_stranger and self._is_closed_to_strangers(packet):
            self.send(header_refusal(packet, 0, Status.AUTH_ERROR, _STRANGER))
            return
        if packet[0] == EXTENDED_REQUEST:
            self.send(header_refusal(packet, 0, Status.NOT_SUPPORTED, _EXTENDED))
            return
        for handler in self.node.handlers:
            if handler.handle(self, packet):
                return

    def _is_closed_to_strangers(self, packet: bytes) -> bool:
        """Nobody looks at what is in it before a login: well-formed or not, in whatever dialect."""
        if packet[0] == Magic.RESPONSE:
            return False
        return packet[0] == EXTENDED_REQUEST or packet[1] not in self.node.open_opcodes

    def run(self, request: Request, command: "Command") -> None:
        """Run one request, and answer with what it gives or why it failed."""
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
        """As everybody's; but who has selected the bucket is shown by the map whom to ask instead."""
        answer = refusal(request, error)
        if self.selected and isinstance(error, NotMyVbucket):
            answer.value = self.node.cluster.encoded()
            answer.datatype = _JSON & self.datatypes
        return answer

    @property
    def datatypes(self) -> int:
        """The bits of data types that the client has agreed on, and is told."""
        return sum(bit for bit, feature in DATATYPES.items() if feature in self.features)

    def _understood(self, error: StatusError) -> StatusError:
        """The error in words that the client knows: who did not agree on extended errors knows of no locks."""
        if isinstance(error, Locked) and Feature.XERROR not in self.features:
            return KeyExists(error.detail or error.text, vbucket=error.vbucket)
        return error

    def authorize(self, role: Role) -> None:
        """Refuse what the user may not do. Without a users file everybody may do everything."""
        if self.node.users is None:
            return
        if self.user is None:
            raise AuthenticationFailed(_STRANGER)
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
        """Answer, behind all that were asked for before."""
        if self._waiting:
            place = Deferred(self)
            self.hold(place, answer.encode())
            self._waiting.append(place)
        else:
            self._out += answer.encode()


def malformed(packet: bytes, error: WireError) -> AnyResponse:
    """The answer to a packet whose frame is right and whose body is not."""
    return header_refusal(packet, 0, Status.EINVAL, str(error))


def header_refusal(data: Buffer, at: int, status: Status, text: str) -> AnyResponse:
    """A refusal of which no more is known than the header of its request."""
    opaque = int.from_bytes(data[at + 12 : at + 16], "big")
    return AnyResponse(opcode=data[at + 1], status=status, opaque=opaque, value=text.encode())
