"""Sort entries of keys in bounded memory.

Entries are collected; when there are ``RUN_ENTRIES``, they are sorted and go to a temporary file as a *run*. In the
end, ``blocks`` cuts all runs at common bounds and sorts each block, which has about as many entries as a run.
Few entries never leave the memory.
"""

import os
import tempfile
from collections.abc import Iterator
from typing import IO, Final, Self

import numpy as np

from upriver.tables.keys.entries import ENTRY_BYTES, Entries, find_entries, no_entries, sort_entries

#: Number of entries to hold in memory: 16 MiB, and as much again while they are sorted.
RUN_ENTRIES: Final = 1 << 20
#: One in this many entries of a run is a candidate for a bound.
SAMPLED: Final = 1 << 14


class SortedRuns:
    """Takes entries in any order and returns them sorted."""

    def __init__(self, run_entries: int = RUN_ENTRIES, sampled: int = SAMPLED) -> None:
        self._run_entries = run_entries
        self._sampled = sampled
        self._held: list[Entries] = []
        self._held_count = 0
        self._file: IO[bytes] | None = None
        #: Where each run starts in the file, in entries, and the end of the last.
        self._starts = [0]

    def __len__(self) -> int:
        return self._starts[-1] + self._held_count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, entries: Entries) -> None:
        """Take entries; the array now belongs to the runs."""
        self._held.append(entries)
        self._held_count += len(entries)
        if self._held_count >= self._run_entries:
            self._spill()

    def blocks(self) -> Iterator[Entries]:
        """All entries in order. Entries of one hash are in one block. To be called once."""
        if self._file is None:
            if self._held_count:
                yield self._take()
            return
        self._spill()
        stored: Entries = np.memmap(self._file, np.uint64, "r", shape=(self._starts[-1], 2))
        runs = [stored[start:end] for start, end in zip(self._starts[:-1], self._starts[1:], strict=True)]
        bounds = self._bounds(runs)
        # find_entries compares 96 bits: a bound without hash and position lies before all entries of its first number.
        cuts = [[0, *find_entries(run, bounds)[0].tolist(), len(run)] for run in runs]
        for number in range(len(bounds) + 1):
            places = [
                (start + cut[number], cut[number + 1] - cut[number])
                for start, cut in zip(self._starts[:-1], cuts, strict=True)
            ]
            block = self._read(places)
            if len(block):
                yield sort_entries(block)

    def close(self) -> None:
        """Forget everything."""
        self._held = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self) -> Entries:
        entries = self._held[0] if len(self._held) == 1 else np.concatenate([no_entries(), *self._held])
        self._held, self._held_count = [], 0
        return sort_entries(entries)

    def _spill(self) -> None:
        if not self._held_count:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="upriver-runs-")  # noqa: SIM115 (closed by close)
        count = self._held_count
        self._file.write(self._take().data)
        self._file.flush()
        self._starts.append(self._starts[-1] + count)

    def _bounds(self, runs: list[Entries]) -> Entries:
        """First numbers that cut all runs into blocks of about one run's length."""
        samples = np.sort(np.concatenate([run[:: self._sampled, 0] for run in runs]))
        chosen = np.unique(samples[:: max(1, self._run_entries // self._sampled)])
        return np.stack([chosen, np.zeros_like(chosen)], axis=1)

    def _read(self, places: list[tuple[int, int]]) -> Entries:
        """Entries at these places of the file. They are read, not mapped, so that they do not stay in memory."""
        assert self._file is not None
        block = np.empty((sum(count for _, count in places), 2), np.uint64)
        at = 0
        for start, count in places:
            target = block[at : at + count].data.cast("B") if count else memoryview(b"")
            offset = start * ENTRY_BYTES
            while len(target):
                got = os.preadv(self._file.fileno(), [target], offset)
                if not got:
                    raise EOFError("a temporary file is shorter than expected")
                target, offset = target[got:], offset + got
            at += count
        return block
