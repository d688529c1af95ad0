"""Consumers of the drafts, from servers on real sockets that answer as the texts allow."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from upriver.client import Consumer
from upriver.client.consumer.settings import DRAFTS
from upriver.errors import StreamRolledBack
from upriver.node import EmbeddedNode, start
from upriver.protocol.producer import STREAM_DIALECTS
from upriver.wire import DIALECTS, AnyResponse, Framer, Response, upr_draft1, upr_draft3
from upriver.wire.dialects.memcached import FailoverEntry

MUTATIONS = {"upr_draft1": upr_draft1.Mutation, "upr_draft2": upr_draft1.Mutation, "upr_draft3": upr_draft3.Mutation}


class Server:
    """A producer with this failover log, which sends one change."""

    def __init__(self, dialect: str, log: tuple[FailoverEntry, ...]) -> None:
        self.dialect, self.wire, self.log = STREAM_DIALECTS[dialect], DIALECTS[dialect], log
        self.requests: list[Any] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            try:
                accepted, _ = self.listener.accept()
            except OSError:
                return
            with accepted:
                framer = Framer(self.wire.framing)
                while data := accepted.recv(65536):
                    framer.feed(data)
                    while packet := framer.next_packet():
                        accepted.sendall(b"".join(self.answers(self.wire.decode(packet))))

    def answers(self, asked: Any) -> Iterator[bytes]:
        short = hasattr(asked, "request_id")
        opaque = asked.request_id if short else asked.opaque

        def said(message: Any) -> bytes:
            if short:
                message.request_id = opaque
            else:
                message.opaque = opaque
                if not isinstance(message, Response):
                    message.vbucket = asked.vbucket
            return bytes(message.encode())

        if type(asked) is self.dialect.failover_log_request:
            yield said(self.dialect.failover_log(self.log))
            return
        yield said(upr_draft1.Ok() if short else AnyResponse(opcode=asked.code))
        if isinstance(asked, upr_draft1.StreamRequest | upr_draft3.StreamRequest):
            self.requests.append(asked)
            assert self.dialect.start is not None
            assert self.dialect.snapshot_end is not None
            yield said(self.dialect.start())
            yield self.dialect.marker(0, opaque)(None, lambda: 0)  # type: ignore[arg-type]
            if asked.start_seqno < 2:
                yield said(MUTATIONS[self.dialect.name](by_seqno=2, key=b"k", value=b"v"))
            yield said(self.dialect.snapshot_end())
            yield said(self.dialect.end(0))


@contextmanager
def serving(dialect: str, *log: FailoverEntry) -> Iterator[Server]:
    server = Server(dialect, log)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        thread.join()


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    """The node that has the cluster map; the streams come from elsewhere."""
    with start(vbuckets=1) as node:
        yield node


@pytest.mark.shows("upr_draft1:log-zero", "upr_draft2:log-zero", "upr_draft3:log-zero")
@pytest.mark.parametrize("dialect", DRAFTS)
def test_a_failover_log_without_pairs_means_a_start_at_0(node: EmbeddedNode, dialect: Any) -> None:
    with serving(dialect) as server:
        settings = {"dialect": dialect, "stream_port": server.port, "end": {0: 2}}
        with Consumer.sync(node.address, **settings) as consumer:
            assert [change["key"] for batch in consumer for change in batch.records.to_pylist()] == [b"k"]
            progress = consumer.progress
        with Consumer.sync(node.address, **settings, start=progress, on_rollback="rewind") as consumer:
            events = [type(batch.event).__name__ for batch in consumer if batch.event is not None]
            assert events == ["Reset"]
        with (
            Consumer.sync(node.address, **settings, start=progress) as consumer,
            pytest.raises(StreamRolledBack),
        ):
            list(consumer)
    assert {(each.start_seqno, each.vbucket_uuid, each.high_seqno) for each in server.requests} == {(0, 0, 0)}


@pytest.mark.shows("upr_draft3:log-count")
@pytest.mark.parametrize("dialect", DRAFTS)
def test_a_failover_log_of_1024_pairs_is_accepted(node: EmbeddedNode, dialect: Any) -> None:
    log = [FailoverEntry(vbucket_uuid=2000 - number, seqno=0) for number in range(1024)]
    with serving(dialect, *log) as server:
        settings = {"dialect": dialect, "stream_port": server.port, "end": {0: 2}}
        with Consumer.sync(node.address, **settings) as consumer:
            assert [change["key"] for batch in consumer for change in batch.records.to_pylist()] == [b"k"]
            progress = consumer.progress
        assert progress[0].position.vbucket_uuid == 2000
        with Consumer.sync(node.address, **settings | {"end": {0: 3}}, start=progress) as consumer:
            assert [batch.event for batch in consumer] == []
    assert [each.start_seqno for each in server.requests] == [0, 2]
    assert server.requests[1].vbucket_uuid == 2000
