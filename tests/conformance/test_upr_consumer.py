"""The UPR transport specification, with the node as consumer: a raw socket plays the mover and the producer."""

import struct
from collections.abc import Iterator

import pytest

from tests.conformance.store import DEAD, REPLICA, Store
from tests.conformance.test_upr_producer import (
    ADD,
    CLOSE,
    DELETION,
    EINVAL,
    END,
    EXPIRATION,
    FLUSH,
    KEY_ENOENT,
    LOG,
    MARKER,
    MUTATION,
    ROLLBACK,
    STATE,
    STREAM,
    STREAM_END,
    open_packet,
    printed,
)
from tests.support.raw_client import Packet, RawClient, packet
from upriver.node import EmbeddedNode

UUID = 0xABC
NOOP = packet(0x0A, opaque=0x55)


def log_bytes(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack(">QQ", *entry) for entry in entries)


def answer(to: Packet, status: int = 0, *, extras: bytes = b"", value: bytes = b"") -> bytes:
    return packet(to.opcode, extras, b"", value, magic=0x81, vbucket=status, opaque=to.opaque)


class Mover:
    """Plays the producer on a consumer connection of the node."""

    def __init__(self, client: RawClient, log: bytes = log_bytes((UUID, 0))) -> None:
        self.client, self.log = client, log

    def add(self, vbucket: int = 0, flags: int = 0, opaque: int = 1) -> Packet:
        """Add a stream; the stream request of 40 bytes that follows, not answered yet."""
        self.client.send(packet(ADD, struct.pack(">I", flags), vbucket=vbucket, opaque=opaque))
        return self.requested()

    def requested(self) -> Packet:
        """The next stream request of 40 bytes; a producer of UPR knows neither settings nor requests of 48."""
        while True:
            asked = self.client.take()
            assert asked.magic == 0x80, asked
            if asked.opcode == LOG:
                self.client.send(answer(asked, value=self.log))
            elif asked.opcode == STREAM and len(asked.extras) == 40:
                return asked
            else:
                self.client.send(answer(asked, EINVAL))

    def established(self, vbucket: int = 0, flags: int = 0) -> int:
        """Add a stream and accept it; its opaque."""
        asked = self.add(vbucket, flags)
        added = self.client.ask(answer(asked, value=self.log))
        assert (added.magic, added.opcode, added.status) == (0x81, ADD, 0)
        return int.from_bytes(added.extras, "big")

    def quiet(self) -> bool:
        """Nothing came in answer to what was sent before."""
        return self.client.ask(NOOP).opaque == 0x55


@pytest.fixture
def mover(node: EmbeddedNode, store: Store) -> Iterator[Mover]:
    for vbucket in (0, 5, 0x210):
        store.set_state(REPLICA, vbucket)
    with RawClient(node.port) as client:
        assert client.ask(open_packet(flags=0)).status == 0
        yield Mover(client)


def mutation(key: bytes, seqno: int, opaque: int, value: bytes = b"v") -> bytes:
    return packet(MUTATION, struct.pack(">QQIIIH", seqno, 1, 0, 0, 0, 0), key, value, opaque=opaque, cas=seqno + 100)


# Add stream


@pytest.mark.shows(
    "upr:add-starts-request", "upr:add-answered-late", "upr:add-answer", "upr:add-opaque", "upr:add-vbucket"
)
def test_a_consumer_asks_for_the_stream_and_then_answers(mover: Mover, store: Store) -> None:
    asked = mover.add(opaque=1)
    assert struct.unpack(">IIQQQQ", asked.extras)[:4] == (0, 0, 0, END)
    assert (asked.key, asked.value, asked.vbucket) == (b"", b"", 0)
    assert mover.quiet(), "add stream is not answered yet"
    added = mover.client.ask(answer(asked, value=mover.log))
    drawn = printed(ADD, 0x81)
    assert added.raw[:24] == drawn[:24]
    assert added.extras == asked.opaque.to_bytes(4, "big"), "the opaque of the stream, and nothing else"
    mover.client.send(packet(MARKER, opaque=asked.opaque), mutation(b"a", 1, asked.opaque))
    assert mover.quiet()
    store.set_state(1)
    assert store.get(b"a") == b"v", "messages with this opaque are taken"


@pytest.mark.shows("upr:add-extras", "upr:add-key", "upr:add-value")
def test_add_stream_has_extras_only(mover: Mover) -> None:
    for wrong in (packet(ADD), packet(ADD, bytes(4), b"k"), packet(ADD, bytes(4), b"", b"v")):
        assert mover.client.ask(wrong).status == EINVAL
    assert mover.established() > 0


@pytest.mark.shows("upr:add-printed", "upr:add-takeover")
def test_the_printed_add_stream_is_a_takeover(mover: Mover) -> None:
    mover.client.send(printed(ADD))
    asked = mover.requested()
    assert asked.vbucket == 5
    assert asked.extras[:4] == (1).to_bytes(4, "big"), "the flag of a takeover goes to the producer"


# Close stream


@pytest.mark.shows("upr:close-both", "upr:close-consumer")
def test_a_closed_stream_is_left_and_the_producer_learns_of_it(mover: Mover, store: Store) -> None:
    opaque = mover.established()
    mover.client.send(packet(MARKER, opaque=opaque), mutation(b"a", 1, opaque))
    assert mover.client.ask(packet(CLOSE, opaque=2)).status == 0
    assert mover.quiet(), "nothing is said before a message comes"
    told = mover.client.ask(mutation(b"b", 2, opaque))
    assert (told.magic, told.opcode, told.status, told.opaque) == (0x81, MUTATION, KEY_ENOENT, opaque)
    assert store.high_seqno() == 1


# Failover log and refusals


@pytest.mark.shows("upr:log-highest")
def test_a_consumer_that_knows_no_entry_takes_the_highest(mover: Mover) -> None:
    mover.log = log_bytes((0xFEEDDECA, 0x5432), (0xDECAFE, 0x1343214), (0xFEEDFACE, 4), (0xDEADBEEF, 0x6524))
    asked = mover.add()
    _, _, start, _, uuid, high = struct.unpack(">IIQQQQ", asked.extras)
    assert (start, uuid, high) == (0, 0xDECAFE, 0x1343214)


@pytest.mark.shows("upr:request-enoent-zero", "upr:request-rollback")
@pytest.mark.parametrize(("status", "extras"), [(KEY_ENOENT, b""), (ROLLBACK, bytes(8))])
def test_a_consumer_that_is_refused_starts_over(mover: Mover, store: Store, status: int, extras: bytes) -> None:
    opaque = mover.established()
    mover.client.send(packet(MARKER, opaque=opaque), mutation(b"a", 1, opaque), mutation(b"b", 2, opaque))
    mover.client.send(packet(STREAM_END, bytes(4), opaque=opaque))
    again = mover.add(opaque=2)
    assert struct.unpack(">IIQQQQ", again.extras)[2::2] == (2, UUID)
    mover.client.send(answer(again, status, extras=extras))
    third = mover.requested()
    assert struct.unpack(">IIQQQQ", third.extras)[2] == 0
    assert mover.client.ask(answer(third, value=mover.log)).status == 0
    assert store.high_seqno() == 0


# Messages of a stream are not answered


@pytest.mark.shows(
    "upr:marker-no-reply",
    "upr:mutation-no-reply",
    "upr:deletion-no-reply",
    "upr:expiration-no-reply",
    "upr:flush-no-reply",
    "upr:end-no-reply",
    "upr:mutation-meaning",
    "upr:deletion-meaning",
    "upr:expiration-meaning",
    "upr:flush-meaning",
)
def test_a_consumer_applies_what_comes_and_answers_nothing(mover: Mover, store: Store) -> None:
    opaque = mover.established()
    removed = struct.pack(">QQH", 3, 2, 0)
    mover.client.send(
        packet(MARKER, opaque=opaque),
        *(mutation(key, seqno, opaque) for seqno, key in enumerate((b"a", b"b"), 1)),
        packet(MARKER, opaque=opaque),
        packet(DELETION, removed, b"a", opaque=opaque, cas=200),
        packet(EXPIRATION, struct.pack(">QQH", 4, 2, 0), b"b", opaque=opaque, cas=201),
        mutation(b"c", 5, opaque),
    )
    assert mover.quiet()
    assert store.high_seqno() == 5
    store.set_state(1)
    assert [store.get(key) for key in (b"a", b"b", b"c")] == [None, None, b"v"]
    store.set_state(REPLICA)
    mover.client.take()  # it has left the stream: a copy that was active receives no more on it
    opaque = mover.established()
    mover.client.send(packet(FLUSH, opaque=opaque), packet(STREAM_END, bytes(4), opaque=opaque))
    assert mover.quiet()
    store.set_state(1)
    assert store.get(b"c") is None


@pytest.mark.shows("upr:state-pending", "upr:state-active", "upr:state-no-reply")
def test_a_takeover_at_its_destination(mover: Mover, store: Store) -> None:
    opaque = mover.established(5, flags=1)
    pending = mover.client.ask(packet(STATE, b"\x02", vbucket=5, opaque=opaque))
    assert (pending.magic, pending.opcode, pending.status, pending.opaque) == (0x81, STATE, 0, opaque)
    assert store.state(5) == 3
    active = mover.client.ask(packet(STATE, b"\x01", vbucket=5, opaque=opaque))
    assert (active.opcode, active.status) == (STATE, 0)
    assert store.state(5) == 1


@pytest.mark.shows("upr:state-dead", "upr:state-printed")
def test_the_printed_state_makes_the_copy_dead(mover: Mover, store: Store) -> None:
    opaque = mover.established(0, flags=1)
    drawn = printed(STATE)
    told = mover.client.ask(drawn[:12] + opaque.to_bytes(4, "big") + drawn[16:])
    assert (told.opcode, told.status) == (STATE, 0)
    assert store.state() == DEAD


@pytest.mark.shows("upr:state-replica")
def test_a_pending_copy_becomes_a_replica_again(mover: Mover, store: Store) -> None:
    opaque = mover.established(5, flags=1)
    for code, memcached in ((2, 3), (3, REPLICA)):
        assert mover.client.ask(packet(STATE, bytes((code,)), vbucket=5, opaque=opaque)).status == 0
        assert store.state(5) == memcached


@pytest.mark.shows("upr:state-only-takeover")
@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_a_stream_that_is_not_a_takeover_changes_no_state(mover: Mover, store: Store, code: int) -> None:
    opaque = mover.established(5)
    assert mover.client.ask(packet(STATE, bytes((code,)), vbucket=5, opaque=opaque)).status == EINVAL
    assert store.state(5) == REPLICA
