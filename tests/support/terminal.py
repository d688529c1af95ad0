"""Commands as a user types them: in processes of their own, at a terminal or in a pipe."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

COMMAND = [sys.executable, "-m", "upriver"]
PATIENCE_S = 90.0


def piped(*arguments: str, given: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a pipe."""
    return subprocess.run(
        [*COMMAND, *arguments], input=given, capture_output=True, timeout=PATIENCE_S, env=os.environ | environment
    )


class Terminal:
    """A command with a terminal in front of it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"} | environment
        environ.pop("NO_COLOR", None)
        # A session of its own with this terminal, so that Ctrl-C reaches it as a signal.
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        os.close(slave)
        self.output = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, condition: Callable[[bytes], bool]) -> bytes:
        """What is shown when the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.output):
            assert time.monotonic() < deadline, self.output
            if not self._read(0.1) and self.process.poll() is not None:
                while self._read(0):
                    pass
                assert condition(self.output), self.output
        return self.output

    def finish(self) -> int:
        """The exit code; everything that was shown is in ``output`` then."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self._read(0.1)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # the other side is gone
                data = os.read(self._master, 65536)
        self.output += data
        return bool(data)
