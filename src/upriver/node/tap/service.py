"""TAP on the node: its connections, and the clients that it remembers.

Theory of operation. The service handles packets with TAP's opcodes. A *connect* makes the session a producer; any other
TAP message makes it a consumer. All other packets stay with the commands. A consumer answers messages in their order,
together with all other answers, and only when everything before them is on disk: the peer does not repeat what was
answered, even after a crash here.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from upriver.errors import KeyExists, KeyNotFound, NotMyVbucket, StatusError, StorageError, TemporaryFailure, WireError
from upriver.model import VbucketState
from upriver.node.auth.permissions import NOTHING
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import when_all_durable
from upriver.node.packet_handlers import PacketHandler
from upriver.node.session import Answer, Session, malformed, refusal
from upriver.node.state import NodeState
from upriver.node.streams.engine_source import EngineSource
from upriver.node.streams.role_changes import RoleChanges
from upriver.node.tap.client_registry import RegistryWriter, TapRegistry
from upriver.node.tap.connections import TapConnection, TapReceiver
from upriver.node.tap.engine_sink import EngineTapSink
from upriver.node.tap.online_update import OnlineUpdate
from upriver.node.tap.turns import TapTurns
from upriver.protocol import NAME_BYTES_MAX, checked_name, made_up, successor_by_tap
from upriver.protocol.tap import (
    TapClients,
    TapConsumer,
    TapPlan,
    TapSettings,
    check_takeover,
    plan_of,
)
from upriver.wire import AnyRequest, Magic, Message, Request, Response, tap
from upriver.wire.dialects.tap import Control

#: The opcodes of TAP, from connect to checkpoint end.
_OPCODES: Final = frozenset(range(0x40, 0x48))
_CONNECT: Final = tap.Connect.declaration.opcode
#: The longest connect without vbuckets: header, flags, name, date, two counts and a byte. Each vbucket may add its
#: number twice, in the list and among the checkpoints, and a checkpoint id.
_CONNECT_BYTES_MAX: Final = 24 + 4 + NAME_BYTES_MAX + 8 + 2 + 2 + 1
_VBUCKET_BYTES: Final = 2 + 2 + 8
#: The interval in which clients that stay away are looked for.
EXPIRE_S: Final = 1.0
_ONLINE_UPDATE: Final = (Control.START_ONLINEUPDATE, Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE)
#: The log has this many different controls that we do not know.
_UNKNOWN_CONTROLS_MAX: Final = 16


class TapService(PacketHandler):
    """All TAP connections of a node, and the clients that it knows."""

    def __init__(
        self, node: NodeState, settings: TapSettings | None = None, registry: TapRegistry | None = None
    ) -> None:
        self.node = node
        self.settings = settings or TapSettings()
        self.source = EngineSource(node)
        self.clients = TapClients(self.settings.keep_alive_s)
        registry = registry or TapRegistry(None)
        for client in registry.load(range(len(node.bucket))):
            self.clients.restore(client)
        self.registry = RegistryWriter(registry, node.scheduler)
        self.turns = TapTurns(node.scheduler)
        self.online_update = OnlineUpdate(node)
        self.sink = EngineTapSink(node, self.online_update)
        self.receivers: set[TapReceiver] = set()
        #: The controls of other engines that the log has already.
        self._unknown_controls: set[Control | None] = set()
        #: The totals of closed connections.
        self.bytes_sent_before = 0
        self.changes_sent_before = 0
        self._by_name: dict[str, TapConnection] = {}
        self._anonymous = itertools.count(1)
        self._expiring = False
        self._roles = RoleChanges(node, self._tell_roles)

    def __iter__(self) -> Iterator[TapConnection]:
        return iter(list(self._by_name.values()))

    # Receiving

    def may_overtake(self, session: Session, opcode: int) -> bool:
        """A connect is answered by its stream, which goes straight out."""
        return opcode == _CONNECT and (session.stream is None or session.stream.answers_at_once)

    def handle(self, session: Session, packet: bytes) -> bool:
        """Take a packet that belongs to TAP."""
        if packet[0] == Magic.REQUEST:
            if packet[1] not in _OPCODES:
                return False
        elif not isinstance(session.stream, TapConnection | TapReceiver):
            return False
        try:
            if packet[0] == Magic.REQUEST and packet[1] == _CONNECT:
                self._check_size(packet)
            message = tap.tap.decode(packet)
        except WireError as error:
            self._refuse(session, packet, error)
            return True
        self._receive(session, message)
        return True

    def _check_size(self, packet: bytes) -> None:
        """Refuse a connect that is longer than a list of all vbuckets, before it is decoded."""
        size_max = _CONNECT_BYTES_MAX + _VBUCKET_BYTES * len(self.node.bucket)
        if len(packet) > size_max:
            raise WireError(8, f"a connect of at most {size_max} bytes", f"{len(packet)}")

    def _refuse(self, session: Session, packet: bytes, error: WireError) -> None:
        """Refuse a malformed request. A malformed connect or response also ends the connection."""
        if packet[0] == Magic.REQUEST:
            answer = malformed(packet, error)
            request = AnyRequest(opcode=packet[1], opaque=answer.opaque)
            session.run(request, lambda session, request: when_all_durable(session, request, answer))
        if packet[0] != Magic.REQUEST or packet[1] == _CONNECT:
            self.close(session, str(error))

    def _receive(self, session: Session, message: Message) -> None:
        stream = session.stream
        if not isinstance(message, Request):
            assert stream is not None
            stream.receive(message)
        elif isinstance(message, tap.Connect):
            self._connect(session, message)
        elif isinstance(stream, TapConnection):
            self._control_from_client(session, message)
        elif stream is None or isinstance(stream, TapReceiver):
            session.run(message, self._consumed)
        else:
            self.close(session, f"{message.title()} on a connection that was opened for other streams")

    # Clients

    def _connect(self, session: Session, request: tap.Connect) -> None:
        try:
            session.authorize(Role.STREAM)
            if session.stream is not None:
                raise KeyExists("this connection already has a TAP stream: open another one")
            plan = plan_of(request, self.node.clock())
            self._check_vbuckets(plan)
            if plan.takeover:  # making vbuckets dead decides which copy is active
                session.authorize(Role.ADMIN)
            name = self._name(request)
            successor = self._successor(name, named=bool(request.name))
            check_takeover(self.source, plan, successor)
            self._replace(session, name)
            known = self.clients.get(name)
            was_registered = known is not None and known.registered
            client = self.clients.connected(name, plan, self.node.clock(), anonymous=not request.name)
        except StatusError as error:
            session.send(refusal(request, error))
            self.close(session, str(error))
            return
        held = {each.vbucket: each.checkpoint for each in request.checkpoints or ()}
        connection = TapConnection(self, session, client, successor, held)
        session.stream = self._by_name[name] = connection
        if connection.held:
            self._note_connected(connection, request, was_registered=was_registered)

    def _check_vbuckets(self, plan: TapPlan) -> None:
        highest, count = max(plan.vbuckets or (0,)), len(self.node.bucket)
        if highest >= count:
            raise NotMyVbucket(f"vbucket {highest} does not exist: the bucket has vbuckets 0 to {count - 1}")

    def _name(self, request: tap.Connect) -> str:
        """The client's name, or one that is made up. A made-up name belongs to its client while that is known."""
        if not request.name:
            return next(name for n in self._anonymous if self.clients.get(name := f"anon_{n}") is None)
        name = checked_name(request.name)
        known = self.clients.get(name)
        if known is not None and known.anonymous and not known.registered:
            raise KeyExists(f"{name!r} is reserved for a client that connected without a name; choose another name")
        return name

    def _successor(self, name: str, *, named: bool) -> str:
        """The successor of vbuckets that are handed over to this client. Without a name of its own it cannot come back,
        so no other connection may continue its takeover."""
        return successor_by_tap(name if named else made_up(f"{name} at {self.node.clock()}"))

    def _note_connected(self, connection: TapConnection, request: tap.Connect, *, was_registered: bool) -> None:
        """Store that a registered client is connected: after a crash, the node cannot know what the client holds."""

        def noted(error: StorageError | None) -> None:
            if connection.lost:
                return
            if error is None:
                connection.release()
                return
            connection.client.registered = was_registered
            failure = TemporaryFailure(f"a registered client must be kept on disk: {error}")
            self._end(connection, refusal(request, failure).encode(), str(failure))

        self.registry.keep(connection.client, noted)

    def _end(self, connection: TapConnection, last: bytes, why: str) -> None:
        """Send last bytes, and close the connection."""
        session = connection.session
        session.put(last)
        self.close(session, why)
        connection.lose()
        session.answers.release_soon()  # this connection may be the one being served now

    def _replace(self, session: Session, name: str) -> None:
        """Replace the older connection of this name."""
        old = self._by_name.get(name)
        if old is not None:
            self._end(old, b"", f"the TAP client {name!r} has connected again, from {session.peer}")

    def _control_from_client(self, session: Session, message: Request) -> None:
        """Let the receiver of a stream start, stop or revert an online update. Ignore unknown controls, refuse all
        else."""
        if isinstance(message, tap.Opaque) and (_is_unknown(message) or message.control in _ONLINE_UPDATE):
            session.run(message, self._consumed)
        else:
            self.close(session, f"{message.title()} from a client that asked for a stream")

    def deregister(self, name: str, done: Callable[[StatusError | None], object]) -> None:
        """Forget a registered client, and call back when that is on disk. End its stream if it is connected."""
        client = self.clients.deregister(name)
        if client is None:
            raise KeyNotFound(f"no TAP client is registered as {name!r}")
        connection = self._by_name.get(name)
        if connection is not None:
            self._end(connection, connection.producer.close_message(), "the client was deregistered")

        def dropped(error: StorageError | None) -> None:
            if error is None:
                done(None)
                return
            if self.clients.get(name) is None:
                client.registered = True
                self.clients.restore(client)
            done(TemporaryFailure(f"the client is still registered: {error}"))

        self.registry.drop(name, dropped)

    def forget(self, connection: TapConnection) -> None:
        """Forget a closed connection; keep for the client's name what it had not acknowledged."""
        client, producer = connection.client, connection.producer
        self.bytes_sent_before += producer.bytes_sent_total
        self.changes_sent_before += producer.changes_sent
        client.changes_sent, client.messages_sent = producer.changes_sent, producer.messages_sent
        client.bytes_sent = producer.bytes_sent_total
        done = producer.done or (client.anonymous and not client.registered)
        now = self.node.clock()
        self.clients.left(client, lambda: producer.positions, now, elsewhere=producer.elsewhere, done=done)
        self.turns.add(lambda: self._settle(connection))
        if self._by_name.get(client.name) is connection:
            del self._by_name[client.name]
        self._expire_later()

    def _settle(self, connection: TapConnection) -> None:
        """Note where a client was that has left, unless it is back."""
        client = connection.client
        if client.connected or self.clients.get(client.name) is not client:
            return
        client.settle()
        if client.registered:
            self.registry.keep(client, lambda error: error is None or self._warn_unkept(connection, error))

    @property
    def idle(self) -> bool:
        """Whether the positions of all clients that have left are noted, on disk if they are registered."""
        return self.turns.idle and self.registry.idle

    @staticmethod
    def _warn_unkept(connection: TapConnection, error: StorageError) -> None:
        connection.session.log.warning(
            "TAP client %s starts over after a restart: its position cannot be written: %s",
            connection.client.name,
            error,
        )

    # Peers that send to the node

    def _consumed(self, session: Session, message: Request) -> Answer:
        session.authorize(self._role_for(message))
        receiver = session.stream
        if receiver is None:
            receiver = session.stream = TapReceiver(self, session)
            self.receivers.add(receiver)
        assert isinstance(receiver, TapReceiver | TapConnection)
        try:
            answer: Response | None = receiver.consumer.receive(message)
        except StatusError as error:
            answer = refusal(message, error)
        # Any answer, even a refusal, tells the peer not to repeat what came before.
        if answer is None or (self.online_update.running and not isinstance(message, tap.SetVbucket | tap.Flush)):
            return answer
        return when_all_durable(session, message, answer)

    def consumer(self, session: Session) -> TapConsumer:
        """The consumer of a session's TAP messages."""
        return TapConsumer(self.sink, self.node.clock(), lambda control: self._note_unknown(session, control))

    def _note_unknown(self, session: Session, control: Control | None) -> None:
        """Log the first control of a kind that we do not know; peers that reconnect repeat theirs."""
        if control not in self._unknown_controls and len(self._unknown_controls) < _UNKNOWN_CONTROLS_MAX:
            self._unknown_controls.add(control)
            what = "without a control code" if control is None else f"0x{int(control):x}"
            session.log.warning("TAP: unknown control message %s is ignored, and so are later ones", what)

    def _role_for(self, message: Request) -> Role:
        """Sending changes needs the role write. Changing copies, emptying or handing over vbuckets needs admin, because
        it decides what the next owner of the vbucket has."""
        match message:
            case tap.Mutation() | tap.Delete():
                vbucket = self.node.bucket.existing(message.vbucket)
                is_copy = vbucket is not None and vbucket.state is not VbucketState.ACTIVE
                return Role.ADMIN if is_copy else Role.WRITE
            case tap.Opaque() if _is_unknown(message):
                return NOTHING
            case tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, cas=date):
                return Role.WRITE if date else Role.ADMIN
            case tap.Opaque():
                return Role.ADMIN if message.control in _ONLINE_UPDATE else Role.WRITE
            case tap.SetVbucket() | tap.Flush():
                return Role.ADMIN
        return Role.WRITE

    # Time and closing

    def _tell_roles(self, numbers: set[int]) -> None:
        for connection in self:
            for number in numbers:
                connection.producer.role_changed(number)

    def _expire_later(self) -> None:
        if not self._expiring and self.clients.away:
            self._expiring = True
            self.node.scheduler.later(EXPIRE_S, self._expire)

    def _expire(self) -> None:
        self._expiring = False
        self.clients.expire(self.node.clock())
        self._expire_later()

    def close(self, session: Session, why: str) -> None:
        """Close a connection that is finished, or broke the rules."""
        client = f"TAP client {session.stream.client.name}: " if isinstance(session.stream, TapConnection) else ""
        session.log.info("%sclosed: %s", client, why)
        session.closing = True


def _is_unknown(message: tap.Opaque) -> bool:
    return message.control is None or not message.control.known
