"""Spark reads and pipelines, against raw gets: each kind of data, default options, restarts of the node in between.

A reader passes only if it has exactly what raw gets of every key in every vbucket find, or fails and says why.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.support.cache_servers import CacheClient, CacheServer
from tests.support.every_kind_of_data import (
    KEYS,
    VBUCKETS,
    Documents,
    change_everything,
    flush_everything,
    own,
    raw,
    write_everything,
)
from tests.support.mirror_comparison import mirror_differences
from tests.support.node_process import wait_until
from tests.support.restartable_node import RestartableNode
from tests.support.spark_tables import PATIENCE_S, stream_of
from upriver.errors import PipelineFailed
from upriver.node import EmbeddedNode, start
from upriver.pipelines import find, run
from upriver.spark import changes, latest
from upriver.tables import read

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
Row = dict[str, Any]


def documents(rows: list[Row]) -> Documents:
    """What the rows of a read leave, the last row of each document winning."""
    found: Documents = {}
    for row in sorted(rows, key=lambda row: (row["branch"], row["seqno"])):
        if row["event"] in ("flush", "reset"):
            found = {place: value for place, value in found.items() if place[0] != row["vbucket"]}
            continue
        place = row["vbucket"], bytes(row["key"])
        found.pop(place, None)
        if row["event"] == "mutation" and not 0 < row["expiry"] <= time.time():
            found[place] = bytes(row["value"]), row["flags"]
    return found


def collected(frame: DataFrame) -> list[Row]:
    return [row.asDict() for row in frame.collect()]


def batch_of(spark: SparkSession, address: str, **options: str) -> DataFrame:
    return spark.read.format("upriver").option("address", address).options(**options).load()


def check_batch_reads(spark: SparkSession, address: str, expected: Documents) -> None:
    """A batch read, its latest state, and its documents with texts as keys."""
    frame = batch_of(spark, address)
    assert documents(collected(frame)) == expected
    assert documents(collected(latest(frame))) == expected
    parsed = changes(latest(batch_of(spark, address, valueFormat="json", valueSchema="pad string, a string")))
    rows = collected(
        parsed.selectExpr("vbucket", "key", "length(value.pad) AS pad", "value.a AS a", "value IS NULL AS no")
    )
    found = {(row["vbucket"], row["key"]): row for row in rows}
    assert found.keys() == {(vbucket, as_text(key)) for vbucket, key in expected}
    for (vbucket, key), (value, _) in expected.items():
        row = found[vbucket, as_text(key)]
        if key in (b"json", b"large", b"text", b"empty"):
            document = json.loads(value) if value.startswith(b"{") else None
            assert row["no"] is (document is None), key
            assert row["pad"] == (None if document is None or "pad" not in document else len(document["pad"])), key


def as_text(key: bytes) -> str:
    """A key as Spark shows it: what is not text is replaced."""
    return key.decode(errors="replace")


@pytest.mark.upriver(vbuckets=VBUCKETS)
def test_a_small_batch_read(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    write_everything(upriver_node.port, large=b'{"pad": "small"}')
    wait_until(lambda: (own(b"expired"), b"expired") not in raw(upriver_node.port), "the item has expired")
    expected = raw(upriver_node.port)
    frame = batch_of(spark, upriver_node.address)
    assert documents(collected(frame)) == documents(collected(latest(frame))) == expected


class Source(RestartableNode):
    """A node with every kind of data, which is killed and started again between the parts of a test."""

    def restart(self) -> Documents:
        self.kill()
        self.start()
        return raw(self.port)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    node = Source(tmp_path / "source", "disk", "dcp", VBUCKETS)
    try:
        write_everything(node.port)
        wait_until(lambda: (own(b"expired"), b"expired") not in raw(node.port), "the item has expired")
        node.restart()
        yield node
    finally:
        node.kill()


def in_parts(source: Source, bring: Callable[[], object], check: Callable[[Documents], object]) -> None:
    """Bring a reader up to date in three parts, with restarts between them, and compare each time."""
    bring()
    check(raw(source.port))
    change_everything(source.port)
    expected = source.restart()
    bring()
    check(expected)
    assert source.restart() == expected
    bring()
    check(expected)


def after_a_flush(source: Source, bring: Callable[[], object], check: Callable[[Documents], object]) -> None:
    """A flush while the reader was away: it follows, or fails and says so."""
    bring()
    flush_everything(source.port)
    expected = raw(source.port)
    refused = None
    try:
        bring()
    except (PipelineFailed, StreamingQueryException) as error:
        refused = str(error)
    if refused is None:
        check(expected)
    else:
        assert "failOnDataLoss" in refused or "fail-on-data-loss" in refused, refused


both_ways = pytest.mark.parametrize("course", [in_parts, after_a_flush])


@pytest.mark.slow
@pytest.mark.heavy
def test_batch_reads(spark: SparkSession, source: Source) -> None:
    check_batch_reads(spark, source.address, raw(source.port))
    change_everything(source.port)
    check_batch_reads(spark, source.address, source.restart())
    flush_everything(source.port)
    check_batch_reads(spark, source.address, source.restart())


@pytest.mark.slow
@pytest.mark.heavy
@both_ways
def test_stream(spark: SparkSession, source: Source, tmp_path: Path, course: Any) -> None:
    rows: list[Row] = []

    def bring() -> None:
        def take(frame: DataFrame, _: int) -> None:
            rows.extend(collected(frame))

        writer = stream_of(spark, source.address).writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        assert query.awaitTermination(PATIENCE_S)

    def check(expected: Documents) -> None:
        assert documents(rows) == expected

    course(source, bring, check)


def once(name: str, directory: Path, source: Source, **options: str) -> Callable[[], Any]:
    """Run a pipeline up to what the source holds, with its defaults."""

    def bring() -> Any:
        return run(find(name).of({"from": source.address, **options}), checkpoint=directory / "checkpoint", once=True)

    return bring


@pytest.mark.slow
@pytest.mark.heavy
@both_ways
def test_mirror(spark: SparkSession, source: Source, tmp_path: Path, course: Any) -> None:
    table = tmp_path / "table"

    def check(expected: Documents) -> None:
        rows = read(table, ["_key", "_raw_key", "_raw", "_vbucket", "_flags"]).to_pylist()
        found = {(row["_vbucket"], row["_raw_key"] or row["_key"].encode()): row for row in rows}
        assert len(found) == len(rows)
        assert found.keys() == expected.keys()
        for place, row in found.items():
            assert row["_flags"] == expected[place][1], place
            if row["_raw"] is not None:
                assert row["_raw"] == expected[place][0], place
        assert mirror_differences(table, source.address) == []

    course(source, once("mirror", tmp_path, source, to=str(table)), check)


@pytest.mark.slow
@pytest.mark.heavy
@both_ways
def test_index(spark: SparkSession, source: Source, tmp_path: Path, course: Any) -> None:
    index = tmp_path / "index.db"

    def check(expected: Documents) -> None:
        with sqlite3.connect(index) as db:
            found = {
                (vbucket, bytes(key)): body
                for vbucket, key, body in db.execute("SELECT vbucket, key, body FROM documents")
            }
        assert found.keys() == expected.keys()
        for place in expected:
            if place[1] in (b"text", b"deleted", b"recreated") or place[1].startswith(b"many"):
                assert found[place] == expected[place][0].decode(), place

    course(source, once("index", tmp_path, source, to=str(index)), check)


@pytest.mark.slow
@pytest.mark.heavy
@both_ways
def test_replicate(spark: SparkSession, source: Source, tmp_path: Path, course: Any) -> None:
    with start(vbuckets=VBUCKETS) as target:

        def check(expected: Documents) -> None:
            assert raw(target.port) == expected

        course(source, once("replicate", tmp_path, source, to=target.address), check)


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.interop
@both_ways
def test_invalidate(spark: SparkSession, source: Source, tmp_path: Path, course: Any) -> None:
    """A cache that holds what the nodes had before must not hold it any more; what did not change may stay."""
    server = CacheServer("memcached", tmp_path)
    client = CacheClient(server)
    before: Documents = {}
    names = [key.decode() for key in KEYS if key.isascii() and b" " not in key]

    def check(expected: Documents) -> None:
        for name in names:
            place = own(name.encode()), name.encode()
            if expected.get(place) != before.get(place):
                assert client.get(name) is None, name
        assert client.get("foreign") == b"stays"
        fill(expected)

    def fill(documents: Documents) -> None:
        before.clear()
        before.update(documents)
        for name in names:
            client.set(name, b"cached")

    try:
        client.set("foreign", b"stays")
        fill({})
        course(source, once("invalidate", tmp_path, source, to=server.url), check)
    finally:
        client.close()
        server.stop()


@pytest.mark.slow
@pytest.mark.heavy
def test_observe(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    """Each document is one stored change, and each tombstone one that deletes."""
    seen = tmp_path / "seen"
    bring = once("observe", tmp_path, source, to=str(seen))

    def counted() -> dict[str, int]:
        rows = pq.read_table(seen).to_pylist()
        events = ("mutation", "deletion", "expiration")
        return {event: sum(row["changes"] for row in rows if row["event"] == event) for event in events}

    bring()
    assert counted() == {"mutation": len(raw(source.port)), "deletion": 2, "expiration": 1}
    assert source.restart()
    bring()
    assert counted() == {"mutation": len(raw(source.port)), "deletion": 2, "expiration": 1}


@pytest.mark.slow
@pytest.mark.heavy
def test_transition(source: Source, tmp_path: Path) -> None:
    destination = Source(tmp_path / "to", "disk", "dcp", VBUCKETS, "--initial-vbuckets", "none")
    try:
        expected = raw(source.port)
        once("transition", tmp_path, source, to=destination.address)()
        assert raw(destination.port) == expected
        assert destination.restart() == expected
    finally:
        destination.kill()
