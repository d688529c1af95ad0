"""Pipelined sets and gets: the node beside memcached, same client, same run.

    python -m bench.node [--seconds S] [--rounds N]

The client is the same for both: blocking sockets that send pipelines of 100 requests and read the answers to the end.
Servers are pinned to one core and the client to another. Each round measures both, one after the other, and what counts
is the ratio within a round, because the machine is another one from second to second: its median is printed with the
lowest and the highest, and the goal beside it. Where others use the machine too, look at the processor time for each
request instead, which is there as a ratio as well: it is what a rate comes to on a core of one's own.

Every set keeps the version that it replaces until memory is short, so at first the node takes fresh memory where
memcached overwrites its own. In a virtual machine whose host has yet to find the page, touching one for the first time
costs up to 14 us: more than all that the sets on it take. So the node is given a quota and sets enough to fill it
before the rounds, after which it drops old versions as fast as new ones come, as it would after some minutes of use.
``--fresh-memory`` measures the time before that instead.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upriver.wire.memcached import Get, Noop, Set

PIPELINE = 100
KEYS = 10_000
#: The least of memcached's rate, and the most of its time for one request.
RATE_GOAL, TIME_GOAL = 1.0, 1.5
VALUE = b"v" * 128
#: A quota for the node, and more sets than fit into it.
QUOTA, FILLING_SETS = "256MiB", 2_000_000


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


def store(port: int, sets: list[bytes], count: int = KEYS) -> None:
    """Store every key at least once: answers to gets are then all of one size."""
    client = Client(port)
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
    """The processor time that all threads of a process have taken."""
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
    ports = {"upriver": free_port(), "memcached": free_port()}
    serve = [sys.executable, "-m", "upriver", "serve", "--port", str(ports["upriver"]), "--log-level", "error"]
    if not options.fresh_memory:
        serve += ["--memory-quota", QUOTA]
    beside = [memcached, "-u", "root", "-t", "1", "-R", "320", "-m", "1024", "-l", "127.0.0.1"]
    beside += ["-p", str(ports["memcached"])]
    work = {"upriver": pipelines(1024), "memcached": pipelines(1)}
    serve, beside = pinned(serve), pinned(beside)
    with running(serve, ports["upriver"]) as ours, running(beside, ports["memcached"]) as theirs:
        pids = {"upriver": ours, "memcached": theirs}
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)
        for name, port in ports.items():
            store(port, work[name][0], KEYS if options.fresh_memory else FILLING_SETS)
        for connections in (1, 4):
            for place, kind in enumerate(("set", "get")):
                compare_rates(ports, pids, work, place, kind, connections, options.rounds, options.seconds)
        for place, kind in enumerate(("set", "get")):
            compare_times(ports, pids, work, place, kind, options.rounds)


def compare_rates(
    ports: dict[str, int],
    pids: dict[str, int],
    work: dict[str, tuple[list[bytes], list[bytes]]],
    place: int,
    kind: str,
    connections: int,
    rounds: int,
    seconds: float,
) -> None:
    """Pipelines: requests a second."""
    rates: dict[str, list[float]] = {name: [] for name in ports}
    costs: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            before = cpu_s(pids[name])
            rates[name].append(rate(port, work[name][place], connections, seconds))
            costs[name].append((cpu_s(pids[name]) - before) / (rates[name][-1] * seconds))
    ratios = [ours / theirs for ours, theirs in zip(rates["upriver"], rates["memcached"], strict=True)]
    shown = {name: f"{max(found) / 1e6:.2f} M/s" for name, found in rates.items()}
    what = f"{kind} x {PIPELINE}, {connections} connections"
    report(what, ratios, shown["upriver"], shown["memcached"], RATE_GOAL, most=False)
    report_cost(what, costs, 1 / RATE_GOAL)


def report_cost(what: str, costs: dict[str, list[float]], goal: float) -> None:
    """One line: the processor time for a request."""
    ratios = [ours / theirs for ours, theirs in zip(costs["upriver"], costs["memcached"], strict=True)]
    shown = {name: f"{min(found) * 1e6:.2f} us" for name, found in costs.items()}
    report(f"    {what}, processor time", ratios, shown["upriver"], shown["memcached"], goal, most=True)


def compare_times(
    ports: dict[str, int],
    pids: dict[str, int],
    work: dict[str, tuple[list[bytes], list[bytes]]],
    place: int,
    kind: str,
    rounds: int,
) -> None:
    """One request at a time: its median time."""
    one = {name: work[name][place][0][: len(work[name][place][0]) // PIPELINE] for name in ports}
    times: dict[str, list[float]] = {name: [] for name in ports}
    costs: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            before = cpu_s(pids[name])
            times[name].append(round_trip_s(port, one[name], 1000))
            costs[name].append((cpu_s(pids[name]) - before) / 1000)
    ratios = [ours / theirs for ours, theirs in zip(times["upriver"], times["memcached"], strict=True)]
    shown = {name: f"p50 {min(found) * 1e6:.0f} us" for name, found in times.items()}
    report(f"one {kind} at a time", ratios, shown["upriver"], shown["memcached"], TIME_GOAL, most=True)
    report_cost(f"one {kind} at a time", costs, TIME_GOAL)


if __name__ == "__main__":
    main()
