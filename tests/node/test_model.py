"""Random sequences of commands: the node, memcached itself, and memcached written down as a dictionary agree."""

import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command_peers import Peer, SocketPeer, open_manual_node
from tests.support.depth import examples
from tests.support.memcached_model import NUMBER_KEYS, Model, Operation, Outcome, operations, outcome, perform
from upriver.node.embedded import EmbeddedNode, start
from upriver.wire.codes import Status

MEMCACHED = shutil.which("memcached") or shutil.which("memcached", path="/usr/bin:/usr/sbin")
_prefixes = (b"%d:" % number for number in itertools.count())


@pytest.mark.parametrize("compiled", [False, True])
@settings(max_examples=examples(250), deadline=None)
@given(steps=st.lists(operations(st.sampled_from([0, 0, 1, 5, 4_000_000_000]), "wait", "flush"), max_size=40))
def test_the_node_agrees_with_the_model(compiled: bool, steps: list[Operation]) -> None:
    manual = open_manual_node(compiled=compiled)
    with manual.bucket:
        peer, model = manual.peer(), Model(manual.time.now)
        for step in steps:
            if step.name == "wait":
                manual.time.pass_by(step.seconds)
            assert perform(peer, step) == model.perform(step), step
        assert manual.bucket.statistics().items >= len(model.items)  # what is expired may still be there


def in_a_pipeline(peer: Peer, steps: list[Operation]) -> list[Outcome]:
    """All operations at once, without any CAS."""
    return [outcome(answer) for answer in peer.send(*(replace(step, cas="").request(0) for step in steps))]


@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(operations(st.just(0), "flush"), max_size=60))
def test_a_pipeline_agrees_with_the_model(steps: list[Operation]) -> None:
    manual = open_manual_node(compiled=True)
    with manual.bucket:
        model = Model(manual.time.now)
        expected = [model.perform(replace(step, cas="")) for step in steps]
        assert in_a_pipeline(manual.peer(), steps) == [answer for answer in expected if answer is not None]


# Memcached itself


@pytest.fixture(scope="module")
def real() -> Iterator[SocketPeer]:
    """A connection to Debian's memcached."""
    if MEMCACHED is None:
        pytest.skip("memcached is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [MEMCACHED, "-p", str(port), "-U", "0", "-l", "127.0.0.1", "-B", "binary", "-m", "64", "-u", "nobody"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with _connected(port, process) as peer:
                yield peer
        finally:
            process.terminate()


def _connected(port: int, process: "subprocess.Popen[bytes]") -> SocketPeer:
    give_up = time.monotonic() + 60
    while True:
        try:
            return SocketPeer("127.0.0.1", port)
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"memcached is installed and does not start (exit code {process.poll()})")
            time.sleep(0.01)


@pytest.fixture(scope="module")
def ours() -> Iterator[SocketPeer]:
    node: EmbeddedNode
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as peer:
        yield peer


def comparable(answer: Outcome | None, step: Operation) -> Outcome | None:
    """Without what is memcached's own: blanks behind a number that got shorter, and which of two errors comes first."""
    if answer is None or not any(step.key.endswith(key) for key in NUMBER_KEYS):
        return answer
    if step.cas == "other" and answer.status is Status.DELTA_BADVAL:
        return Outcome(Status.KEY_EEXISTS)
    return replace(answer, value=answer.value.rstrip(b" "))


@pytest.mark.interop
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations(st.sampled_from([0, 1000, 4_000_000_000])), max_size=25))
def test_the_node_agrees_with_memcached(ours: SocketPeer, real: SocketPeer, steps: list[Operation]) -> None:
    prefix = next(_prefixes)
    model = Model(time.time())
    for step in steps:
        mine = replace(step, key=prefix + step.key)
        expected = comparable(perform(real, mine), mine)
        assert comparable(perform(ours, mine), mine) == expected, step
        assert comparable(model.perform(mine), mine) == expected, step


@pytest.mark.interop
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations(st.just(0)), max_size=60))
def test_pipelines_agree_with_memcached(ours: SocketPeer, real: SocketPeer, steps: list[Operation]) -> None:
    prefix = next(_prefixes)
    mine = [replace(step, key=prefix + step.key) for step in steps if step.name not in ("increment", "decrement")]
    assert in_a_pipeline(ours, mine) == in_a_pipeline(real, mine)
