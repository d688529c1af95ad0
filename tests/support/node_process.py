"""What the tests of the node's shell share: blocking clients, a served process, and a look at what it costs."""

import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from upriver.wire import Request
from upriver.wire.dialects.memcached import Get, Noop, Set

#: Long enough for a loaded machine; a test that passes never waits for it.
PATIENCE_S = 30.0
_HEADER = struct.Struct(">BBHBBHIIQ")


class Reply(NamedTuple):
    """A response, as far as these tests care."""

    opcode: int
    status: int
    opaque: int
    cas: int
    body: bytes


def wait_until(condition: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S) -> None:
    """Return when the condition holds; fail when it does not hold in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain: {what}"
        time.sleep(0.005)


class Client:
    """A blocking connection."""

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        context: ssl.SSLContext | None = None,
        server_name: str = "localhost",
        receive_bytes: int | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(PATIENCE_S)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            self.socket.connect((host, port))
            if context is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname=server_name)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *requests: Request) -> None:
        self.socket.sendall(b"".join(request.encode() for request in requests))

    def reply(self) -> Reply:
        """The next reply; fails if there is none."""
        _, opcode, _, _, _, status, length, opaque, cas = _HEADER.unpack(self._exactly(_HEADER.size))
        return Reply(opcode, status, opaque, cas, self._exactly(length))

    def ask(self, request: Request) -> Reply:
        self.send(request)
        return self.reply()

    def set(self, key: bytes, value: bytes, vbucket: int = 0) -> None:
        assert self.ask(Set(key=key, value=value, vbucket=vbucket)).status == 0

    def get(self, key: bytes, vbucket: int = 0) -> bytes:
        reply = self.ask(Get(key=key, vbucket=vbucket))
        assert reply.status == 0, reply
        return reply.body[4:]

    def is_closed(self) -> bool:
        """Read until the node closes the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            piece = self.socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise EOFError(f"closed after {len(received)} of {size} bytes")
            received += piece
        return bytes(received)


class BackgroundClient:
    """Somebody with ordinary requests, who must be served whatever the others do."""

    def __init__(self, port: int, client: Callable[[int], Client] = Client) -> None:
        self.worst_s = 0.0
        self.rounds = 0
        self.failure: Exception | None = None
        self._client = client(port)
        self._client.set(b"probe", b"alive")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.monotonic()
                assert self._client.get(b"probe") == b"alive"
                self.worst_s = max(self.worst_s, time.monotonic() - start)
                self.rounds += 1
                self._stop.wait(0.002)
        except Exception as error:
            self.failure = error
        finally:
            self._client.close()

    def another_round(self) -> None:
        """Wait until it was served once more from now on."""
        before = self.rounds
        wait_until(lambda: self.failure is not None or self.rounds > before + 1, "another client is served")
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def served_meanwhile(port: int, worst_s_max: float = 2.0) -> Iterator[BackgroundClient]:
    """Another client, which is served all the time: never slower than this many seconds."""
    probe = BackgroundClient(port)
    try:
        yield probe
        probe.another_round()
    finally:
        probe.stop()
    assert probe.failure is None, probe.failure
    assert probe.rounds
    assert probe.worst_s < worst_s_max


class NodeProcess:
    """A process that runs ``upriver serve``."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        started = time.monotonic()
        self.log = log or Path(os.devnull)
        self._log = None if log is None else log.open("w")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("UPRIVER_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "upriver", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log or subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=variables | (environment or {}),
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.start_s = time.monotonic() - started
        found = re.search(r"served on (\S+?):(\d+)(?:, \S+ on \S+:\d+)*?(?:, metrics on \S+:(\d+))?\n", self.line)
        if found is None:
            _, self.errors = self.process.communicate(timeout=PATIENCE_S)
            raise AssertionError(f"it did not start: {self.errors}")
        self.host, self.port = found[1], int(found[2])
        self.metrics_port = int(found[3]) if found[3] else 0
        self.pid = self.process.pid

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        if self._log is not None:
            self._log.close()

    def stop(self, number: int = signal.SIGTERM) -> tuple[str, str]:
        """Ask it to stop; what else it printed, and its log."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, errors
        return output, errors


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What ``upriver serve`` says when it cannot start: one line, exit code 2."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UPRIVER_")}
    done = subprocess.run(
        [sys.executable, "-m", "upriver", "serve", *arguments],
        capture_output=True,
        text=True,
        env=variables | (environment or {}),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def descriptors(pid: int | str = "self") -> int:
    """How many files and sockets the process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_bytes(pid: int | str = "self") -> int:
    """How much memory the process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads() -> set[str]:
    """The names of this process's threads."""
    return {thread.name for thread in threading.enumerate()}


def gets(key: bytes, count: int, vbucket: int = 0) -> bytes:
    """A number of gets in a row, numbered by their opaque."""
    packet = bytearray(Get(key=key, vbucket=vbucket).encode())
    pieces = []
    for number in range(count):
        packet[12:16] = number.to_bytes(4, "big")
        pieces.append(bytes(packet))
    return b"".join(pieces)


def noops(count: int) -> bytes:
    """A number of noops in a row, numbered by their opaque: requests that the compiled loop leaves to the session."""
    return b"".join(Noop(opaque=number).encode() for number in range(count))


def opaques(client: Client, count: int) -> Sequence[int]:
    """The opaques of the next replies."""
    return [client.reply().opaque for _ in range(count)]


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
