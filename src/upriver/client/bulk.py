"""Bulk operations: sends each row of a batch to its node, as quiet requests with one reply at the end.

Rows go out in slices of bounded size, a few of them at a time. A row is sent again until the timeout if the node
refused it temporarily, no longer owns the vbucket, or could not store it on disk. After a lost connection the whole
slice is sent again. Both are safe because the writes are unconditional. A row is not sent again after a later row with
the same key was written.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.cluster.cluster import Cluster
from upriver.client.transport.address import Endpoint
from upriver.client.transport.backoff import Backoff
from upriver.client.transport.replies import Reply
from upriver.errors import (
    ConnectionLost,
    DurabilityAmbiguous,
    KeyNotFound,
    NodeUnavailable,
    NotMyVbucket,
    StatusError,
    TimedOut,
)
from upriver.model import CHANGES, Event
from upriver.wire.codec import encode_reads, encode_writes, encode_writes_with_meta, key_vbuckets
from upriver.wire.dialects.memcached import MetaOption, Noop

T = TypeVar("T")

#: The maximum number of rows in a slice; large rows make it smaller.
SLICE_ROWS_MAX: Final = 4096
SLICE_BYTES_MAX: Final = 1024 * 1024
#: The maximum number of outstanding slices per node.
SLICES_MAX: Final = 3


class RecordBatchLike(Protocol):
    """A ``pyarrow.RecordBatch``, for type checkers: pyarrow has no types, so its classes would accept everything."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    @property
    def schema(self) -> Any:
        """The names and types of the columns."""

    def column(self, name: str) -> Any:
        """One column."""


def keys_batch(keys: Sequence[bytes]) -> pa.RecordBatch:
    """Return rows that have only a key."""
    return completed(pa.record_batch({"key": pa.array(keys, pa.binary())}))


def store_batch(rows: Sequence[tuple[bytes, bytes]], flags: int, expiry: int) -> pa.RecordBatch:
    """Return rows that store these values."""
    keys, values = zip(*rows, strict=True) if rows else ((), ())
    count = len(rows)
    return completed(
        pa.record_batch(
            {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "flags": pa.repeat(pa.scalar(flags, pa.uint32()), count),
                "expiry": pa.repeat(pa.scalar(expiry, pa.uint32()), count),
            }
        )
    )


def completed(batch: RecordBatchLike) -> pa.RecordBatch:
    """Return the batch in the schema of changes: missing columns are 0, and a missing event means mutation."""
    if batch.schema.equals(CHANGES):
        return batch
    if "key" not in batch.schema.names:
        raise ValueError(f"the batch has no column key, only {', '.join(batch.schema.names)}")
    columns = []
    for field in CHANGES:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            default: Any = b"" if field.type == pa.binary() else int(Event.MUTATION) if field.name == "event" else 0
            columns.append(pa.repeat(pa.scalar(default, field.type), batch.num_rows))
        if columns[-1].null_count:
            raise ValueError(f"the column {field.name} contains nulls; fill or drop these rows")
    return pa.RecordBatch.from_arrays(columns, schema=CHANGES)


class BulkWork:
    """One bulk operation."""

    def __init__(self, cluster: Cluster, timeout_s: float, for_now: tuple[type[StatusError], ...]) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._for_now = for_now
        #: Whether the later of two rows with the same key wins, rather than the node's conflict resolution.
        self._in_order = True
        #: Whether the rows have vbuckets of their own; otherwise their keys decide.
        self._keeps_vbuckets = False
        #: The answer to a row that was written but is not known to be on disk.
        self._made: DurabilityAmbiguous | None = None

    async def write(
        self,
        batch: RecordBatchLike,
        *,
        with_meta: bool,
        options: MetaOption | None,
        keep_vbuckets: bool = False,
    ) -> dict[bytes, StatusError]:
        """Store and delete rows; return the refused keys with their errors."""
        self._keeps_vbuckets = keep_vbuckets
        self._in_order = not with_meta or MetaOption.SKIP_CONFLICT_RESOLUTION in (options or MetaOption(0))

        def encode(rows: pa.RecordBatch, first: int) -> Any:
            return encode_writes_with_meta(rows, first, options) if with_meta else encode_writes(rows, first)

        refused: dict[bytes, StatusError] = {}

        def take(keys: Sequence[bytes], reply: Reply) -> bool:
            error = reply.error()
            if error is None:
                return True
            if isinstance(error, DurabilityAmbiguous):
                self._made = error
                return False
            if isinstance(error, (NotMyVbucket, *self._for_now)):
                return False
            refused.update(dict.fromkeys(keys, error))
            return True

        await self._run(completed(batch), encode, take)
        return refused

    async def read(self, batch: pa.RecordBatch, item: Callable[[Reply], T]) -> dict[bytes, T]:
        """Return the items of the keys that exist."""
        found: dict[bytes, T] = {}

        def take(keys: Sequence[bytes], reply: Reply) -> bool:
            error = reply.error()
            if error is None:
                found[keys[0]] = item(reply)
                return True
            if isinstance(error, (NotMyVbucket, *self._for_now)):
                return False
            raise error

        await self._run(batch, encode_reads, take)
        return found

    async def _run(
        self,
        batch: pa.RecordBatch,
        encode: Callable[[pa.RecordBatch, int], Any],
        take: Callable[[Sequence[bytes], Reply], bool],
    ) -> None:
        """Send rows until each is done or refused for good."""
        loop, backoff = asyncio.get_running_loop(), Backoff()
        deadline = loop.time() + self._timeout_s
        await self._cluster.open()
        while batch.num_rows:
            known = self._cluster.map
            # The timeout limits the time without progress, not the time of a large batch.
            before = batch.num_rows
            batch, failure = await self._round(batch, encode, take)
            if not batch.num_rows:
                return
            if batch.num_rows < before:
                deadline = loop.time() + self._timeout_s
                backoff.reset()
            if isinstance(failure, NotMyVbucket) and self._cluster.map is not known:
                continue  # the refusal came with a new map
            pause_s = backoff.pause_s()
            if loop.time() + pause_s >= deadline:
                raise (
                    self._made
                    or failure
                    or TimedOut(
                        str(self._cluster.address),
                        f"{batch.num_rows} rows were not written within {self._timeout_s:g} s",
                    )
                )
            await asyncio.sleep(pause_s)
            if isinstance(failure, NodeUnavailable | NotMyVbucket):
                with contextlib.suppress(NodeUnavailable):  # the next round reports it again
                    await self._cluster.refresh(known)

    async def _round(
        self,
        batch: pa.RecordBatch,
        encode: Callable[[pa.RecordBatch, int], Any],
        take: Callable[[Sequence[bytes], Reply], bool],
    ) -> tuple[pa.RecordBatch, Exception | None]:
        """Send every row once; return the rows to send again, and the last failure."""
        again: list[pa.RecordBatch] = []
        failures: list[Exception] = []

        async def send_all(endpoint: Endpoint, rows: pa.RecordBatch) -> None:
            missed: set[int] = set()
            refused: set[int] = set()

            async def send(start: int, piece: pa.RecordBatch) -> None:
                try:
                    replies = await self._exchange(endpoint, piece, encode)
                except NodeUnavailable as failure:
                    failures.append(failure)
                    missed.update(range(start, start + piece.num_rows))
                    return
                keys = piece.column("key").to_pylist() if replies else []
                for answered, reply in replies:
                    error = reply.error()
                    if not take([keys[row] for row in answered], reply):
                        missed.update(start + row for row in answered)
                        failures.append(error or NotMyVbucket())
                    elif error is not None and not isinstance(error, KeyNotFound):
                        refused.update(start + row for row in answered)

            await self._in_slices(rows, send)
            if missed:
                left = not_overtaken(rows, missed, refused) if self._in_order else sorted(missed)
                again.append(rows.take(pa.array(left, pa.int64())))

        by_node, unowned = self._by_node(batch)
        if unowned is not None:
            again.append(unowned)
            failures.append(NotMyVbucket("the vbucket has no owner now"))
        try:
            async with asyncio.TaskGroup() as group:
                for endpoint, rows in by_node.items():
                    group.create_task(send_all(endpoint, rows))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first error cancelled the other tasks
        left = pa.Table.from_batches(again, CHANGES).combine_chunks().to_batches() if again else []
        return (left[0] if left else batch.slice(0, 0)), (failures[-1] if failures else None)

    async def _in_slices(self, rows: pa.RecordBatch, send: Callable[[int, pa.RecordBatch], Any]) -> None:
        running: set[asyncio.Task[None]] = set()
        start = 0
        try:
            for piece in slices(rows):
                if len(running) == SLICES_MAX:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
                running.add(asyncio.ensure_future(send(start, piece)))
                start += piece.num_rows
            for each in running:
                await each
        finally:
            for each in running:
                each.cancel()

    async def _exchange(
        self, endpoint: Endpoint, rows: pa.RecordBatch, encode: Callable[[pa.RecordBatch, int], Any]
    ) -> list[tuple[list[int], Reply]]:
        """Send rows and return the replies, each with the indexes of its rows."""
        connection = await self._cluster.connection(endpoint, bulk=True)
        count = rows.num_rows
        first = connection.reserve(count + 1)
        data = b"".join((encode(rows, first), Noop(opaque=first + count).encode()))
        replies = await connection.collect(data, first, count + 1, count + 1, self._timeout_s)
        if not replies or replies[-1].opaque != first + count:
            raise ConnectionLost(str(endpoint), "the node replied in the wrong order")
        return [([opaque - first for opaque in (reply.opaque, *reply.alike)], reply) for reply in replies[:-1]]

    def _by_node(self, batch: pa.RecordBatch) -> tuple[dict[Endpoint, pa.RecordBatch], pa.RecordBatch | None]:
        """Return the rows of each node, with their vbuckets, and the rows whose vbucket has no owner."""
        cluster_map = self._cluster.map
        vbuckets = batch.column("vbucket")
        if not self._keeps_vbuckets:
            vbuckets = key_vbuckets(batch.column("key"), cluster_map.vbuckets)
            place = CHANGES.get_field_index("vbucket")
            batch = batch.set_column(place, CHANGES.field(place), vbuckets)
        if len(set(cluster_map.owners)) == 1 and cluster_map.owners[0] >= 0:
            return {cluster_map.endpoints[cluster_map.owners[0]]: batch}, None
        owners = pc.take(pa.array(cluster_map.owners, pa.int16()), vbuckets)
        rows_of = {owner: batch.filter(pc.equal(owners, owner)) for owner in pc.unique(owners).to_pylist()}
        unowned = rows_of.pop(-1, None)
        return {cluster_map.endpoints[owner]: rows for owner, rows in rows_of.items()}, unowned


def slices(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Split a batch into slices of bounded size; a single row may exceed it."""
    if not batch.num_rows:
        return []
    per_row = max(1, batch.nbytes // batch.num_rows)
    rows = max(1, min(SLICE_ROWS_MAX, SLICE_BYTES_MAX // per_row))
    return [batch.slice(start, rows) for start in range(0, batch.num_rows, rows)]


def not_overtaken(rows: pa.RecordBatch, missed: set[int], refused: set[int]) -> list[int]:
    """Return the missed rows in order, without those whose key a later row has already written in the same vbucket.

    Sending such a row again would overwrite a newer value with an older one.
    """
    keys = list(zip(rows.column("vbucket").to_pylist(), rows.column("key").to_pylist(), strict=True))
    written = {key: place for place, key in enumerate(keys) if place not in missed and place not in refused}
    return [place for place in sorted(missed) if place > written.get(keys[place], -1)]
