"""Mistakes that a type checker must find: each marked line is one, with the code of the error it must give."""

from collections.abc import Callable

from upriver.client import Consumer, ConsumerSettings, KvClient, SyncConsumer, SyncKvClient, SyncMover

ADDRESS = "127.0.0.1:11210"


def sync_kv(kv: SyncKvClient) -> None:
    SyncKvClient(ADDRESS, timeout=5)  # error: call-arg
    SyncKvClient(ADDRESS, timeout_s="5")  # error: arg-type
    SyncKvClient(11210)  # error: arg-type
    SyncKvClient()  # error: call-arg
    kv.sett("a", "b")  # error: attr-defined
    kv.set("a")  # error: call-arg
    kv.set("a", 1)  # error: arg-type
    kv.set("a", "b", expires=5)  # error: call-arg
    kv.set("a", "b", cas="5")  # error: arg-type
    kv.set_many({1: "b"})  # error: arg-type
    kv.write_batch(5)  # error: arg-type
    kv.cluster  # error: attr-defined
    kv.get("a").value  # error: union-attr
    kv.timeout_s = 5  # error: misc
    value: str = kv.lock("a").value  # error: assignment
    print(value)


async def async_kv(kv: KvClient) -> None:
    KvClient(ADDRESS, timeout=5)  # error: call-arg
    KvClient(ADDRESS, timeout_s="5")  # error: arg-type
    await kv.sett("a", "b")  # error: attr-defined
    await kv.set("a", 1)  # error: arg-type
    await kv.set("a", "b", expires=5)  # error: call-arg
    await kv.set_many({1: "b"})  # error: arg-type
    await kv.write_batch(5)  # error: arg-type
    (await kv.get("a")).value  # error: union-attr


def sync_consumer(consumer: SyncConsumer) -> None:
    Consumer.sync(ADDRESS, ends="latest")  # error: call-arg
    Consumer.sync(ADDRESS, end="newest")  # error: arg-type
    Consumer.sync(ADDRESS, checkpoint="progress")  # error: arg-type
    Consumer.sync(ADDRESS, dialect="dpc")  # error: arg-type
    Consumer.sync(ADDRESS, columns=("kee",))  # error: arg-type
    SyncConsumer(ADDRESS, ends="latest")  # error: call-arg
    SyncConsumer(ADDRESS, window_bytes="16MiB")  # error: arg-type
    SyncConsumer(ADDRESS, on_rollback="ignore")  # error: arg-type
    consumer.change()  # error: attr-defined
    consumer.cluster  # error: attr-defined
    consumer.connections  # error: attr-defined
    consumer.acknowledge()  # error: call-arg
    consumer.acknowledge(5)  # error: arg-type
    consumer.queued_bytes()  # error: operator
    for batch in consumer:
        batch.record  # error: attr-defined
    for change in consumer.changes():
        change.key  # error: union-attr


async def async_consumer(consumer: Consumer) -> None:
    Consumer(ADDRESS, ends="latest")  # error: call-arg
    Consumer(ADDRESS, end="newest")  # error: arg-type
    Consumer(ADDRESS, window_bytes="16MiB")  # error: arg-type
    Consumer(ADDRESS, vbuckets=5)  # error: arg-type
    Consumer(ADDRESS, dialect="dpc")  # error: arg-type
    Consumer(ADDRESS, columns=("kee",))  # error: arg-type
    ConsumerSettings(ends="latest")  # error: call-arg
    ConsumerSettings(dialect="dpc")  # error: arg-type
    await consumer.saves()  # error: attr-defined
    async for batch in consumer:
        batch.record  # error: attr-defined


def sync_mover(mover: SyncMover) -> None:
    SyncMover(ADDRESS, ADDRESS)  # error: call-arg
    SyncMover(ADDRESS, ADDRESS, [0], patience="1m")  # error: call-arg
    mover.carryout()  # error: attr-defined
    then: Callable[[int], None] = mover.stop  # error: assignment
    print(then)
