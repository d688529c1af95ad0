"""How large the data file becomes under sustained overwrites, and how long other clients wait meanwhile.

    python -m bench.data_file [--live MIB] [--history BYTES] [--history-s S] [--seconds N] [--value BYTES]

Node and writer are separate processes. The writer overwrites random keys at full speed and repeats what is refused.
Another connection sends one noop after the other. The file should stay below three times the live data and the retained
history, plus 256 MiB, and 99 of 100 noops should be answered within 20 ms.
"""

import argparse
import contextlib
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.streams import connected
from upriver.wire import memcached

VBUCKETS = 64
PIPELINE = 200
#: The writer waits this long after a refusal.
PAUSE_S = 0.002
SLACK_BYTES = 256 * 2**20
MIB = 2**20


def statistics(port: int) -> dict[str, int]:
    found: dict[str, int] = {}
    with connected(port) as peer, peer.makefile("rb") as answers:
        peer.sendall(memcached.Stat(key=b"memory").encode())
        while True:
            header = answers.read(24)
            key_bytes, body_bytes = struct.unpack_from(">H", header, 2)[0], struct.unpack_from(">I", header, 8)[0]
            body = answers.read(body_bytes)
            if not key_bytes:
                return found
            with contextlib.suppress(ValueError):
                found[body[:key_bytes].decode()] = int(body[key_bytes:])


def write_for_ever(port: int, live_bytes: int, value_bytes: int) -> None:
    """The writer, in a separate process. It prints the bytes stored and the refusals each second."""
    rng, value = random.Random(1), os.urandom(value_bytes)
    keys = live_bytes // value_bytes
    stored = refused = number = 0
    said = time.monotonic()
    with connected(port) as peer, peer.makefile("rb") as answers:
        while True:
            chosen = [number + i if number + i < keys else rng.randrange(keys) for i in range(PIPELINE)]
            number += PIPELINE
            peer.sendall(
                b"".join(memcached.Set(vbucket=k % VBUCKETS, key=b"key-%08d" % k, value=value).encode() for k in chosen)
            )
            busy = False
            for _ in chosen:
                header = answers.read(24)
                answers.read(struct.unpack_from(">I", header, 8)[0])
                if struct.unpack_from(">H", header, 6)[0]:
                    refused, busy = refused + 1, True
                else:
                    stored += value_bytes
            if busy:
                time.sleep(PAUSE_S)
            if time.monotonic() - said >= 1:
                said = time.monotonic()
                print(stored, refused, flush=True)


@contextlib.contextmanager
def serving(data: Path, history_bytes: int, history_s: float) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "upriver", "serve", "--port", str(port), "--data", str(data)]
    command += ["--vbuckets", str(VBUCKETS), "--history-bytes", str(history_bytes), "--history-s", str(history_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield port
        finally:
            process.kill()


def noops(port: int, seconds: float, each_second: Callable[[], object]) -> str:
    """Send one noop after the other; returns how long they waited."""
    waits: list[float] = []
    until, said = time.monotonic() + seconds, time.monotonic()
    with connected(port) as peer:
        while time.monotonic() < until:
            began = time.perf_counter()
            peer.sendall(memcached.Noop().encode())
            assert len(peer.recv(24)) == 24
            waits.append(time.perf_counter() - began)
            time.sleep(0.001)
            if time.monotonic() - said > 1:
                said = time.monotonic()
                each_second()
    waits.sort()
    p50, p99, longest = (waits[int((len(waits) - 1) * share)] * 1e3 for share in (0.5, 0.99, 1))
    return f"noops p50 {p50:.2f} ms, p99 {p99:.1f} ms, longest {longest:.0f} ms"


def measure(port: int, data: Path, seconds: float, live_bytes: int) -> None:
    shares, sizes = [0.0], [0]

    def look() -> None:
        sizes.append((data / "data.mdb").stat().st_size)
        limit = 3 * (live_bytes + statistics(port)["ep_history_bytes"]) + SLACK_BYTES
        shares.append(sizes[-1] / limit)

    waits = noops(port, seconds, look)
    print(f"  the file grew to {max(sizes) // MIB} MiB, at most {max(shares):.2f} of its limit; {waits}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=int, default=16)
    parser.add_argument("--history", type=int, default=2_000_000)
    parser.add_argument("--history-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--value", type=int, default=1000)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    live_bytes = options.live * MIB
    if options.write:
        write_for_ever(options.write, live_bytes, options.value)
    path = Path(tempfile.mkdtemp(prefix="upriver-bench-"))
    try:
        with serving(path / "data", options.history, options.history_s) as port:
            print(f"  without writes: {noops(port, 5, int)}")
            command = [sys.executable, "-m", "bench.data_file", "--write", str(port)]
            command += ["--live", str(options.live), "--value", str(options.value)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
                assert writer.stdout is not None
                try:
                    measure(port, path / "data", options.seconds, live_bytes)
                finally:
                    writer.kill()
                *_, last = writer.stdout.read().split("\n")[:-1] or ["0 0"]
                stored, refused = map(int, last.split())
                print(f"  {stored / MIB / options.seconds:.0f} MiB/s stored, {refused} writes refused and repeated")
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
