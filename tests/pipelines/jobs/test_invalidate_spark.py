"""The pipeline invalidate on a real Spark, with Debian's servers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.cache_servers import CacheClient, CacheServer
from tests.support.pipeline_runs import run_once
from upriver.client import SyncKvClient
from upriver.errors import NodeUnavailable
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.invalidate import Invalidate

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[CacheServer]]:
    servers = [CacheServer(program, tmp_path) for program in ("memcached", "redis-server")]
    yield servers
    for server in servers:
        server.stop()


@pytest.mark.spark
@pytest.mark.interop
def test_two_real_caches_one_of_them_down_while_spark_runs(
    spark: SparkSession, upriver_node: EmbeddedNode, servers: list[CacheServer], tmp_path: Path
) -> None:
    to = ",".join(server.url for server in servers)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"old" for n in range(20)})
        users = [CacheClient(server) for server in servers]
        for user in users:
            user.set("k3", b"old")
            user.set("other", b"stays")
        servers[1].stop()
        pipeline = Invalidate.of({"from": upriver_node.address}, to=to, wait="200ms")
        with pytest.raises(NodeUnavailable, match="redis://"):
            run_once(spark, pipeline, tmp_path)
        assert users[0].get("k3") is None
        # It comes back with the next attempt, which has to wait for it.
        again = Invalidate.of({"from": upriver_node.address}, to=to, wait="60s")
        back = threading.Timer(1.0, servers[1].start)
        back.start()
        run_once(spark, again, tmp_path)
        back.join()
        assert again.counts()["forgotten"] == 20
        assert users[0].get("other") == b"stays"
        for each in (pipeline, again):
            each.close()
        for user in users:
            user.close()
