"""How fast a TAP dump is, beside a `dcp` stream of the same items and a plain ``sendall`` of the same bytes.

    python -m bench.tap [--items N] [--rounds N]

A reader in another process reads and discards everything. Rounds alternate, the best of each counts. The last
line is the time from a write to its TAP mutation on another connection, beside a raw echo over TCP.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.streams import (
    CORES,
    KEY,
    connected,
    echoes,
    fill,
    next_packet,
    other_process,
    print_latency,
    timed,
    timed_sendall,
    until_delivered,
)
from upriver.node import EmbeddedNode, start
from upriver.wire import Framer, dcp, memcached, tap
from upriver.wire.dialects.tap import ConnectFlag
from upriver.wire.framing import MEMCACHED

PIECE_BYTES = 256 * 1024
#: The goal for a dump of 64-byte values.
GOAL_PER_S = 4_000_000


# The reader, in a separate process


def read_and_discard(host: str, port: int) -> None:
    """Request a dump, and print the time until the node closed and the number of bytes."""
    with socket.create_connection((host, port)) as peer:
        buffer = bytearray(1024 * 1024)
        started = time.perf_counter()
        peer.sendall(tap.Connect(flags=ConnectFlag.DUMP).encode())
        received = 0
        while count := peer.recv_into(buffer):
            received += count
        print(time.perf_counter() - started, received, flush=True)


def timed_dump(node: EmbeddedNode, expected: int) -> float:
    command = [sys.executable, "-m", "bench.tap", "--read", f"{node.host}:{node.port}"]
    seconds, received = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(received) == expected, f"{received} of {expected} bytes"
    return float(seconds)


def compare(value_size: int, vbuckets: int, items: int, rounds: int) -> None:
    """Print one line."""
    value = b"v" * value_size
    message = tap.Mutation(key=KEY % 1, value=value, rev_seqno=1, nru=0).encode()
    frame_size = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=value).encode())
    per_vbucket = items // vbuckets
    changes = per_vbucket * vbuckets
    total = changes * len(message) + vbuckets * 2 * 36 + 36  # each with its two controls, and the last one
    per_piece = PIECE_BYTES // len(message)
    pieces = [message * per_piece for _ in range(changes // per_piece)]
    with start(vbuckets=1024 if vbuckets > 1 else 1, initial_vbuckets=f"0-{vbuckets - 1}") as node:
        fill(node, vbuckets, per_vbucket, value)
        raw = dump = stream = float("inf")
        for _ in range(rounds):
            raw = min(raw, timed_sendall(pieces, paced=True))
            dump = min(dump, timed_dump(node, total))
            stream = min(stream, timed(node.port, changes * frame_size + vbuckets * (40 + 44), vbuckets))
    print(
        f"a dump of {vbuckets:4d} vbucket{'s' if vbuckets > 1 else ' '} with values of {value_size:5,} B:"
        f" {changes / dump / 1e6:5.2f} M items/s (goal {GOAL_PER_S / 1e6:.0f}),"
        f" {raw / dump:4.2f} of sendall, {stream / dump:4.2f} of a dcp stream",
        flush=True,
    )


def deliveries(port: int) -> Iterator[float]:
    """Seconds from sending a set on one connection to receiving its TAP mutation on another."""
    with connected(port) as writer, connected(port) as reader:
        framer = Framer(MEMCACHED)
        reader.sendall(tap.Connect(name=b"latency").encode() + memcached.Noop().encode())
        next_packet(reader, framer)
        change = memcached.Set(key=b"key", value=b"v" * 64).encode()
        mutation = tap.Mutation(key=b"key", value=b"v" * 64, rev_seqno=1, nru=0)
        yield from until_delivered(writer, reader, change, mutation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tap", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        host, port = options.read.split(":")
        read_and_discard(host, int(port))
        return
    for value_size, vbuckets, items in (
        (64, 1, options.items),
        (64, 1024, options.items),
        (1024, 1, options.items // 5),
    ):
        compare(value_size, vbuckets, items, options.rounds)
    serve = "-m", "upriver", "serve", "--port", "0", "--vbuckets", "1", "--log-level", "error"
    with other_process("-m", "bench.streams", "--echo", "raw") as raw_port, other_process(*serve) as node_port:
        os.sched_setaffinity(0, CORES[:1])
        raw = sorted(echoes(raw_port))
        print_latency("a set to its TAP mutation elsewhere", sorted(deliveries(node_port)), raw)


if __name__ == "__main__":
    main()
