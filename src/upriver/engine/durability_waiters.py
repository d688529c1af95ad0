"""Waiters for the disk: until one change is stored, or until everything done so far is.

Each waiter is told exactly one thing: the change is stored, a write failed, or the change is undone. ``cancel`` ends a
wait without that. After a failed write the change stays in memory, is written again and may be on disk later. A change
is undone when its copy rolls back below it. A waiter without a callback for these cases goes on waiting. All methods
are called under the journal's lock; the callbacks they return run outside of it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock

from upriver.engine.table import Table
from upriver.errors import StorageError

Done = Callable[[], object]
Failed = Callable[[StorageError], object]


def not_on_disk(error: StorageError) -> str:
    """What a client is told of a change that was made, but not stored because of this error."""
    why = f"the change was made but is not on disk: {error.why}"
    return f"{why}; it is stored when the disk takes writes again, and lost if the node stops before"


class Wait:
    """One waiter, and the handle that cancels it."""

    __slots__ = ("_done", "_failed", "_home", "_lock", "_undone", "seqno")

    def __init__(self, lock: RLock, seqno: int, done: Done, failed: Failed | None, undone: Done | None = None) -> None:
        self.seqno = seqno
        self._lock = lock
        self._done: Done | None = done
        self._failed = failed
        self._undone = undone
        self._home: dict[Wait, None] | None = None

    @property
    def waiting(self) -> bool:
        """Neither told nor cancelled yet."""
        return self._done is not None

    def cancel(self) -> None:
        """Stop waiting without a callback. A callback that is already running may still arrive."""
        with self._lock:
            self._end()

    def told(self) -> Done | None:
        """End the wait; returns the callback for success."""
        done = self._done
        self._end()
        return done

    def told_failure(self, error: StorageError) -> Done | None:
        """End the wait; returns the callback for a failed write. Without one it returns None and goes on waiting."""
        if self._failed is None:
            return None
        failed = self._failed
        self._end()
        return partial(failed, error)

    def told_undone(self) -> Done | None:
        """End the wait; returns the callback for an undone change. Without one it returns None and goes on waiting."""
        undone = self._undone
        if undone is not None:
            self._end()
        return undone

    def enter(self, home: "dict[Wait, None]") -> None:
        """Join these waiters, unless cancelled meanwhile."""
        if self._done is not None:
            self._leave()
            self._home = home
            home[self] = None

    def _end(self) -> None:
        self._leave()
        self._done = self._failed = self._undone = None

    def _leave(self) -> None:
        if self._home is not None:
            self._home.pop(self, None)
            self._home = None


class DurabilityWaiters:
    """All waiters for the disk of one bucket."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        #: By table, not by number: a vbucket may be removed and created again meanwhile.
        self._by_table: dict[Table, dict[Wait, None]] = {}
        self._for_all: dict[Wait, None] = {}

    def __len__(self) -> int:
        return len(self._for_all) + sum(map(len, self._by_table.values()))

    def for_change(
        self, table: Table, seqno: int, done: Done, failed: Failed | None, undone: Done | None = None
    ) -> Wait:
        """Wait for one change."""
        wait = Wait(self._lock, seqno, done, failed, undone)
        wait.enter(self._by_table.setdefault(table, {}))
        return wait

    def for_everything(self, done: Done, failed: Failed | None) -> Wait:
        """Wait for everything that has been done so far."""
        wait = Wait(self._lock, 0, done, failed)
        wait.enter(self._for_all)
        return wait

    def take_for_everything(self) -> list[Wait]:
        """The waiters that the batch now being gathered will satisfy."""
        return list(self._for_all)

    def on_cut(self, vbuckets: Iterable[int]) -> list[Wait]:
        """The waiters for changes of histories that are now cut: the cut is all that they can wait for."""
        cut = set(vbuckets)
        return [wait for table, waits in self._by_table.items() if table.vbucket in cut for wait in waits]

    def undone(self, table: Table, seqno: int) -> list[Done]:
        """The table was rolled back to ``seqno``: the callbacks of waiters for later changes."""
        waits = [wait for wait in self._by_table.get(table, ()) if wait.seqno > seqno]
        return [call for wait in waits if (call := wait.told_undone()) is not None]

    def persisted(self, reached: Callable[[Table], int]) -> list[Done]:
        """The callbacks of waiters whose change is on disk; ``reached`` is the persisted seqno of each table."""
        due: list[Done] = []
        for table, waits in list(self._by_table.items()):
            upto = reached(table)
            due += told(wait for wait in list(waits) if wait.seqno <= upto)
            if not waits:
                del self._by_table[table]
        return due

    def failed(self, error: StorageError) -> list[Done]:
        """A write failed: the callbacks of the waiters that have one for that."""
        waits = [*(wait for waits in self._by_table.values() for wait in waits), *self._for_all]
        return [call for wait in waits if (call := wait.told_failure(error)) is not None]


def told(waits: Iterable[Wait]) -> list[Done]:
    """The callbacks of these waiters; cancelled ones are left out."""
    return [call for wait in waits if (call := wait.told()) is not None]
