"""Random sequences of commands: the node, memcached itself, and memcached written down as a dictionary agree."""

import itertools
import random
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command_peers import Peer, SocketPeer, open_manual_node
from tests.support.depth import examples
from tests.support.memcached_model import Model, Operation, Outcome, operations, outcome, perform
from upriver.node.embedded import EmbeddedNode, start
from upriver.wire import AnyRequest
from upriver.wire import memcached as wire
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
    # A background thread that looks at an item makes memcached replace it instead of writing over it.
    command += ["-o", "no_lru_maintainer,no_lru_crawler"]
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


@pytest.mark.interop
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations(st.sampled_from([0, 1000, 4_000_000_000])), max_size=25))
def test_the_node_agrees_with_memcached(ours: SocketPeer, real: SocketPeer, steps: list[Operation]) -> None:
    prefix = next(_prefixes)
    model = Model(time.time())
    for step in steps:
        mine = replace(step, key=prefix + step.key)
        expected = perform(real, mine)
        assert perform(ours, mine) == expected, step
        assert model.perform(mine) == expected, step


@pytest.mark.interop
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations(st.just(0)), max_size=60))
def test_pipelines_agree_with_memcached(ours: SocketPeer, real: SocketPeer, steps: list[Operation]) -> None:
    prefix = next(_prefixes)
    mine = [replace(step, key=prefix + step.key) for step in steps if step.name not in ("increment", "decrement")]
    assert in_a_pipeline(ours, mine) == in_a_pipeline(real, mine)


# Raw packets: everything that an answer says but its text and the value of its CAS.

OPCODES = [
    *range(0x07),
    0x08,
    0x09,
    0x0A,
    *range(0x0C, 0x10),
    *range(0x11, 0x17),
    *range(0x18, 0x1B),
    *range(0x1C, 0x1F),
]
STORING, COUNTING, TOUCHING, FLUSHING = (1, 2, 3, 0x11, 0x12, 0x13), (5, 6, 0x15, 0x16), (0x1C, 0x1D, 0x1E), (8, 0x18)
JOINING, NOOP = (0x0E, 0x0F, 0x19, 0x1A), 0x0A
VALUES = [b"", b"0", b"1", b"10", b"99", b"100", b"99 ", b" 1", b"5 5", b"words", b"-1", b"+1", b"007", b"12a", b"\t3"]
VALUES += [b"9\0", b"3.5", b"0" * 22 + b"1", b"1" * 21, b"18446744073709551615", b"18446744073709551616", b"-0", b"1\n"]
RAW_KEYS = [b"a", b"b", b"c"]


def raw_request(rng: random.Random) -> AnyRequest:
    """Any command of memcached with any operands; 1 in place of its CAS is the item's, 2 another one."""
    opcode, now = rng.choice(OPCODES), int(time.time())
    key = b"" if opcode in (*FLUSHING, NOOP) else rng.choice(RAW_KEYS)
    expiry = rng.choice([0, 0, 0, 1000, 2592000, now + 5000, 4_000_000_000, 2592001, now - 10, 0xFFFFFFFF])
    extras = value = b""
    if opcode in STORING:
        extras, value = struct.pack(">II", rng.choice([0, 1, 2**32 - 1]), expiry), rng.choice(VALUES)
    elif opcode in COUNTING:
        extras = struct.pack(">QQI", rng.choice([0, 1, 5, 95, 2**63, 2**64 - 1]), rng.choice([0, 3, 2**64 - 1]), expiry)
    elif opcode in TOUCHING:
        extras = struct.pack(">I", expiry)
    elif opcode in JOINING:
        value = rng.choice([b"", b"1", b"1 ", b"x", b"22"])  # in a value of spaces memcached reads beyond its end
    elif opcode in FLUSHING:
        extras = rng.choice([b"", bytes(4), struct.pack(">I", 2592001)])
    cas = rng.choice([0, 0, 0, 1, 2]) if key else 0
    return AnyRequest(opcode=opcode, extras=extras, key=key, value=value, cas=cas)


def said(peer: SocketPeer, request: AnyRequest) -> list[tuple[object, ...]]:
    """What the peer answers, with the item's CAS in the request."""
    if request.cas:
        current = peer.ask(wire.Get(key=request.key))
        own = current.cas if current.status is Status.SUCCESS else 1
        request = replace(request, cas=own + request.cas - 1)
    answers: list[tuple[object, ...]] = []
    for answer in peer.send(request):
        refused = answer.status is not Status.SUCCESS
        body = b"" if refused else replace(answer, cas=0, opaque=0).encode()
        answers.append((answer.code, answer.status, bool(answer.cas), body))
    if request.opcode in FLUSHING:
        # Memcached forgets items only when they are read, and a flush at a past time brings the others back.
        peer.send(*(wire.GetQ(key=key) for key in RAW_KEYS))
    return answers


@pytest.mark.interop
@pytest.mark.parametrize(
    ("count", "seed"),
    [pytest.param(2_000, 1), pytest.param(100_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_raw_packets_get_the_same_answers(ours: SocketPeer, real: SocketPeer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for peer in (ours, real):
        peer.ask(wire.Flush())
    for number in range(count):
        request = raw_request(rng)
        expected = said(real, request)
        assert said(ours, request) == expected, (number, request)
        state = [perform(peer, Operation("get", request.key)) for peer in (ours, real)] if request.key else [None, None]
        assert state[0] == state[1], (number, request)
