"""``upriver run mirror`` as a process that a test can kill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.node_contents import vbuckets
from tests.support.spark_session import PYTHONS
from upriver.model import VbucketState
from upriver.pipelines.core.directory import RunDirectory

#: A batch takes long on a busy machine, and after a crash Spark starts again.
PATIENCE_S = 240.0
_LOOK_S = 0.1


class MirrorProcess:
    """A mirror that runs until it is stopped or killed, and continues when it starts again."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        """``directory`` holds the checkpoint and what the process prints."""
        directory.mkdir(parents=True, exist_ok=True)
        self.checkpoint = directory / "checkpoint"
        self._output = directory / "mirror.log"
        self._command = [
            sys.executable, "-m", "upriver", "run", "mirror", "--checkpoint", str(self.checkpoint), *arguments
        ]  # fmt: skip
        self._environment = {**os.environ, **PYTHONS, **environment}
        self.process: subprocess.Popen[bytes] | None = None
        self._printed_before = 0

    def __enter__(self) -> "MirrorProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process id of the driver."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, with a Spark of its own."""
        assert self.process is None
        with self._output.open("ab") as out:
            self._printed_before = out.tell()
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, *, only_driver: bool = False) -> None:
        """``kill -9`` of everything, or of the driver's Python: then its Spark ends some time later."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if only_driver:
                self.process.kill()
            else:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> dict[str, Any]:
        """Stop it as an operator would, when it runs; returns its summary."""
        self.wait(lambda: self._output.stat().st_size > self._printed_before, "the first line")
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.said()
        self.process = None
        found: dict[str, Any] = json.loads(self._output.read_text().splitlines()[-1])
        return found

    def said(self) -> str:
        """What it and its Spark have printed last."""
        log = self.checkpoint / "spark.log"
        texts = [path.read_text(errors="replace")[-4000:] for path in (self._output, log) if path.exists()]
        return "\n".join(texts)

    @property
    def batches(self) -> int:
        """The number of batches that its checkpoint has as completed, over all its runs."""
        batch = RunDirectory(self.checkpoint).batch()
        return 0 if batch is None else batch.done + 1

    def has_caught_up(self, *addresses: str) -> bool:
        """Whether completed batches have all changes of the nodes."""
        owned = [status for address in addresses for status in vbuckets(address).values()]
        high = {status.number: status.high_seqno for status in owned if status.state is VbucketState.ACTIVE}
        reached = {place.vbucket: place.seqno for place in RunDirectory(self.checkpoint).reached()}
        return all(reached.get(number, 0) >= seqno for number, seqno in high.items())

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds; the process must not end meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process is None or self.process.poll() is None, f"the mirror has ended:\n{self.said()}"
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain: {what}\n{self.said()}"
            time.sleep(_LOOK_S)
