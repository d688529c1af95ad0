"""How close a stream comes to sending the same bytes from a buffer.

    python -m bench.streams [--megabytes N] [--rounds N] [--only memory|disk|latency]

A reader in another process reads and discards everything, once from a thread that sends pre-encoded frames with a
blocking ``sendall``, once from a node. Rounds alternate, the best of each counts, and the ratio matters most: both
share the machine with the reader. A node disables pacing on loopback, so there is a second ``sendall`` that does the
same. The last lines compare the time from a write to its delivery on another connection with a raw echo over TCP, all
between processes, the servers on one core and their client on another: with the system's placement an echo takes 8 µs
or 70.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from bench.engine_history import evict_everything
from upriver.network import do_not_pace
from upriver.node import EmbeddedNode, start
from upriver.protocol.producer.stream_scheduler import TURN_BYTES
from upriver.wire import Framer, Message, dcp, memcached
from upriver.wire.framing import MEMCACHED

RECEIVE_BYTES = 1024 * 1024
KEY = b"key:%012d"
VALUE_SIZES = (64, 1024, 16 * 1024)
#: Bytes to write before waiting for the disk queue.
FILL_BYTES = 32 << 20
LATENCY_ROUNDS = 3000
#: The last one is for servers, the first one for their client.
CORES = sorted(os.sched_getaffinity(0))


# The reader, in a separate process


def read_and_discard(port: int, total: int, vbuckets: int, first: int) -> None:
    """Request the streams, if any, and print the time for all bytes."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        if vbuckets:
            peer.sendall(dcp.Open(name=b"bench", flags=dcp.OpenFlag.PRODUCER).encode())
            peer.recv(24, socket.MSG_WAITALL)
        requests = b"".join(
            dcp.StreamRequest(vbucket=vbucket, opaque=1).encode() for vbucket in range(first, first + vbuckets)
        )
        buffer = bytearray(RECEIVE_BYTES)
        started = time.perf_counter()
        peer.sendall(requests or b"\0")
        received = 0
        while received < total:
            count = peer.recv_into(buffer)
            assert count, f"closed after {received} of {total} bytes"
            received += count
        print(time.perf_counter() - started, flush=True)


def timed(port: int, total: int, vbuckets: int, first: int = 0) -> float:
    command = [sys.executable, "-m", "bench.streams", "--read", f"{port}:{total}:{vbuckets}:{first}"]
    # Idle threads of a numerical library would spin on the measured cores.
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout)


# The senders


def timed_sendall(pieces: list[bytes], *, paced: bool) -> float:
    """A thread that sends prepared frames."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            peer, _ = listener.accept()
            with peer:
                if not paced:
                    do_not_pace(peer)
                peer.recv(1)
                for piece in pieces:
                    peer.sendall(piece)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return timed(listener.getsockname()[1], sum(map(len, pieces)), 0)
        finally:
            sender.join()


def fill(node: EmbeddedNode, vbuckets: int, changes: int, value: bytes) -> None:
    def run(vbucket: int, numbers: range) -> None:
        put = node.bucket.vbucket(vbucket).set
        for number in numbers:
            put(KEY % number, value)

    at_once = max(1, FILL_BYTES // len(value))
    for vbucket in range(vbuckets):
        for first in range(0, changes, at_once):
            node.call(run, vbucket, range(first, min(first + at_once, changes)))
            node.bucket.sync()


def frames(changes: int, value: bytes) -> list[bytes]:
    one = dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode()
    per_piece = max(1, TURN_BYTES // len(one))
    whole, rest = divmod(changes, per_piece)
    # Each piece has its own memory: a stream does not send the same cache lines repeatedly either.
    return [one * per_piece for _ in range(whole)] + [one * rest] * bool(rest)


def compare(value_size: int, vbuckets: int, megabytes: int, rounds: int) -> None:
    """Print one line."""
    value = b"v" * value_size
    size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode())
    per_vbucket = max(1, megabytes * 10**6 // size // vbuckets)
    changes = per_vbucket * vbuckets
    total = changes * size + vbuckets * (40 + 44)  # each with a response and a marker
    pieces = frames(changes, value)
    with start(vbuckets=1024 if vbuckets > 1 else 1) as node:
        fill(node, vbuckets, per_vbucket, value)
        raw, unpaced, ours = [], [], []
        for _ in range(rounds):
            raw.append(timed_sendall(pieces, paced=True))
            unpaced.append(timed_sendall(pieces, paced=False))
            ours.append(timed(node.port, total, vbuckets))
    best = min(ours)
    print(
        f"{vbuckets:5d} stream{'s' if vbuckets > 1 else ' '} of {value_size:6,} B:"
        f" {changes / best / 1e6:6.2f} M changes/s {total / best / 1e9:5.2f} GB/s;"
        f" of sendall {compared(raw, ours, total)}; of one that is not paced {compared(unpaced, ours, total)}",
        flush=True,
    )


def compared(theirs: list[float], ours: list[float], total: int) -> str:
    """The ratio of the best rounds and that of the medians."""
    medians = statistics.median(theirs) / statistics.median(ours)
    return f"{min(theirs) / min(ours):4.2f}, medians {medians:4.2f} ({total / min(theirs) / 1e9:.2f} GB/s)"


# The latency of one change: node, echoes and this program are separate processes


def next_packet(peer: socket.socket, framer: Framer) -> bytes:
    while (packet := framer.next_packet()) is None:
        framer.feed(peer.recv(65536))
    return packet


def connected(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


@contextlib.contextmanager
def other_process(*arguments: str) -> Iterator[int]:
    """A server process and its port, the last number of its first line of output."""

    def stay() -> None:
        os.sched_setaffinity(0, CORES[-1:])

    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=stay) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rstrip().rpartition(":")[2])
        finally:
            process.terminate()


def until_delivered(writer: socket.socket, reader: socket.socket, change: bytes, *expected: Message) -> Iterator[float]:
    """Seconds from sending a change until all its bytes have arrived; they are checked later."""
    answers, framer, opcodes = Framer(MEMCACHED), Framer(MEMCACHED), [message.code for message in expected]
    size = sum(len(message.encode()) for message in expected)
    for _ in range(LATENCY_ROUNDS):
        started = time.perf_counter()
        writer.sendall(change)
        data = reader.recv(65536)
        while len(data) < size:
            data += reader.recv(65536)
        yield time.perf_counter() - started
        framer.feed(data)
        assert [next_packet(reader, framer)[1] for _ in opcodes] == opcodes
        next_packet(writer, answers)


def deliveries(port: int) -> Iterator[float]:
    """Seconds from sending a set on one connection to receiving the mutation on another."""
    with connected(port) as writer, connected(port) as reader:
        framer, answers = Framer(MEMCACHED), Framer(MEMCACHED)
        writer.sendall(memcached.GetAllVbucketSeqnos().encode())
        ((_, high),) = struct.iter_unpack(">HQ", next_packet(writer, answers)[24:34])
        reader.sendall(dcp.Open(name=b"latency", flags=dcp.OpenFlag.PRODUCER).encode())
        reader.sendall(dcp.FailoverLogRequest().encode())
        next_packet(reader, framer)
        (uuid,) = struct.unpack_from(">Q", next_packet(reader, framer), 24)
        request = dcp.StreamRequest(start_seqno=high, vbucket_uuid=uuid, snapshot_start=high, snapshot_end=high)
        reader.sendall(request.encode())
        next_packet(reader, framer)
        change = memcached.Set(key=b"key", value=b"v" * 64).encode()
        mutation = dcp.Mutation(by_seqno=1, key=b"key", value=b"v" * 64)
        yield from until_delivered(writer, reader, change, dcp.SnapshotMarker(start_seqno=0, end_seqno=1), mutation)


def echo_server(kind: str) -> None:
    """Echo all input: from a blocking loop, or from asyncio, the best that a node can reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"echo on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        if kind == "asyncio":
            asyncio.run(_echo_asyncio(listener))
            return
        peer, _ = listener.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := peer.recv(4096):
                peer.sendall(data)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


async def _echo_asyncio(listener: socket.socket) -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, sock=listener)
    await server.serve_forever()


def echoes(port: int) -> Iterator[float]:
    """Seconds of round trips."""
    with connected(port) as peer:
        for _ in range(LATENCY_ROUNDS):
            started = time.perf_counter()
            peer.sendall(b"x" * 100)
            peer.recv(4096)
            yield time.perf_counter() - started


def latency(megabytes: int) -> None:
    with contextlib.ExitStack() as stack:
        me = "-m", "bench.streams"
        raw_port = stack.enter_context(other_process(*me, "--echo", "raw"))
        asyncio_port = stack.enter_context(other_process(*me, "--echo", "asyncio"))
        serve = "-m", "upriver", "serve", "--port", "0", "--vbuckets", "2", "--log-level", "error"
        node_port = stack.enter_context(other_process(*serve))
        os.sched_setaffinity(0, CORES[:1])
        raw = sorted(echoes(raw_port))
        print_latency("an echo by asyncio", sorted(echoes(asyncio_port)), raw)
        print_latency("a set to its mutation elsewhere", sorted(deliveries(node_port)), raw)
        size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=b"v" * 1024).encode())
        changes = megabytes * 10**6 // size
        write(node_port, 1, changes, b"v" * 1024)
        done = threading.Event()

        def read_again_and_again() -> None:
            while not done.is_set():
                timed(node_port, changes * size + 40 + 44, 1, first=1)

        reader = threading.Thread(target=read_again_and_again)
        reader.start()
        try:
            print_latency("the same beside a backfill", sorted(deliveries(node_port)), raw)
        finally:
            done.set()
            reader.join()


def write(port: int, vbucket: int, changes: int, value: bytes) -> None:
    """Fill a vbucket over the wire."""
    with connected(port) as peer:
        for number in range(changes):
            peer.sendall(memcached.SetQ(vbucket=vbucket, key=KEY % number, value=value).encode())
        peer.sendall(memcached.Noop().encode())
        next_packet(peer, Framer(MEMCACHED))


def print_latency(what: str, ours: list[float], raw: list[float]) -> None:
    parts = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = int(share * LATENCY_ROUNDS)
        parts.append(f"{name} {ours[at] * 1e6:.0f} µs, {ours[at] / raw[at]:.1f} x an echo ({raw[at] * 1e6:.0f} µs)")
    print(f"{what}: {'; '.join(parts)}; mean {statistics.mean(ours) * 1e6:.0f} µs", flush=True)


def from_disk(megabytes: int, rounds: int) -> None:
    """A history whose values were evicted, read from disk and sent; the file is in the page cache."""
    value = b"v" * 64
    size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode())
    changes = megabytes * 10**6 // size
    with tempfile.TemporaryDirectory() as path, start(vbuckets=1, data=path) as node:
        fill(node, 1, changes, value)
        node.call(evict_everything, node.bucket)
        best = min(timed(node.port, changes * size + 40 + 44, 1) for _ in range(rounds))
    print(f"    1 stream  of     64 B from disk: {changes / best / 1e6:6.2f} M changes/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="how much each stream sends")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("memory", "disk", "latency"), help="measure only this")
    options = parser.parse_args()
    if options.echo:
        echo_server(options.echo)
        return
    if options.read:
        with contextlib.suppress(BrokenPipeError):
            read_and_discard(*map(int, options.read.split(":")))
        return
    if options.only in (None, "memory"):
        for value_size in VALUE_SIZES:
            compare(value_size, 1, options.megabytes, options.rounds)
        # Requesting a thousand streams takes some 50 ms, which should not dominate the result.
        compare(64, 1024, 2 * options.megabytes, options.rounds)
    if options.only in (None, "disk"):
        from_disk(options.megabytes, options.rounds)
    if options.only in (None, "latency"):
        latency(options.megabytes)


if __name__ == "__main__":
    main()
