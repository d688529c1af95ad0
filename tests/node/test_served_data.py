"""The data file and the memory of a node in a process of its own, under what clients send over sockets."""

import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.node_process import PATIENCE_S, Client, NodeProcess, served_meanwhile
from upriver.client import SyncKvClient
from upriver.wire import Status
from upriver.wire.dialects.memcached import Set, Stat

MIB = 2**20


def statistic(client: Client, group: bytes, name: str) -> int:
    client.send(Stat(key=group))
    found = 0
    while (body := client.reply().body) != b"":
        if body.startswith(name.encode()):
            found = int(body.removeprefix(name.encode()))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_file_stays_bounded_under_sustained_overwrites(tmp_path: Path) -> None:
    """It grew by all that was written. A writer at full speed now gets temporary failures, and repeats those writes."""
    live_bytes, rng = 16 * MIB, random.Random(1)
    values = [os.urandom(4096) for _ in range(20)]
    options = ("--vbuckets", "16", "--history-bytes", "2000000", "--history-s", "1", "--port", "0")
    stored, sizes, file = 0, [0], tmp_path / "data" / "data.mdb"
    with NodeProcess(*options, "--data", str(tmp_path / "data")) as node, Client(node.port) as writer:
        with served_meanwhile(node.port):
            while stored < 1200 * MIB:
                chosen = [rng.randrange(live_bytes // 4096) for _ in range(200)]
                writer.send(*(Set(key=b"%d" % n, value=rng.choice(values), vbucket=n % 16) for n in chosen))
                statuses = dict.fromkeys((Status.SUCCESS, Status.ETMPFAIL), 0)
                for _ in chosen:
                    statuses[Status(writer.reply().status)] += 1
                stored += 4096 * statuses[Status.SUCCESS]
                if statuses[Status.ETMPFAIL]:
                    time.sleep(0.002)  # a client that is told to try again later
                sizes.append(file.stat().st_size)
                history_bytes = statistic(writer, b"memory", "ep_history_bytes")
                assert sizes[-1] <= 3 * (live_bytes + history_bytes) + 256 * MIB
        assert max(sizes) > live_bytes


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
