"""Merges small files of a table, and files with many dead rows, while batches go on.

A merge runs in Spark's tasks and takes as long as it needs. Batches that are committed meanwhile may hide rows of its
input files; these rows are hidden in the merged file too when it replaces them. A merge whose input is gone, because
another program has merged it, is dropped.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from upriver.errors import FilesLost, StorageError, TableConflict
from upriver.pipelines.core.workers import Done, LocalWorkers, Workers, ignored
from upriver.pipelines.targets.tables.history import PROPERTY as HISTORY
from upriver.pipelines.targets.tables.table_keeper import seed_of
from upriver.pipelines.targets.tables.table_work import FileWork, PlainFileWork, merged_groups
from upriver.tables import Commit, Edit, Merged, Table, arrow_schema, carried, choose, read_vector, vacuum_table

LOG: Final = logging.getLogger("upriver.pipelines")
#: Time between two searches for files that no version needs any more.
VACUUM_S: Final = 3600.0
#: How long the end of a pipeline waits for a running merge. What it leaves behind is removed later.
_STOP_S: Final = 30.0


@dataclass
class CompactionCounts:
    """Counts since the start."""

    merged_files: int = 0
    vacuumed_files: int = 0


class Compactor:
    """Compacts one table, in a thread of its own."""

    def __init__(
        self,
        table: Table,
        lock: threading.RLock,
        on_commits: Callable[[Iterable[Commit]], object] = lambda _: None,
    ) -> None:
        """``lock`` is held for every use of the table; ``on_commits`` gets the commits of other writers."""
        self.counts = CompactionCounts()
        self._table = table
        self._lock = lock
        self._on_commits = on_commits
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._vacuumed_at = time.monotonic()

    def start(self, workers: Workers, patience: int = 1) -> None:
        """Compact in the background if that is due. A process without Spark does it at once."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            due = bool(choose(self._table.snapshot.files.values(), patience=patience))
        if not due and time.monotonic() - self._vacuumed_at < VACUUM_S:
            return
        if isinstance(workers, LocalWorkers):
            self._run(workers)
            return
        self._thread = threading.Thread(target=self._run, args=(workers,), name="upriver-compaction", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a running merge, but not for ever."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self, workers: Workers) -> None:
        try:
            while not self._stopping.is_set() and self.compact(workers):
                pass
            if time.monotonic() - self._vacuumed_at >= VACUUM_S:
                self._vacuumed_at = time.monotonic()
                # With a reader of its own: batches need not wait until everything is listed and deleted.
                self.counts.vacuumed_files += len(vacuum_table(Table.open(self._table.storage)).paths)
        except Exception as error:
            # A table that is not compacted is still right. The next batch tries again.
            if not self._stopping.is_set():
                LOG.warning("the table %s could not be compacted: %s", self._table.storage.url, _first_line(error))

    def compact(self, workers: Workers, *, everything: bool = False, done: Done = ignored) -> int:
        """Merge what is due; returns the number of files that were replaced."""
        with self._lock:
            work = merging_work(self._table)
            groups = choose(self._table.snapshot.files.values(), everything=everything)
        replaced = sum(self._replace(merged) for merged in merged_groups(work, groups, workers, done))
        self.counts.merged_files += replaced
        return replaced

    def _replace(self, merged: Merged) -> int:
        """Put a merged file in the place of its inputs; returns how many files it replaces."""
        storage, paths = self._table.storage, [each.path for each in merged.inputs]
        while True:
            with self._lock:
                files = self._table.snapshot.files
                if all(path in files for path in paths):
                    now = {path: read_vector(storage, files[path].deletion_vector) for path in paths}
                    dead = carried(merged, now)
                    if not dead or self._table.vectors:
                        new = [] if merged.file is None else [merged.file]
                        edit = Edit(
                            "OPTIMIZE",
                            [file.add(time.time_ns() // 1_000_000, data_change=False) for file in new],
                            {file.path: dead for file in new if dead},
                            paths,
                            data_change=False,
                        )
                        try:
                            self._table.commit(edit)
                        except FilesLost:
                            return 0
                        except TableConflict as conflict:
                            self._on_commits(conflict.commits)
                            continue
                        return len(paths)
            if merged.file is not None:
                with contextlib.suppress(StorageError):
                    storage.delete([merged.file.path])
            return 0


def compact_table(table: Table, workers: Workers, done: Done = ignored) -> int:
    """Merge all small files and purge all dead rows; returns the number of files that were replaced.

    The table's mirror may run at the same time: it repairs itself what other programs change.
    """
    return Compactor(table, threading.RLock()).compact(workers, everything=True, done=done)


def merging_work(table: Table) -> FileWork | PlainFileWork:
    """The work on the files of a table as it is now."""
    if HISTORY in table.properties:
        return PlainFileWork(table.storage, arrow_schema(table.snapshot.metadata.schema))
    return FileWork(table.storage, table.schema, seed_of(table))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
