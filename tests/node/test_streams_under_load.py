"""Nodes in processes of their own, under load: who delays whom, and who costs what."""

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest

from upriver.wire import Framer, dcp, memcached
from upriver.wire.columns import ChangeBatch, ChangeDecoder
from upriver.wire.framing import MEMCACHED

TIMEOUT_S = 60.0
BACKFILL_ITEMS = 1_000_000
BACKFILL, LIVE = 1, 0


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[int, int]]:
    """A node in another process: its port and its process id."""
    command = [sys.executable, "-m", "upriver", "serve", "--port", "0", "--vbuckets", "2", "--log-level", "error"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rstrip().rpartition(":")[2]), process.pid
        finally:
            process.terminate()


def connected(port: int, receive_buffer_bytes: int = 0) -> socket.socket:
    peer = socket.socket()
    if receive_buffer_bytes:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    peer.settimeout(TIMEOUT_S)
    peer.connect(("127.0.0.1", port))
    return peer


def fill(port: int, vbucket: int, count: int, value: bytes) -> None:
    """Set keys, without waiting for each."""
    head, tail = memcached.SetQ(vbucket=vbucket, key=b"0" * 12, value=value).encode().split(b"0" * 12, 1)
    with connected(port) as peer:
        for first in range(0, count, 10_000):
            peer.sendall(b"".join(b"%b%012d%b" % (head, first + number, tail) for number in range(10_000)))
        peer.sendall(memcached.Noop().encode())
        framer = Framer(MEMCACHED)
        while (packet := framer.next_packet()) is None:
            framer.feed(peer.recv(4096))
        assert packet[1] == memcached.Noop.declaration.opcode, "nothing was refused before it"


def open_streams(peer: socket.socket, *vbuckets: int) -> None:
    peer.sendall(dcp.Open(name=b"reader", flags=dcp.OpenFlag.PRODUCER).encode())
    for vbucket in vbuckets:
        peer.sendall(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket).encode())


def test_a_backfill_of_a_million_items_does_not_delay_a_live_change() -> None:
    with served() as (port, _):
        fill(port, BACKFILL, BACKFILL_ITEMS, b"v" * 16)
        done = threading.Event()

        def write() -> None:
            with connected(port) as writer:
                number = 0
                while not done.is_set():
                    number += 1
                    change = memcached.Set(vbucket=LIVE, key=b"%d" % number, value=repr(time.perf_counter()).encode())
                    writer.sendall(change.encode())
                    writer.recv(4096)

        with connected(port) as reader:
            open_streams(reader, LIVE)
            writer = threading.Thread(target=write)
            writer.start()
            try:
                reader.sendall(dcp.StreamRequest(vbucket=BACKFILL, opaque=BACKFILL).encode())
                delays = delays_beside_the_backfill(reader)
            finally:
                done.set()
                writer.join()
    assert len(delays) >= 5
    assert statistics.median(delays) < 0.05


def delays_beside_the_backfill(reader: socket.socket) -> list[float]:
    """How old each live change was when it was here, from the first to the last change of the backfill."""
    decoder, buffer = ChangeDecoder(dcp.dcp), bytearray(1 << 20)
    delays, taken = [], 0
    while taken < BACKFILL_ITEMS:
        size = reader.recv_into(buffer)
        assert size
        now = time.perf_counter()
        decoder.feed(bytes(buffer[:size]))
        for item in decoder:
            if isinstance(item, ChangeBatch):
                live = item.records.filter(pc.equal(item.records["vbucket"], LIVE))
                taken += len(item) - live.num_rows
                if 0 < taken < BACKFILL_ITEMS:
                    delays += [now - float(value.as_py()) for value in live["value"]]
    return delays


def resident_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc to ask")
def test_a_consumer_that_stops_reading_costs_little_however_many_changes_arrive() -> None:
    taken = {}
    for consumers in (0, 4):
        with served() as (port, pid), contextlib.ExitStack() as stack:
            for number in range(consumers):
                peer = stack.enter_context(connected(port, receive_buffer_bytes=4096))
                name = b"sleeper %d" % number
                peer.sendall(dcp.Open(name=name, flags=dcp.OpenFlag.PRODUCER).encode())
                for vbucket in (LIVE, BACKFILL):
                    peer.sendall(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket).encode())
            for vbucket in (LIVE, BACKFILL):
                fill(port, vbucket, 20_000, b"v" * 2000)
            taken[consumers] = resident_bytes(pid)
    assert taken[4] - taken[0] < 32 * 2**20
