"""The statistics of streaming connections, under the names that Couchbase's tools read.

A connection belongs to the group of the dialect of its first stream request. Before that it belongs to the dialect that
its listener is pinned to, or else to `dcp`; a draft belongs to `upr`. The two groups together have every connection
once. Only streams that have not ended appear. Unacknowledged and acknowledged bytes add up to all bytes that the window
has counted: those sent or, on a connection of the consumer type, those received. The sent bytes of a producer are those
of its streams, without answers and noops, so they add up with the window if that was set first.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from upriver.node.state import NodeState
from upriver.node.streams.replica_connection import ReplicaConnection
from upriver.node.streams.service import StreamService
from upriver.node.streams.stall_check import backlog
from upriver.node.streams.stream_connection import StreamConnection
from upriver.protocol.producer import Producer

Pairs = Iterator[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class StreamNumbers:
    """Totals over all streaming connections."""

    #: The number of connections of each type.
    connections: Counter[str]
    streams: int
    #: The number of seqnos that the streams have yet to read.
    backlog: int
    #: Includes closed connections.
    bytes_sent: int
    changes_sent: int


def stream_numbers(node: NodeState) -> StreamNumbers:
    """Totals over all streaming connections, including TAP."""
    streams, tap = _stream_numbers(node), _tap_numbers(node)
    return StreamNumbers(
        streams.connections + tap.connections,
        streams.streams + tap.streams,
        streams.backlog + tap.backlog,
        streams.bytes_sent + tap.bytes_sent,
        streams.changes_sent + tap.changes_sent,
    )


def _stream_numbers(node: NodeState) -> StreamNumbers:
    service = node.streams
    if service is None:
        return StreamNumbers(Counter(), 0, 0, 0, 0)
    producers = [connection.producer for connection in service if connection.producer is not None]
    return StreamNumbers(
        Counter(connection.type for connection in service),
        sum(len(producer.streams) for producer in producers),
        sum(backlog(node, stream) for producer in producers for stream in producer.streams.values()),
        service.bytes_sent_before + sum(producer.bytes_sent_total for producer in producers),
        service.changes_sent_before + sum(producer.changes_sent for producer in producers),
    )


def _tap_numbers(node: NodeState) -> StreamNumbers:
    service = node.tap
    if service is None:
        return StreamNumbers(Counter(), 0, 0, 0, 0)
    producers = [connection.producer for connection in service]
    return StreamNumbers(
        Counter({"tap_producer": len(producers), "tap_consumer": len(service.receivers)}),
        sum(not stream.ended for producer in producers for stream in producer.streams.values()),
        sum(producer.backlog for producer in producers),
        service.bytes_sent_before + sum(producer.bytes_sent_total for producer in producers),
        service.changes_sent_before + sum(producer.changes_sent for producer in producers),
    )


def stream_statistics(service: StreamService | None, group: Literal["dcp", "upr"]) -> Pairs:
    """The statistics of all connections of one group, and their number."""
    found = [connection for connection in service or () if _group(connection) == group]
    yield f"ep_{group}_count", len(found)
    for connection in found:
        prefix = f"eq_{group}q:{connection.name}"
        yield f"{prefix}:type", connection.type
        yield f"{prefix}:created", int(connection.created)
        yield f"{prefix}:connected", "true"
        given = _producer(connection.producer) if isinstance(connection, StreamConnection) else _replica(connection)
        for name, value in given:
            yield f"{prefix}:{name}", value


def _group(connection: StreamConnection | ReplicaConnection) -> str:
    if isinstance(connection, ReplicaConnection):
        dialect = connection.replica.consumer.dialect
    else:
        dialect = connection.producer.dialect
    dialect = dialect or connection.session.listen_address.dialect
    return "dcp" if dialect in ("", "dcp") else "upr"


def _replica(connection: ReplicaConnection) -> Pairs:
    consumer = connection.replica.consumer
    window = consumer.window
    yield "max_buffer_bytes", window.size_bytes
    yield "unacked_bytes", window.unacked_bytes
    yield "total_acked_bytes", window.acked_bytes_total
    yield "total_bytes_received", consumer.bytes_received_total
    yield "total_bytes_sent", connection.replica.bytes_sent_total
    yield "items_received", consumer.changes_received
    streams = {number: stream for number, stream in consumer.streams.items() if not stream.life.ended}
    yield "num_streams", len(streams)
    for number, stream in sorted(streams.items()):
        position = stream.position
        yield f"stream_{number}_opaque", stream.opaque
        yield f"stream_{number}_start_seqno", stream.start_seqno
        yield f"stream_{number}_state", stream.life.state.value
        yield f"stream_{number}_items_received", stream.changes_received
        yield f"stream_{number}_last_received_seqno", position.seqno
        yield f"stream_{number}_snap_start_seqno", position.snapshot.start
        yield f"stream_{number}_snap_end_seqno", position.snapshot.end
        yield f"stream_{number}_vb_uuid", position.vbucket_uuid
        yield f"stream_{number}_flags", stream.flags


def _producer(producer: Producer) -> Pairs:
    window = producer.window
    yield "max_buffer_bytes", window.size_bytes
    yield "unacked_bytes", window.unacked_bytes
    yield "total_acked_bytes", window.acked_bytes_total
    yield "total_bytes_sent", producer.stream_bytes_total
    yield "items_sent", producer.changes_sent
    yield "num_streams", len(producer.streams)
    for number, stream in sorted(producer.streams.items()):
        yield f"stream_{number}_opaque", stream.opaque
        yield f"stream_{number}_start_seqno", stream.start_seqno
        yield f"stream_{number}_end_seqno", stream.end_seqno
        yield f"stream_{number}_state", stream.life.state.value
        yield f"stream_{number}_backfilled", stream.backfilled
        yield f"stream_{number}_items_sent", stream.changes_sent
        yield f"stream_{number}_last_sent_seqno", stream.last_sent_seqno
        yield f"stream_{number}_flags", stream.flags
        if stream.group_id is not None:
            yield f"stream_{number}_group_id", stream.group_id.decode(errors="replace")
