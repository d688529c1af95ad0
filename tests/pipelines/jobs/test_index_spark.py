"""The pipeline index on a real Spark: a node that is killed, a server that is down."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.pipeline_runs import run_once
from tests.support.restartable_node import RestartableNode
from tests.support.search_servers import FakeOpenSearch, served
from upriver.client import SyncKvClient
from upriver.errors import Unreachable
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.index import Index, search_index

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def keys(to: object, query: str) -> set[str]:
    return {hit.key.decode() for hit in search_index(str(to), query, 1000)}


def test_deletions_and_what_a_killed_node_has_lost_leave_the_index(spark: SparkSession, tmp_path: Path) -> None:
    to = tmp_path / "index.db"
    node = RestartableNode(tmp_path / "node", vbuckets=8)
    try:
        index = Index.of({"from": node.address}, to=to)
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"name": "first %d"}' % n for n in range(50)})
            kv.delete("k1")
        run_once(spark, index, tmp_path)
        assert keys(to, "first") == {f"k{n}" for n in range(50) if n != 1}
        node.stop_persistence()
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"name": "second"}' for n in range(20)} | {"lost": b'"second"'})
            kv.delete("k30")
        run_once(spark, index, tmp_path)
        assert keys(to, "second") == {f"k{n}" for n in range(20)} | {"lost"}
        node.kill()
        node.start()
        with SyncKvClient(node.address) as kv:
            kv.set("k2", b'{"name": "third"}')
        run_once(spark, index, tmp_path)
        assert keys(to, "second") == set()
        assert keys(to, "first") == {f"k{n}" for n in range(50) if n not in (1, 2)}
        assert keys(to, "third") == {"k2"}
        index.close()
    finally:
        node.kill()


def test_a_server_that_is_down_loses_nothing(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv, served(FakeOpenSearch) as server:
        to = f"opensearch+http://127.0.0.1:{server.port}/shop"
        index = Index.of({"from": upriver_node.address}, to=to, wait="300ms")
        kv.set_many({f"k{n}": b"word" for n in range(40)})

        def down(_: str, path: str, __: bytes) -> tuple[int, Any] | None:
            return (503, {"error": "shutting down"}) if path.endswith("_bulk") else None

        server.trouble.append(down)
        with pytest.raises(Unreachable, match="503"):
            run_once(spark, index, tmp_path)
        assert server.documents == {}
        server.trouble.clear()
        kv.delete("k0")
        run_once(spark, index, tmp_path)
        assert keys(to, "word") == {f"k{n}" for n in range(1, 40)}
        index.close()
