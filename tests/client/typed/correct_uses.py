"""Uses of the clients in which a type checker must find no error."""

import pyarrow as pa

from upriver.client import (
    Address,
    Consumer,
    FileCheckpoint,
    Flush,
    Item,
    KvClient,
    Progress,
    Reset,
    Rollback,
    Step,
    SyncConsumer,
    SyncKvClient,
    SyncMover,
    Written,
)
from upriver.client.consumer import ColumnName
from upriver.errors import StatusError
from upriver.model import Change, Event

ADDRESS = "127.0.0.1:11210"


def sync_kv() -> None:
    with SyncKvClient(ADDRESS, timeout_s=5, connect_timeout_s=1.5, agent="orders") as kv:
        written: Written = kv.set("fruit", b"apple", flags=7, expiry=60)
        item: Item | None = kv.get(b"fruit")
        if item is not None:
            kv.set("fruit", item.value + b"s", cas=item.cas)
        count: int = kv.incr("count", 5, initial=1)
        refused: dict[bytes, StatusError] = kv.set_many({"a": b"1"})
        refused |= kv.set_many({b"a": "1"}, expiry=60)
        refused |= kv.set_many([("a", b"1"), (b"b", "2")])
        refused |= kv.write_batch(pa.record_batch({"key": [b"a"], "value": [b"1"]}))
        items: dict[bytes, Item] = kv.get_many(["a", b"b"])
        seconds: float = kv.timeout_s
        print(written.seqno, count, refused, items, seconds, kv.cluster_map.revision)


async def async_kv() -> None:
    async with KvClient(Address.parse(ADDRESS), timeout_s=5) as kv:
        kv.timeout_s = 10
        written: Written = await kv.set("fruit", b"apple")
        item: Item | None = await kv.get("fruit")
        print(written, item)


def sync_consumer(progress: dict[int, Progress]) -> None:
    checkpoint = FileCheckpoint("progress", source="orders")
    with Consumer.sync(ADDRESS, end="latest", vbuckets=range(8), checkpoint=checkpoint) as consumer:
        opened: SyncConsumer = consumer
        for batch in opened:
            print(len(batch), [change.key for change in batch.changes()])
            opened.acknowledge(batch)
    with SyncConsumer(ADDRESS, start=progress, end={0: 5}, patience_s=None) as consumer:
        for change in consumer.changes():
            if isinstance(change, Change):
                print(change.key, change.value, change.event is Event.MUTATION)
            else:
                event: Rollback | Reset | Flush = change
                print(event.vbucket)
        progress = consumer.progress
        print(progress, consumer.settings.window_bytes)


async def async_consumer() -> None:
    columns: tuple[ColumnName, ...] = ("key", "seqno")
    async with Consumer(ADDRESS, dialect="upr", on_rollback="rewind", keys_only=True, columns=columns) as consumer:
        async for batch in consumer:
            print(batch.records, batch.wire_bytes)
        async for change in consumer.changes():
            print(change.vbucket)


def sync_mover() -> None:
    with SyncMover(ADDRESS, "127.0.0.1:11211", range(512), parallel=8) as mover:
        steps: list[Step] = mover.carry_out()
        print([step.phase for step in steps], mover.bytes_passed_on)
