"""The pipeline mirror on a real Spark: restarts, a killed node, a lost disk, a failure after the commit."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.pipeline_model import row, table
from tests.support.pipeline_runs import run_once
from tests.support.restartable_node import RestartableNode
from upriver.client import SyncKvClient
from upriver.errors import ForeignData, OptionError
from upriver.node import EmbeddedNode
from upriver.pipelines.core.registry import find
from upriver.pipelines.jobs.mirror import Mirror, ParquetHistory, open_table
from upriver.pipelines.targets.tables.delta import Delta
from upriver.pipelines.targets.tables.parquet import ParquetTable

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_a_delta_table_follows_its_node(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    to, history = tmp_path / "table", tmp_path / "history"
    mirror = Mirror.of({"from": upriver_node.address}, to=to, history=history, max_rows=300)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(500)} | {"plain": b"text \xff"})
        run_once(spark, mirror, tmp_path)
        assert mirror_differences(to, upriver_node.address) == []
        kv.set_many({f"k{n}": b'{"n": %d, "more": true}' % n for n in range(100, 120)})
        kv.delete("k7")
        kv.set("gone", b"{}")
        kv.delete("gone")
    again = Mirror.of({"from": upriver_node.address}, to=to, history=history, max_rows=300)
    run_once(spark, again, tmp_path)
    assert mirror_differences(to, upriver_node.address) == []
    rows = DeltaTable(str(to)).to_pyarrow_table()
    assert rows.num_rows == 500
    assert sum(rows.column("more").to_pylist()[n] is True for n in range(500)) == 20
    changes = DeltaTable(str(history)).to_pyarrow_table()
    assert changes.num_rows >= 501 + 20 + 2
    assert mirror.counts()["replayed"] == 0
    mirror.close()
    again.close()


def test_a_failure_after_the_commit_changes_nothing_when_the_batch_comes_again(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "table"
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(50)})
    mirror = Mirror.of({"from": upriver_node.address}, to=to)
    applied = Mirror.apply

    def fail(self: Mirror, changes: object, number: int) -> None:
        applied(self, changes, number)
        raise RuntimeError("the process is gone before the checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "apply", fail)
        with pytest.raises(RuntimeError, match="gone before the checkpoint"):
            run_once(spark, mirror, tmp_path)
    version = Delta(to).version
    run_once(spark, mirror, tmp_path)
    assert mirror.counts()["replayed"] == 1
    assert Delta(to).version == version
    assert mirror_differences(to, upriver_node.address) == []
    mirror.close()


def test_a_killed_node_and_what_it_has_lost_are_followed(spark: SparkSession, tmp_path: Path) -> None:
    node = RestartableNode(tmp_path / "node", vbuckets=8)
    try:
        mirror = Mirror.of({"from": node.address}, to=tmp_path / "table")
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"n": 1, "id": %d}' % n for n in range(100)})
        run_once(spark, mirror, tmp_path)
        node.stop_persistence()
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"n": 2, "id": %d}' % n for n in range(50)})
            kv.delete("k60")
            kv.set("lost", b"{}")
        run_once(spark, mirror, tmp_path)
        assert mirror_differences(tmp_path / "table", node.address) == []
        node.kill()
        node.start()
        assert mirror_differences(tmp_path / "table", node.address)
        with SyncKvClient(node.address) as kv:
            kv.set("k3", b'{"n": 3, "id": 3}')
        run_once(spark, mirror, tmp_path)
        assert mirror_differences(tmp_path / "table", node.address) == []
        assert mirror.counts()["undone"] > 0
        mirror.close()
    finally:
        node.kill()


# Without Spark


def test_options_that_make_no_sense_are_refused() -> None:
    assert find("mirror") is Mirror
    with pytest.raises(OptionError, match="it must be earliest"):
        Mirror.of(start="latest")
    with pytest.raises(OptionError, match="one of delta, parquet"):
        Mirror.of(format="csv")
    with pytest.raises(OptionError, match="choose another one"):
        Mirror.of(to="t", history="./t")


def test_a_table_is_opened_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ForeignData, match="not a mirror"):
        open_table(tmp_path)
    Delta(tmp_path / "d")
    assert isinstance(open_table(tmp_path / "d"), Delta)
    with pytest.raises(ForeignData):
        open_table(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert isinstance(ParquetTable(tmp_path / "p"), ParquetTable)


def test_a_file_of_history_is_written_once(tmp_path: Path) -> None:
    history = ParquetHistory(tmp_path)
    changes = table([row(0, 1, "mutation", b"k", b"v")])
    assert history.append(changes, "q", 0)
    assert not history.append(changes, "q", 0)
    assert pq.read_table(tmp_path).num_rows == 1


def test_a_file_of_history_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(
        "upriver.pipelines.jobs.mirror.sync",
        lambda synced_path: synced.append((synced_path, [path.name for path in tmp_path.glob("q-*")])),
    )
    ParquetHistory(tmp_path).append(table([row(0, 1, "mutation", b"k", b"v")]), "q", 0)
    name = "q-000000000000.parquet"
    assert synced == [(tmp_path / f".{name}", []), (tmp_path, [name])]
