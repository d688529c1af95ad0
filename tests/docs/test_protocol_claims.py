"""What the protocol pages claim, against a node on a real socket: each packet that is sent, and each error."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mover_socket import MoverSocket
from tests.support.stream_client import StreamClient
from upriver.model import Change, Event, FailoverEntry, FailoverLog, VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import (
    DIALECTS,
    AnyResponse,
    Message,
    Response,
    Status,
    dcp,
    upr,
    upr_draft1,
    upr_draft3,
)

ERRATA = Path(__file__).parents[2] / "docs" / "protocol" / "errata.md"
#: The texts' own numbers.
VBUCKET, OPAQUE, HIGH_SEQNO = 12, 0x2D, 0x45A8
UPR_LOG = ((0xFEEDDECA, 0x5432), (0xDECAFE, 0x1343214), (0xFEEDFACE, 4), (0xDEADBEEF, 0x6524))
DRAFT3_LOG = ((0xDF2, 0xF294), (0x7B43, 0x9321))
PINNED = ("upr_draft1", "upr_draft2", "upr_draft3")


def sent_lines() -> list[tuple[str, int, str]]:
    """Dialect, line of the text, and the bytes that the page says are sent."""
    found, dialect, line = [], "", 0
    for text in ERRATA.read_text().splitlines():
        if match := re.match(r"## Printed in (\w+)", text):
            dialect = match[1]
        elif match := re.match(r"### Line (\d+):", text):
            line = int(match[1])
        elif match := re.match(r"(?:printed and )?sent +([0-9a-f]+)$", text):
            found.append((dialect, line, match[1]))
    return found


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    listen = " ".join(f"127.0.0.1:0,dialect={name}" for name in PINNED)
    with start(vbuckets=64, initial_vbuckets="none", listen=listen) as node:
        yield node


def client_of(node: EmbeddedNode, dialect: str, name: bytes = b"") -> StreamClient:
    port = next((each.port for each in node.node.listen_addresses if each.dialect == dialect), node.port)
    return StreamClient(node, name, wire=DIALECTS[dialect], port=port)


def read(client: StreamClient, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = client.socket.recv(size - len(data))
        assert received, data.hex()
        data += received
    return data


def active(node: EmbeddedNode, writes: int = 0, number: int = VBUCKET) -> int:
    """An active vbucket; its uuid."""

    def fill() -> int:
        vbucket = node.bucket.create_vbucket(number, VbucketState.ACTIVE)
        for _ in range(writes):
            vbucket.set(b"key", b"")
        return vbucket.failover_log.newest.vbucket_uuid

    return node.call(fill)


def with_log(node: EmbeddedNode, entries: tuple[tuple[int, int], ...]) -> None:
    """A copy with this failover log."""

    def fill() -> None:
        vbucket = node.bucket.create_vbucket(VBUCKET, VbucketState.REPLICA)
        vbucket.replace_failover_log(FailoverLog.received(FailoverEntry(*entry) for entry in entries))
        vbucket.begin_snapshot(0, 1)

    node.call(fill)


def with_change(node: EmbeddedNode, event: Event) -> None:
    """A copy with the change that the texts print."""
    value = b"myvalue" if event is Event.MUTATION else b""
    change = Change(event=event, vbucket=VBUCKET, seqno=0x8CB, rev_seqno=3, cas=0xA5, key=b"mykey", value=value)

    def fill() -> None:
        vbucket = node.bucket.create_vbucket(VBUCKET, VbucketState.REPLICA)
        vbucket.begin_snapshot(0, change.seqno)
        vbucket.apply(change)

    node.call(fill)


def request(dialect: str, **fields: Any) -> Any:
    if dialect == "upr_draft3":
        return upr_draft3.StreamRequest(vbucket=VBUCKET, opaque=OPAQUE, **fields)
    return upr_draft1.StreamRequest(vbucket=VBUCKET, request_id=OPAQUE, **fields)


# What a consumer sends is taken by the node


def accepted(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    active(node)
    with client_of(node, dialect) as client:
        if packet[0] == 1 and packet[12] == 2:  # this one means the vbucket of the last stream request
            client.send(request(dialect))
            list(client.until(upr_draft1.StreamStart))
        client.socket.sendall(packet)
        answer = client.next()
        assert isinstance(answer, upr_draft1.Ok | AnyResponse | upr_draft3.FailoverLogResponse), answer
        assert not getattr(answer, "status", 0)


def acknowledged(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    """A TAP message from another node, which asks for an acknowledgement."""
    node.call(node.bucket.create_vbucket, 0x38, VbucketState.REPLICA)
    with client_of(node, dialect) as client:
        client.socket.sendall(packet)
        answer = client.next()
        assert isinstance(answer, Response)
        assert (answer.code, answer.opaque, answer.status) == (packet[1], 0x39, Status.SUCCESS)


# What a producer sends is sent by the node, byte for byte


def rollback(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    uuid = active(node, HIGH_SEQNO)
    with client_of(node, dialect) as client:
        client.send(request(dialect, start_seqno=HIGH_SEQNO + 1, vbucket_uuid=uuid))
        assert read(client, len(packet)).hex() == packet.hex()


def not_my_vbucket(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    with client_of(node, dialect) as client:
        client.send(request(dialect))
        assert read(client, len(packet)).hex() == packet.hex()


def stream_request_response(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    with_log(node, UPR_LOG)
    with client_of(node, dialect, b"reader") as client:
        client.send(upr.StreamRequest(vbucket=VBUCKET, opaque=0x1000))
        assert read(client, len(packet)).hex() == packet.hex()


def failover_log(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    with_log(node, DRAFT3_LOG)
    with client_of(node, dialect) as client:
        client.send(upr_draft3.FailoverLogRequest(vbucket=VBUCKET, opaque=OPAQUE))
        assert read(client, len(packet)).hex() == packet.hex()


def change_of(event: Event) -> Callable[[EmbeddedNode, str, bytes], None]:
    def check(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
        with_change(node, event)
        with client_of(node, dialect) as client:
            client.send(request(dialect))
            message = next(each for each in iter(client.next, None) if hasattr(each, "by_seqno"))
            if event is not Event.MUTATION:  # drawn as 0; we send the second of the deletion
                assert message.expiration > 0  # type: ignore[attr-defined]
                message.expiration = 0  # type: ignore[attr-defined]
            assert message.encode().hex() == packet.hex()

    return check


def last_of(*kinds: type[Message], client: StreamClient) -> Message:
    return list(client.until(*kinds))[-1]


def stream_end(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    active(node, 1)
    is_ok = packet[-1] == 0
    with client_of(node, dialect) as client:
        client.send(request(dialect, end_seqno=1 if is_ok else 2**64 - 1))
        if not is_ok:
            last_of(upr_draft3.SnapshotEnd, client=client)
            node.call(node.bucket.vbucket(VBUCKET).set_state, VbucketState.REPLICA)
        assert last_of(upr_draft3.StreamEnd, client=client).encode().hex() == packet.hex()


def set_vbucket_state(node: EmbeddedNode, dialect: str, packet: bytes) -> None:
    active(node, 1)
    with client_of(node, dialect) as client:
        client.send(request(dialect, flags=upr.StreamFlag.TAKEOVER))
        pending = last_of(upr_draft3.SetVbucketState, client=client)
        client.send(AnyResponse(opcode=pending.code, opaque=OPAQUE))
        assert last_of(upr_draft3.SetVbucketState, client=client).encode().hex() == packet.hex()


SENT = {
    ("tap", 834): acknowledged,
    ("tap", 881): acknowledged,
    ("tap", 930): acknowledged,
    ("upr", 618): stream_request_response,
    ("upr_draft1", 82): accepted,
    ("upr_draft1", 196): rollback,
    ("upr_draft1", 233): accepted,
    ("upr_draft2", 109): accepted,
    ("upr_draft2", 223): rollback,
    ("upr_draft2", 260): accepted,
    ("upr_draft2", 418): change_of(Event.MUTATION),
    ("upr_draft2", 475): change_of(Event.DELETION),
    ("upr_draft2", 527): change_of(Event.EXPIRATION),
    ("upr_draft3", 158): accepted,
    ("upr_draft3", 269): not_my_vbucket,
    ("upr_draft3", 301): rollback,
    ("upr_draft3", 346): accepted,
    ("upr_draft3", 380): failover_log,
    ("upr_draft3", 538): change_of(Event.MUTATION),
    ("upr_draft3", 597): change_of(Event.DELETION),
    ("upr_draft3", 653): change_of(Event.EXPIRATION),
    ("upr_draft3", 752): stream_end,
    ("upr_draft3", 787): stream_end,
    ("upr_draft3", 834): set_vbucket_state,
}


def test_every_sent_line_has_a_check() -> None:
    assert set(SENT) == {(dialect, line) for dialect, line, _ in sent_lines()}


@pytest.mark.parametrize(("dialect", "line", "packet"), sent_lines(), ids=lambda value: str(value)[:24])
def test_what_the_errata_say_is_sent(node: EmbeddedNode, dialect: str, line: int, packet: str) -> None:
    SENT[dialect, line](node, dialect, bytes.fromhex(packet))


# The errors that the pages list


def status(answer: Message | None) -> Status:
    assert isinstance(answer, Response), answer
    return answer.status


def opened(node: EmbeddedNode) -> StreamClient:
    return StreamClient(node, b"reader")


def no_name(node: EmbeddedNode) -> Status:
    with StreamClient(node) as client:
        return status(client.ask(dcp.Open(name=b"", flags=dcp.OpenFlag.PRODUCER)))


def add_stream_twice(node: EmbeddedNode) -> Status:
    node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
    with MoverSocket(node) as mover:
        mover.add_stream()
        return status(mover.ask(upr.AddStream(vbucket=0, opaque=2)))


def add_stream_without_vbucket(node: EmbeddedNode) -> Status:
    with MoverSocket(node) as mover:
        return status(mover.ask(upr.AddStream(vbucket=5, opaque=2)))


def add_stream_that_cannot_roll_back(node: EmbeddedNode) -> Status:
    node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
    with MoverSocket(node) as mover:
        mover.send(upr.AddStream(vbucket=0, opaque=2))
        asked = last_of(dcp.StreamRequest, client=mover)
        mover.send(dcp.RollbackRequired(seqno=0, opaque=asked.opaque))  # type: ignore[attr-defined]
        return status(mover.next())


def close_no_stream(node: EmbeddedNode) -> Status:
    active(node)
    with opened(node) as client:
        return status(client.ask(upr.CloseStream(vbucket=VBUCKET)))


def of_no_vbucket(message: Message) -> Callable[[EmbeddedNode], Status]:
    def check(node: EmbeddedNode) -> Status:
        with opened(node) as client:
            return status(client.ask(message))

    return check


def asked(kind: Any, **fields: Any) -> Callable[[EmbeddedNode], Status]:
    """A stream request from a vbucket with six changes; ``uuid`` is replaced by its uuid."""

    def check(node: EmbeddedNode) -> Status:
        uuid = active(node, 6)
        given = {name: uuid if value == "uuid" else value for name, value in fields.items()}
        with opened(node) as client:
            return status(client.ask(kind(vbucket=VBUCKET, **given)))

    return check


def asked_twice(kind: Any) -> Callable[[EmbeddedNode], Status]:
    def check(node: EmbeddedNode) -> Status:
        active(node)
        with opened(node) as client:
            client.send(kind(vbucket=VBUCKET))
            assert status(client.next()) is Status.SUCCESS
            return status(client.ask(kind(vbucket=VBUCKET)))

    return check


def nothing_to_stream(node: EmbeddedNode) -> Status:
    node.call(node.bucket.create_vbucket, VBUCKET, VbucketState.REPLICA)
    with opened(node) as client:
        return status(client.ask(dcp.StreamRequest(vbucket=VBUCKET)))


def state_of_no_stream(node: EmbeddedNode) -> Status:
    with MoverSocket(node) as mover:
        return mover.set_state(VbucketState.PENDING)


def state_without_takeover(node: EmbeddedNode) -> Status:
    node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
    with MoverSocket(node) as mover:
        mover.add_stream()
        return mover.set_state(VbucketState.PENDING)


def draft3(message: Any, writes: int = 0) -> Callable[[EmbeddedNode], Status]:
    def check(node: EmbeddedNode) -> Status:
        uuid = active(node, writes, 0)
        if writes:
            message.vbucket_uuid = uuid
        with client_of(node, "upr_draft3") as client:
            return status(client.ask(message))

    return check


def other_draft(node: EmbeddedNode) -> Status:
    with client_of(node, "upr_draft2") as client:
        answer = client.ask(upr_draft1.DialectRequest(draft=1))
        assert isinstance(answer, upr_draft1.RequestError)
        return answer.status


S = Status
AHEAD = {"start_seqno": 9, "snapshot_start": 9, "snapshot_end": 9}
ERRORS: dict[tuple[type[Message], Status], Callable[[EmbeddedNode], Status]] = {
    (upr.Open, S.EINVAL): no_name,
    (dcp.Open, S.EINVAL): no_name,
    (upr.AddStream, S.KEY_EEXISTS): add_stream_twice,
    (upr.AddStream, S.NOT_MY_VBUCKET): add_stream_without_vbucket,
    (upr.AddStream, S.ROLLBACK): add_stream_that_cannot_roll_back,
    (upr.CloseStream, S.KEY_ENOENT): close_no_stream,
    (upr.StreamRequest, S.KEY_ENOENT): asked(upr.StreamRequest, start_seqno=3, vbucket_uuid=0xBAD),
    (upr.StreamRequest, S.KEY_EEXISTS): asked_twice(upr.StreamRequest),
    (upr.StreamRequest, S.NOT_MY_VBUCKET): of_no_vbucket(upr.StreamRequest(vbucket=5)),
    (upr.StreamRequest, S.ERANGE): asked(upr.StreamRequest, start_seqno=9, vbucket_uuid="uuid"),
    (upr.StreamRequest, S.ROLLBACK): asked(upr.StreamRequest, start_seqno=3, vbucket_uuid="uuid", high_seqno=7),
    (upr.FailoverLogRequest, S.NOT_MY_VBUCKET): of_no_vbucket(upr.FailoverLogRequest(vbucket=5)),
    (upr.SetVbucketState, S.KEY_ENOENT): state_of_no_stream,
    (upr.SetVbucketState, S.EINVAL): state_without_takeover,
    (dcp.StreamRequest, S.KEY_EEXISTS): asked_twice(dcp.StreamRequest),
    (dcp.StreamRequest, S.NOT_MY_VBUCKET): of_no_vbucket(dcp.StreamRequest(vbucket=5)),
    (dcp.StreamRequest, S.ERANGE): asked(dcp.StreamRequest, start_seqno=3),
    (dcp.StreamRequest, S.ROLLBACK): asked(dcp.StreamRequest, vbucket_uuid="uuid", **AHEAD),
    (dcp.StreamRequest, S.ETMPFAIL): nothing_to_stream,
    (dcp.Control, S.EINVAL): of_no_vbucket(dcp.Control(key=b"colour", value=b"blue")),
    (upr_draft1.DialectRequest, S.EINVAL): other_draft,
    (upr_draft3.StreamRequest, S.NOT_MY_VBUCKET): draft3(upr_draft3.StreamRequest(vbucket=5)),
    (upr_draft3.StreamRequest, S.ROLLBACK): draft3(upr_draft3.StreamRequest(start_seqno=9), 6),
    (upr_draft3.FailoverLogRequest, S.NOT_MY_VBUCKET): draft3(upr_draft3.FailoverLogRequest(vbucket=5)),
}
STREAMS = ("upr", "dcp", "upr_draft1", "upr_draft2", "upr_draft3")


def listed() -> set[tuple[type[Message], Status]]:
    """Every error on the pages of the stream dialects."""
    return {
        (message, error)
        for name in STREAMS
        for message in DIALECTS[name].messages
        for error, _ in message.declaration.errors
    }


def test_every_listed_error_has_a_check() -> None:
    assert listed() == set(ERRORS)


@pytest.mark.parametrize(
    ("message", "error"), ERRORS, ids=[f"{kind.declaration.dialect} {kind.__name__} {e.name}" for kind, e in ERRORS]
)
def test_every_listed_error_is_sent(node: EmbeddedNode, message: type[Message], error: Status) -> None:
    assert ERRORS[message, error](node) is error
