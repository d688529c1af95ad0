"""Who waits for the disk: until one change is there, or until everything done so far is.

Each of them is told exactly once, that it is there, that a write failed or that the change is undone, or is
let go by ``cancel``. A failed write says nothing about the change itself: it stays in memory, is tried again
and may be on disk later. A change is undone when the copy that holds it goes back behind it. Whoever waits
without an ear for these simply waits on. All calls are made under the journal's lock; telling happens outside
of it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock

from upriver.engine.table import Table
from upriver.errors import StorageError

Done = Callable[[], object]
Failed = Callable[[StorageError], object]


class Wait:
    """One who waits, and the handle by which the wait is given up."""

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
        """Neither told nor given up yet."""
        return self._done is not None

    def cancel(self) -> None:
        """Wait no longer: nobody is told, and nothing is kept. A call that is under way may still arrive."""
        with self._lock:
            self._end()

    def told(self) -> Done | None:
        """Whom to call now that it is on disk."""
        done = self._done
        self._end()
        return done

    def told_failure(self, error: StorageError) -> Done | None:
        """Whom to call now that a write failed; None, and it waits on, if it has no ear for that."""
        if self._failed is None:
            return None
        failed = self._failed
        self._end()
        return partial(failed, error)

    def told_undone(self) -> Done | None:
        """Whom to call now that the change is undone; None, and it waits on, if it has no ear for that."""
        undone = self._undone
        if undone is not None:
            self._end()
        return undone

    def enter(self, home: "dict[Wait, None]") -> None:
        """Wait among others from here on; a wait that was given up meanwhile does not."""
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
    """Everybody who waits for the disk of one bucket."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        #: By table, not by number: a vbucket may be removed and created again while somebody waits.
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
        """Wait for whatever has been done so far."""
        wait = Wait(self._lock, 0, done, failed)
        wait.enter(self._for_all)
        return wait

    def take_for_everything(self) -> list[Wait]:
        """Those whom the batch that is gathered now will satisfy."""
        return list(self._for_all)

    def on_cut(self, vbuckets: Iterable[int]) -> list[Wait]:
        """Those who wait for changes of histories that are cut now: there is nothing else to wait for."""
        cut = set(vbuckets)
        return [wait for table, waits in self._by_table.items() if table.vbucket in cut for wait in waits]

    def undone(self, table: Table, seqno: int) -> list[Done]:
        """The table has gone back to ``seqno``: those who waited for more and want to hear that it does not come."""
        waits = [wait for wait in self._by_table.get(table, ()) if wait.seqno > seqno]
        return [call for wait in waits if (call := wait.told_undone()) is not None]

    def persisted(self, reached: Callable[[Table], int]) -> list[Done]:
        """Those whose change is on disk; ``reached`` says how far each table is."""
        due: list[Done] = []
        for table, waits in list(self._by_table.items()):
            upto = reached(table)
            due += told(wait for wait in list(waits) if wait.seqno <= upto)
            if not waits:
                del self._by_table[table]
        return due

    def failed(self, error: StorageError) -> list[Done]:
        """A write failed: those who want to hear of it."""
        waits = [*(wait for waits in self._by_table.values() for wait in waits), *self._for_all]
        return [call for wait in waits if (call := wait.told_failure(error)) is not None]


def told(waits: Iterable[Wait]) -> list[Done]:
    """Whom to call for these; those who gave up meanwhile are left out."""
    return [call for wait in waits if (call := wait.told()) is not None]
