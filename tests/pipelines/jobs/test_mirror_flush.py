"""A mirror on a real Spark, whose node is flushed."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.pipeline_runs import run_once
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.mirror import Mirror
from upriver.tables import read

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_a_flush_empties_the_table_and_stops_nothing(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    to, history = tmp_path / "table", tmp_path / "history"
    mirror = Mirror.of({"from": upriver_node.address}, to=to, history=history)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": 1}' for n in range(50)})
        run_once(spark, mirror, tmp_path / "run")
        assert read(to).num_rows == 50
        upriver_node.call(upriver_node.bucket.flush)
        kv.set("new", b"{}")
    run_once(spark, mirror, tmp_path / "run")
    assert mirror_differences(to, upriver_node.address) == []
    assert read(to, ["_key"]).column("_key").to_pylist() == ["new"]
    events = read(history, ["event"]).column("event").to_pylist()
    assert events.count("mutation") == 51
    assert "reset" in events
    mirror.close()
