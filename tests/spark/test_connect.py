"""Through Spark Connect: a client of its own, and the example of a declarative pipeline, which runs over it."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.spark_processes import ConnectServer, connect_server, run, script
from tests.support.spark_tables import contents_at
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start

pytest.importorskip("grpc", reason="Spark Connect needs grpcio: install pyspark[connect]")

__all__ = ["connect_server"]

pytestmark = [pytest.mark.spark, pytest.mark.heavy, pytest.mark.timeout(900), pytest.mark.upriver(vbuckets=4)]
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "spark-pipelines"


def test_a_client(upriver_node: EmbeddedNode, connect_server: ConnectServer, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({"a": b'{"name": "Ann"}', "b": b'{"name": "Bob"}'})
        kv.set("a", b'{"name": "Eve"}')
    with start(vbuckets=2) as other:
        client = [sys.executable, str(Path(__file__).parent / "connect_client.py"), connect_server.address]
        said = run([*client, upriver_node.address, other.address, str(tmp_path)], tmp_path / "client.log")
        told = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert told == {"names": ["Bob", "Eve"], "connect": "pyspark.sql.connect.session"}
        assert contents_at(other.address) == contents_at(upriver_node.address) | {b"d": b"written"}
        assert contents_at(upriver_node.address).keys() == {b"a", b"c"}


@pytest.mark.slow
def test_the_example_of_a_declarative_pipeline(
    upriver_node: EmbeddedNode, connect_server: ConnectServer, tmp_path: Path
) -> None:
    """Two runs: the second takes what has changed since the first."""
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    assert text.count("file:///var/tmp/upriver-changes") == 1
    spec.write_text(text.replace("file:///var/tmp/upriver-changes", f"file://{tmp_path}/storage"))

    def update() -> None:
        command = [script("spark-pipelines"), "--remote", connect_server.address, "run", "--spec", str(spec)]
        run(command, tmp_path / "pipelines.log", UPRIVER_ADDRESS=upriver_node.address)

    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v%d" % n for n in range(100)})
        kv.set("k3", b"again")
        kv.delete("k4")
        update()
        kv.delete("k5")
        kv.set("k100", b"new")
        update()
    warehouse = connect_server.warehouse
    items = pq.read_table(warehouse / "items").to_pylist()
    assert {row["key"].encode(): row["value"] for row in items} == contents_at(upriver_node.address)
    assert len(items) == 99
    assert all(row["event_time"].year >= 2026 for row in items)
    assert pq.read_table(warehouse / "changes").num_rows == 102
    events = pq.read_table(warehouse / "events").to_pylist()
    assert sum(row["changes"] for row in events if row["event"] == "deletion") == 2
    assert sum(row["changes"] for row in events) == 102
