"""A node process that can be killed and started again on the same port."""

import secrets
import socket
from pathlib import Path
from typing import Any, Final

from tests.support.node_process import Client, NodeProcess
from upriver.wire.dialects.memcached import StopPersistence

_PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PORTS_BELOW: Final = 20_000


def free_port() -> int:
    """A port that is free and stays so while a node is down.

    The kernel gives it to no outgoing connection. Otherwise a client that tries to reconnect can be given the very port
    that it connects to, is then connected to itself, and the node cannot come back.
    """
    first = int(_PORT_RANGE.read_text().split()[0])
    for _ in range(100):
        port = first - 1 - secrets.randbelow(min(_PORTS_BELOW, first - 1024)) if first > 1024 else 0
        try:
            with socket.create_server(("127.0.0.1", port)) as listener:
                return int(listener.getsockname()[1])
        except OSError:
            continue
    raise AssertionError("no port is free")


class RestartableNode:
    """A node in a process of its own. After ``kill`` and ``start`` it has what was on disk."""

    host = "127.0.0.1"

    def __init__(
        self, directory: Path, ack: str = "memory", dialect: str = "dcp", vbuckets: int = 4, *arguments: str
    ) -> None:
        self.directory = directory
        self.arguments = ["--data", str(directory), "--vbuckets", str(vbuckets), "--ack", ack, *arguments]
        #: The settings that a consumer needs. The first draft has a listener of its own.
        self.settings: dict[str, Any] = {"dialect": dialect}
        if dialect == "upr_draft1":
            self.settings["stream_port"] = port = free_port()
            self.arguments += ["--listen", f"127.0.0.1:{port},dialect=upr_draft1,anonymous"]
        self.port = free_port()
        self.process = self._started(self.port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """``kill -9``."""
        self.process.__exit__()

    def start(self) -> None:
        """Start again at the same address."""
        self.process = self._started(self.port)

    def _started(self, port: int) -> NodeProcess:
        return NodeProcess("--port", str(port), *self.arguments, log=self.directory.with_suffix(".log"))

    def stop_persistence(self) -> None:
        """Stop writing to disk: what is written from now on is lost when the node is killed."""
        with Client(self.port) as client:
            assert client.ask(StopPersistence()).status == 0
