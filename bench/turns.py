"""How long slow requests delay others: a noop beside each of them, over sockets.

    python -m bench.turns [--seconds S]

The node has 1,024 vbuckets. One client keeps a few of the requests in transit; another sends one noop at a time and
measures its latency. The goal is a p99 of some 10 ms: slower work must be done in turns. The same noop without other
requests shows the latency of the machine.
"""

import argparse
import socket
import subprocess
import sys
import threading
import time

from bench.node import free_port, pinned, running
from upriver.model import vbucket_of
from upriver.wire import Request
from upriver.wire.dialects.memcached import (
    Append,
    CreateCheckpoint,
    Get,
    GetAllVbucketSeqnos,
    GetClusterConfig,
    Noop,
    Observe,
    ObservedKey,
    Set,
    SetVbucket,
    Stat,
    Touch,
    VbucketState,
)

GOAL_MS = 10.0
#: How many requests are in transit, and how many keys are stored.
AHEAD, KEYS = 4, 20_000
OBSERVED_KEYS = 500
#: Size of the large values in MiB, and requests for one in a pipeline: a small request copies all of it.
LARGE, SMALL_REQUESTS = (1, 19), 50
GROUPS = (
    "", "memory", "vbucket", "vbucket-details", "vbucket-seqno", "vbucket-positions", "failovers", "checkpoint", "dcp",
)  # fmt: skip


def requests() -> dict[str, Request | list[Request]]:
    """The requests by name: one, or several in a pipeline."""
    keys = [b"key:%012d" % number for number in range(OBSERVED_KEYS)]
    observed = tuple(ObservedKey(vbucket=vbucket_of(key, 1024), key=key) for key in keys)
    large: dict[str, Request | list[Request]] = {}
    for size in LARGE:
        key = b"%d" % size
        large[f"gets of {size} MiB"] = [Get(key=key)] * SMALL_REQUESTS
        large[f"touches of {size} MiB"] = [Touch(key=key, expiration=0)] * SMALL_REQUESTS
        large[f"appends to {size} MiB"] = [Append(key=key, value=b"+")] * SMALL_REQUESTS
    return {
        **{f"stat {name}".strip(): Stat(key=name.encode()) for name in GROUPS},
        "all seqnos": GetAllVbucketSeqnos(),
        "cluster config": GetClusterConfig(),
        "create checkpoint": CreateCheckpoint(vbucket=1),
        "set vbucket": SetVbucket(vbucket=1, state=VbucketState.ACTIVE),
        f"observe of {OBSERVED_KEYS} keys": Observe(keys=observed),
        **large,
    }


def store(port: int) -> None:
    """Store some keys in every vbucket, and large values."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        keys = [b"key:%012d" % number for number in range(KEYS)]
        connection.sendall(b"".join(Set(key=key, value=b"v", vbucket=vbucket_of(key, 1024)).encode() for key in keys))
        connection.sendall(b"".join(Set(key=b"%d" % size, value=bytes(size * 2**20)).encode() for size in LARGE))
        left = 24 * (KEYS + len(LARGE))
        while left:
            left -= len(connection.recv(1 << 20))


class Asker:
    """A client that repeats the same request, in its own thread."""

    def __init__(self, port: int, requests: list[Request]) -> None:
        self.answers = 0
        self._ended = False
        self._packet = b"".join(request.encode() for request in (*requests, Noop(opaque=0xFEEDFACE)) if requests)
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Asker":
        if self._packet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._packet:
            self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        """Send the next request when the noop after the previous one is answered."""
        end, rest = b"\xfe\xed\xfa\xce" + bytes(8), b""
        self._connection.sendall(self._packet * AHEAD)
        while not self._ended:
            rest = rest[-len(end) + 1 :] + self._connection.recv(1 << 20)
            if ended := rest.count(end):
                self.answers += ended
                self._connection.sendall(self._packet * ended)


def noop_times_s(port: int, seconds: float) -> list[float]:
    """The latency of each of many noops, one at a time, in order."""
    times, packet = [], Noop().encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            connection.sendall(packet)
            assert len(connection.recv(24)) == 24
            times.append(time.perf_counter() - start)
    return sorted(times)


def measured(port: int, seconds: float) -> str:
    """The noops of a separate process, so that the client's thread does not delay them."""
    command = [sys.executable, "-c", f"from bench.turns import told; told({port}, {seconds})"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def told(port: int, seconds: float) -> None:
    """Print what ``measured`` reads."""
    times = noop_times_s(port, seconds)
    middle, late, last = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99, 0.99999))
    verdict = "ok" if late <= GOAL_MS else "MISSED"
    print(
        f"p50 {middle:6.2f} ms, p99 {late:6.2f}, max {last:6.2f} of {len(times)}; goal p99 <= {GOAL_MS:.0f} {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="beside each request")
    options = parser.parse_args()
    port = free_port()
    with running(pinned([sys.executable, "-m", "upriver", "serve", "--port", str(port), "--log-level", "error"]), port):
        store(port)
        for name, asked in {"nothing": [], **requests()}.items():
            with Asker(port, asked if isinstance(asked, list) else [asked]) as asker:
                print(f"beside {name:22} {measured(port, options.seconds)}; {asker.answers} answers", flush=True)


if __name__ == "__main__":
    main()
