"""Pipelined sets and gets: the node beside memcached, same client, same run.

    python -m bench.node [--seconds S]

The client is the same for both: blocking sockets that send pipelines of 100 requests and read the answers to the end.
"""

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from upriver.wire.memcached import Get, Noop, Set

PIPELINE = 100
KEYS = 10_000
VALUE = b"v" * 128


def pipelines(vbuckets: int) -> tuple[list[bytes], list[bytes]]:
    """Requests in pipelines: all sets, all gets."""
    from upriver.model import vbucket_of

    keys = [b"key:%012d" % number for number in range(KEYS)]
    placed = [(key, vbucket_of(key, vbuckets) if vbuckets > 1 else 0) for key in keys]
    sets = [Set(key=key, value=VALUE, vbucket=vbucket).encode() for key, vbucket in placed]
    gets = [Get(key=key, vbucket=vbucket).encode() for key, vbucket in placed]

    def joined(requests: list[bytes]) -> list[bytes]:
        return [b"".join(requests[at : at + PIPELINE]) for at in range(0, KEYS, PIPELINE)]

    return joined(sets), joined(gets)


class Client:
    """A blocking connection that knows how many bytes a pipeline's answers take."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(1 << 20)

    def answer_bytes(self, pipeline: bytes) -> int:
        """Send it once with a noop behind, and count what comes before the noop's answer."""
        self.socket.sendall(pipeline + Noop(opaque=0xFEEDFACE).encode())
        received = b""
        while not received.endswith(b"\xfe\xed\xfa\xce" + bytes(8)):
            received += self.socket.recv(1 << 20)
        return len(received) - 24

    def receive(self, size: int) -> None:
        while size > 0:
            size -= self.socket.recv_into(self.buffer, min(size, len(self.buffer)))


def rate(port: int, work: list[bytes], connections: int, seconds: float) -> float:
    """Requests a second over so many connections, each with one pipeline on its way."""
    clients = [Client(port) for _ in range(connections)]
    size = clients[0].answer_bytes(work[0])
    done, place, end = 0, 0, time.perf_counter() + seconds
    start = time.perf_counter()
    while time.perf_counter() < end:
        for client in clients:
            client.socket.sendall(work[place % len(work)])
            place += 1
        for client in clients:
            client.receive(size)
            done += PIPELINE
    took = time.perf_counter() - start
    for client in clients:
        client.socket.close()
    return done / took


def round_trip_s(port: int, request: bytes, rounds: int = 3000) -> float:
    """The median time of one request at a time."""
    client = Client(port)
    size = client.answer_bytes(request)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        client.socket.sendall(request)
        client.receive(size)
        times.append(time.perf_counter() - start)
    client.socket.close()
    return statistics.median(times)


@contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    memcached = shutil.which("memcached")
    if memcached is None:
        raise SystemExit("memcached is not installed: there is nothing to compare with")
    ports = {"upriver": free_port(), "memcached": free_port()}
    serve = [sys.executable, "-m", "upriver", "serve", "--port", str(ports["upriver"]), "--log-level", "error"]
    beside = [
        memcached,
        "-u",
        "root",
        "-t",
        "1",
        "-R",
        "320",
        "-m",
        "1024",
        "-l",
        "127.0.0.1",
        "-p",
        str(ports["memcached"]),
    ]
    work = {"upriver": pipelines(1024), "memcached": pipelines(1)}
    with running(serve, ports["upriver"]), running(beside, ports["memcached"]):
        for connections in (1, 4):
            for place, kind in enumerate(("set", "get")):
                best = dict.fromkeys(ports, 0.0)
                for _ in range(options.rounds):
                    for name, port in ports.items():
                        best[name] = max(best[name], rate(port, work[name][place], connections, options.seconds / 2))
                ratio = best["upriver"] / best["memcached"]
                print(
                    f"{kind} x {PIPELINE}, {connections} connections: {best['upriver'] / 1e6:5.2f} M/s, "
                    f"memcached {best['memcached'] / 1e6:5.2f} M/s, {ratio:4.2f} of it"
                )
        for place, kind in enumerate(("set", "get")):
            one = {name: work[name][place][0][: len(work[name][place][0]) // PIPELINE] for name in ports}
            times = {name: min(round_trip_s(port, one[name]) for _ in range(3)) for name, port in ports.items()}
            ours, theirs = times["upriver"], times["memcached"]
            print(
                f"one {kind} at a time: p50 {ours * 1e6:5.1f} us, memcached {theirs * 1e6:5.1f} us, "
                f"{ours / theirs:4.2f} of it"
            )


if __name__ == "__main__":
    main()
