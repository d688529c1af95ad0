"""``upriver run mirror`` as a client of Spark Connect: the pipeline runs on the server, this process only watches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytest.importorskip("grpc", reason="Spark Connect needs grpcio: install pyspark[connect]")

from tests.support.mirror_comparison import mirror_differences
from tests.support.mirror_process import MirrorProcess
from tests.support.spark_processes import ConnectServer, connect_server
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode

__all__ = ["connect_server"]

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.upriver(vbuckets=8)
def test_a_table_is_kept_by_a_server_of_spark_connect(
    upriver_node: EmbeddedNode, connect_server: ConnectServer, tmp_path: Path
) -> None:
    address, table, server = upriver_node.address, tmp_path / "table", connect_server.address
    with SyncKvClient(address) as kv:
        command = [sys.executable, "-m", "upriver", "run", "mirror", "--from", address, "--master", server]

        def once(*arguments: str) -> subprocess.CompletedProcess[str]:
            done = [*command, "--checkpoint", str(tmp_path / "checkpoint"), "--once", *arguments]
            return subprocess.run(done, capture_output=True, text=True, timeout=300, check=False)

        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(200)})
        done = once("--to", str(table))
        assert done.returncode == 0, done.stderr
        assert mirror_differences(table, address) == []
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["rows"], summary["lag_changes"], summary["restarts"]) == (200, 0, 0)
        assert summary["batches"] >= 1
        kv.set("k3", b'{"n": -3}')
        kv.delete("k4")
        mirror = MirrorProcess(tmp_path, "--from", address, "--to", str(table), "--master", server)
        with mirror:  # it continues, and does not end by itself
            mirror.wait(lambda: mirror_differences(table, address) == [], "table and node to agree")
            kv.set("k5", b'{"n": -5}')
            mirror.wait(lambda: mirror_differences(table, address) == [], "table and node to agree")
            assert mirror.stop()["rows"] == 3
        done = once("--to", str(tmp_path / "other"))
        assert done.returncode == 1
        assert "belongs to another pipeline" in done.stderr
        assert done.stderr.count("\n") <= 2, done.stderr
