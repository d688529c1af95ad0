"""Filters that the source takes over: the same rows, fewer of them read."""

import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    Not,
)

from tests.support.spark_driver import source_of
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.spark import pushed_filters
from upriver.spark.pushed_filters import PushedFilters, key_pattern
from upriver.spark.range_reader import close_readers
from upriver.spark.readers import BatchReader

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
VBUCKET, KEY, EVENT = ("vbucket",), ("key",), ("event",)
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def scans_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Spark that plans each scan by itself."""
    monkeypatch.setattr(pushed_filters, "SCANS_ARE_APART", True)


def push(*filters: Filter, **options: Any) -> tuple[Any, list[Filter]]:
    source = source_of(**options)
    reader: Any = source.reader(source.schema())
    return reader, list(reader.pushFilters(list(filters)))


def read(reader: BatchReader) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pickled = pickle.dumps(reader)  # before the tasks are planned, as Spark does
    try:
        for partition in reader.partitions():
            rows += [row for batch in pickle.loads(pickled).read(partition) for row in batch.to_pylist()]
    finally:
        close_readers()
    return rows


# Which filters


@pytest.mark.usefixtures("scans_are_apart")
@pytest.mark.parametrize(
    ("filters", "pushed"),
    [
        ([IsNotNull(VBUCKET), EqualTo(VBUCKET, 3)], {3}),
        ([In(VBUCKET, (1, 2, 70))], {1, 2}),
        ([GreaterThanOrEqual(VBUCKET, 2), LessThan(VBUCKET, 5), Not(EqualTo(VBUCKET, 3))], {2, 4}),
        ([EqualNullSafe(VBUCKET, 63)], {63}),
        ([GreaterThan(VBUCKET, 100)], set()),
    ],
)
def test_vbuckets(filters: list[Filter], pushed: set[int]) -> None:
    reader, left = push(*filters)
    assert left == []
    assert set(reader.pushed.vbuckets(range(64))) == pushed


@pytest.mark.usefixtures("scans_are_apart")
@pytest.mark.parametrize(
    ("filters", "keys", "prefix"),
    [
        ([IsNotNull(KEY), EqualTo(KEY, b"user:1")], {b"user:1"}, b"user:1"),
        ([In(KEY, (b"user:1", b"user:2"))], {b"user:1", b"user:2"}, b"user:"),
        ([In(KEY, (b"a", b"b"))], {b"a", b"b"}, b""),
        ([In(KEY, (b"a", b"b")), EqualTo(KEY, b"b")], {b"b"}, b"b"),
        ([EqualTo(KEY, b"a"), EqualTo(KEY, b"b")], set(), b""),
        ([In(KEY, (b"ab", b"a"))], {b"a", b"ab"}, b"a"),
        ([GreaterThanOrEqual(KEY, b"user:"), LessThan(KEY, b"user;")], None, b"user:"),
    ],
)
def test_keys(filters: list[Filter], keys: set[bytes] | None, prefix: bytes) -> None:
    reader, left = push(*filters)
    assert left == []
    assert reader.pushed == PushedFilters(
        keys=None if keys is None else frozenset(keys), key_prefix=prefix, needs_key=True
    )


@pytest.mark.usefixtures("scans_are_apart")
def test_events() -> None:
    reader, left = push(IsNotNull(EVENT), Not(In(EVENT, ("flush", "reset", "rollback"))))
    assert (left, reader.pushed.events) == ([], {"mutation", "deletion", "expiration"})
    assert push(EqualTo(EVENT, "mutation"))[0].pushed.events == {"mutation"}
    assert push(IsNotNull(EVENT))[0].pushed.events is None


@pytest.mark.usefixtures("scans_are_apart")
@pytest.mark.parametrize(
    "given",
    [
        EqualTo(("value",), b"x"),
        EqualTo(("key", "inside"), b"x"),
        EqualTo(VBUCKET, None),
        EqualTo(VBUCKET, 1.5),
        In(KEY, (b"a", None)),
        Not(EqualTo(KEY, b"a")),
        GreaterThan(KEY, b"a"),
        GreaterThanOrEqual(KEY, b"a"),
        IsNull(KEY),
        Not(IsNotNull(EVENT)),
    ],
)
def test_others_stay_with_spark(given: Filter) -> None:
    kept = EqualTo(VBUCKET, 1)
    reader, left = push(given, kept)
    assert len(left) == 1
    assert left[0] is given
    assert reader.pushed == PushedFilters((kept,))


@pytest.mark.usefixtures("scans_are_apart")
def test_bounds_that_are_more_than_a_prefix_stay_with_spark() -> None:
    for lower, upper in ((b"a", b"c"), (b"a\xff", b"b"), (b"", b"a")):
        filters = [GreaterThanOrEqual(KEY, lower), LessThan(KEY, upper)]
        assert push(*filters)[1] == filters


def test_spark_takes_it_for_the_method_of_the_base_class() -> None:
    """It refuses readers with a method of their own while the pushdown is off, which is its default."""
    source = source_of()
    assert getattr(source.reader(source.schema()).pushFilters, "__func__", None) is DataSourceReader.pushFilters


# Which rows


@pytest.fixture
def node(upriver_node: EmbeddedNode) -> EmbeddedNode:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"user:{n}": b"v" for n in range(100)} | {f"order:{n}": b"v" for n in range(100)})
        for n in range(10):
            kv.delete(f"order:{n}")
    return upriver_node


@pytest.mark.usefixtures("scans_are_apart")
def test_the_rows_of_a_task(node: EmbeddedNode) -> None:
    address = node.address
    everything = read(push(address=address)[0])
    assert len(everything) == 200
    for filters, wanted in (
        ([EqualTo(VBUCKET, 3)], lambda row: row["vbucket"] == 3),
        ([In(KEY, (b"user:1", b"order:3", b"no reader"))], lambda row: row["key"] in (b"user:1", b"order:3")),
        ([EqualTo(KEY, b"user:1")], lambda row: row["key"] == b"user:1"),
        (
            [GreaterThanOrEqual(KEY, b"user:1"), LessThan(KEY, b"user:2")],
            lambda row: row["key"].startswith(b"user:1"),
        ),
        ([EqualTo(EVENT, "deletion")], lambda row: row["event"] == "deletion"),
        (
            [EqualTo(EVENT, "deletion"), In(KEY, (b"order:3", b"order:4", b"user:1"))],
            lambda row: row["key"] in (b"order:3", b"order:4"),
        ),
        ([GreaterThan(VBUCKET, 1000)], lambda row: False),
    ):
        reader, left = push(*filters, address=address)
        assert left == []
        rows = read(reader)
        assert sorted(row["key"] for row in rows) == sorted(row["key"] for row in everything if wanted(row)), filters


@pytest.mark.usefixtures("scans_are_apart")
def test_the_node_leaves_out_keys_without_the_prefix(node: EmbeddedNode) -> None:
    def patterns(**options: Any) -> set[str | None]:
        reader, _ = push(EqualTo(KEY, b"user:1"), address=node.address, **options)
        return {partition.key_filter for partition in reader.partitions()}

    assert patterns() == patterns(keyPrefix="user") == patterns(dialect="upr") == {r"^user\x3a1"}
    assert patterns(keyPrefix="order") == patterns(keyFilter="1") == patterns(dialect="upr_draft3") == {None}
    reader, _ = push(EqualTo(KEY, b"user:1"), address=node.address, keyPrefix="order")
    assert read(reader) == []
    reader, _ = push(EqualTo(KEY, b"user:1"), address=node.address, keyFilter="1")
    assert [row["key"] for row in read(reader)] == [b"user:1"]


def test_rows_about_whole_vbuckets_have_no_key() -> None:
    batch = pa.record_batch({"event": ["reset", "mutation"], "key": pa.array([None, b"a"], pa.binary())})
    assert PushedFilters(needs_key=True).rows(batch)["event"].to_pylist() == ["mutation"]
    assert PushedFilters(key_prefix=b"a", needs_key=True).rows(batch)["event"].to_pylist() == ["mutation"]
    assert PushedFilters(events=frozenset({"reset"})).rows(batch)["key"].to_pylist() == [None]


def test_a_pattern_of_any_bytes() -> None:
    assert key_pattern(b"a.Z9\xff") == r"^a\x2eZ9\xff"


# In Spark


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


@pytest.mark.usefixtures("pushdown")
def test_each_scan_of_a_dataframe_has_only_its_own_filters(spark: SparkSession, node: EmbeddedNode) -> None:
    """Spark 4.3 plans all scans of a DataFrame like the last one whose filters it pushed."""
    frame = spark.read.format("upriver").option("address", node.address).load()
    deleted, others = frame.where("event = 'deletion'"), frame.where("event != 'deletion'")
    assert (len(deleted.collect()), len(frame.collect())) == (10, 200)
    assert len(others.union(deleted).collect()) == 200


@pytest.mark.usefixtures("pushdown")
def test_the_plan_shows_who_applies_filters(spark: SparkSession, node: EmbeddedNode) -> None:
    frame = spark.read.format("upriver").option("address", node.address).load()
    wanted = "vbucket >= 3 AND key IN ('user:1', 'user:2', 'user:3') AND event = 'mutation'"
    jvm: Any = spark._jvm
    formatted = jvm.org.apache.spark.sql.execution.ExplainMode.fromString("formatted")
    plan = frame.where(wanted)._jdf.queryExecution().explainString(formatted)
    line = next((line for line in plan.splitlines() if line.startswith("PushedFilters")), "")
    names = ("GreaterThanOrEqual(vbucket,3)", "In(key, ", "EqualTo(event,mutation)")
    assert [name in line for name in names] == [pushed_filters.SCANS_ARE_APART] * 3
    assert ("Condition" in plan) is not pushed_filters.SCANS_ARE_APART
