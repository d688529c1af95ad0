"""Requests of a consumer, and short texts for what a producer sends."""

from typing import Any, Protocol

from upriver.model import VbucketState
from upriver.wire import AnyResponse, Message, Response, dcp, upr
from upriver.wire.codes import Status

END = 2**64 - 1


class SendsMessages(Protocol):
    """The other end of a connection: of an ``InMemoryNode`` or of a ``FakeNode``."""

    def send(self, *messages: Message | bytes) -> list[Message]:
        """Send messages and return what came back."""


class HasVbuckets(Protocol):
    """An ``InMemoryNode`` or a ``FakeNode``."""

    def vbucket(self, number: int) -> Any:
        """A vbucket that exists."""


def ask(
    peer: SendsMessages, start: int = 0, end: int = END, vbucket: int = 0, opaque: int = 7, **fields: Any
) -> list[Message]:
    """Ask for a `dcp` stream; unless it names a snapshot it is consistent at its start."""
    fields = {"snapshot_start": start, "snapshot_end": start, **fields}
    fields["flags"] = dcp.StreamFlag(fields.get("flags", 0))
    return peer.send(dcp.StreamRequest(start_seqno=start, end_seqno=end, vbucket=vbucket, opaque=opaque, **fields))


def ask_upr(
    peer: SendsMessages, start: int = 0, end: int = END, vbucket: int = 0, opaque: int = 7, **fields: Any
) -> list[Message]:
    """Ask for an `upr` stream."""
    fields["flags"] = upr.StreamFlag(fields.get("flags", 0))
    return peer.send(upr.StreamRequest(start_seqno=start, end_seqno=end, vbucket=vbucket, opaque=opaque, **fields))


def control(peer: SendsMessages, name: bytes, value: bytes = b"true") -> Status:
    """Change a setting; the status of the answer."""
    (answer,) = peer.send(dcp.Control(key=name, value=value))
    assert isinstance(answer, Response)
    return answer.status


def brief(messages: list[Message]) -> list[str]:
    """Messages as short texts: ``k@3`` a mutation, ``-k@4`` a deletion, ``!k@5`` an expiration, ``(0,3]`` a marker."""
    return [_brief(message) for message in messages]


def _brief(message: Message) -> str:
    match message:
        case dcp.Mutation() | upr.Mutation():
            return f"{message.key.decode()}@{message.by_seqno}"
        case dcp.Expiration() | upr.Expiration():
            return f"!{message.key.decode()}@{message.by_seqno}"
        case dcp.Deletion() | upr.Deletion():
            return f"-{message.key.decode()}@{message.by_seqno}"
        case dcp.SnapshotMarker():
            return f"({message.start_seqno},{message.end_seqno}]"
        case upr.SnapshotMarker():
            return "marker"
        case dcp.StreamEnd() | upr.StreamEnd():
            return f"end {int(message.reason)}"
        case dcp.SeqnoAdvanced():
            return f"advanced {message.by_seqno}"
        case upr.SetVbucketState():
            return f"state {message.state.name.lower()}"
        case Response():
            return message.status.name.lower()
        case _:
            return message.title()


def uuid_of(node: HasVbuckets, vbucket: int = 0) -> int:
    uuid: int = node.vbucket(vbucket).failover_log.newest.vbucket_uuid
    return uuid


def set_state(node: HasVbuckets, state: VbucketState, vbucket: int = 0) -> None:
    node.vbucket(vbucket).set_state(state)


def answer_to(message: Message, status: Status = Status.SUCCESS) -> AnyResponse:
    """What a consumer answers to a marker or a set vbucket state."""
    return AnyResponse(opcode=message.code, opaque=getattr(message, "opaque", 0), status=status)
