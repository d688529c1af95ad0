"""What memcached answers where its text is silent, over a socket. ``tests/node/test_model.py`` compares the two."""

import struct
import time
from collections.abc import Iterator

import pytest

from tests.support.raw_client import Packet, RawClient, packet
from upriver.node import start

GET, SET, ADD, INCREMENT, DECREMENT, FLUSH, TOUCH = 0x00, 0x01, 0x02, 0x05, 0x06, 0x08, 0x1C
KEY_ENOENT, KEY_EEXISTS, NOT_A_NUMBER = 1, 2, 6


class Peer(RawClient):
    """A connection for commands about the key ``k``."""

    def set(self, value: bytes, flags: int = 0) -> int:
        answer = self.ask(packet(SET, struct.pack(">II", flags, 0), b"k", value))
        assert answer.status == 0
        return answer.cas

    def get(self) -> bytes:
        return self.ask(packet(GET, b"", b"k")).value

    def count(self, opcode: int = INCREMENT, delta: int = 1, initial: int = 0, cas: int = 0, expiry: int = 0) -> Packet:
        return self.ask(packet(opcode, struct.pack(">QQI", delta, initial, expiry), b"k", cas=cas))


@pytest.fixture
def peer() -> Iterator[Peer]:
    with start(vbuckets=1) as node, Peer(node.port) as client:
        yield client  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 5000], ids=["short", "long"])  # each is answered by other code
def test_a_touch_returns_the_flags(peer: Peer, size: int) -> None:
    peer.set(b"v" * size, flags=0xCAFE)
    answer = peer.ask(packet(TOUCH, struct.pack(">I", 1000), b"k"))
    assert (answer.status, answer.extras) == (0, struct.pack(">I", 0xCAFE))


def test_an_add_with_a_cas_replaces_that_version(peer: Peer) -> None:
    cas = peer.set(b"old")
    assert peer.ask(packet(ADD, bytes(8), b"k", b"wrong", cas=cas + 1)).status == KEY_EEXISTS
    assert peer.ask(packet(ADD, bytes(8), b"k", b"new", cas=cas)).status == 0
    assert peer.get() == b"new"
    assert peer.ask(packet(ADD, bytes(8), b"absent", b"v", cas=cas)).status == KEY_ENOENT


def test_a_count_with_a_cas_creates_a_missing_number(peer: Peer) -> None:
    assert peer.count(initial=7, cas=99).value == struct.pack(">Q", 7)
    assert peer.get() == b"7"


@pytest.mark.parametrize("value", [b"words", b"7"])
def test_the_cas_is_compared_before_the_number_is_read(peer: Peer, value: bytes) -> None:
    cas = peer.set(value)
    assert peer.count(cas=cas + 1).status == KEY_EEXISTS
    assert peer.count(cas=cas).status == (0 if value.isdigit() else NOT_A_NUMBER)


def test_a_number_that_becomes_shorter_is_padded(peer: Peer) -> None:
    peer.set(b"100")
    assert peer.count(DECREMENT).value == struct.pack(">Q", 99)
    assert peer.get() == b"99 "
    assert peer.count(DECREMENT, delta=95).value == struct.pack(">Q", 4)
    assert peer.get() == b"4  "


@pytest.mark.parametrize(("value", "number"), [(b" 1", 1), (b"5 5", 5), (b"+3", 3), (b"007", 7), (b"12a", None)])
def test_numbers_are_read_as_c_reads_them(peer: Peer, value: bytes, number: int | None) -> None:
    peer.set(value)
    answer = peer.count()
    assert answer.status == (NOT_A_NUMBER if number is None else 0)
    if number is not None:
        assert answer.value == struct.pack(">Q", number + 1)
        assert peer.get() == (b"%d" % (number + 1)).ljust(len(value))


def test_a_flush_at_a_past_time_removes_nothing(peer: Peer) -> None:
    peer.set(b"v")
    assert peer.ask(packet(FLUSH, struct.pack(">I", int(time.time()) - 100))).status == 0
    assert peer.get() == b"v"
    assert peer.ask(packet(FLUSH)).status == 0
    assert peer.ask(packet(GET, b"", b"k")).status == KEY_ENOENT
