"""Reading ranges of many vbuckets into rows of Spark, in a task.

Theory of operation. A worker process lives on between micro-batches, and so do its event loop and its connections: one
*feed* to each node serves task after task. A task asks every node for the ranges of its vbuckets at once and hands out
rows as they come; while Spark is busy with a batch nothing is read, and the window bounds what waits.

A range that loses its stream (the vbucket moved, a connection was cut) is asked for again from where it stands, a few
times, wherever the vbucket is then; only what nobody can give makes the task fail. What comes beyond the end of a range
is cut off: deployed servers send a snapshot to its end.
"""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from upriver.client.cluster import Cluster, failover_logs
from upriver.client.consumer import (
    ConsumerSettings,
    Feed,
    Flush,
    Policy,
    Progress,
    Run,
    TrackedVbuckets,
    VbucketEvent,
    active_on,
    open_feed,
)
from upriver.client.transport import Address, Backoff, Endpoint
from upriver.errors import (
    ClusterMapError,
    DataLoss,
    NodeUnavailable,
    NotMyVbucket,
    OutOfRange,
    StatusError,
    StreamRefused,
    UpriverError,
)
from upriver.model import Event, FailoverEntry, FailoverLog, StreamPosition, inflated_batch
from upriver.protocol.consumer import ConsumerStream
from upriver.spark.batch_planner import GoBack, Range, Rules, answered_with_rollback
from upriver.spark.rows import Bounds, RowMaker, bits, rollback_value, unsigned_numbers
from upriver.wire import dcp

T = TypeVar("T")
#: How much is received at once: about what Spark likes to get as one batch.
RECEIVE_BYTES: Final = 2 * 1024 * 1024
LOG: Final = logging.getLogger("upriver.spark")
#: A range that nobody gives is asked for again for so long, then its task fails.
RETRY_S: Final = 60.0
#: Whoever says nothing for so long, though a range is not at its end, is asked again over another connection. Filters
#: may look for longer at what does not pass.
STALL_S: Final = 120.0


class Reading(NamedTuple):
    """What the ranges of a query have in common."""

    address: Address
    settings: ConsumerSettings
    rules: Rules
    rows: RowMaker
    rows_per_batch: int


class _Arrived(NamedTuple):
    """Changes that wait for Spark, and what they took on the wire; or a row that tells of a whole vbucket."""

    records: pa.RecordBatch
    runs: tuple[tuple[int, Bounds], ...] = ()
    feed: Feed | None = None
    wire_bytes: int = 0


class RangeReader:
    """The connections of one worker process to one cluster; reads one task's ranges at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.new_event_loop()
        self._cluster = Cluster(reading.address)
        # They never fail: a former owner may answer, and only the log in its answer tells what holds.
        policy: Policy = "rewind" if reading.rules.on_rollback == "rewind" else "emit"
        self._copies = TrackedVbuckets({}, policy, on_event=self._happened, on_move=lambda *_: None)
        self._feeds: dict[tuple[Endpoint, bool], Feed] = {}
        self._open: dict[int, Range] = {}
        self._asked_of: dict[int, Feed] = {}
        self._inexact: set[int] = set()
        #: Up to where something came in this task.
        self._stands: dict[int, StreamPosition] = {}
        #: These go back inside of their range, which is told with the first snapshot that comes then.
        self._going_back: dict[int, GoBack] = {}
        #: Somebody has answered for these who does not know their branch.
        self._doubted: set[int] = set()
        self._lost: set[int] = set()
        self._backoff = Backoff()
        #: When nothing has come since.
        self._trying_since: float | None = None
        self._queue: deque[_Arrived] = deque()
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """The rows of these ranges, each vbucket in its order."""
        self._start(ranges)
        try:
            self._run(self._ask())
            while (arrived := self._run(self._next())) is not None:
                together = self._taken(arrived)
                rows, limit = self._rows(together), self._reading.rows_per_batch
                for at in range(0, rows.num_rows, limit):
                    yield rows.slice(at, limit)
                for each in together:
                    if each.feed is not None:
                        each.feed.processed(each.wire_bytes)
        except BaseException:
            # Whatever is still on its way would come into the next task's hands.
            self.close()
            raise

    def close(self) -> None:
        """Let go of all connections."""
        feeds, self._feeds = self._feeds, {}
        self._open.clear()

        async def close() -> None:
            for feed in feeds.values():
                await feed.close()
            await self._cluster.close()

        if not self._loop.is_closed():
            self._run(close())
            self._loop.close()

    @property
    def is_open(self) -> bool:
        """It can read another task's ranges."""
        return not self._loop.is_closed()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    # Asking

    def _start(self, ranges: Iterable[Range]) -> None:
        self._queue.clear()
        self._inexact.clear()
        self._stands.clear()
        self._going_back.clear()
        self._doubted.clear()
        self._trying_since = None
        self._failure = None
        for asked in ranges:
            if asked.go_back is not None:
                self._tell(asked.place.vbucket, asked.go_back, asked.place.branch, asked.go_back.seqno)
            if asked.end_seqno > asked.place.seqno:
                self._open[asked.place.vbucket] = asked
                self._copies.put(asked.place.vbucket, _progress(asked))
        self._lost = set(self._open)

    async def _ask(self) -> None:
        """Ask for everything that has no stream, wherever it is now."""
        wanted, self._lost = sorted(self._lost), set()
        try:
            await self._cluster.open()
        except NodeUnavailable as error:
            for number in wanted:
                self._retry(number, error)
            return
        by_owner: dict[tuple[Endpoint, bool], list[int]] = {}
        for number in wanted:
            endpoint = self._cluster.map.owner(number)
            if endpoint is None:
                self._retry(number, NotMyVbucket("no node of the cluster has it"))
            else:
                by_owner.setdefault((endpoint, number not in self._inexact), []).append(number)
        for (endpoint, exact), numbers in by_owner.items():
            try:
                feed = await self._feed(endpoint, exact=exact)
                if feed.speaks_dcp and feed.connection.is_upriver_node:
                    self._ask_node(feed, numbers)
                else:
                    await self._ask_if_active(endpoint, feed, numbers)
            except NodeUnavailable as error:
                for number in numbers:
                    self._retry(number, error)

    def _ask_node(self, feed: Feed, numbers: Iterable[int]) -> None:
        """Ask for active copies: what a move has left behind is never read, where the dialect can say so."""
        flags = int(dcp.StreamFlag.ACTIVE_ONLY) if feed.speaks_dcp else 0
        for number in numbers:
            self._asked_of[number] = feed
            feed.add_stream(number, self._answered, end_seqno=self._open[number].end_seqno, flags=flags)
        feed.flush()

    async def _ask_if_active(self, endpoint: Endpoint, feed: Feed, numbers: list[int]) -> None:
        """The same where the flag is not known, or not to everybody: look before, and again after.

        A copy that was not active would answer for a branch that others have left. One that dies between the look and
        the request takes no change any more, and would keep us waiting for ever; one that dies later ends its streams.
        """
        before = await self._active_among(numbers, endpoint)
        if not feed.speaks_dcp:
            await self._learn_logs(before, endpoint)
        self._ask_node(feed, before)
        try:
            after = await self._active_among(before, endpoint)
        except NodeUnavailable:
            after = []
        refused = NotMyVbucket(f"{endpoint} does not have it active")
        for number in self._open.keys() & set(numbers) - set(after):
            feed.close_stream(number)
            if number not in self._lost:
                self._retry(number, refused)

    async def _active_among(self, numbers: list[int], endpoint: Endpoint) -> list[int]:
        try:
            active = await active_on(await self._cluster.connection(endpoint))
        except StatusError:  # it does not know the question
            return numbers
        return [number for number in numbers if number in active]

    async def _learn_logs(self, numbers: list[int], endpoint: Endpoint) -> None:
        """Where the branches of our places began: `upr` and the drafts compare that too; an offset has only uuids."""
        begun = [number for number in numbers if self._copies[number].position.seqno]
        try:
            logs = await failover_logs(await self._cluster.connection(endpoint), begun)
        except StatusError:  # it does not know the question
            return
        for number, log in logs.items():
            copy = self._copies[number]
            index = log.index(copy.position.vbucket_uuid)
            if index is not None:
                copy.progress = dataclasses.replace(copy.progress, failover_log=FailoverLog(log.entries[index:]))

    async def _feed(self, endpoint: Endpoint, *, exact: bool) -> Feed:
        feed = self._feeds.get((endpoint, exact))
        if feed is None or not feed.connection.is_open:
            settings = self._reading.settings
            if not exact:  # under a name of its own, since a node has one connection of each name
                settings = dataclasses.replace(settings, exact_end=False, name=f"current:{settings.name}")
            feed = await open_feed(self._cluster, endpoint, settings, self._copies, self, RECEIVE_BYTES)
            self._feeds[endpoint, exact] = feed
        return feed

    def _answered(self, stream: ConsumerStream, error: StatusError | None) -> None:
        if error is None:
            asked = self._open.get(stream.vbucket)
            if asked is None:
                self._asked_of[stream.vbucket].close_stream(stream.vbucket)
            elif asked.place.vbucket_uuid not in (0, stream.position.vbucket_uuid):
                self._on_another_branch(asked)
            return
        if isinstance(error, OutOfRange) and stream.vbucket not in self._inexact:
            self._inexact.add(stream.vbucket)  # the state at the end is not kept any more
            self._lost.add(stream.vbucket)
            self._arrived.set()
        else:
            self._retry(stream.vbucket, error)

    def _on_another_branch(self, asked: Range) -> None:
        """The range's end may lie on a lost branch and never come; then the next plan, which sees that, goes back.

        But whoever does not know the range's branch at all may be a former owner, whom a newer map does not name.
        """
        number = asked.place.vbucket
        feed = self._asked_of[number]
        feed.close_stream(number)
        if feed.is_draft:  # which cannot close a stream, and would refuse another one beside it
            self._loop.call_soon(feed.connection.abort)
        if self._is_strange(number, self._copies[number].failover_log):
            self._doubted.add(number)
            self._copies.put(number, _progress(asked, self._stands.get(number)))
            self._retry(number, StreamRefused(number, "who was asked does not know its branch"))
        else:
            self._finish(number)

    def _is_strange(self, number: int, log: FailoverLog) -> bool:
        return log.index(self._open[number].place.vbucket_uuid) is None and number not in self._doubted

    def _retry(self, number: int, error: UpriverError) -> None:
        now = self._loop.time()
        if self._trying_since is None:
            self._trying_since = now
        if now - self._trying_since < RETRY_S:
            self._lost.add(number)
        else:
            asked, is_gone = self._open[number], isinstance(error, NotMyVbucket)
            why = f"{error} (changes {asked.place.seqno} to {asked.end_seqno}, asked for {RETRY_S:g} s)"
            if is_gone and not self._reading.rules.fail_on_data_loss:
                # The offset behind the range is in Spark's log already, and no later batch comes back for it.
                LOG.warning("vbucket %d: %s: left out, because failOnDataLoss is false", number, why)
                self._finish(number)
            else:
                self.failed(DataLoss(number, why) if is_gone else StreamRefused(number, why))
        self._arrived.set()

    # Waiting

    async def _next(self) -> _Arrived | None:
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if self._lost:
                await self._ask_again()
                continue
            if not self._open:
                return None
            self._arrived.clear()
            if not self._queue and not self._lost and self._failure is None:
                await self._arrival()
        return self._queue.popleft()

    async def _arrival(self) -> None:
        """Until something comes. A connection on which nothing does is cut, so that nobody waits for ever."""
        settings = self._reading.settings
        filtered = settings.key_filter is not None or settings.value_filter is not None
        try:
            async with asyncio.timeout(None if filtered else STALL_S):
                await self._arrived.wait()
        except TimeoutError:
            for feed in {self._asked_of[number] for number in self._open}:
                LOG.warning("%s has said nothing for %g s: asking again", feed.connection.endpoint, STALL_S)
                feed.connection.abort()

    async def _ask_again(self) -> None:
        await asyncio.sleep(self._backoff.pause_s())
        try:
            await self._cluster.refresh(self._cluster.map)
        except (NodeUnavailable, ClusterMapError) as error:
            for number in tuple(self._lost):
                self._retry(number, error)
        else:
            await self._ask()

    def _taken(self, first: _Arrived) -> list[_Arrived]:
        """What came in small pieces, because each vbucket has its own, together: a batch costs Spark a millisecond."""
        together, size = [first], first.wire_bytes
        while first.runs and self._queue and self._queue[0].runs and size + self._queue[0].wire_bytes <= RECEIVE_BYTES:
            together.append(self._queue.popleft())
            size += together[-1].wire_bytes
        return together

    def _rows(self, together: list[_Arrived]) -> pa.RecordBatch:
        first = together[0]
        if not first.runs:
            return first.records
        records = first.records if len(together) == 1 else pa.concat_batches([each.records for each in together])
        return self._reading.rows.rows(records, [run for each in together for run in each.runs])

    # What feeds tell

    def received(self, feed: Feed, records: pa.RecordBatch, runs: tuple[Run, ...], wire_bytes: int) -> None:
        """Changes came."""
        self._backoff.reset()
        self._trying_since = None
        self._stands.update((run.vbucket, run.position) for run in runs)
        records = inflated_batch(records, feed.connection.inflate)
        for run in runs:
            self._tell_going_back(run.vbucket, run.position.snapshot.end)
        counts = [run.rows for run in runs]
        bounds = [self._bounds(run) for run in runs]
        beyond = [run.vbucket for run in runs if run.position.seqno > self._end(run.vbucket)]
        if beyond:
            records, counts = self._within(records, runs)
            for number in beyond:
                self._finish(number)
                feed.close_stream(number)
        kept = tuple((count, bound) for count, bound in zip(counts, bounds, strict=True) if count)
        if kept:
            self._queue.append(_Arrived(records, kept, feed, wire_bytes))
            self._arrived.set()
        else:
            feed.processed(wire_bytes)

    def _within(self, records: pa.RecordBatch, runs: tuple[Run, ...]) -> tuple[pa.RecordBatch, list[int]]:
        """Only the changes that belong to a range, and how many of each run; of a finished range none does."""
        counts = [run.rows for run in runs]
        ends = np.repeat(np.array([self._end(run.vbucket) for run in runs], np.uint64), counts)
        is_within = unsigned_numbers(records.column("seqno")) <= ends
        mask = pa.Array.from_buffers(pa.bool_(), len(is_within), [None, bits(is_within)])
        return records.filter(mask), np.add.reduceat(is_within, np.cumsum([0, *counts[:-1]]), dtype=int).tolist()

    def _end(self, number: int) -> int:
        asked = self._open.get(number)
        return 0 if asked is None else asked.end_seqno

    def _bounds(self, run: Run) -> Bounds:
        position, asked = run.position, self._open.get(run.vbucket)
        branch = 0 if asked is None else asked.place.branch
        return Bounds(position.vbucket_uuid, branch, position.snapshot.start, position.snapshot.end)

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:
        """The source went back after the range was planned; or it was flushed, which the next plan will see."""
        asked = self._open.get(event.vbucket)
        if asked is None or isinstance(event, Flush) or self._is_strange(event.vbucket, progress.failover_log):
            return
        instead = answered_with_rollback(asked, event.seqno, progress.failover_log, self._reading.rules)
        assert instead.go_back is not None
        if event.vbucket in self._stands and event.new_uuid == asked.place.vbucket_uuid:
            # Rows above it are handed out already, and nothing in the same batch can come behind them.
            raise StreamRefused(event.vbucket, "its source went back while it was read: the task has to be run again")
        if instead.end_seqno > instead.place.seqno:
            self._going_back[event.vbucket] = instead.go_back
        else:
            self._tell(event.vbucket, instead.go_back, asked.place.branch, instead.go_back.seqno)
            self._finish(event.vbucket)

    def stream_ended(self, feed: Feed, stream: ConsumerStream) -> None:  # noqa: ARG002
        """A stream is over: because everything came, or because something happened."""
        number = stream.vbucket
        if number not in self._open:
            return
        if stream.end_reason == "ok" or stream.position.seqno >= self._end(number):
            self._finish(number)
        else:
            self._retry(number, StreamRefused(number, f"its stream ended: {stream.end_reason}"))

    def feed_lost(self, feed: Feed, error: UpriverError) -> None:
        """A connection is gone, and the streams that it had with it; each is told as ended, too."""

    def failed(self, error: BaseException) -> None:
        """Something went wrong that no other attempt would change."""
        self._failure = self._failure or error
        self._arrived.set()

    def _finish(self, number: int) -> None:
        self._tell_going_back(number, self._end(number))
        self._open.pop(number, None)
        self._lost.discard(number)
        self._arrived.set()

    def _tell_going_back(self, number: int, snapshot_end: int) -> None:
        """The offset that was planned keeps its branch, so the snapshot has to tell which rows come after this one."""
        back = self._going_back.pop(number, None)
        if back is not None:
            self._tell(number, back, self._open[number].place.branch, snapshot_end)

    def _tell(self, number: int, back: GoBack, branch: int, snapshot_end: int) -> None:
        event = Event.ROLLBACK if back.seqno else Event.RESET
        bounds = Bounds(back.new_uuid, branch, back.seqno, snapshot_end)
        value = rollback_value(back.old_uuid, back.new_uuid)
        self._queue.append(_Arrived(self._reading.rows.row(event, number, back.seqno, bounds, value)))


def _progress(asked: Range, stands: StreamPosition | None = None) -> Progress:
    """Where the range begins, or by now stands, as a consumer says it."""
    place, position = asked.place, stands or asked.place.position
    if not position.seqno:
        return Progress.beginning()
    log = FailoverLog((FailoverEntry(place.vbucket_uuid, 0),))
    return Progress(position, log, place.first_consistent or None)


#: The readers that this worker process keeps, the one used last at the end.
_READERS: dict[object, RangeReader] = {}
#: So many queries may have connections here at once; those of the one that has waited longest are closed.
READERS_MAX: Final = 4


def reader_for(key: object, make: Callable[[], RangeReader]) -> RangeReader:
    """The reader that this worker process keeps for a query, made when it is first needed."""
    reader = _READERS.pop(key, None)
    if reader is None or not reader.is_open:
        reader = make()
    _READERS[key] = reader
    while len(_READERS) > READERS_MAX:
        _READERS.pop(next(iter(_READERS))).close()
    return reader


def close_readers() -> None:
    """Let go of all connections that this process keeps for tasks to come; a worker that ends does so anyway."""
    while _READERS:
        _READERS.popitem()[1].close()
