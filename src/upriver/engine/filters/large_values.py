"""Judges large values in a process of its own, so that parsing them delays no client.

Parsing twenty megabytes of JSON takes seconds, during which Python runs nothing else, in no thread. So a second process
parses, and a thread waits for it. The process starts with the first large value that a filter has to look at. It also
keeps the memory of the parsed document away from the node. If it is killed, the value passes: the consumer can drop it.

Few values wait at a time, because each of them is held in memory. A reader that finds no room is called when there is.
"""

import contextlib
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from upriver.engine.filters import json_match
from upriver.engine.filters.value_filter import ValueFilter
from upriver.model import SNAPPY, plain

#: This many values may wait at a time.
WAITING_MAX: Final = 4


class LargeValues:
    """The large values of a bucket that filters have to look at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0
        self._no_room: deque[Callable[[bool | None], object]] = deque()
        self._closed = False

    def judge(
        self, wanted: ValueFilter, value: memoryview, datatype: int, done: Callable[[bool | None], object]
    ) -> None:
        """Tell ``done`` whether the value passes; or None if there was no room for it and there may be now.

        ``done`` is called in another thread.
        """
        with self._lock:
            if self._closed:
                return
            if self._waiting >= WAITING_MAX:
                self._no_room.append(done)
                return
            self._waiting += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="upriver-values")
            self._pool.submit(self._run, wanted, value, datatype, done)

    def _run(
        self, wanted: ValueFilter, value: memoryview, datatype: int, done: Callable[[bool | None], object]
    ) -> None:
        try:
            passes = self._ask(wanted, plain(bytes(value), datatype) if datatype & SNAPPY else value)
        except (OSError, ValueError):
            self._stop_process()
            passes = True
        with self._lock:
            self._waiting -= 1
            others = list(self._no_room)
            self._no_room.clear()
        done(passes)
        for each in others:
            each(None)

    def _ask(self, wanted: ValueFilter, document: bytes | memoryview) -> bool:
        if self._process is None:
            command = [sys.executable, "-I", json_match.__file__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process, question = self._process, pickle.dumps(wanted.question)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json_match.SIZES.pack(len(question), len(document)) + question)
        process.stdin.write(document)
        process.stdin.flush()
        answer = process.stdout.read(1)
        if not answer:
            raise OSError("the process has ended")
        return answer != b"\0"

    def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()

    def close(self) -> None:
        """Stop the process. Values that still wait are never checked."""
        with self._lock:
            self._closed = True
            self._no_room.clear()
            pool = self._pool
        if self._process is not None:
            self._process.kill()  # ends the question that the thread waits for
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self._stop_process()
