"""A TAP client that answers as a test decides, and short texts for what it receives."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from upriver.wire import AnyResponse, Message, Request, Response, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import FUTURE as FUTURE
from upriver.wire.dialects.tap import ConnectFlag, Control, TapFlag

BACKFILL, DUMP, LIST, TAKEOVER = 0x01, 0x02, 0x04, 0x08
ACK, KEYS_ONLY, CHECKPOINT, REGISTERED, BYTE_ORDER = 0x10, 0x20, 0x40, 0x80, 0x100


def connect(
    name: bytes = b"",
    flags: int = 0,
    date: int = 0,
    vbuckets: tuple[int, ...] = (),
    checkpoints: tuple[tap.VbucketCheckpoint, ...] = (),
) -> tap.Connect:
    """A connect for live changes, unless its flags ask for existing ones."""
    if not flags & (BACKFILL | DUMP | TAKEOVER):
        flags, date = flags | BACKFILL, FUTURE
    return connect_with(name, flags, date, vbuckets, checkpoints)


def connect_with(
    name: bytes,
    flags: int,
    date: int = 0,
    vbuckets: tuple[int, ...] = (),
    checkpoints: tuple[tap.VbucketCheckpoint, ...] = (),
) -> tap.Connect:
    """A connect with exactly these flags, and the values that they ask for."""
    return tap.Connect(
        name=name,
        flags=ConnectFlag(flags),
        backfill_date=date if flags & BACKFILL else None,
        vbuckets=vbuckets if flags & LIST else None,
        checkpoints=checkpoints if flags & CHECKPOINT else None,
    )


def succeed(_: Message) -> Status | None:
    """Every message can be taken."""
    return Status.SUCCESS


def succeed_until(key: str) -> Callable[[Message], Status | None]:
    """Every message can be taken; from this key on nothing is answered."""
    heard: list[Message] = []

    def judge(message: Message) -> Status | None:
        heard.append(message)
        return None if key in keys(heard) else Status.SUCCESS

    return judge


class Connection(Protocol):
    """The other end of a connection: of an ``InMemoryNode`` or of a ``FakeNode``."""

    @property
    def closed(self) -> bool:
        """The node has closed it, or it is cut."""

    def put(self, *messages: Message | bytes) -> None:
        """Send messages."""

    def take(self) -> list[Message]:
        """What has come since the last time."""

    def lose(self) -> None:
        """Cut the connection."""


C = TypeVar("C", bound=Connection, covariant=True)


class Node(Protocol[C]):
    """An ``InMemoryNode`` or a ``FakeNode``."""

    def connect(self) -> C:
        """A new connection."""

    def settle(self) -> None:
        """Let everything happen that can happen now."""


P = TypeVar("P", bound=Connection)


class TapPeer(Generic[P]):
    """A client of a TAP stream that answers each message that asks for it, until nothing more comes."""

    def __init__(self, node: Node[P], request: tap.Connect) -> None:
        self.node = node
        self.peer: P = node.connect()
        self.received: list[Message] = []
        #: What it answers to a message; None for nothing at all.
        self.judge: Callable[[Message], Status | None] = succeed
        self.peer.put(request)

    @property
    def closed(self) -> bool:
        return self.peer.closed

    def run(self) -> list[Message]:
        """Everything that comes until the node is quiet."""
        out: list[Message] = []
        while True:
            self.node.settle()
            messages = self.peer.take()
            if not messages:
                self.received += out
                return out
            out += messages
            for message in messages:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        if not isinstance(message, Request):
            return
        asked = isinstance(message, memcached.Noop) or TapFlag.ACK in message.tap_flags  # type: ignore[attr-defined]
        status = self.judge(message)
        if status is not None and (asked or status is not Status.SUCCESS):
            self.peer.put(AnyResponse(opcode=message.code, opaque=message.opaque, status=status))

    def leave(self) -> None:
        """The connection is cut."""
        self.peer.lose()


def brief(messages: list[Message]) -> list[str]:
    """Messages as short texts: ``k=v`` a mutation, ``-k`` a deletion, ``#name`` a control."""
    return [_brief(message) for message in messages]


def _brief(message: Message) -> str:
    match message:
        case tap.Mutation():
            return f"{message.key.decode()}={message.value.decode()}"
        case tap.Delete():
            return f"-{message.key.decode()}"
        case tap.Opaque():
            return f"#{message.control.name.lower()}" if message.control is not None else "#"
        case tap.SetVbucket():
            return f"state {message.state.name.lower()}"
        case tap.CheckpointEnd():
            return f"end of {message.checkpoint}"
        case tap.CheckpointStart():
            return f"start of {message.checkpoint}"
        case Response():
            return message.status.name.lower()
        case _:
            return message.title()


def keys(messages: list[Message]) -> list[str]:
    """The keys of the changes, in their order."""
    return [m.key.decode() for m in messages if isinstance(m, tap.Mutation | tap.Delete)]


def state_of(messages: list[Message]) -> dict[bytes, bytes]:
    """What a consumer holds that has taken all of it."""
    out: dict[bytes, bytes] = {}
    for message in messages:
        match message:
            case tap.Mutation():
                out[message.key] = message.value
            case tap.Delete():
                out.pop(message.key, None)
            case tap.Flush():
                out.clear()
            case tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, cas=0):
                out.clear()
    return out
