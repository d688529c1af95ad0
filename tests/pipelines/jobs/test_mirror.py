"""The mirror with its defaults, on a real Spark: read by other programs, changed, restarted, refused."""

from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.pipeline_runs import run_once
from tests.support.sample_tables import READERS
from tests.support.spark_driver import Query
from upriver.client import SyncKvClient
from upriver.errors import ForeignData, OptionError, StorageError
from upriver.node import EmbeddedNode
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.workers import LocalWorkers
from upriver.pipelines.jobs.mirror import Mirror
from upriver.spark.range_rows import RANGE_ROWS
from upriver.tables import Table, TableStorage, read


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_table_follows_and_every_reader_sees_it(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    mirror = Mirror.of({"from": upriver_node.address}, to=tmp_path / "table")
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d, "name": "x"}' % n for n in range(300)})
        run_once(spark, mirror, tmp_path / "run")
        kv.set_many({f"k{n}": b'{"n": %d, "name": "y"}' % -n for n in range(50)})
        for n in range(250, 300):
            kv.delete(f"k{n}")
    run_once(spark, mirror, tmp_path / "run")
    mirror.close()
    expected = {f"k{n}": -n if n < 50 else n for n in range(250)}
    for name, rows in READERS.items():
        assert dict(rows(str(tmp_path / "table"), {}, "n")) == expected, name
    assert mirror_differences(tmp_path / "table", upriver_node.address) == []
    table = Table.open(TableStorage.of(tmp_path / "table"))
    assert sum(file.dead for file in table.snapshot.files.values()) == 100  # hidden, and not written again


def test_table_and_history_are_compacted(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    mirror = Mirror.of({"from": upriver_node.address}, to=tmp_path / "table", history=tmp_path / "history")
    mirror.open(RunDirectory(tmp_path / "run"))
    with SyncKvClient(upriver_node.address) as kv, Query(**mirror.reader_options()) as query:
        for number in range(10):
            kv.set(f"k{number}", b'{"n": 1}')
            assert query.plan()
            ranges = pa.RecordBatch.from_pylist(query.read(), RANGE_ROWS)
            mirror.apply_messages([mirror.in_sink_task([ranges])], number)
    assert mirror.counts()["merged_files"] >= 16
    mirror.close()
    for name in ("table", "history"):
        assert len(Table.open(TableStorage.of(tmp_path / name)).snapshot.files) < 8
        assert read(tmp_path / name).num_rows == 10


@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft3"])
def test_the_history_has_every_version_and_the_table_the_last(
    upriver_node: EmbeddedNode, tmp_path: Path, dialect: str
) -> None:
    mirror = Mirror.of({"from": upriver_node.address}, to=tmp_path / "t", history=tmp_path / "h", dialect=dialect)
    mirror.open(RunDirectory(tmp_path / "run"))
    with SyncKvClient(upriver_node.address) as kv, Query(**mirror.reader_options()) as query:
        for batch_number in range(2):
            for version in range(20):
                kv.set_many({f"k{n}": b'{"n": %d}' % (100 * batch_number + version) for n in range(3)})
            kv.set("gone", b"{}")
            kv.delete("gone")
            items = [row["ranges"] for row in query.batch()]
            mirror._run(partial(LocalWorkers().map, items=items), batch_number)
    mirror.close()
    assert sorted(read(tmp_path / "t").column("n").to_pylist()) == [119, 119, 119]
    assert mirror_differences(tmp_path / "t", upriver_node.address) == []
    history = DeltaTable(str(tmp_path / "h")).to_pyarrow_table()
    versions = 1 if dialect == "upr_draft3" else 20
    assert Counter(history.column("key").to_pylist()) == {
        b"k0": 2 * versions, b"k1": 2 * versions, b"k2": 2 * versions, b"gone": 4 if versions > 1 else 2,
    }  # fmt: skip
    assert len(set(zip(*(history.column(name).to_pylist() for name in ("vbucket", "seqno")), strict=True))) == len(
        history
    )


def test_a_table_of_another_checkpoint_is_refused_and_adopted_on_request(
    upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    first = Mirror.of({"from": upriver_node.address}, to=tmp_path / "table")
    first.open(RunDirectory(tmp_path / "one"))
    second = Mirror.of({"from": upriver_node.address}, to=tmp_path / "table")
    with pytest.raises(ForeignData, match="--adopt"):
        second.open(RunDirectory(tmp_path / "two"))
    second.close()
    third = Mirror.of({"from": upriver_node.address}, to=tmp_path / "table", adopt=True)
    third.open(RunDirectory(tmp_path / "two"))
    assert read(tmp_path / "table").num_rows == 0
    for each in (first, third):
        each.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": "latest"}, "it must be earliest"),
        ({"to": "t", "history": "t"}, "choose another one"),
        ({"schema": "name"}, "name string, age long"),
        ({"column_share": "2"}, "from 0 to 1"),
        ({"deletion_vectors": "maybe"}, "on, off"),
        ({"storage_options": "aws_region"}, "aws_region="),
    ],
)
def test_options_that_make_no_sense(options: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Mirror.of(options)


def test_a_file_system_that_tables_cannot_use_is_refused_by_name() -> None:
    with pytest.raises(StorageError, match="hdfs://"):
        _ = Mirror.of(to="hdfs://host/table").target
