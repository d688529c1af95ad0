"""TAP on the node: connections that it sends on, connections that it receives on, and the names it remembers.

Theory of operation. A session hands packets with TAP's opcodes here before its own commands see them. A *connect* makes
the session a producer's; any other TAP message makes it a consumer's. Whatever else comes on such a connection stays
with the session's commands. Messages of a consumer are answered in their order, together with all other answers, and
only when everything before them is on disk: the peer goes on behind what was answered, also after a crash here.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from upriver.errors import KeyExists, KeyNotFound, NotMyVbucket, StatusError, StorageError, TemporaryFailure, WireError
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import when_all_durable
from upriver.node.role_changes import RoleChanges
from upriver.node.session import Answer, Session, malformed, refusal
from upriver.node.state import NodeState
from upriver.node.streams import draft_connections
from upriver.node.streams.engine_source import EngineSource
from upriver.node.streams.streaming_session import StreamingSession
from upriver.node.tap.client_registry import RegistryWriter, TapRegistry
from upriver.node.tap.engine_sink import EngineTapSink
from upriver.node.tap.online_update import OnlineUpdate
from upriver.protocol import NAME_BYTES_MAX, checked_name, successor_by_tap
from upriver.protocol.tap import (
    TapClient,
    TapClients,
    TapConsumer,
    TapPlan,
    TapProducer,
    TapSettings,
    check_takeover,
    plan_of,
)
from upriver.wire import DRAFT, AnyRequest, Magic, Message, Request, Response, tap
from upriver.wire.dialects.tap import Control

#: The opcodes of TAP, from connect to checkpoint end.
_OPCODES: Final = frozenset(range(0x40, 0x48))
_CONNECT: Final = tap.Connect.declaration.opcode
#: What a connect may have for itself: header, flags, name, date, two counts and a byte; and for each vbucket: its
#: number in the list, its number and an id among the checkpoints.
_CONNECT_BYTES_MAX: Final = 24 + 4 + NAME_BYTES_MAX + 8 + 2 + 2 + 1
_VBUCKET_BYTES: Final = 2 + 2 + 8
#: Clients that stay away are looked for once in so many seconds.
EXPIRE_S: Final = 1.0
_ONLINE_UPDATE: Final = (Control.START_ONLINEUPDATE, Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE)


class TapConnection(StreamingSession):
    """A session that a client has made its TAP stream."""

    def __init__(self, service: "TapService", session: Session, client: TapClient, successor: str = "") -> None:
        super().__init__(service.node, session)
        self.service = service
        self.client = client
        #: Nothing is sent before it is on disk that a registered client is connected.
        self.held = client.registered
        assert client.plan is not None
        self.plan = client.plan
        self.created = self.node.clock()
        self.producer = TapProducer(
            service.source,
            f"tap:{client.name}",
            self.plan,
            service.settings,
            self.node.ticks(),
            successor=successor,
            places=client.places,
            elsewhere=client.elsewhere,
            on_ready=self.wake,
            warn=lambda text: session.log.warning("TAP client %s: %s", client.name, text),
        )
        self.call_at(self.producer.deadline)
        self.wake()

    def receive(self, message: Message) -> bool:
        """Take an answer of the consumer; False if it is none."""
        if not self.producer.receive(message, self.node.ticks()):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        if self.producer.closing:
            self.service.close(self.session, self.producer.closing)
            return
        self.call_at(self.producer.deadline)
        if self.has_output:
            self.wake()

    def release(self) -> None:
        """Begin to send."""
        self.held = False
        self.wake()

    def produce(self) -> bytes:
        """The next messages. Only when nothing of them is left in the transport is the connection closed."""
        if self.session.closing or self.held:
            return b""
        out = self.producer.produce()
        if self.producer.done and not out:
            self.service.close(self.session, "everything is sent")
        elif self.producer.done or (self.producer.beginning and not out):
            self.wake()
        return out

    @property
    def has_output(self) -> bool:
        """May there be something to send?"""
        return self.producer.has_output and not self.held

    @property
    def stream_count(self) -> int:
        """How many streams it sends."""
        return len(self.producer.streams)

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams that have something to send, and whose consumer would take it."""
        if self.producer.room:
            for number, stream in self.producer.streams.items():
                if stream.backlog:
                    yield (self.producer.cursor_name, number), stream, stream.seqno

    def on_time(self, now: float) -> None:
        """Something is to be sent again, or a noop is due."""
        self.producer.tick(now)
        self._settle()
        self.flush()

    def lose(self) -> None:
        """The connection is gone."""
        if not self.lost:
            super().lose()
            self.producer.lose()
            self.service.forget(self)


class TapReceiver(StreamingSession):
    """A session on which a peer sends TAP messages."""

    def __init__(self, service: "TapService", session: Session) -> None:
        super().__init__(service.node, session)
        self.service = service
        self.consumer = TapConsumer(service.sink, self.node.clock())

    def receive(self, message: Message) -> bool:
        """An answer: to nothing that was asked here."""
        self.service.close(self.session, f"{message.title()} on a connection that only receives")
        return True

    def produce(self) -> bytes:
        """A consumer has only answers to send."""
        return b""

    @property
    def has_output(self) -> bool:
        """It never has."""
        return False

    def on_time(self, now: float) -> None:
        """It waits for nothing."""

    def lose(self) -> None:
        """The connection is gone."""
        super().lose()
        self.service.receivers.discard(self)


class TapService:
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
        self.online_update = OnlineUpdate(node)
        self.sink = EngineTapSink(node, self.online_update)
        self.receivers: set[TapReceiver] = set()
        #: What connections that are gone have sent.
        self.bytes_sent_before = 0
        self.changes_sent_before = 0
        self._by_name: dict[str, TapConnection] = {}
        self._anonymous = itertools.count(1)
        self._expiring = False
        self._roles = RoleChanges(node, self._tell_roles)

    def __iter__(self) -> Iterator[TapConnection]:
        return iter(list(self._by_name.values()))

    # Coming in

    def take(self, session: Session, packet: bytes) -> bool:
        """Take a packet that belongs to TAP; False if it is somebody else's."""
        if session.framing is DRAFT:
            return False
        if packet[0] == Magic.REQUEST:
            if packet[1] not in _OPCODES or not draft_connections.admits(session.listen_address, packet):
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
        """Nobody waits while a list is read that is longer than everything that there is."""
        size_max = _CONNECT_BYTES_MAX + _VBUCKET_BYTES * len(self.node.bucket)
        if len(packet) > size_max:
            raise WireError(8, f"a connect of at most {size_max} bytes", f"{len(packet)}")

    def _refuse(self, session: Session, packet: bytes, error: WireError) -> None:
        """A request that cannot be read is answered; a connect, whose value does not fit, and an answer end it."""
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
                raise KeyExists("the connection streams already")
            plan = plan_of(request, self.node.clock())
            self._check_vbuckets(plan)
            if plan.takeover:  # who makes vbuckets dead decides who is active
                session.authorize(Role.ADMIN)
            name = self._name(request)
            successor = successor_by_tap(name)
            check_takeover(self.source, plan, successor)
            self._replace(session, name)
            known = self.clients.get(name)
            was_registered = known is not None and known.registered
            client = self.clients.connected(name, plan, self.node.clock(), anonymous=not request.name)
        except StatusError as error:
            session.send(refusal(request, error))
            self.close(session, str(error))
            return
        session.stream = self._by_name[name] = connection = TapConnection(self, session, client, successor)
        if connection.held:
            self._note_connected(connection, request, was_registered=was_registered)

    def _check_vbuckets(self, plan: TapPlan) -> None:
        highest, count = max(plan.vbuckets or (0,)), len(self.node.bucket)
        if highest >= count:
            raise NotMyVbucket(f"there is no vbucket {highest}: the bucket has {count}, from 0 on")

    def _name(self, request: tap.Connect) -> str:
        """What a client calls itself; one that was made up for somebody else is his as long as he is there."""
        if not request.name:
            return next(name for n in self._anonymous if self.clients.get(name := f"anon_{n}") is None)
        name = checked_name(request.name)
        known = self.clients.get(name)
        if known is not None and known.anonymous:
            raise KeyExists(f"{name!r} was made up for a client that told no name; connect under another one")
        return name

    def _note_connected(self, connection: TapConnection, request: tap.Connect, *, was_registered: bool) -> None:
        """From here on nobody knows what a registered client holds, should the node crash: so it says on disk."""

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
        """Say one more thing, and close the connection."""
        session = connection.session
        session.put(last)
        self.close(session, why)
        connection.lose()
        session.release_soon()  # it may be the one that is just being served

    def _replace(self, session: Session, name: str) -> None:
        """Who comes under a name that is connected takes its place."""
        old = self._by_name.get(name)
        if old is not None:
            self._end(old, b"", f"the TAP client {name!r} has connected again, from {session.peer}")

    def _control_from_client(self, session: Session, message: Request) -> None:
        """The receiver of a stream may start, stop and revert an online update too; more it has not to say."""
        if isinstance(message, tap.Opaque) and message.control in _ONLINE_UPDATE:
            session.run(message, self._consumed)
        else:
            self.close(session, f"{message.title()} from a client that asked for a stream")

    def deregister(self, name: str, done: Callable[[StatusError | None], object]) -> None:
        """Forget a registered client, and say so when it is forgotten on disk too.

        If it is connected it is told that nothing more comes.
        """
        client = self.clients.deregister(name)
        if client is None:
            raise KeyNotFound(f"no TAP client is registered as {name!r}")
        connection = self._by_name.get(name)
        if connection is not None:
            self._end(connection, connection.producer.farewell(), "the client was deregistered")

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
        """The connection is gone; what it had not acknowledged is kept for its name."""
        client, producer = connection.client, connection.producer
        self.bytes_sent_before += producer.bytes_sent_total
        self.changes_sent_before += producer.changes_sent
        client.changes_sent, client.messages_sent = producer.changes_sent, producer.messages_sent
        client.bytes_sent = producer.bytes_sent_total
        done = producer.done or client.anonymous
        self.clients.left(client, producer.places, self.node.clock(), elsewhere=producer.elsewhere, done=done)
        if client.registered:
            self.registry.keep(client, lambda error: error is None or self._warn_unkept(connection, error))
        if self._by_name.get(client.name) is connection:
            del self._by_name[client.name]
        self._expire_later()

    @staticmethod
    def _warn_unkept(connection: TapConnection, error: StorageError) -> None:
        connection.session.log.warning(
            "TAP client %s starts over after a restart: its place cannot be written: %s", connection.client.name, error
        )

    # Peers that send

    def _consumed(self, session: Session, message: Request) -> Answer:
        session.authorize(_role_for(message))
        receiver = session.stream
        if receiver is None:
            receiver = session.stream = TapReceiver(self, session)
            self.receivers.add(receiver)
        consumer = receiver.consumer if isinstance(receiver, TapReceiver) else TapConsumer(self.sink, self.node.clock())
        try:
            answer: Response | None = consumer.receive(message)
        except StatusError as error:
            answer = refusal(message, error)
        # Any answer, a refusal too, tells the peer that it need not send again what came before.
        if answer is None or (self.online_update.running and not isinstance(message, tap.SetVbucket | tap.Flush)):
            return answer
        return when_all_durable(session, message, answer)

    # Time, and the end

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
        """Close a connection that is done, or broke the rules."""
        client = f"TAP client {session.stream.client.name}: " if isinstance(session.stream, TapConnection) else ""
        session.log.info("%sclosed: %s", client, why)
        session.closing = True


def _role_for(message: Request) -> Role:
    """Who may send a change may write; who empties or hands over vbuckets is an administrator."""
    if isinstance(message, tap.SetVbucket | tap.Flush):
        return Role.ADMIN
    if isinstance(message, tap.Opaque) and message.control in (Control.INITIAL_VBUCKET_STREAM, *_ONLINE_UPDATE):
        return Role.ADMIN
    return Role.WRITE
