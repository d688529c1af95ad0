"""Replication in a real Spark: one way, both ways, with other names, and through crashes of the source."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.background_pipeline import BackgroundPipeline
from tests.support.consumer_runs import wait_until_persisted
from tests.support.depth import DEEP
from tests.support.node_contents import changes, copies, held, put, vbuckets
from tests.support.node_process import Client
from tests.support.restartable_node import RestartableNode
from upriver.client import KvClient, SyncKvClient
from upriver.errors import OptionError, PipelineFailed, RowsRefused
from upriver.model import VbucketState, vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.pipelines import run
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.jobs.replicate import Replicate, ReplicateOptions, renamed
from upriver.spark.offsets import Offset, VbucketOffset
from upriver.wire.dialects.memcached import Delete


@pytest.fixture
def target() -> Iterator[EmbeddedNode]:
    """The node that gets the changes."""
    with start(vbuckets=4) as node:
        yield node


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_source_that_is_killed_and_loses_changes_is_followed(
    spark: SparkSession, target: EmbeddedNode, tmp_path: Path
) -> None:
    """Told and then lost: overwritten, deleted and new keys. The copy ends with exactly what the source holds."""
    node = RestartableNode(tmp_path / "data")
    keys = [f"k{n}" for n in range(100)] + [f"new{n}" for n in range(20)] + ["last"]

    async def lose() -> None:
        async with KvClient(node.address, timeout_s=60) as kv:
            await asyncio.to_thread(node.stop_persistence)
            await kv.set_many({b"k%d" % n: b"lost" for n in range(50)})
            for n in range(50, 60):
                await kv.delete(f"k{n}")
            await kv.set_many({b"new%d" % n: b"lost" for n in range(20)})

    async def fill() -> None:
        async with KvClient(node.address) as kv:
            await kv.set_many({b"k%d" % n: b"old" for n in range(100)})
            await wait_until_persisted(kv)
            await kv.set("last", "before")
            await wait_until_persisted(kv)

    try:
        asyncio.run(fill())
        job = Replicate.of({"from": node.address, "to": target.address})
        with BackgroundPipeline(job, tmp_path / "checkpoint") as running:
            running.wait(lambda: len(held(target.address, keys)) == 101)
            asyncio.run(lose())
            running.wait(lambda: len(held(target.address, keys)) == 111)
            node.kill()
            if DEEP:  # it tries for a minute before it begins again
                running.wait(lambda: running.seen[-1].restarts > 0)
                assert node.address in running.seen[-1].waiting_for
            node.start()
            with SyncKvClient(node.address, timeout_s=60) as kv:
                kv.set_many({b"k%d" % n: b"right" for n in range(90, 100)})
            expected = {f"k{n}": b"old" for n in range(90)} | {f"k{n}": b"right" for n in range(90, 100)}
            expected["last"] = b"before"
            assert held(node.address, keys) == expected
            running.wait(lambda: held(target.address, keys) == expected)
        assert running.summary is not None
        counts = running.summary.last.counts
        assert counts["rollbacks"] > 0
        assert counts["repaired"] > 0
        # New versions of a key that was lost come too: the repaired versions do not prevent it.
        with SyncKvClient(node.address) as kv:
            kv.set_many({b"new%d" % n: b"again" for n in range(20)})
        last = run(
            Replicate.of({"from": node.address, "to": target.address}), checkpoint=tmp_path / "checkpoint", once=True
        )
        assert held(target.address, keys) == held(node.address, keys)
        assert last.last.restarts == 0
    finally:
        node.kill()


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.upriver(vbuckets=8)
@pytest.mark.heavy
def test_both_ways_with_other_names_the_echo_ends(
    spark: SparkSession, upriver_node: EmbeddedNode, target: EmbeddedNode, tmp_path: Path
) -> None:
    with SyncKvClient(upriver_node.address) as a, SyncKvClient(target.address) as b:
        a.set_many({f"user:{n}": b"from a" for n in range(50)} | {"other": b"stays"})
        b.set_many({f"customer:{n}": b"from b" for n in range(100, 150)} | {"mine": b"stays"})
        a.set("user:7", b"older")
        a.delete("user:8")
        b.set_with_meta("customer:7", b"newer", rev_seqno=9, cas=9)
    job = Replicate.of({"from": upriver_node.address, "to": target.address, "rename": "user:=customer:", "both": True})
    here, there = ([f"{name}:{n}" for n in range(200)] for name in ("user", "customer"))
    with BackgroundPipeline(job, tmp_path / "checkpoint") as running:
        running.wait(lambda: len(held(target.address, there)) == len(held(upriver_node.address, here)) == 99)
        running.wait(lambda: held(upriver_node.address, ["user:7"]) == {"user:7": b"newer"})
        with SyncKvClient(target.address) as b:
            b.delete("customer:7")
        running.wait(lambda: held(upriver_node.address, ["user:7"]) == {})
    run(job, checkpoint=tmp_path / "checkpoint", once=True)
    # An echo is known where it comes from: it is read once more and changes nothing.
    highs = [changes(node.address) for node in (upriver_node, target)]
    again = run(job, checkpoint=tmp_path / "checkpoint", once=True)
    assert again.last.rows == 0
    assert [changes(node.address) for node in (upriver_node, target)] == highs
    assert {key.removeprefix("user:"): value for key, value in held(upriver_node.address, here).items()} == {
        key.removeprefix("customer:"): value for key, value in held(target.address, there).items()
    }
    assert held(target.address, ["other", "mine"]) == {"mine": b"stays"}


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_a_target_that_refuses_is_told_with_its_place(
    spark: SparkSession, upriver_node: EmbeddedNode, target: EmbeddedNode, tmp_path: Path
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("long enough to be too long with a new name", b"x")
    job = Replicate.of({"from": upriver_node.address, "to": target.address, "rename": "=" + "n" * 240})
    with pytest.raises(PipelineFailed, match=r"stage 'write', batch 0, vbucket \d+ .*1 rows were refused") as caught:
        run(job, checkpoint=tmp_path, once=True)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.upriver(vbuckets=4)
def test_a_key_in_two_vbuckets_is_copied_twice(
    spark: SparkSession, upriver_node: EmbeddedNode, target: EmbeddedNode, tmp_path: Path
) -> None:
    values = {number: b"v%d" % number for number in range(4)}
    put(upriver_node, b"twin", values)
    job = Replicate.of({"from": upriver_node.address, "to": target.address})
    assert run(job, checkpoint=tmp_path, once=True).last.counts["written"] == 4
    assert copies(target, b"twin") == values
    with Client(upriver_node.port) as client:
        assert client.ask(Delete(key=b"twin", vbucket=2)).status == 0
    run(Replicate.of({"from": upriver_node.address, "to": target.address}), checkpoint=tmp_path, once=True)
    assert copies(target, b"twin") == {number: value for number, value in values.items() if number != 2}


def written(source: EmbeddedNode, target: EmbeddedNode, rows: pa.RecordBatch, rename: str | None = None) -> int:
    """Let a task write these rows; returns how many were written."""
    options = ReplicateOptions.read(
        {"from": source.address, "to": target.address} | ({} if rename is None else {"rename": rename})
    )
    work = Replicate(options).in_task()
    return sum(pc.sum(batch.column("written")).as_py() for batch in work([rows]))


@pytest.mark.upriver(vbuckets=8)
def test_a_document_that_has_no_place_in_the_target(upriver_node: EmbeddedNode, target: EmbeddedNode) -> None:
    """Not in a cluster with another number of vbuckets, and not under another name."""
    own = vbucket_of(b"user:1", 8)

    def rows(event: str, *vbuckets: int) -> pa.RecordBatch:
        count = len(vbuckets)
        return pa.record_batch(
            {
                "vbucket": pa.array(vbuckets, pa.int32()),
                "event": [event] * count,
                "key": pa.array([b"user:1"] * count),
                "value": pa.array([b"v%d" % number for number in vbuckets]),
                "cas": [5] * count,
                "rev_seqno": [5] * count,
            }
        )

    with pytest.raises(RowsRefused, match=r"b'user:1': .*its source has 8 vbuckets and this cluster 4"):
        written(upriver_node, target, rows("mutation", own, own ^ 4))
    with pytest.raises(RowsRefused, match=r"1 rows .*b'user:1': it is in vbucket \d instead of its key's.*another key"):
        written(upriver_node, target, rows("mutation", own, own ^ 1), "user:=customer:")
    for rename, name in ((None, b"user:1"), ("user:=customer:", b"customer:1")):
        assert written(upriver_node, target, rows("deletion", own ^ 1), rename) == 0
        assert written(upriver_node, target, rows("mutation", own), rename) == 1
        assert copies(target, name) == {vbucket_of(name, 4): b"v%d" % own}


def test_a_repair_is_done_again_when_its_source_falls_over_before_the_stream_is_there(
    target: EmbeddedNode, tmp_path: Path
) -> None:
    """What a repair has read beyond the stream may be lost without a row that says so: the mark remembers it."""
    with start(vbuckets=4) as source:
        with SyncKvClient(source.address) as a, SyncKvClient(target.address) as b:
            a.set("k", b"right")
            b.set_with_meta("k", b"lost", rev_seqno=99, cas=99)
            number = a.cluster_map.vbucket_of(b"k")
        before = vbuckets(source.address)[number]
        directory = RunDirectory(tmp_path)
        directory.write("repairs.json", {str(number): [before.vbucket_uuid ^ 1, before.high_seqno]})
        job = Replicate.of({"from": source.address, "to": target.address})
        job.open(directory)
        job.idle()
        assert held(target.address, ["k"]) == {"k": b"right"}
        assert job.counts()["repaired"] == 1
        kept = directory.read("repairs.json")
        assert kept == {str(number): [before.vbucket_uuid, before.high_seqno, before.purge_seqno]}
        job.idle()  # nothing has changed: nothing is done
        assert job.counts()["repaired"] == 1
        offsets = Path(directory.spark) / "offsets"
        offsets.mkdir(parents=True)
        (Path(directory.spark) / "commits").mkdir()
        place = VbucketOffset.consistent_at(number, before.vbucket_uuid, before.high_seqno)
        (offsets / "0").write_text("v1\n{}\n" + json.dumps(Offset([place]).packed()))
        (Path(directory.spark) / "commits" / "0").write_text("v1\n{}")
        vbucket = source.bucket.vbucket(number)
        source.call(vbucket.set_state, VbucketState.DEAD)
        job.idle()  # the stream is consistent up to there, but its branch is unknown
        assert directory.read("repairs.json") == kept
        source.call(vbucket.set_state, VbucketState.ACTIVE)
        with SyncKvClient(target.address) as b:
            b.set_with_meta("k", b"lost", rev_seqno=99, cas=99)
        source.call(setattr, vbucket.table, "purge_seqno", 1)  # a deletion was forgotten before the stream got there
        job.idle()
        assert held(target.address, ["k"]) == {"k": b"right"}
        now = vbuckets(source.address)[number]
        place = VbucketOffset.consistent_at(number, now.vbucket_uuid, now.high_seqno)
        (offsets / "0").write_text("v1\n{}\n" + json.dumps(Offset([place]).packed()))
        job.idle()  # the stream is whole up to there
        assert directory.read("repairs.json") == {}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "give the cluster that gets the changes"),
        ({"to": "a:1"}, "it is the source itself"),
        ({"to": "a:1", "rename": "x=xy"}, "it is the source itself"),
        ({"to": "b:1", "rename": "x"}, "it must be OLD=NEW"),
        ({"to": "b:1", "rename": "x=y", "key_prefix": "z"}, "only keys that start with 'x'"),
        ({"to": "b:1", "rename": "x=y", "key_filter": "z"}, "cannot be combined with rename"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        ReplicateOptions.read({"from": "a:1", **given})


def test_the_way_back_undoes_the_names() -> None:
    options = ReplicateOptions.read({"from": "a:1", "to": "b:2", "rename": "user:=c:", "key_prefix": "user:x"})
    back = options.reversed()
    assert (str(back.source), str(back.to), back.rename, back.prefix) == ("b:2", "a:1", ("c:", "user:"), "c:x")
    assert back.reversed() == options
    batch = pa.record_batch({"n": pa.array([1]), "key": pa.array([b"user:x7"])})
    assert options.rename is not None
    assert back.rename is not None
    assert renamed(renamed(batch, options.rename), back.rename) == batch
    assert renamed(batch, options.rename).column("key").to_pylist() == [b"c:x7"]
