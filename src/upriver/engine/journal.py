"""Pending work for the disk besides records: changed descriptions of vbuckets, cut histories, and waiters.

Writes of clients do not use the journal. A thread that changes a vbucket's role, log or bounds holds ``lock``, and the
flusher holds it while it gathers a batch. So a description on disk always fits the records beside it.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final

from upriver.engine.durability_waiters import DurabilityWaiters
from upriver.errors import TemporaryFailure

CLOSED: Final = "the bucket is closed"


class Journal:
    """Shared by the vbuckets of a bucket, emptied by the flusher."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Vbuckets whose description must be written.
        self.changed: set[int] = set()
        #: Vbuckets whose stored history must be cut back to a seqno before anything is added to it.
        self.trims: dict[int, int] = {}
        #: Vbuckets with waiters for more of their changes on disk.
        self.watched: set[int] = set()
        self.waiting = DurabilityWaiters(self.lock)
        self.wake: Callable[[], object] | None = None
        #: Later changes are not stored any more.
        self.closed = False

    def check_open(self, vbucket: int) -> None:
        """Raise if a change of the vbucket would not be stored."""
        if self.closed:
            raise TemporaryFailure(CLOSED, vbucket=vbucket)

    def change(self, vbucket: int) -> None:
        """Note that the vbucket's description has changed."""
        with self.lock:
            self.changed.add(vbucket)
        if self.wake is not None:
            self.wake()

    def trim(self, vbucket: int, seqno: int) -> None:
        """Note that the vbucket's history now ends at ``seqno``, even if the disk holds more."""
        with self.lock:
            self.trims[vbucket] = min(seqno, self.trims.get(vbucket, seqno))
            self.change(vbucket)

    def take(self) -> tuple[set[int], dict[int, int]]:
        """Take everything that waits; call ``give_back`` if it did not reach the disk."""
        with self.lock:
            changed, self.changed = self.changed, set()
            trims, self.trims = self.trims, {}
        return changed, trims

    def take_watched(self, vbuckets: Iterable[int]) -> list[int]:
        """Take the watched ones among these vbuckets; watching ends with this."""
        with self.lock:
            found = [vbucket for vbucket in vbuckets if vbucket in self.watched] if self.watched else []
            self.watched.difference_update(found)
        return found

    def give_back(self, changed: set[int], trims: dict[int, int]) -> None:
        with self.lock:
            self.changed |= changed
            for vbucket, seqno in trims.items():
                self.trims[vbucket] = min(seqno, self.trims.get(vbucket, seqno))
