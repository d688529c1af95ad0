"""Which vbuckets a consumer still reads, and the seqno at which each of them ends.

A source need not stop at the requested end. A deployed server sends the whole snapshot that contains it, and a source
that was rolled back refuses an end below the consumer's position. Changes beyond the end are removed here.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa

from upriver.model import NO_END, StreamPosition
from upriver.protocol.consumer import Run


class EndPositions:
    """The unfinished vbuckets of a consumer, and the last seqno to read of each vbucket that has one."""

    def __init__(self, on_finished: Callable[[int], object]) -> None:
        """``on_finished`` is called with each vbucket that has reached its end."""
        self.unfinished: set[int] = set()
        self._ends: dict[int, int] = {}
        self._on_finished = on_finished
        #: Vbuckets whose streams go beyond their ends and cannot be closed.
        self._overlong: set[int] = set()

    def start(self, vbuckets: Iterable[int], ends: Mapping[int, int]) -> None:
        """Read these vbuckets, up to these ends."""
        self.unfinished = set(vbuckets)
        self._ends = dict(ends)
        self._overlong.clear()

    @property
    def may_overshoot(self) -> bool:
        """Whether streams may go beyond their ends although the node respects the ends."""
        return bool(self._overlong)

    @property
    def has_ends(self) -> bool:
        """Whether any vbucket has an end."""
        return bool(self._ends)

    def has_end(self, vbucket: int) -> bool:
        """Whether this vbucket has an end."""
        return vbucket in self._ends

    def wanted_end(self, vbucket: int) -> int:
        """The last seqno to read."""
        return self._ends.get(vbucket, NO_END)

    def end_to_request(self, vbucket: int, seqno: int) -> int:
        """The end to name in a request from ``seqno``: at least ``seqno``, because sources refuse a lower one."""
        return max(self.wanted_end(vbucket), seqno)

    def finish(self, vbucket: int) -> None:
        """Everything up to the end was received."""
        if vbucket in self.unfinished:
            self.unfinished.remove(vbucket)
            self._on_finished(vbucket)

    def stop_listening_at_end(self, vbucket: int) -> None:
        """Ignore the part of a stream beyond the end, because the stream cannot be closed."""
        if self._ends[vbucket] == 0:
            self.finish(vbucket)
        else:
            self._overlong.add(vbucket)

    def cut(
        self, records: pa.RecordBatch, runs: tuple[Run, ...]
    ) -> tuple[pa.RecordBatch, tuple[Run, ...], dict[int, StreamPosition]]:
        """Remove the changes beyond the ends, and finish the vbuckets that went beyond theirs.

        Also returns the position of each such vbucket: at its end, inside the snapshot that goes beyond it.
        """
        reached = {run.vbucket: run.position for run in runs if run.position.seqno >= self._ends[run.vbucket]}
        beyond: dict[int, StreamPosition] = {}
        for number, position in reached.items():
            end = max(self._ends[number], position.snapshot.start)
            if position.seqno > end:
                beyond[number] = StreamPosition(position.vbucket_uuid, end, position.snapshot)
                self.finish(number)
            elif number in self._overlong:
                self.finish(number)
            self._overlong.discard(number)
        if any(position.seqno > self._ends[number] for number, position in reached.items()):
            records, runs = self._kept(records, runs)
        return records, runs, beyond

    def _kept(self, records: pa.RecordBatch, runs: tuple[Run, ...]) -> tuple[pa.RecordBatch, tuple[Run, ...]]:
        # With slices, because Arrow's comparisons import pandas, which takes a Spark worker a second.
        pieces, kept, at = [], [], 0
        for vbucket, rows, position in runs:
            count, end = rows, self._ends[vbucket]
            if position.seqno > end:
                seqnos = records.column("seqno").slice(at, rows).to_pylist()
                count = bisect_right(seqnos, end)
                seqno = seqnos[count - 1] if count else 0
                position = StreamPosition(position.vbucket_uuid, max(seqno, position.snapshot.start), position.snapshot)
            if count:
                pieces.append(records.slice(at, count))
                kept.append(Run(vbucket, count, position))
            at += rows
        return (pa.concat_batches(pieces) if pieces else records.slice(0, 0)), tuple(kept)
