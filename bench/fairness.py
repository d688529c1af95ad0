"""How long a live change waits beside a backfill of a million items.

    python -m bench.fairness [--items N] [--rounds N]

Node, writer and reader are separate processes. The writer sends one change after the other, each with the time as its
value. The reader has a live stream and a backfill, on one connection and then on two, and measures the age of each live
change at its arrival, from the first to the last change of the backfill.
"""

import argparse
import contextlib
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pyarrow.compute as pc

from bench.streams import KEY, connected, next_packet, other_process
from upriver.wire import Framer, dcp, memcached
from upriver.wire.codec.columns import ChangeBatch, ChangeDecoder
from upriver.wire.framing import MEMCACHED

LIVE, BACKFILL = 0, 1
#: Receive buffer of the reader: a live change waits behind all of it, whatever the node does.
RECEIVE_BUFFER_BYTES = 256 * 1024
GOAL_S = 0.05
#: Pause of the writer after each change, so that the reader does not become the bottleneck.
PAUSE_S = 0.0005
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def write_for_ever(port: int) -> None:
    """The writer, in a separate process."""
    with connected(port) as peer:
        framer, number = Framer(MEMCACHED), 0
        while True:
            number += 1
            change = memcached.Set(vbucket=LIVE, key=b"%d" % number, value=repr(time.perf_counter()).encode())
            peer.sendall(change.encode())
            next_packet(peer, framer)
            if number == 1:
                print("writing", flush=True)
            time.sleep(PAUSE_S)


def fill(port: int, items: int) -> None:
    with connected(port) as peer:
        for first in range(0, items, 1000):
            numbers = range(first, min(items, first + 1000))
            peer.sendall(
                b"".join(memcached.SetQ(vbucket=BACKFILL, key=KEY % n, value=b"v" * 64).encode() for n in numbers)
            )
        peer.sendall(memcached.Noop().encode())
        assert next_packet(peer, Framer(MEMCACHED))[1] == memcached.Noop.declaration.opcode


@contextlib.contextmanager
def writing(port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.fairness", "--write", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


def open_streams(port: int, name: bytes, *vbuckets: int) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    peer.connect(("127.0.0.1", port))
    peer.sendall(dcp.Open(name=name, flags=dcp.OpenFlag.PRODUCER).encode())
    for vbucket in vbuckets:
        peer.sendall(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket).encode())
    return peer


def delays(peers: list[socket.socket], items: int) -> list[float]:
    """The age of each live change at its arrival during the backfill."""
    found: list[float] = []
    taken, began, buffer = 0, time.perf_counter(), bytearray(1 << 20)
    decoders = {peer: ChangeDecoder(dcp.dcp) for peer in peers}
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while taken < items:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                size = key.fileobj.recv_into(buffer)
                assert size, "the node has closed the connection"
                now, decoder = time.perf_counter(), decoders[key.fileobj]
                decoder.feed(bytes(buffer[:size]))
                for item in decoder:
                    if isinstance(item, ChangeBatch):
                        live = item.records.filter(pc.equal(item.records["vbucket"], LIVE))
                        taken += len(item) - live.num_rows
                        if 0 < taken < items:
                            written = [float(value.as_py()) for value in live["value"]]
                            found += [now - at for at in written if at > began]
    return found


def measure(port: int, what: str, items: int, rounds: int, *connections: tuple[int, ...]) -> None:
    """Print one line."""
    best: list[float] = []
    for _ in range(rounds):
        with contextlib.ExitStack() as stack:
            stack.enter_context(writing(port))
            peers = [
                stack.enter_context(open_streams(port, b"reader %d" % number, *vbuckets))
                for number, vbuckets in enumerate(connections)
            ]
            found = sorted(delays(peers, items))
            assert found, "no live change came while the backfill was on its way"
            if not best or found[len(found) // 2] < best[len(best) // 2]:
                best = found
    parts = [f"{name} {best[int(share * (len(best) - 1))] * 1e3:.1f}" for name, share in SHARES.items()]
    print(f"{what}: {', '.join(parts)} ms of {len(best):,} changes (goal: {GOAL_S * 1e3:.0f})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write_for_ever(given.write)
        return
    pc.equal(BACKFILL, LIVE)  # the first comparison imports pandas, for seconds in which the stream would not be read
    serve = "-m", "upriver", "serve", "--port", "0", "--vbuckets", "2", "--log-level", "error"
    with other_process(*serve) as port:
        fill(port, given.items)
        live, backfill = (LIVE,), (BACKFILL,)
        measure(port, "a live change beside a backfill, one connection ", given.items, given.rounds, (*live, *backfill))
        measure(port, "a live change beside a backfill, two connections", given.items, given.rounds, live, backfill)


if __name__ == "__main__":
    main()
