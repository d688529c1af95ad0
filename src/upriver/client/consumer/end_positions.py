"""Which vbuckets a consumer still reads, and where each of them ends.

A source need not stop where it was told to: deployed servers send the whole snapshot that holds the end, and one that
has gone back cannot be asked for an end behind it. What lies beyond is left out here.
"""

from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.consumer.progress import Progress
from upriver.model import NO_END, StreamPosition
from upriver.protocol.consumer import Run


class Ranges:
    """The vbuckets of a consumer that are not finished, each with the last seqno that it wants, if it wants one."""

    def __init__(self, vbuckets: Iterable[int], ends: Mapping[int, int], on_over: Callable[[], object]) -> None:
        self.unfinished = set(vbuckets)
        self._ends = dict(ends)
        self._on_over = on_over
        #: Vbuckets whose stream does not end where it should.
        self._overlong: set[int] = set()

    @property
    def may_overshoot(self) -> bool:
        """Whether a stream of a node that keeps to the ends may go beyond one all the same."""
        return bool(self._overlong)

    @property
    def has_ends(self) -> bool:
        """Whether there is an end at all."""
        return bool(self._ends)

    def has_end(self, vbucket: int) -> bool:
        """Whether this one has an end."""
        return vbucket in self._ends

    def wanted_end(self, vbucket: int) -> int:
        """The last seqno that is wanted."""
        return self._ends.get(vbucket, NO_END)

    def end_to_ask_for(self, vbucket: int, stands_at: int) -> int:
        """Where its stream ends: not before where we stand, which no source would accept."""
        return max(self.wanted_end(vbucket), stands_at)

    def finish(self, vbucket: int) -> None:
        """Everything has come."""
        self.unfinished.discard(vbucket)
        if not self.unfinished:
            self._on_over()

    def stop_listening_at_end(self, vbucket: int) -> None:
        """Its stream goes beyond the end and cannot be closed."""
        if self._ends[vbucket] == 0:
            self.finish(vbucket)
        else:
            self._overlong.add(vbucket)

    def cut(
        self, records: pa.RecordBatch, runs: tuple[Run, ...], progress: dict[int, Progress]
    ) -> tuple[pa.RecordBatch, tuple[Run, ...], list[int]]:
        """Leave out what lies beyond the ends; also the vbuckets whose streams have gone so far and can be closed.

        Everything up to the end has come then: that is where we stand, inside the snapshot that goes beyond it.
        """
        reached = {run.vbucket: run.position for run in runs if run.position.seqno >= self._ends[run.vbucket]}
        beyond = []
        for number, position in reached.items():
            end = max(self._ends[number], position.snapshot.start)
            if position.seqno > end:
                stands = StreamPosition(position.vbucket_uuid, end, position.snapshot)
                progress[number] = progress[number].moved(stands)
                beyond.append(number)
                self.finish(number)
            elif number in self._overlong:
                self.finish(number)
            self._overlong.discard(number)
        if any(position.seqno > self._ends[number] for number, position in reached.items()):
            records, runs = self._kept(records, runs)
        return records, runs, beyond

    def _kept(self, records: pa.RecordBatch, runs: tuple[Run, ...]) -> tuple[pa.RecordBatch, tuple[Run, ...]]:
        pieces, kept, at = [], [], 0
        for run in runs:
            rows = records.slice(at, run.rows)
            at += run.rows
            end, position = self._ends[run.vbucket], run.position
            if position.seqno > end:
                rows = rows.filter(pc.less_equal(rows.column("seqno"), pa.scalar(end, pa.uint64())))
                seqno = rows.column("seqno")[-1].as_py() if rows.num_rows else 0
                position = StreamPosition(position.vbucket_uuid, max(seqno, position.snapshot.start), position.snapshot)
            if rows.num_rows:
                pieces.append(rows)
                kept.append(Run(run.vbucket, rows.num_rows, position))
        return (pa.concat_batches(pieces) if pieces else records.slice(0, 0)), tuple(kept)
