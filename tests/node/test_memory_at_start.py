"""The memory of a node in a process of its own, after clients have filled it over sockets."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.support.node_process import PATIENCE_S, NodeProcess
from upriver.client import SyncKvClient

MIB = 2**20


def start_peak_bytes(*arguments: str) -> int:
    """How much memory of its own a node takes until it serves; afterwards it is stopped."""
    command = [sys.executable, "-m", "upriver", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        status, peak, give_up = Path(f"/proc/{process.pid}/status"), 0, time.monotonic() + PATIENCE_S
        while not select.select([process.stdout], [], [], 0.002)[0]:
            assert time.monotonic() < give_up
            # Not those of the file, which the kernel can take back at any time.
            peak = max(peak, int(status.read_text().split("RssAnon:")[1].split()[0]) * 1024)
        line = process.stdout.readline()
        process.terminate()
    assert b"served on" in line
    return peak


def test_opening_respects_the_memory_quota_inside_a_vbucket(tmp_path: Path) -> None:
    data, value = str(tmp_path / "data"), os.urandom(2**16)
    with NodeProcess("--port", "0", "--vbuckets", "1", "--data", data) as node:
        with SyncKvClient(f"127.0.0.1:{node.port}") as kv:  # which repeats what is refused for now
            assert kv.set_many({b"%d" % number: value for number in range(1600)}) == {}
        node.stop()
    empty = start_peak_bytes("--vbuckets", "1", "--data", str(tmp_path / "empty"))
    peak = start_peak_bytes("--vbuckets", "1", "--data", data, "--memory-quota", "8MiB")
    assert peak - empty < 60 * MIB, "100 MiB are stored"
