"""Two nodes in separate processes, so that one can really be killed."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VBUCKETS = 64


class NodeProcess:
    """``upriver serve`` on a directory; it restarts on the same port."""

    def __init__(self, directory: Path, *, initial_vbuckets: str) -> None:
        self._directory = directory
        self._initial_vbuckets = initial_vbuckets
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        command = [sys.executable, "-m", "upriver", "serve", "--data", str(self._directory), "--port", str(self._port)]
        command += ["--vbuckets", str(VBUCKETS), "--initial-vbuckets", self._initial_vbuckets, "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"served on [^:]+:(\d+)", line)
        if found is None:
            raise RuntimeError(f"the node in {self._directory} did not start: {line.strip() or 'see above'}")
        self._port = int(found[1])

    def kill(self) -> None:
        """Kill it with ``kill -9``: it cannot write anything more."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it as an operator would."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def cluster(directory: Path) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes; the first has all vbuckets."""
    nodes: list[NodeProcess] = []
    try:
        for name, initial in (("first", "all"), ("second", "none")):
            nodes.append(NodeProcess(directory / name, initial_vbuckets=initial))
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.stop()
