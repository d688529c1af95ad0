"""Streams over a real engine: locks, filters, compressed values, and a clock that somebody sets."""

import subprocess
import sys
from collections.abc import Callable

import pyarrow as pa
import pytest

from tests.support.in_memory_node import Peer, node_with_peer
from tests.support.stream_requests import ask, ask_upr, brief, control
from upriver.wire import Message, dcp
from upriver.wire.codes import Status


def test_the_remaining_lock_time_goes_with_a_mutation() -> None:
    node, peer = node_with_peer(b"k")
    node.bucket.vbucket(0).get_and_lock(b"k", 20)
    node.pass_by(5)
    assert ask(peer)[2].lock_time == 15  # type: ignore[attr-defined]


@pytest.mark.shows("open_issues:filters")
def test_a_filter_on_values() -> None:
    node, peer = node_with_peer()
    vbucket = node.bucket.vbucket(0)
    vbucket.set(b"a", b'{"type": {"name": "dog"}}')
    vbucket.set(b"b", b'{"type": {"name": "cat"}}')
    assert control(peer, b"value_filter", b'{"field": "type.name", "equals": "dog"}') is Status.SUCCESS
    control(peer, b"keys_only")
    answer, marker, mutation, advanced = ask(peer)
    assert brief([answer, marker, mutation, advanced]) == ["success", "(0,2]", "a@1", "advanced 2"]
    assert mutation.value == b""  # type: ignore[attr-defined]


def test_a_filter_on_values_that_are_null() -> None:
    node, peer = node_with_peer()
    for key, value in ((b"a", b'{"x": null}'), (b"b", b'{"x": 0}'), (b"c", b"{}")):
        node.bucket.vbucket(0).set(key, value)
    assert control(peer, b"value_filter", b'{"field": "x", "equals": null}') is Status.SUCCESS
    assert brief(ask(peer)) == ["success", "(0,3]", "a@1", "advanced 3"]


@pytest.mark.parametrize("asks", [ask, ask_upr])
def test_a_filter_looks_into_values_that_are_compressed(asks: Callable[[Peer], list[Message]]) -> None:
    node, peer = node_with_peer()
    deflate = pa.Codec("snappy").compress
    for key, name in ((b"a", b"dog"), (b"b", b"cat")):
        node.bucket.vbucket(0).set(key, bytes(deflate(b'{"name": "%b"}' % name)), datatype=3)
    control(peer, b"value_filter", b'{"field": "name", "equals": "dog"}')
    messages = asks(peer)
    assert "a@1" in brief(messages)
    assert "b@2" not in brief(messages)
    assert messages[2].value == bytes(deflate(b'{"name": "dog"}'))  # type: ignore[attr-defined]


def test_a_filtered_stream_loads_nothing_that_takes_long() -> None:
    """The node stands still while a module is imported, and pandas takes seconds."""
    script = (
        "import sys\n"
        "from tests.support.in_memory_node import node_with_peer\n"
        "from tests.support.stream_requests import ask, ask_upr, brief, control\n"
        "node, peer = node_with_peer(b'a', b'b')\n"
        "before = set(sys.modules)\n"
        "control(peer, b'key_filter', b'^b')\n"
        "assert brief(ask_upr(peer)) == ['success', 'marker', 'b@2']\n"
        "other = node.connect('other').open(b'other')\n"
        'control(other, b\'value_filter\', b\'{"field": "x", "equals": 1}\')\n'
        "control(other, b'keys_only')\n"
        "assert brief(ask_upr(other)) == ['success', 'marker']\n"
        "assert 'pandas' not in before, 'it proves nothing'\n"
        "print({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (found.stdout, found.stderr) == ("set()\n", "")


@pytest.mark.parametrize("set_s", [-86_400.0, 86_400.0])
def test_a_clock_that_somebody_sets_neither_cuts_a_consumer_nor_hides_a_dead_one(set_s: float) -> None:
    node, peer = node_with_peer(b"a")
    control(peer, b"set_noop_interval", b"10")
    control(peer, b"enable_noop")
    node.clock_set_s = set_s
    node.pass_by(9.9)
    assert peer.take() == []
    node.pass_by(0.1)
    assert brief(peer.send(dcp.BufferAck(bytes_processed=1))) == ["noop"]
    node.clock_set_s = 0.0
    node.pass_by(10)
    assert brief(peer.take()) == ["noop"]
    node.clock_set_s = set_s
    node.pass_by(9.9)
    assert not peer.closed
    node.pass_by(0.1)
    assert peer.closed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"key_filter", b"("),
        (b"value_filter", b"{"),
        (b"value_filter", b'{"field": "a"}'),
        (b"value_filter", b'{"equals": 1}'),
        (b"value_filter", b'{"field": "a", "is": 1}'),
        (b"value_filter", b'{"field": "a", "equals": 1, "contains": null}'),
        (b"value_filter", b'{"field": "a", "equals": NaN}'),
        (b"value_filter", b'{"field": "a", "equals": [Infinity]}'),
        (b"value_filter", b'{"field": "a", "equals": %s}' % (b"[" * 10_000 + b"]" * 10_000)),
        (b"value_filter", b"[]"),
        (b"unknown", b"1"),
    ],
)
def test_a_control_that_makes_no_sense_changes_nothing(name: bytes, value: bytes) -> None:
    node, peer = node_with_peer(b"a")
    assert control(peer, name, value) is Status.EINVAL
    (connection,) = node.service
    assert connection.producer is not None
    assert connection.producer.controls["key_filter"] == connection.producer.controls["value_filter"] == ""
