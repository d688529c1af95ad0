"""Sources to compare the Spark source with: one without a network, and a naive one."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from upriver.model import Change, Event, change_batch
from upriver.spark.rows import FIELDS, SCHEMA, Bounds, RowMaker
from upriver.wire import Framer, dcp
from upriver.wire.framing import MEMCACHED

TASKS: Final = 2
VALUE: Final = b"v" * 128
#: Rows of a pre-built batch: about what the source itself yields.
PREBUILT_ROWS: Final = 12_000


class Share(InputPartition):
    """One task's part of the work."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(None)
        self.numbers = tuple(numbers)


class CeilingSource(DataSource):
    """Yields the same record batches over and over, without any network."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return CeilingReader(int(self.options["rows"]))


class CeilingReader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def partitions(self) -> list[InputPartition]:
        return [Share([self.rows // TASKS]) for _ in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Share)
        (rows,) = partition.numbers
        batch = prebuilt(PREBUILT_ROWS)
        while rows > 0:
            yield batch.slice(0, min(rows, PREBUILT_ROWS))
            rows -= PREBUILT_ROWS


def prebuilt(rows: int) -> pa.RecordBatch:
    """A batch as the source yields it."""
    changes = [
        Change(vbucket=n % 16, event=Event.MUTATION, seqno=n + 1, rev_seqno=1, cas=n, key=b"%016d" % n, value=VALUE)
        for n in range(rows)
    ]
    return RowMaker(tuple(FIELDS)).rows(change_batch(changes), [(rows, Bounds(1 << 40, 0, 0, rows))])


class NaiveSource(DataSource):
    """A straightforward source: a socket for each task, a message for each change, a tuple for each row."""

    @classmethod
    def name(cls) -> str:
        return "naive"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return NaiveReader(int(self.options["port"]), int(self.options["vbuckets"]), int(self.options["rows"]))


class NaiveReader(DataSourceReader):
    def __init__(self, port: int, vbuckets: int, rows: int) -> None:
        self.port, self.vbuckets, self.end = port, vbuckets, rows // vbuckets

    def partitions(self) -> list[InputPartition]:
        return [Share(range(first, self.vbuckets, TASKS)) for first in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Share)
        framer, running = Framer(MEMCACHED), len(partition.numbers)
        snapshots: dict[int, tuple[int, int]] = {}
        with socket.create_connection(("127.0.0.1", self.port)) as peer:
            peer.sendall(dcp.Open(name=b"naive%d" % os.getpid(), flags=dcp.OpenFlag.PRODUCER).encode())
            for number in partition.numbers:
                peer.sendall(dcp.StreamRequest(vbucket=number, end_seqno=self.end).encode())
            while running:
                framer.feed(peer.recv(1 << 18))
                while (packet := framer.next_packet()) is not None:
                    message = dcp.dcp.decode(packet)
                    if isinstance(message, dcp.SnapshotMarker):
                        snapshots[message.vbucket] = message.start_seqno, message.end_seqno
                    elif isinstance(message, dcp.StreamEnd):
                        running -= 1
                    elif isinstance(message, dcp.Mutation):
                        yield _as_tuple(message, snapshots[message.vbucket])


def _as_tuple(message: dcp.Mutation, snapshot: tuple[int, int]) -> tuple[Any, ...]:
    return (
        message.vbucket, message.by_seqno, message.rev_seqno, message.cas, "mutation", message.key, message.value,
        message.flags, message.expiration, message.lock_time, int(message.datatype), 1 << 40, 0, *snapshot,
    )  # fmt: skip
