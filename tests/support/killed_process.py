"""Kill a process before its n-th file operation, without a process: from then on, every operation fails."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: What writes, publishes or removes files. Reading does no harm.
OPERATIONS = ("fsync", "link", "mkdir", "replace", "unlink")


class Killed(BaseException):
    """The process is gone; nothing that it would still do takes place."""


class FileOperations:
    """Counts file operations, and kills before one of them."""

    def __init__(self, kill_before: int | None = None) -> None:
        self.count = 0
        self._kill_before = kill_before

    def wrapped(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._kill_before is not None and self.count >= self._kill_before:
                raise Killed
            self.count += 1
            return operation(*args, **kwargs)

        return run


@contextmanager
def killed_before(operation: int) -> Iterator[None]:
    """Run a block that is killed before its n-th file operation."""
    operations = FileOperations(operation)
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, operations.wrapped(getattr(os, name)))
        yield


def each_kill(run: Callable[[], object]) -> Iterator[int]:
    """Run something again and again, killed one operation later each time, until it ends by itself."""
    for number in range(1000):
        try:
            with killed_before(number):
                run()
        except Killed:
            yield number
            continue
        assert number, "there was no file operation"
        return
    raise AssertionError("it does not end")
