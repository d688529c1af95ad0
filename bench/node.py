"""Pipelined sets and gets: the node beside memcached, same client, same run.

    python -m bench.node [--seconds S] [--rounds N]

The client is the same for both: blocking sockets that send pipelines of 100 requests and read all responses. Servers
are pinned to one core and the client to another. Each round measures both, one after the other. The ratio within a
round counts, because the machine's speed varies: the median is printed with the lowest and the highest, and the goal
beside it. On a busy machine look at the CPU time per request instead, which is also printed as a ratio.

Every set keeps the version that it replaces until memory is short, so at first the node takes fresh memory where
memcached overwrites its own. In a virtual machine whose host must first provide the page, the first touch of a page
costs up to 14 us: more than all sets on it. So the benchmark gives the node a quota and fills it before the rounds.
After that the node drops old versions as fast as new ones come, as it would after some minutes of use.
``--fresh-memory`` measures the time before that instead.

Below the plain requests stand those that clients really send: of items that expire, which memcached is asked for too,
and of what it does not have, beside its plain ones: data types and tokens, as SDKs agree on them, keys beside one that
is locked, in every vbucket, and reads of a node whose writes wait for the disk.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from upriver.model import vbucket_of
from upriver.wire import Request
from upriver.wire.dialects.memcached import Feature, Get, GetLocked, Hello, Noop, Set

PIPELINE = 100
KEYS = 10_000
#: The least of memcached's rate, and the most of its time for one request.
RATE_GOAL, TIME_GOAL = 1.0, 1.5
VALUE = b"v" * 128
#: A quota for the node, and more sets than fit into it.
QUOTA, FILLING_SETS = "256MiB", 2_000_000


#: Expiries long after the end, and the duration of a lock: longer than one measurement.
EXPIRY_S, LOCK_S = 100_000, 30
#: What SDKs negotiate in their hello.
SDK = (Feature.MUTATION_SEQNO, Feature.JSON)
NAMES = [b"key:%012d" % number for number in range(KEYS)]


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, its process, and how many vbuckets it has; memcached has one."""

    port: int
    pid: int
    vbuckets: int

    def vbucket(self, key: bytes) -> int:
        return vbucket_of(key, self.vbuckets) if self.vbuckets > 1 else 0

    def pipelines(self, request: Callable[[bytes, int], Request]) -> list[bytes]:
        """A request for every key, in pipelines."""
        requests = [request(key, self.vbucket(key)).encode() for key in NAMES]
        return [b"".join(requests[at : at + PIPELINE]) for at in range(0, KEYS, PIPELINE)]


def set_(prefix: bytes = b"", datatype: int = 0, expiration: int = 0) -> Callable[[bytes, int], Request]:
    return lambda key, vbucket: Set(
        key=prefix + key, value=VALUE, vbucket=vbucket, datatype=datatype, expiration=expiration
    )


def get(prefix: bytes = b"") -> Callable[[bytes, int], Request]:
    return lambda key, vbucket: Get(key=prefix + key, vbucket=vbucket)


def lock_some(server: Server) -> None:
    """A lock in (nearly) every vbucket, on keys that are not requested."""
    client = Client(server.port)
    for number in range(4 * server.vbuckets):
        key = b"locked:%d" % number
        vbucket = server.vbucket(key)
        client.answer_bytes(Set(key=key, vbucket=vbucket).encode())
        client.answer_bytes(GetLocked(key=key, vbucket=vbucket, lock_time=LOCK_S).encode())
    client.socket.close()


@dataclass(frozen=True)
class Case:
    """A case to measure: the requests to the node and to memcached."""

    what: str
    ours: list[bytes]
    theirs: list[bytes]
    #: What the node's client negotiates first.
    features: tuple[Feature, ...] = ()
    #: Done before each round.
    prepare: Callable[[], object] = lambda: None


class Client:
    """A blocking connection that knows the size of a pipeline's responses."""

    def __init__(self, port: int, features: tuple[Feature, ...] = ()) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(1 << 20)
        if features:
            self.answer_bytes(Hello(features=features).encode())

    def answer_bytes(self, pipeline: bytes) -> int:
        """Send it once with a noop after it, and count the bytes before the noop's response."""
        self.socket.sendall(pipeline + Noop(opaque=0xFEEDFACE).encode())
        received = b""
        while not received.endswith(b"\xfe\xed\xfa\xce" + bytes(8)):
            received += self.socket.recv(1 << 20)
        return len(received) - 24

    def receive(self, size: int) -> None:
        while size > 0:
            size -= self.socket.recv_into(self.buffer, min(size, len(self.buffer)))


def rate(port: int, work: list[bytes], connections: int, seconds: float, features: tuple[Feature, ...] = ()) -> float:
    """Requests per second over this many connections, each with one pipeline in transit."""
    clients = [Client(port, features) for _ in range(connections)]
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


def store(port: int, sets: list[bytes], count: int = KEYS, features: tuple[Feature, ...] = ()) -> None:
    """Store every key at least once, so that all responses to gets have one size."""
    client = Client(port, features)
    size = client.answer_bytes(sets[0])
    for pipeline in sets * (count // KEYS):
        client.socket.sendall(pipeline)
        client.receive(size)
    client.socket.close()


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


def cpu_s(pid: int) -> float:
    """The CPU time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


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
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def pinned(command: list[str]) -> list[str]:
    """The command on the first core; this process takes the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or shutil.which("taskset") is None:
        return command
    return ["taskset", "-c", str(cores[0]), *command]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(what: str, ratios: list[float], ours: str, theirs: str, goal: float, *, most: bool) -> None:
    """One line: the median ratio with its spread, and the goal."""
    middle = statistics.median(ratios)
    good = middle <= goal if most else middle >= goal
    print(
        f"{what}: {middle:4.2f} x memcached ({min(ratios):.2f} to {max(ratios):.2f}), goal {'<=' if most else '>='} "
        f"{goal:.1f} {'ok' if good else 'MISSED'}; {ours}, memcached {theirs} at their best",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fresh-memory", action="store_true", help="leave it to the rounds to fill the memory")
    options = parser.parse_args()
    memcached = shutil.which("memcached")
    if memcached is None:
        raise SystemExit("memcached is not installed: there is nothing to compare with")
    ports = [free_port() for _ in range(3)]
    beside = [memcached, "-u", "root", "-t", "1", "-R", "320", "-m", "1024", "-l", "127.0.0.1", "-p", str(ports[1])]
    quota = [] if options.fresh_memory else ["--memory-quota", QUOTA]
    with (
        tempfile.TemporaryDirectory() as directory,
        running(pinned(serve(ports[0], *quota)), ports[0]) as ours,
        running(pinned(beside), ports[1]) as theirs,
        running(pinned(serve(ports[2], "--ack", "disk", "--data", directory)), ports[2]) as durable,
    ):
        node, other = Server(ports[0], ours, 1024), Server(ports[1], theirs, 1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)
        compare(node, other, Server(ports[2], durable, 1024), options)


def serve(port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "upriver", "serve", "--port", str(port), "--log-level", "error", *options]


def compare(node: Server, other: Server, durable: Server, options: argparse.Namespace) -> None:
    """Everything, case by case."""
    plain_set = Case("set", node.pipelines(set_()), other.pipelines(set_()))
    plain_get = Case("get", node.pipelines(get()), other.pipelines(get()))
    for server in (node, other):
        store(server.port, server.pipelines(set_()), KEYS if options.fresh_memory else FILLING_SETS)
        store(server.port, server.pipelines(set_(b"e", expiration=EXPIRY_S)))
    store(node.port, node.pipelines(set_(b"j", datatype=1)), features=SDK)
    store(durable.port, durable.pipelines(set_()))
    for connections in (1, 4):
        for case in (plain_set, plain_get):
            compare_rates(case, node, other, connections, options)
    expiring = set_(b"e", expiration=EXPIRY_S)
    for case in (
        Case("set that expires", node.pipelines(expiring), other.pipelines(expiring)),
        Case("get of what expires", node.pipelines(get(b"e")), other.pipelines(get(b"e"))),
        Case("set of an SDK", node.pipelines(set_(b"j", datatype=1)), plain_set.theirs, SDK),
        Case("get of an SDK", node.pipelines(get(b"j")), plain_get.theirs, SDK),
        Case("set beside a lock", plain_set.ours, plain_set.theirs, prepare=lambda: lock_some(node)),
        Case("get beside a lock", plain_get.ours, plain_get.theirs, prepare=lambda: lock_some(node)),
    ):
        compare_rates(case, node, other, 1, options)
    compare_rates(Case("get, ack disk", plain_get.ours, plain_get.theirs), durable, other, 1, options)
    for case in (plain_set, plain_get):
        compare_times(case, node, other, options.rounds)


def compare_rates(case: Case, node: Server, other: Server, connections: int, options: argparse.Namespace) -> None:
    """Pipelines: requests a second."""
    rates: dict[str, list[float]] = {"upriver": [], "memcached": []}
    costs: dict[str, list[float]] = {"upriver": [], "memcached": []}
    for _ in range(options.rounds):
        case.prepare()
        for name, server, work, features in (
            ("upriver", node, case.ours, case.features),
            ("memcached", other, case.theirs, ()),
        ):
            before = cpu_s(server.pid)
            rates[name].append(rate(server.port, work, connections, options.seconds, features))
            costs[name].append((cpu_s(server.pid) - before) / (rates[name][-1] * options.seconds))
    ratios = [ours / theirs for ours, theirs in zip(rates["upriver"], rates["memcached"], strict=True)]
    shown = {name: f"{max(found) / 1e6:.2f} M/s" for name, found in rates.items()}
    what = f"{case.what} x {PIPELINE}, {connections} connection{'s' if connections > 1 else ''}"
    report(what, ratios, shown["upriver"], shown["memcached"], RATE_GOAL, most=False)
    report_cost(what, costs, 1 / RATE_GOAL)


def report_cost(what: str, costs: dict[str, list[float]], goal: float) -> None:
    """One line: the CPU time per request."""
    ratios = [ours / theirs for ours, theirs in zip(costs["upriver"], costs["memcached"], strict=True)]
    shown = {name: f"{min(found) * 1e6:.2f} us" for name, found in costs.items()}
    report(f"    {what}, processor time", ratios, shown["upriver"], shown["memcached"], goal, most=True)


def compare_times(case: Case, node: Server, other: Server, rounds: int) -> None:
    """One request at a time: its median time."""
    times: dict[str, list[float]] = {"upriver": [], "memcached": []}
    costs: dict[str, list[float]] = {"upriver": [], "memcached": []}
    for _ in range(rounds):
        for name, server, work in (("upriver", node, case.ours), ("memcached", other, case.theirs)):
            before = cpu_s(server.pid)
            times[name].append(round_trip_s(server.port, work[0][: len(work[0]) // PIPELINE], 1000))
            costs[name].append((cpu_s(server.pid) - before) / 1000)
    ratios = [ours / theirs for ours, theirs in zip(times["upriver"], times["memcached"], strict=True)]
    shown = {name: f"p50 {min(found) * 1e6:.0f} us" for name, found in times.items()}
    report(f"one {case.what} at a time", ratios, shown["upriver"], shown["memcached"], TIME_GOAL, most=True)
    report_cost(f"one {case.what} at a time", costs, TIME_GOAL)


if __name__ == "__main__":
    main()
