"""Observation in a real Spark: everything is counted, and nothing twice."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.spark_tables import lose_commit
from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.node import EmbeddedNode
from upriver.pipelines import run
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.jobs.observe import TABLE_COLUMNS, Observe, ObserveOptions, table_rows
from upriver.pipelines.jobs.windows import Window


def fill(node: EmbeddedNode, first: int) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"user:{n}": b"x" * 10 for n in range(first, first + 30)})
        kv.set_many({f"session:{n}": b"x" * 30 for n in range(first, first + 10)}, expiry=3000)
        for n in range(first, first + 5):
            kv.delete(f"user:{n}")


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_everything_is_counted_once_over_restarts(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the pipelines extra is not installed")
    told, picture = tmp_path / "told.jsonl", tmp_path / "seen.png"
    options = {"from": upriver_node.address, "window": "3600s", "to": str(told), "plot": str(picture)}
    fill(upriver_node, 0)
    first = Observe.of(options)
    summary = run(first, checkpoint=tmp_path / "checkpoint", once=True)
    assert summary.last.counts == {"mutations": 35, "deletions": 5, "expirations": 0}
    # As if it had been killed after counting and before Spark knew that the batch was done: it comes again.
    lose_commit(tmp_path / "checkpoint" / "spark")
    fill(upriver_node, 100)
    second = Observe.of(options)
    run(second, checkpoint=tmp_path / "checkpoint", once=True)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    newest = {line["window"]: line for line in lines}
    totals: Counter[str] = Counter()
    for line in newest.values():
        totals.update({event: count["changes"] for event, count in line["events"].items()})
    assert totals == {"mutation": 70, "deletion": 10}
    user = [line["prefixes"]["user"]["mutation"] for line in newest.values()]
    assert sum(count["changes"] for count in user) == 50
    assert all(count["mean_bytes"] == 10 for count in user)
    assert sum(line["prefixes"]["session"]["mutation"]["expiring"] for line in newest.values()) == 20
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert second.table() is not None


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_windows_become_files(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    fill(upriver_node, 0)
    job = Observe.of({"from": upriver_node.address, "to": str(tmp_path / "seen"), "window": "1s"})
    run(job, checkpoint=tmp_path / "checkpoint", once=True)
    table = pq.read_table(tmp_path / "seen").to_pylist()
    stored = [row for row in table if row["event"] == "mutation" and row["name"] == "session"]
    assert sum(row["changes"] for row in stored) == sum(row["expiring"] for row in stored) == 10
    assert sum(row["bytes"] for row in stored) == 300
    hot = {row["name"].split(":")[0] for row in table if row["event"] is None}
    assert hot
    assert hot <= {"user", "session"}  # all keys are as hot, and a window keeps only some of them


def test_a_table_shows_prefixes_and_hot_keys() -> None:
    window = Window(0, 10)
    window.add("user", "mutation", (20, 400, 90, 5))
    window.add("user", "expiration", (10, 0, 0, 0))
    window.add("", "mutation", (10, 10, 1, 0))
    window.add("user:7", None, (9, 0, 0, 0))
    rows = list(table_rows(window, 5))
    assert rows == [
        ("(all)", 3.0, 0.0, 1.0, 14, 90, 5),
        ("user", 2.0, 0.0, 1.0, 20, 90, 5),
        ("(none)", 1.0, 0.0, 0.0, 1, 1, 0),
        ("key user:7", 0.9, 0.0, 0.0, 0, 0, 0),
    ]
    assert {len(row) for row in rows} == {len(TABLE_COLUMNS)}


def test_a_window_has_whole_seconds() -> None:
    with pytest.raises(OptionError, match="whole seconds"):
        ObserveOptions.read({"window": "1500ms"})


@pytest.mark.parametrize("name", ["plot", "to"])
def test_a_file_has_a_directory_before_anything_runs(name: str, tmp_path: Path) -> None:
    ending = "png" if name == "plot" else "jsonl"
    assert ObserveOptions.read({name: tmp_path / f"x.{ending}"})
    with pytest.raises(OptionError, match=f"option {name} = '.*/no/x.{ending}': the directory does not exist"):
        ObserveOptions.read({name: tmp_path / "no" / f"x.{ending}"})
    (tmp_path / f"x.{ending}").mkdir()
    with pytest.raises(OptionError, match="this is a directory"):
        ObserveOptions.read({name: tmp_path / f"x.{ending}"})


def test_counts_of_batches_that_the_checkpoint_has_lost_are_dropped(tmp_path: Path) -> None:
    """If Spark's part of the checkpoint was removed, the same changes come again, under numbers from 0 on."""
    log = tmp_path / "run" / "spark" / "offsets"
    log.mkdir(parents=True)
    (log / "3").write_text("v1\n{}")
    observe = Observe.of({"to": str(tmp_path / "told.jsonl")})
    directory = RunDirectory(tmp_path / "run")
    observe.open(directory)
    observe.windows.batch = 3
    observe.apply(observe.in_task().schema.empty_table(), 3)
    observe.open(directory)
    assert observe.windows.batch == 3
    (log / "3").unlink()
    observe.open(directory)
    assert observe.windows.batch == -1
