"""Writes to a node with ``ack=disk`` whose disk fails: nothing is done twice, nothing acknowledged is lost."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.command_peers import ManualNode
from tests.support.failing_disk import FailingDisk
from tests.support.node_process import PATIENCE_S
from tests.support.raw_client import Packet, RawClient, packet
from upriver.client import KvClient
from upriver.errors import DurabilityAmbiguous, KeyExists, KeyNotFound, StatusError, TemporaryFailure
from upriver.model import Event
from upriver.node import EmbeddedNode, start
from upriver.wire import Request, Status
from upriver.wire.dialects.memcached import (
    Add,
    Append,
    Delete,
    Increment,
    Set,
    SetWithMeta,
)

GET, SET, ADD, REPLACE, DELETE, INCREMENT, DECREMENT, NOOP, APPEND, PREPEND = (
    0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0A, 0x0E, 0x0F,
)  # fmt: skip
FLUSH, TOUCH, GAT, SET_WITH_META, DELETE_WITH_META = 0x08, 0x1C, 0x1D, 0xA2, 0xA8
#: The quiet form of each command.
QUIET = {
    SET: 0x11, ADD: 0x12, REPLACE: 0x13, DELETE: 0x14, INCREMENT: 0x15, DECREMENT: 0x16, FLUSH: 0x18, APPEND: 0x19,
    PREPEND: 0x1A, SET_WITH_META: 0xA3, DELETE_WITH_META: 0xA9,
}  # fmt: skip
AMBIGUOUS, TEMPORARY, EXISTS, MISSING = 0xA3, 0x86, 0x02, 0x01
STORE, COUNT = struct.pack(">II", 0, 0), struct.pack(">QQI", 1, 0, 0)
META = struct.pack(">IIQQ", 0, 0, 9, 9)
#: Extras, value, and what the key holds after the command was carried out once; the key held 7 before.
ONCE: dict[int, tuple[bytes, bytes, bytes | None]] = {
    SET: (STORE, b"8", b"8"),
    REPLACE: (STORE, b"8", b"8"),
    DELETE: (b"", b"", None),
    INCREMENT: (COUNT, b"", b"8"),
    DECREMENT: (COUNT, b"", b"6"),
    APPEND: (b"", b"8", b"78"),
    PREPEND: (b"", b"8", b"87"),
    TOUCH: (struct.pack(">I", 1000), b"", b"7"),
    GAT: (struct.pack(">I", 1000), b"", b"7"),
    SET_WITH_META: (META, b"8", b"8"),
    DELETE_WITH_META: (META, b"", None),
    FLUSH: (b"", b"", None),
}
WITH_CAS = (SET, REPLACE, DELETE, INCREMENT, APPEND, PREPEND)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedNode]:
    monkeypatch.setattr("upriver.engine.flusher.RETRY_S", 0.01)
    with start(data=str(tmp_path / "data"), vbuckets=1, ack="disk") as started:
        yield started


@pytest.fixture
def disk(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingDisk]:
    failing = FailingDisk(node, monkeypatch)
    yield failing
    failing.failures = 0


@pytest.fixture
def client(node: EmbeddedNode) -> Iterator[RawClient]:
    with RawClient(node.port) as connected:
        yield connected


def stored(client: RawClient, key: bytes, value: bytes = b"7") -> int:
    """Store a value and return its CAS."""
    answer = client.ask(packet(SET, STORE, key, value))
    assert answer.status == 0
    return answer.cas


def held(client: RawClient, key: bytes) -> bytes | None:
    answer = client.ask(packet(GET, b"", key))
    return None if answer.status == MISSING else answer.value


def test_an_unstored_change_has_an_answer_of_its_own(client: RawClient, disk: FailingDisk) -> None:
    """Each command, and where it takes one with a CAS: made once, visible, stored later, and not called temporary."""
    for opcode, (extras, value, after) in ONCE.items():
        for cas in (False, True)[: 1 + (opcode in WITH_CAS)]:
            key = b"k%d" % opcode
            version = stored(client, key)
            disk.failures = 10**9
            name = b"" if opcode == FLUSH else key
            answer = client.ask(packet(opcode, extras, name, value, cas=version if cas else 0, opaque=5))
            assert (answer.status, answer.opaque, answer.cas, answer.extras) == (AMBIGUOUS, 5, 0, b""), hex(opcode)
            assert b"No space left on device" in answer.value
            assert held(client, key) == after, hex(opcode)
            disk.work()
            assert held(client, key) == after, hex(opcode)


def test_an_unstored_add(client: RawClient, disk: FailingDisk) -> None:
    disk.failures = 10**9
    assert client.ask(packet(ADD, STORE, b"k", b"v")).status == AMBIGUOUS
    assert client.ask(packet(ADD, STORE, b"l", b"v")).status == TEMPORARY, "nothing was changed"
    disk.work()
    assert (held(client, b"k"), held(client, b"l")) == (b"v", None)
    assert client.ask(packet(ADD, STORE, b"l", b"v")).status == 0


def test_quiet_forms_tell_of_unstored_changes(client: RawClient, disk: FailingDisk) -> None:
    """A pipeline that one commit would have stored: each request is answered, in order."""
    quiet = [opcode for opcode in ONCE if opcode in QUIET and opcode != FLUSH]
    for opcode in quiet:
        stored(client, b"k%d" % opcode)
    disk.failures = 10**9
    requests = [
        packet(QUIET[opcode], *ONCE[opcode][:1], b"k%d" % opcode, ONCE[opcode][1], opaque=opcode) for opcode in quiet
    ]
    client.send(*requests, packet(QUIET[ADD], STORE, b"new", b"v", opaque=ADD), packet(NOOP))
    answers = list(client.until(NOOP))[:-1]
    assert [answer.opaque for answer in answers] == [*quiet, ADD]
    assert {answer.status for answer in answers} == {AMBIGUOUS}
    disk.work()
    for opcode in quiet:
        assert held(client, b"k%d" % opcode) == ONCE[opcode][2], hex(opcode)
    client.send(packet(QUIET[SET], STORE, b"k", b"v"), packet(NOOP))
    assert client.take().opcode == NOOP, "a quiet form says nothing of a stored change"


def test_a_second_attempt_hears_of_the_first_when_that_is_stored(
    node: EmbeddedNode, client: RawClient, disk: FailingDisk
) -> None:
    """Until then the refusal is temporary: a client that believed it would lose the change with the node."""
    attempts = {
        DELETE: (packet(DELETE, b"", b"gone"), MISSING),
        SET_WITH_META: (packet(SET_WITH_META, META, b"copied", b"v"), EXISTS),
        DELETE_WITH_META: (packet(DELETE_WITH_META, META, b"deleted"), EXISTS),
        ADD: (packet(ADD, STORE, b"added", b"v"), EXISTS),
        SET: (packet(SET, STORE, b"versioned", b"8", cas=stored(client, b"versioned")), EXISTS),
    }
    stored(client, b"gone")
    with RawClient(node.port) as other:
        for opcode, (request, status) in attempts.items():
            disk.failures = 10**9
            assert client.ask(request).status == AMBIGUOUS, hex(opcode)
            second: Packet = other.ask(request)
            assert second.status == TEMPORARY, hex(opcode)
            disk.work()
            assert other.ask(request).status == status, hex(opcode)


def test_a_refusal_waits_for_the_version_that_causes_it(manual_on_disk: ManualNode) -> None:
    peer, other = manual_on_disk.peer(), manual_on_disk.peer()
    peer.put(Set(key=b"old", value=b"v"))
    manual_on_disk.commit()
    peer.receive()
    peer.put(Set(key=b"new", value=b"v"), Delete(key=b"old"))
    refusals: dict[Status, list[Request]] = {
        Status.KEY_EEXISTS: [Add(key=b"new"), Set(key=b"new", cas=5), SetWithMeta(key=b"new", rev_seqno=1, item_cas=1)],
        Status.KEY_ENOENT: [Delete(key=b"old"), Increment(key=b"old", expiration=0xFFFFFFFF)],
        Status.NOT_STORED: [Append(key=b"old")],
    }
    requests = [request for each in refusals.values() for request in each]
    assert other.send(*requests) == []
    manual_on_disk.commit()
    wanted = [status for status, each in refusals.items() for _ in each]
    assert [answer.status for answer in other.receive()] == wanted
    assert [answer.status for answer in other.send(*requests)] == wanted, "it is on disk: the refusals come at once"


# The client


async def _made_once(disk: FailingDisk, write: Callable[[], Awaitable[Any]]) -> DurabilityAmbiguous:
    disk.failures = 1
    with pytest.raises(DurabilityAmbiguous) as caught:
        await write()
    await asyncio.to_thread(disk.work)
    return caught.value


def test_the_client_does_nothing_twice(node: EmbeddedNode, disk: FailingDisk) -> None:
    async def run() -> None:
        async with KvClient(node.address, timeout_s=PATIENCE_S) as kv:
            await kv.set("n", "5")
            error = await _made_once(disk, lambda: kv.incr("n"))
            told = str(error)
            assert "the change was made but is not on disk: cannot write: [Errno 28] No space left on device" in told
            assert "it is stored when the disk takes writes again" in told
            assert "vbucket" in told and "0xa3" in told  # noqa: PT018
            await _made_once(disk, lambda: kv.append("n", "x"))
            await _made_once(disk, lambda: kv.prepend("n", "x"))
            item = await kv.get("n")
            assert item is not None
            assert item.value == b"x6x"
            await _made_once(disk, lambda: kv.set("n", "8", cas=item.cas))
            await _made_once(disk, lambda: kv.touch("n", 1000))
            await _made_once(disk, lambda: kv.gat("n", 2000))
            await _made_once(disk, lambda: kv.add("new", "v"))
            await _made_once(disk, lambda: kv.replace("new", "w"))
            await _made_once(disk, lambda: kv.delete("new"))
            await _made_once(disk, lambda: kv.set_with_meta("m", "v", rev_seqno=5, cas=7))
            await _made_once(disk, lambda: kv.delete_with_meta("m", rev_seqno=6, cas=8))
            found = await kv.get_many(["n", "new", "m"])
            assert {key: item.value for key, item in found.items()} == {b"n": b"8"}

    asyncio.run(run())


def test_the_client_repeats_what_may_be_repeated(node: EmbeddedNode, disk: FailingDisk) -> None:
    """Unconditional sets and bulk writes: when they return, everything is on disk."""
    batch = pa.record_batch(
        {
            "key": pa.array([b"a", b"b"]),
            "value": pa.array([b"", b"w"]),
            "event": pa.array([int(Event.DELETION), int(Event.MUTATION)], pa.uint8()),
            "rev_seqno": pa.array([50, 50], pa.uint64()),
            "cas": pa.array([2**62, 2**62], pa.uint64()),
        }
    )

    def is_stored() -> bool:
        return all(vbucket.persisted_seqno == vbucket.high_seqno for vbucket in node.bucket)

    async def run() -> None:
        async with KvClient(node.address, timeout_s=PATIENCE_S) as kv:
            disk.failures = 1
            await kv.set("a", "v")
            assert node.call(is_stored)
            disk.failures = 1
            assert await kv.set_many({"a": "1", "b": "2", "c": "3"}) == {}
            assert node.call(is_stored)
            disk.failures = 1
            refused = await kv.write_batch(batch)
            assert all(isinstance(error, KeyNotFound) for error in refused.values()), refused
            assert node.call(is_stored)
            disk.failures = 1
            refused = await kv.write_batch(batch, with_meta=True)
            assert all(isinstance(error, KeyExists) for error in refused.values()), refused
            assert node.call(is_stored)
            found = await kv.get_many(["a", "b", "c"])
            assert {key: item.value for key, item in found.items()} == {b"b": b"w", b"c": b"3"}

    asyncio.run(run())


def test_the_client_says_at_last_that_the_change_was_made(node: EmbeddedNode, disk: FailingDisk) -> None:
    """Later attempts are refused as temporary, but the first one has changed something."""

    async def error_of(write: Callable[[KvClient], Awaitable[Any]]) -> StatusError:
        async with KvClient(node.address, timeout_s=0.5) as kv:
            await asyncio.to_thread(disk.work)
            disk.failures = 10**9
            with pytest.raises(StatusError) as caught:
                await write(kv)
            return caught.value

    assert isinstance(asyncio.run(error_of(lambda kv: kv.set("k", "v"))), DurabilityAmbiguous)
    assert isinstance(asyncio.run(error_of(lambda kv: kv.set_many({"k": "w"}))), DurabilityAmbiguous)

    async def too_late(kv: KvClient) -> None:
        with pytest.raises(DurabilityAmbiguous):
            await kv.incr("n", initial=0)
        await kv.incr("n")

    assert isinstance(asyncio.run(error_of(too_late)), TemporaryFailure)
    disk.work()
    with RawClient(node.port) as client:
        assert held(client, b"n") == b"0"
