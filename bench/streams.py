"""How near a stream comes to sending the same bytes from a buffer.

    python -m bench.streams [--megabytes N] [--rounds N]

A reader in another process takes everything and throws it away, once from a thread that sends pre-encoded frames with a
blocking ``sendall``, once from a node. Rounds alternate, the best of each counts, and the ratio is what matters: both
share the machine with the reader. The last lines compare the way from a write to its delivery on another connection
with a raw echo over TCP.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from upriver.node import EmbeddedNode, start
from upriver.wire import Framer, dcp, memcached
from upriver.wire.framing import MEMCACHED

PIECE_BYTES = 256 * 1024
RECEIVE_BYTES = 1024 * 1024
KEY = b"key:%012d"
VALUE_SIZES = (64, 1024, 16 * 1024)
LATENCY_ROUNDS = 3000


# The reader, in a process of its own


def read_and_discard(host: str, port: int, total: int, vbuckets: int) -> None:
    """Ask for the streams, if there are any, and print how long all bytes took."""
    with socket.create_connection((host, port)) as peer:
        if vbuckets:
            peer.sendall(dcp.Open(name=b"bench", flags=dcp.OpenFlag.PRODUCER).encode())
            peer.recv(24, socket.MSG_WAITALL)
        requests = b"".join(dcp.StreamRequest(vbucket=vbucket, opaque=1).encode() for vbucket in range(vbuckets))
        buffer = bytearray(RECEIVE_BYTES)
        started = time.perf_counter()
        peer.sendall(requests or b"\0")
        received = 0
        while received < total:
            count = peer.recv_into(buffer)
            assert count, f"closed after {received} of {total} bytes"
            received += count
        print(time.perf_counter() - started, flush=True)


def timed(port: int, total: int, vbuckets: int) -> float:
    command = [sys.executable, "-m", "bench.streams", "--read", f"127.0.0.1:{port}:{total}:{vbuckets}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# What it reads from


def timed_sendall(pieces: list[bytes]) -> float:
    """A thread that sends what it has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            peer, _ = listener.accept()
            with peer:
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
    def run(vbucket: int) -> None:
        put = node.bucket.vbucket(vbucket).set
        for number in range(changes):
            put(KEY % number, value)

    for vbucket in range(vbuckets):
        node.call(run, vbucket)
    node.bucket.sync()


def frames(changes: int, value: bytes) -> list[bytes]:
    one = dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode()
    per_piece = max(1, PIECE_BYTES // len(one))
    whole, rest = divmod(changes, per_piece)
    # Each in memory of its own: a stream does not send the same cache lines over and over either.
    return [one * per_piece for _ in range(whole)] + [one * rest] * bool(rest)


def compare(value_size: int, vbuckets: int, megabytes: int, rounds: int) -> None:
    """Print one line."""
    value = b"v" * value_size
    size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode())
    per_vbucket = max(1, megabytes * 10**6 // size // vbuckets)
    changes = per_vbucket * vbuckets
    total = changes * size + vbuckets * (40 + 44)  # each with an answer and a marker
    pieces = frames(changes, value)
    with start(vbuckets=1024 if vbuckets > 1 else 1) as node:
        fill(node, vbuckets, per_vbucket, value)
        best_raw = best = float("inf")
        for _ in range(rounds):
            best_raw = min(best_raw, timed_sendall(pieces))
            best = min(best, timed(node.port, total, vbuckets))
    print(
        f"{vbuckets:5d} stream{'s' if vbuckets > 1 else ' '} of {value_size:6,} B:"
        f" {changes / best / 1e6:6.2f} M changes/s {total / best / 1e9:5.2f} GB/s,"
        f" {best_raw / best:4.2f} of sendall ({total / best_raw / 1e9:.2f} GB/s)",
        flush=True,
    )


# The way of one change


def next_packet(peer: socket.socket, framer: Framer) -> bytes:
    while (packet := framer.next_packet()) is None:
        framer.feed(peer.recv(65536))
    return packet


def deliveries(node: EmbeddedNode) -> Iterator[float]:
    """Seconds from sending a set on one connection to having the mutation on another."""
    with (
        socket.create_connection((node.host, node.port)) as writer,
        socket.create_connection((node.host, node.port)) as reader,
    ):
        for peer in (writer, reader):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        framer, answers = Framer(MEMCACHED), Framer(MEMCACHED)
        uuid, high = node.call(_position, node)
        request = dcp.StreamRequest(start_seqno=high, vbucket_uuid=uuid, snapshot_start=high, snapshot_end=high)
        reader.sendall(dcp.Open(name=b"latency", flags=dcp.OpenFlag.PRODUCER).encode() + request.encode())
        for _ in range(2):
            next_packet(reader, framer)
        change = memcached.Set(key=b"key", value=b"v" * 64).encode()
        for _ in range(LATENCY_ROUNDS):
            started = time.perf_counter()
            writer.sendall(change)
            while next_packet(reader, framer)[1] != 0x57:
                pass
            yield time.perf_counter() - started
            next_packet(writer, answers)


def _position(node: EmbeddedNode) -> tuple[int, int]:
    vbucket = node.bucket.vbucket(0)
    return vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno


def echoes() -> Iterator[float]:
    """Seconds of a round trip to a thread that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := peer.recv(4096):
                    peer.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with socket.create_connection(listener.getsockname()) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(LATENCY_ROUNDS):
                started = time.perf_counter()
                peer.sendall(b"x" * 100)
                peer.recv(4096)
                yield time.perf_counter() - started


def latency(megabytes: int) -> None:
    raw = sorted(echoes())
    with start(vbuckets=2) as node:
        print_latency("a set to its mutation elsewhere", sorted(deliveries(node)), raw)
        size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=b"v" * 1024).encode())
        changes = megabytes * 10**6 // size
        fill(node, 2, changes, b"v" * 1024)
        done = threading.Event()

        def read_again_and_again() -> None:
            while not done.is_set():
                timed(node.port, 2 * (changes * size + 40 + 44), 2)

        reader = threading.Thread(target=read_again_and_again)
        reader.start()
        try:
            print_latency("the same beside a backfill", sorted(deliveries(node)), raw)
        finally:
            done.set()
            reader.join()


def print_latency(what: str, ours: list[float], raw: list[float]) -> None:
    parts = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = int(share * LATENCY_ROUNDS)
        parts.append(f"{name} {ours[at] * 1e6:.0f} µs, {ours[at] / raw[at]:.1f} x an echo ({raw[at] * 1e6:.0f} µs)")
    print(f"{what}: {'; '.join(parts)}; mean {statistics.mean(ours) * 1e6:.0f} µs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="how much each stream sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        host, port, total, vbuckets = options.read.split(":")
        with contextlib.suppress(BrokenPipeError):
            read_and_discard(host, int(port), int(total), int(vbuckets))
        return
    for value_size in VALUE_SIZES:
        compare(value_size, 1, options.megabytes, options.rounds)
    # Asking for a thousand streams takes some 50 ms, which should not be what is measured.
    compare(64, 1024, 2 * options.megabytes, options.rounds)
    latency(options.megabytes)


if __name__ == "__main__":
    main()
