"""Requests that cost much: other clients are served meanwhile."""

import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.node_process import PATIENCE_S, Client, NodeProcess, wait_until
from tests.support.stream_client import StreamClient
from upriver.node import EmbeddedNode
from upriver.wire import AnyResponse, Response, Status, dcp
from upriver.wire.dialects.memcached import Noop, Stat

#: A turn has ten milliseconds. A machine that runs other tests may add some tens; without turns it is seconds.
NOOP_S_MAX = 0.5
SIZE = 20 * 2**20 - 4096


def _probe(port: int, stop: Callable[[], bool], tell: Callable[[list[float]], object]) -> None:
    waits: list[float] = []
    with Client(port) as client:
        client.ask(Noop())
        tell([])
        while not stop():
            start = time.perf_counter()
            client.ask(Noop())
            waits.append(time.perf_counter() - start)
            time.sleep(0.001)
    tell(waits)


@contextmanager
def other_client(port: int) -> Iterator[list[float]]:
    """The waits of another client, in a process of its own, for the noops that it sends meanwhile."""
    context = multiprocessing.get_context("fork")
    waits: list[float] = []
    ours, theirs = context.Pipe()
    process = context.Process(target=_probe, args=(port, theirs.poll, theirs.send), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE_S)
        ours.recv()
        yield waits
        ours.send("stop")
        assert ours.poll(PATIENCE_S)
        waits += ours.recv()
    finally:
        process.join(PATIENCE_S)
    assert waits


@pytest.fixture(scope="module")
def served() -> Iterator[NodeProcess]:
    with NodeProcess("--port", "0", "--vbuckets", "64") as node:
        with Client(node.port) as client:
            unit = b'[1,2,3,"x",{"y":null}],'
            for number in (7, 8):
                document = b'{"list":[%s0],"a":{"b":%d}}' % (unit * (SIZE // len(unit)), number)
                client.set(b"large%d" % number, document)
                client.set(b"small%d" % number, b'{"a":{"b":%d}}' % number)
        yield node


def opened(node: NodeProcess, name: bytes) -> StreamClient:
    return StreamClient(node, name)


def test_a_value_filter_over_large_documents(served: NodeProcess) -> None:
    wanted = json.dumps({"field": "a.b", "equals": 7}).encode()
    with other_client(served.port) as waits, opened(served, b"filtering") as client:
        client.ask(dcp.Control(key=b"value_filter", value=wanted))
        client.send(dcp.StreamRequest(end_seqno=4, opaque=9))
        keys = [each.key for each in client.until(dcp.StreamEnd) if isinstance(each, dcp.Mutation)]
    assert keys == [b"large7", b"small7"]
    assert max(waits) < NOOP_S_MAX


def test_a_stream_that_waits_for_a_verdict_can_be_closed(served: NodeProcess) -> None:
    with opened(served, b"closing") as client:
        client.ask(dcp.Control(key=b"value_filter", value=b'{"field": "a", "equals": 1}'))
        client.send(dcp.StreamRequest(end_seqno=2**64 - 1, opaque=9), dcp.CloseStream(opaque=9))
        answers = itertools.islice((each for each in iter(client.next, None) if isinstance(each, Response)), 2)
        assert [each.status for each in answers] == [Status.SUCCESS] * 2
        assert client.statistics(b"dcp")["eq_dcpq:closing:num_streams"] == "0"


def test_patterns_that_are_refused(served: NodeProcess) -> None:
    units = ("a{1000}", "(?:a?){1000}", "((a{30}){30})", r"\\w{1000}", "[acegikmoqsuwy]{99}")
    controls = [dcp.Control(key=b"key_filter", value=(unit * (4000 // len(unit))).encode()) for unit in units]
    with other_client(served.port) as waits, opened(served, b"patterns") as client:
        for _ in range(8):
            client.send(*controls * 4)
            for _ in controls * 4:
                refused = client.next()
                assert isinstance(refused, Response)
                assert refused.status is Status.EINVAL
    assert max(waits) < NOOP_S_MAX
    assert statistics.median(waits) < 0.05


def test_statistics_of_everything() -> None:
    """Sixteen thousand streams have some hundred thousand statistics, which took more than a second at once."""
    groups = ("", "vbucket-details", "vbucket-seqno", "vbucket-positions", "failovers", "checkpoint", "dcp")
    last = AnyResponse(opcode=Noop.declaration.opcode, opaque=7).encode()
    with NodeProcess("--port", "0", "--vbuckets", "1024") as node, ExitStack() as stack:
        for number in range(16):
            streams = stack.enter_context(opened(node, b"many%d" % number))
            streams.send(*(dcp.StreamRequest(vbucket=number, end_seqno=2**64 - 1) for number in range(1024)))
            answers = [streams.next() for _ in range(1024)]
            assert {getattr(each, "status", None) for each in answers} == {Status.SUCCESS}
        with other_client(node.port) as waits, Client(node.port) as client:
            for group in groups:
                client.send(Stat(key=group.encode()), Noop(opaque=7))
                received = b""
                while not received.endswith(last):
                    received = (received + client.socket.recv(1 << 20))[-len(last) :]
    assert max(waits) < NOOP_S_MAX


def test_the_process_that_judges_ends_with_the_node() -> None:
    from upriver.node import start

    node: EmbeddedNode
    with start(vbuckets=1) as node:
        with Client(node.port) as client:
            client.set(b"large", b'{"a":"%s"}' % (b"x" * 100_000))
        with StreamClient(node, b"filtering") as stream:
            stream.ask(dcp.Control(key=b"value_filter", value=b'{"field": "a", "equals": 1}'))
            stream.send(dcp.StreamRequest(end_seqno=1, opaque=9))
            assert not [each for each in stream.until(dcp.StreamEnd) if isinstance(each, dcp.Mutation)]
        process = node.bucket.large_values._process
        assert process is not None
        assert process.poll() is None
    wait_until(lambda: process.poll() is not None)
