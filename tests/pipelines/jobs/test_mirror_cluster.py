"""A mirror on a standalone Spark cluster of separate processes, with its table in an object store."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from tests.support.mirror_comparison import mirror_differences
from tests.support.mirror_process import MirrorProcess
from tests.support.node_process import NodeProcess
from tests.support.object_store import ObjectStore, object_store
from tests.support.sample_tables import rows_seen
from tests.support.spark_processes import cluster, settings_variable
from tests.support.spark_tables import contents_at
from upriver.client import SyncKvClient

__all__ = ["object_store"]

pytestmark = [pytest.mark.spark, pytest.mark.heavy, pytest.mark.timeout(900)]
KEYS = 3000


def documents(numbers: range, value: int) -> dict[str, bytes]:
    return {f"k{number}": json.dumps({"n": value + number, "text": "x" * 50}).encode() for number in numbers}


def test_a_cluster_that_loses_a_worker_keeps_a_table_in_an_object_store(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    storage = object_store.new_storage()
    given = ",".join(f"{name}={value}" for name, value in storage.options.items())
    environment = {"SPARK_LOCAL_IP": "127.0.0.1", **settings_variable(spark_cores_max="2")}
    with NodeProcess("--port", "0", "--vbuckets", "16") as node, cluster(tmp_path, 2) as processes:
        address = f"127.0.0.1:{node.port}"
        arguments = ["--from", address, "--to", storage.url, "--storage-options", given, "--max-rows", "600"]
        mirror = MirrorProcess(tmp_path / "run", *arguments, "--master", processes.master, **environment)
        with SyncKvClient(address) as kv, mirror:
            kv.set_many(documents(range(KEYS), 0))
            mirror.wait(lambda: mirror.batches >= 2, "two batches")
            assert [processes.executors(number) for number in range(2)] == [1, 1]
            processes.kill(0)
            kv.set_many(documents(range(KEYS // 2, KEYS), 10_000))
            for number in range(0, KEYS, 10):
                kv.delete(f"k{number}")
            mirror.wait(lambda: mirror.has_caught_up(address), "all changes")
            assert mirror.stop()["restarts"] == 0, mirror.said()
        assert mirror_differences(storage.url, address, storage.options) == []
        held = contents_at(address)
        assert len(held) == KEYS * 9 // 10
        expected = sorted((int(key[1:]), json.loads(value)["n"]) for key, value in held.items())
        assert rows_seen(storage) == expected
        assert rows_seen(storage, "polars") == expected
