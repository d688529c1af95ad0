"""The memory of an idle connection at the node.

    python -m bench.idle_connections [--connections N] [--tls-cert FILE --tls-key FILE]

Opens as many connections as the descriptor limit allows, at most 10,000. Each sends one request, like a real client,
before it becomes idle. The numbers do not include the kernel's buffers, which are the same for every server.
"""

import argparse
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from upriver.wire.dialects.memcached import Noop, Set

GOAL_KIB = 20.0
#: Descriptors that this process and the node need for other things.
KEPT = 100


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def connect(port: int, context: ssl.SSLContext | None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 30)
    return connection if context is None else context.wrap_socket(connection)


def ask(connection: socket.socket, packet: bytes) -> None:
    connection.sendall(packet)
    assert len(connection.recv(24)) == 24


def round_trip_s(connection: socket.socket, rounds: int = 500) -> float:
    """The median time of a noop."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        ask(connection, Noop().encode())
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(options.connections, hard - KEPT)
    context = None
    command = [sys.executable, "-m", "upriver", "serve", "--port", "0", "--log-level", "warning"]
    if options.tls_cert:
        command += ["--tls-cert", options.tls_cert, "--tls-key", options.tls_key]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r":(\d+)$", process.stdout.readline().strip())
            assert ready is not None
            measure(process.pid, int(ready[1]), count, context)
        finally:
            process.terminate()


def measure(pid: int, port: int, count: int, context: ssl.SSLContext | None) -> None:
    first = connect(port, context)
    ask(first, Set(key=b"key", value=b"value").encode())
    alone_s = round_trip_s(first)
    before, start = rss_bytes(pid), time.perf_counter()
    idle = []
    for _ in range(count):
        idle.append(connect(port, context))
        ask(idle[-1], Noop().encode())
    took = time.perf_counter() - start
    each = (rss_bytes(pid) - before) / count / 1024
    print(
        f"{count:,} idle connections: {each:.1f} KiB each (goal {GOAL_KIB:.0f}), {count / took:,.0f} connects a second"
    )
    print(f"a noop meanwhile: {round_trip_s(first) * 1e6:.0f} us, alone {alone_s * 1e6:.0f} us")
    for connection in idle:
        connection.close()
    first.close()


if __name__ == "__main__":
    main()
