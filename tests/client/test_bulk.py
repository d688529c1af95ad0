"""Many keys at once."""

import asyncio
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import Client
from upriver.client import KvClient, Meta, SyncKvClient
from upriver.client.bulk import SLICE_BYTES_MAX, completed, keys_batch, not_overtaken, slices, store_batch
from upriver.errors import InvalidArguments, KeyExists
from upriver.model import CHANGES, Change, Event, change_batch
from upriver.node import EmbeddedNode
from upriver.wire.dialects.memcached import Noop, SetQ, SetVbucket, VbucketState


def test_many_are_stored_and_read(upriver_node: EmbeddedNode) -> None:
    items = {b"key%d" % n: b"value%d" % n for n in range(20_000)}
    with SyncKvClient(upriver_node.address) as kv:
        assert kv.set_many(items, flags=3) == {}
        found = kv.get_many([*items, b"missing"])
        assert {key: item.value for key, item in found.items()} == items
        assert found[b"key1"].flags == 3
        item = kv.get(b"key1")
        assert item is not None
        assert item.value == b"value1"
        assert kv.set_many([]) == {}
        assert kv.get_many([]) == {}
        assert kv.set_many([("text", "too")]) == {}
        assert kv.get_many(["text"])[b"text"].value == b"too"


def test_what_is_refused_is_told_by_key(upriver_node: EmbeddedNode) -> None:
    rows = [(b"good%d" % n, b"v") for n in range(10)] + [(b"k" * 251, b"v")]
    with SyncKvClient(upriver_node.address) as kv:
        refused = kv.set_many(rows)
        assert list(refused) == [b"k" * 251]
        assert len(kv.get_many([key for key, _ in rows[:-1]])) == 10


def test_a_batch_stores_and_deletes(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("old", "x")
        batch = change_batch(
            [
                Change(vbucket=0, event=Event.MUTATION, seqno=0, key=b"new", value=b"y", flags=9),
                Change(vbucket=0, event=Event.DELETION, seqno=0, key=b"old"),
            ]
        )
        assert kv.write_batch(batch) == {}
        assert kv.get("old") is None
        item = kv.get("new")
        assert item is not None
        assert item.flags == 9
        meta = change_batch(
            [
                Change(vbucket=0, event=Event.MUTATION, seqno=0, key=b"m", value=b"y", rev_seqno=70, cas=700),
                Change(vbucket=0, event=Event.EXPIRATION, seqno=0, key=b"e", rev_seqno=80, cas=800),
            ]
        )
        assert kv.write_batch(meta, with_meta=True) == {}
        assert kv.meta("m") == Meta(deleted=False, flags=0, expiry=0, rev_seqno=70, cas=700)
        expired = kv.meta("e")
        assert expired is not None
        assert (expired.deleted, expired.rev_seqno) == (True, 80)
        assert list(kv.write_batch(meta, with_meta=True)) == [b"m", b"e"]


def test_thousands_of_refusals_are_told_by_key(upriver_node: EmbeddedNode) -> None:
    """What the node has already, in between of what it has not and of what it cannot take."""
    rows = [
        Change(vbucket=0, event=Event.MUTATION, seqno=0, key=b"%d" % n, value=b"v", rev_seqno=5, cas=500)
        for n in range(20_000)
    ]
    with SyncKvClient(upriver_node.address) as kv:
        known = {row.key for n, row in enumerate(rows) if n % 100 < 90}
        assert kv.write_batch(change_batch([row for row in rows if row.key in known]), with_meta=True) == {}
        rows[7] = replace(rows[7], key=b"k" * 251)
        refused = kv.write_batch(change_batch(rows), with_meta=True)
        assert refused.keys() == (known - {b"7"}) | {b"k" * 251}
        assert {type(error) for key, error in refused.items() if key in known} == {KeyExists}
        assert isinstance(refused[b"k" * 251], InvalidArguments)


def test_rows_of_several_nodes_that_are_refused() -> None:
    with two_nodes() as (first, second), SyncKvClient(first.address) as kv:
        rows = [
            Change(vbucket=0, event=Event.MUTATION, seqno=0, key=b"%d" % n, value=b"v", rev_seqno=5, cas=500)
            for n in range(2000)
        ]
        assert kv.write_batch(change_batch(rows), with_meta=True) == {}
        assert all(sum(vbucket.table.items for vbucket in node.bucket) > 500 for node in (first, second))
        assert kv.write_batch(change_batch(rows), with_meta=True).keys() == {row.key for row in rows}


async def refusing_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: dict[bytes, bytes]) -> None:
    """A server that stands alone, and is busy when the first row comes."""
    busy = True
    while header := await reader.read(24):
        header += await reader.readexactly(24 - len(header))
        opcode, key_bytes, extras, _, _, body, opaque, _ = struct.unpack(">xBHBBHIIQ", header)
        rest = (await reader.readexactly(body))[extras:]
        status = 0x00 if opcode == Noop.declaration.opcode else 0x81
        if opcode == SetQ.declaration.opcode:
            status, busy = (0x86 if busy else 0x00), False
            if not status:
                held[rest[:key_bytes]] = rest[key_bytes:]
                continue
        writer.write(struct.pack(">BBHBBHIIQ", 0x81, opcode, 0, 0, 0, status, 0, opaque, 0))
    writer.close()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(b"a", b"old"), (b"b", b"1"), (b"a", b"new")], {b"a": b"new", b"b": b"1"}),
        ([(b"a", b"only"), (b"b", b"1")], {b"a": b"only", b"b": b"1"}),
    ],
)
def test_a_row_that_is_sent_again_does_not_undo_a_later_one(
    rows: list[tuple[bytes, bytes]], expected: dict[bytes, bytes]
) -> None:
    """The first row is refused for now, the others are not."""
    held: dict[bytes, bytes] = {}

    async def store() -> None:
        server = await asyncio.start_server(lambda reader, writer: refusing_first(reader, writer, held), "127.0.0.1", 0)
        async with server, KvClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as kv:
            assert await kv.set_many(rows) == {}

    asyncio.run(store())
    assert held == expected


def test_what_was_overtaken_is_void() -> None:
    rows = store_batch([(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", b"2"), (b"a", b"3")], 0, 0)
    assert not_overtaken(rows, {0, 1, 2}, set()) == []  # a later row of each key was written
    assert not_overtaken(rows, {0, 1, 2, 4}, set()) == [0, 2, 4]  # in their order, none was
    assert not_overtaken(rows, {0, 1}, {2, 3, 4}) == [0, 1]  # what is refused overtakes nothing
    place, numbers = CHANGES.get_field_index("vbucket"), pa.array([0, 0, 0, 0, 1], pa.uint16())
    rows = rows.set_column(place, CHANGES.field(place), numbers)
    assert not_overtaken(rows, {0, 1, 2}, {3}) == [0, 1, 2]  # the same key in another vbucket is another document


def test_a_refusal_to_read_is_told_as_it_is(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv, pytest.raises(InvalidArguments):
        kv.get_many([b"good", b"k" * 251])


def test_a_narrow_batch_is_completed() -> None:
    batch = completed(pa.record_batch({"value": pa.array([b"v"]), "key": pa.array(["text"]).cast(pa.binary())}))
    assert batch.schema == CHANGES
    assert batch.to_pylist()[0]["event"] == Event.MUTATION
    assert completed(batch) is batch
    with pytest.raises(ValueError, match="has no column key"):
        completed(pa.record_batch({"value": pa.array([b"v"])}))
    with pytest.raises(ValueError, match="the column key contains nulls"):
        completed(pa.record_batch({"key": pa.array([None], pa.binary())}))


def test_slices_are_bounded() -> None:
    batch = store_batch([(b"%d" % n, bytes(100_000)) for n in range(100)], 0, 0)
    pieces = slices(batch)
    assert sum(piece.num_rows for piece in pieces) == 100
    assert max(piece.num_rows for piece in pieces) * 100_000 <= SLICE_BYTES_MAX
    assert slices(keys_batch([])) == []
    assert [piece.num_rows for piece in slices(store_batch([(b"k", bytes(3 << 20))] * 2, 0, 0))] == [1, 1]


@contextmanager
def moving(first: EmbeddedNode, second: EmbeddedNode) -> Iterator[None]:
    """Vbuckets wander between the nodes while something else goes on."""
    done = threading.Event()
    owners = [0, 0, 0, 0, 1, 1, 1, 1]

    def run() -> None:
        rev = 10
        with Client(first.port) as one, Client(second.port) as two:
            while not done.is_set():
                vbucket = rev % 8
                old, new = (one, two) if owners[vbucket] == 0 else (two, one)
                old.ask(SetVbucket(vbucket=vbucket, state=VbucketState.DEAD))
                new.ask(SetVbucket(vbucket=vbucket, state=VbucketState.ACTIVE))
                owners[vbucket] = 1 - owners[vbucket]
                push_map([first, second], owners, rev=rev)
                rev += 1
                done.wait(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_rows_follow_their_vbuckets_while_these_wander() -> None:
    async def run(address: str) -> None:
        async with KvClient(address, timeout_s=60) as kv:
            for turn in range(5):
                assert await kv.set_many({b"%d-%d" % (turn, n): b"v" for n in range(1000)}) == {}

    with two_nodes() as (first, second):
        with moving(first, second):
            asyncio.run(run(first.address))
        # Moved without their contents, so each key lies where its vbucket was at that moment.
        held = {change.key for node in (first, second) for change in node.call(_held, node)}
        assert len(held) == 5000


def _held(node: EmbeddedNode) -> list[Change]:
    return [change for vbucket in node.bucket for snapshot in vbucket.changes() for change in snapshot]
