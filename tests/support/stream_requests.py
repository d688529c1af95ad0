"""What the producer's tests share: a vbucket with some history, a peer, and short names for messages."""

from typing import Any

from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.model import VbucketState
from upriver.wire import AnyResponse, Message, Response, dcp, upr
from upriver.wire.codes import Status

END = 2**64 - 1


def node_with_peer(*keys: bytes, vbucket: int = 0, name: bytes = b"peer", flags: int = 1) -> tuple[InMemoryNode, Peer]:
    """A node whose vbucket holds these keys, and a peer that has opened a connection."""
    node = InMemoryNode()
    node.bucket.create_vbucket(vbucket)
    node.write(vbucket, *keys)
    return node, node.connect().open(name, flags)


def ask(peer: Peer, start: int = 0, end: int = END, vbucket: int = 0, opaque: int = 7, **fields: Any) -> list[Message]:
    """Ask for a `dcp` stream; a snapshot that is not named is whole at the start."""
    fields = {"snapshot_start": start, "snapshot_end": start, **fields}
    fields["flags"] = dcp.StreamFlag(fields.get("flags", 0))
    return peer.send(dcp.StreamRequest(start_seqno=start, end_seqno=end, vbucket=vbucket, opaque=opaque, **fields))


def ask_upr(
    peer: Peer, start: int = 0, end: int = END, vbucket: int = 0, opaque: int = 7, **fields: Any
) -> list[Message]:
    """Ask for an `upr` stream."""
    fields["flags"] = upr.StreamFlag(fields.get("flags", 0))
    return peer.send(upr.StreamRequest(start_seqno=start, end_seqno=end, vbucket=vbucket, opaque=opaque, **fields))


def control(peer: Peer, name: bytes, value: bytes = b"true") -> Status:
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


def uuid_of(node: InMemoryNode, vbucket: int = 0) -> int:
    return node.bucket.vbucket(vbucket).failover_log.newest.vbucket_uuid


def set_state(node: InMemoryNode, state: VbucketState, vbucket: int = 0) -> None:
    node.bucket.vbucket(vbucket).set_state(state)


def answer_to(message: Message, status: Status = Status.SUCCESS) -> AnyResponse:
    """What a consumer answers to a marker or a set vbucket state."""
    return AnyResponse(opcode=message.code, opaque=getattr(message, "opaque", 0), status=status)
