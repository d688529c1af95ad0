"""Bytes in any pieces become the same batches."""

import asyncio

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import Connection
from upriver.errors import UpriverError
from upriver.model import CHANGES
from upriver.protocol.consumer.consumer import ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream, Run
from upriver.wire import AnyResponse, Dialect, Framer, Message, Response, dcp, memcached, upr, upr_draft3
from upriver.wire.framing import MEMCACHED


class Line(Connection):
    """A connection whose other end is the test."""

    def __init__(self, wire: Dialect = dcp.dcp) -> None:
        super().__init__(Endpoint("nowhere", 1), 1)
        self.wire = wire
        self.sent: list[Message] = []

    def write(self, data: bytes) -> None:
        framer = Framer(MEMCACHED)
        framer.feed(data)
        self.sent += [self.wire.decode(packet) for packet in iter(framer.next_packet, None)]


class Owner:
    """Records what the feed reports."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.expiries: list[int] = []
        self.runs: list[Run] = []
        self.bytes = 0
        self.ended: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []

    def received(self, feed: Feed, records: pa.RecordBatch, runs: tuple[Run, ...], wire_bytes: int) -> None:
        self.rows += zip(records.column("vbucket").to_pylist(), records.column("seqno").to_pylist(), strict=True)
        self.expiries += records.column("expiry").to_pylist()
        self.runs += runs
        self.bytes += wire_bytes

    def stream_ended(self, feed: Feed, stream: ConsumerStream) -> None:
        self.ended.append((stream.vbucket, stream.end_reason))

    def feed_lost(self, feed: Feed, error: UpriverError) -> None:
        self.errors.append(error)

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


async def exchange(sizes: list[int], value_bytes: int) -> tuple[Owner, Line]:
    line, owner = Line(), Owner()
    tracked = TrackedVbuckets({n: Progress.beginning() for n in range(3)}, "fail", on_event=print, on_move=print)
    options = ConsumerOptions(window_bytes=1000, acks_late=True)
    feed = Feed(line, tracked, owner, owner, options, columns=tuple(CHANGES.names))
    for vbucket in range(3):
        feed.add_stream(vbucket, lambda _, error: owner.errors.append(error) if error else None, end_seqno=20)
        feed.flush()
    opaques = {m.vbucket: m.opaque for m in line.sent if isinstance(m, dcp.StreamRequest)}
    messages: list[Message] = []
    for vbucket, opaque in opaques.items():
        log = (memcached.FailoverEntry(vbucket_uuid=7, seqno=0),)
        messages += [upr.StreamRequestResponse(opaque=opaque, log=log)]
        messages += [dcp.SnapshotMarker(vbucket=vbucket, opaque=opaque, start_seqno=0, end_seqno=20)]
    for seqno in range(1, 21):
        for vbucket, opaque in opaques.items():
            key, value = b"k%d" % seqno, b"v" * value_bytes
            messages.append(dcp.Mutation(vbucket=vbucket, opaque=opaque, by_seqno=seqno, key=key, value=value))
        if seqno == 10:
            messages.append(dcp.Noop(opaque=99))
    messages += [dcp.StreamEnd(vbucket=vbucket, opaque=opaque) for vbucket, opaque in opaques.items()]
    data = memoryview(b"".join(message.encode() for message in messages))
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        feed.receive(data[at : at + size])
        at, turn = at + size, turn + 1
    feed.processed(owner.bytes)
    if feed._timer is not None:
        feed._timer.cancel()
    return owner, line


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.sampled_from([0, 10, 300]))
def test_any_pieces(sizes: list[int], value_bytes: int) -> None:
    owner, line = asyncio.run(exchange(sizes, value_bytes))
    assert owner.errors == []
    assert owner.rows == [(vbucket, seqno) for seqno in range(1, 21) for vbucket in range(3)]
    assert [run.position.seqno for run in owner.runs if run.vbucket == 1][-1] == 20
    assert sum(run.rows for run in owner.runs) == 60
    assert owner.ended == [(0, "ok"), (1, "ok"), (2, "ok")]
    # The noop was answered; bytes were acknowledged when they had been used.
    assert [m.opaque for m in line.sent if isinstance(m, Response) and m.code == dcp.Noop.declaration.opcode] == [99]
    assert sum(m.bytes_processed for m in line.sent if isinstance(m, dcp.BufferAck)) >= owner.bytes


async def held_back() -> Owner:
    """A stream of the third draft whose first changes come before the log that confirms it."""
    line, owner = Line(upr_draft3.upr_draft3), Owner()
    tracked = TrackedVbuckets({0: Progress.beginning()}, "fail", on_event=print, on_move=print)
    options = ConsumerOptions(dialects=("upr",), acks_late=True)
    feed = Feed(line, tracked, owner, owner, options, columns=tuple(CHANGES.names), draft=upr_draft3.upr_draft3)
    feed.add_stream(0, lambda _, error: owner.errors.append(error) if error else None, end_seqno=2)
    feed.flush()
    log = (memcached.FailoverEntry(vbucket_uuid=7, seqno=0),)

    def say(*messages: Message) -> None:
        feed.receive(memoryview(b"".join(message.encode() for message in messages)))

    (asked,) = line.sent
    assert isinstance(asked, upr_draft3.FailoverLogRequest)
    say(upr_draft3.FailoverLogResponse(opaque=asked.opaque, log=log))
    request, again = line.sent[1:]
    assert isinstance(request, upr_draft3.StreamRequest)
    assert isinstance(again, upr_draft3.FailoverLogRequest)
    here = {"opaque": request.opaque, "vbucket": 0}
    say(
        AnyResponse(opcode=request.code, opaque=request.opaque),
        upr_draft3.StreamStart(**here),
        upr_draft3.SnapshotStart(**here),
        upr_draft3.Deletion(by_seqno=1, key=b"gone", expiration=77, **here),
        upr_draft3.FailoverLogResponse(opaque=again.opaque, log=log),
        upr_draft3.Deletion(by_seqno=2, key=b"too", expiration=88, **here),
        upr_draft3.SnapshotEnd(**here),
    )
    if feed._timer is not None:
        feed._timer.cancel()
    return owner


def test_deletions_of_a_draft_that_were_held_back_keep_what_its_text_has() -> None:
    owner = asyncio.run(held_back())
    assert (owner.errors, owner.rows, owner.expiries) == ([], [(0, 1), (0, 2)], [77, 88])
