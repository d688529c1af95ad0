"""A mirror of Parquet files on a real Spark, whose node is flushed."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.pipeline_runs import run_once
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.mirror import Mirror

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_a_flushed_node_empties_a_parquet_table(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    to = tmp_path / "table"
    options = {"to": to, "format": "parquet", "history": tmp_path / "history", "fail_on_data_loss": False}
    mirror = Mirror.of({"from": upriver_node.address}, **options)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": 1}' for n in range(50)})
        run_once(spark, mirror, tmp_path)
        assert pq.read_table(to / "current").num_rows == 50
        upriver_node.call(upriver_node.bucket.flush)
        kv.set("new", b"{}")
    run_once(spark, mirror, tmp_path)
    assert mirror_differences(to, upriver_node.address) == []
    assert pq.read_table(to / "current").column("_key").to_pylist() == ["new"]
    assert pq.read_table(tmp_path / "history").num_rows > 50
    mirror.close()
