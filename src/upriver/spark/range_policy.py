"""How the streams of a task's ranges are requested, followed through rollbacks, and finished.

A range was planned on a branch. A source that accepts it on another branch has lost that branch: the end of the range
may never arrive, so the range is finished early and the next plan rolls back. But a former owner may not know the
planned branch at all; then the supervisor asks again with a newer map first.

No plan follows a batch read. Its ranges are exact, and fail if they cannot be, or open: the task asks the node for the
high seqno and reads up to there, on whichever branch continues the start.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final

from upriver.client.cluster import active_seqnos, failover_logs
from upriver.client.consumer import (
    ConsumerSettings,
    EndPositions,
    Feed,
    Flush,
    Progress,
    Reset,
    Rollback,
    Run,
    StreamPolicy,
    TrackedVbuckets,
    VbucketEvent,
)
from upriver.client.transport import Connection
from upriver.errors import ClusterMapError, DataLoss, OutOfRange, StatusError, StreamRefused, UpriverError
from upriver.model import NO_END, FailoverEntry, FailoverLog, Snapshot, StreamPosition
from upriver.protocol.consumer import ConsumerStream
from upriver.spark.batch_planner import Range, RangeEnd, RangeRollback, Rules, answered_with_rollback
from upriver.spark.rows import Bounds
from upriver.wire import dcp

LOG: Final = logging.getLogger("upriver.spark")
#: A task fails when its ranges have got no stream and no changes for this long.
RETRY_S: Final = 60.0
#: The longest pause between two attempts of a task.
PAUSE_S: Final = 0.25


class RangePolicy(StreamPolicy):
    """Read finite ranges from active copies, task after task."""

    shares_patience: ClassVar[bool] = True
    checks_active_again: ClassVar[bool] = True
    #: A batch waits for its slowest task, and all readers of its target wait with it.
    longest_pause_s: ClassVar[float] = PAUSE_S

    def __init__(
        self,
        settings: ConsumerSettings,
        rules: Rules,
        *,
        on_rollback: Callable[[VbucketEvent, Progress], object],
        on_finished: Callable[[], object],
    ) -> None:
        """``on_rollback`` is called with each rollback and the progress after it."""
        # A former owner may answer, and only the failover log in its answer shows that; so a rollback never fails here.
        tracked = TrackedVbuckets(
            {},
            "rewind" if rules.on_rollback == "rewind" else "emit",
            on_event=self._happened,
            on_move=lambda *_: None,
        )
        settings = dataclasses.replace(settings, patience_s=RETRY_S)
        super().__init__(settings, tracked, EndPositions(on_finished=self._finished))
        #: Two connections to one node need two names.
        self._inexact_settings = dataclasses.replace(settings, exact_end=False, name=f"current:{settings.name}")
        self._rules = rules
        self._on_rollback = on_rollback
        self._on_finished = on_finished
        self._ranges: dict[int, Range] = {}
        #: The ends of open ranges: the high seqnos when they were requested.
        self._high_seqnos: dict[int, int] = {}
        #: Vbuckets whose state at the end of the range is not retained any more.
        self._inexact: set[int] = set()
        #: The position of each vbucket that has received changes in this task.
        self._received: dict[int, StreamPosition] = {}
        #: Rollbacks inside a range. They are reported with the first snapshot that follows.
        self._unreported: dict[int, RangeRollback] = {}
        #: Vbuckets that a node accepted without knowing their branch.
        self._doubted: set[int] = set()

    def start(self, ranges: Iterable[Range]) -> None:
        """Read these ranges next."""
        for state in (
            self._ranges, self._high_seqnos, self._inexact, self._received, self._unreported, self._doubted
        ):  # fmt: skip
            state.clear()
        ends: dict[int, int] = {}
        for asked in ranges:
            number = asked.start.vbucket
            self._ranges[number] = asked
            if asked.rollback is not None:
                self._report(number, asked.rollback, asked.rollback.seqno)
            if asked.end is RangeEnd.OPEN or asked.end_seqno > asked.start.seqno:
                self.tracked.put(number, _progress(asked))
                ends[number] = NO_END if asked.end is RangeEnd.OPEN else asked.end_seqno
        self.ends.start(ends, ends)

    def received(self, runs: Iterable[Run]) -> None:
        """These runs arrived."""
        for number, _, position in runs:
            asked = self._ranges[number]
            if asked.end is RangeEnd.EXACT and position.seqno > asked.end_seqno:
                raise _inexact_end(number, f"the source has changed, and cannot give the state at {asked.end_seqno}")
            self._received[number] = position
            self._report_pending(number, position.snapshot.end)

    def bounds(self, run: Run) -> Bounds:
        """The bounds of a run's rows."""
        uuid, snapshot = run.position.vbucket_uuid, run.position.snapshot
        return Bounds(uuid, self._ranges[run.vbucket].start.branch, snapshot.start, snapshot.end)

    # What the supervisor asks

    def settings_for(self, vbucket: int) -> ConsumerSettings:
        """Exact ends, unless the node has refused them."""
        return self._inexact_settings if vbucket in self._inexact else self.settings

    def end_seqno(self, vbucket: int) -> int:
        """The end to request; for an open range the high seqno."""
        if self._ranges[vbucket].end is not RangeEnd.OPEN:
            return super().end_seqno(vbucket)
        high_seqno = self._high_seqnos.get(vbucket, self._ranges[vbucket].end_seqno)
        return max(high_seqno, self.tracked[vbucket].position.seqno)

    def flags(self, feed: Feed) -> int:
        """Request active copies where the dialect can."""
        return int(dcp.StreamFlag.ACTIVE_ONLY) if feed.speaks_dcp else 0

    def must_check_active(self, feed: Feed) -> bool:
        """Check everywhere except on Upriver nodes with `dcp`: other servers may ignore the flag.

        Open ranges need the check too, because it comes with ``prepare``.
        """
        is_open = any(self._ranges[number].end is RangeEnd.OPEN for number in self.ends.unfinished)
        return is_open or not (feed.speaks_dcp and feed.connection.is_upriver_node)

    async def prepare(self, feed: Feed, connection: Connection, vbuckets: Sequence[int]) -> None:
        """Learn the ends of open ranges, and where the branches began: `upr` and the drafts compare that too."""
        await self._find_ends(connection, [n for n in vbuckets if self._ranges[n].end is RangeEnd.OPEN])
        if not feed.speaks_dcp:
            await self._find_branches(connection, vbuckets)

    async def _find_ends(self, connection: Connection, vbuckets: Sequence[int]) -> None:
        if not vbuckets:
            return
        try:
            found = await active_seqnos(connection)
        except StatusError:  # the node does not know the request
            return
        for number in vbuckets:
            if number in found:
                self._high_seqnos[number] = found[number]
                if not found[number] and not self.tracked[number].position.seqno:
                    self.ends.finish(number)

    async def _find_branches(self, connection: Connection, vbuckets: Sequence[int]) -> None:
        """An offset has only uuids."""
        begun = [number for number in vbuckets if self.tracked[number].position.seqno]
        try:
            logs = await failover_logs(connection, begun)
        except StatusError:  # the node does not know the request
            return
        for number, log in logs.items():
            vbucket = self.tracked[number]
            index = log.index(vbucket.position.vbucket_uuid)
            if index is not None:
                vbucket.progress = dataclasses.replace(vbucket.progress, failover_log=FailoverLog(log.entries[index:]))

    def accepted(self, feed: Feed, stream: ConsumerStream, end_seqno: int) -> str:
        """Read nothing from another branch than the planned one, unless no plan follows."""
        number = stream.vbucket
        if number not in self.ends.unfinished:
            feed.close_stream(number)
            return ""
        asked, log = self._ranges[number], self.tracked[number].failover_log
        is_unknown = self._is_unknown_branch(number, log)
        if self._branch(number) in (0, stream.position.vbucket_uuid) or (
            not is_unknown and self._continues(asked, log)
        ):
            if asked.end is not RangeEnd.OPEN or end_seqno <= self.end_seqno(number):
                return ""
            self._close(feed, number)
            return "the source was rolled back below the requested end"
        self._close(feed, number)
        if is_unknown:
            self._doubted.add(number)
            self.tracked.put(number, _progress(asked, self._received.get(number)))
            return f"{feed.endpoint} does not know its branch"
        self.ends.finish(number)
        return ""

    def _close(self, feed: Feed, number: int) -> None:
        feed.close_stream(number)
        if feed.is_draft:  # which cannot close a stream, and would refuse a second one
            asyncio.get_running_loop().call_soon(feed.connection.abort)

    def _continues(self, asked: Range, log: FailoverLog) -> bool:
        """Whether a range is read although the source has another branch than the planned one."""
        if asked.end is not RangeEnd.EXACT:
            return asked.end is RangeEnd.OPEN
        index = log.index(self._branch(asked.start.vbucket))
        if index is None or asked.end_seqno > log.upper(index, NO_END):
            raise _inexact_end(asked.start.vbucket, f"the source has another history before {asked.end_seqno} now")
        return True

    def changes_request(self, vbucket: int, error: UpriverError) -> bool:
        """Read the current state where the exact end is not retained any more, if the next range corrects that."""
        if not isinstance(error, OutOfRange) or vbucket in self._inexact:
            return False
        if self._ranges[vbucket].end is RangeEnd.EXACT:
            raise _inexact_end(vbucket, error.detail)
        if self._ranges[vbucket].end is RangeEnd.OPEN:
            return False
        self._inexact.add(vbucket)
        return True

    def retries(self, error: UpriverError) -> bool:
        """Retry every refusal until the task's patience ends."""
        return isinstance(error, (StatusError, ClusterMapError))

    def is_complete(self, stream: ConsumerStream) -> bool:
        """Whether the range is complete when its stream ended."""
        return stream.end_reason == "ok" or stream.position.seqno >= self.ends.wanted_end(stream.vbucket)

    def give_up(self, vbucket: int, why: str, *, unowned: bool) -> UpriverError | None:
        """Fail, or leave out a vbucket without an owner if the query tolerates data loss."""
        asked = self._ranges[vbucket]
        why = f"{why} (changes {asked.start.seqno} to {asked.end_seqno}, tried for {RETRY_S:g} s)"
        if not unowned:
            return StreamRefused(vbucket, why)
        if self._rules.fail_on_data_loss:
            return DataLoss(vbucket, why)
        # Spark has logged the offset behind the range, so no later batch would read it.
        LOG.warning("vbucket %d: %s: left out, because failOnDataLoss is false", vbucket, why)
        self.ends.finish(vbucket)
        return None

    # Rollbacks

    def _branch(self, number: int) -> int:
        """The branch on which a vbucket is read; 0 if it may be read on any."""
        received = self._received.get(number)
        return self._ranges[number].start.vbucket_uuid if received is None else received.vbucket_uuid

    def _is_unknown_branch(self, number: int, log: FailoverLog) -> bool:
        uuid = self._branch(number)
        return uuid != 0 and log.index(uuid) is None and number not in self._doubted

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:
        """The source was rolled back after the range was planned. (The next plan sees a flush.)"""
        number = event.vbucket
        if number not in self.ends.unfinished:
            return
        asked = self._ranges[number]
        is_corrected = asked.end is RangeEnd.PLANNED
        if isinstance(event, Flush):
            if not is_corrected:
                raise StreamRefused(number, "the source was flushed during the read; run the query again")
            return
        if self._branch(number) == 0 or self._is_unknown_branch(number, progress.failover_log):
            return
        # Spark may have rows above the rollback already, and a batch cannot take them back.
        too_late = StreamRefused(number, "the source was rolled back during the read; the task must run again")
        if number in self._received and not is_corrected:
            raise too_late
        instead = answered_with_rollback(asked, event.seqno, progress.failover_log, self._rules)
        assert instead.rollback is not None
        if number in self._received and event.new_uuid == asked.start.vbucket_uuid:
            raise too_late
        if instead.end_seqno > instead.start.seqno or not is_corrected:
            self._unreported[number] = instead.rollback
        else:
            self._report(number, instead.rollback, instead.rollback.seqno)
            self.ends.finish(number)

    def _finished(self, number: int) -> None:
        is_open = self._ranges[number].end is RangeEnd.OPEN
        self._report_pending(number, self.end_seqno(number) if is_open else self.ends.wanted_end(number))
        self._on_finished()

    def _report_pending(self, number: int, snapshot_end: int) -> None:
        """The planned offset keeps its branch, so the snapshot's end shows which rows follow the rollback."""
        back = self._unreported.pop(number, None)
        if back is not None:
            self._report(number, back, snapshot_end)

    def _report(self, number: int, back: RangeRollback, snapshot_end: int) -> None:
        seqno, old_uuid, new_uuid = back
        event = Rollback(number, seqno, old_uuid, new_uuid) if seqno else Reset(number, old_uuid, new_uuid)
        position = StreamPosition(new_uuid, seqno, Snapshot(seqno, snapshot_end))
        self._on_rollback(event, Progress(position, FailoverLog.fresh(new_uuid)))


def _inexact_end(vbucket: int, why: str) -> StreamRefused:
    """The error for a batch read whose end cannot be exact any more."""
    return StreamRefused(
        vbucket, f"{why}: leave out endingOffsets, or name newer ones (a node keeps old states for --history-s)"
    )


def _progress(asked: Range, received: StreamPosition | None = None) -> Progress:
    """The progress of a consumer that starts the range, or continues it behind ``received``."""
    start, position = asked.start, received or asked.start.position
    if not position.seqno:
        return Progress.beginning()
    log = FailoverLog((FailoverEntry(start.vbucket_uuid, 0),))
    return Progress(position, log, start.first_consistent or None)
