"""The third draft, with the node as producer: raw bytes over a real socket."""

import struct
from collections.abc import Iterator

import pytest

from tests.conformance.store import DEAD, REPLICA, Store
from tests.support.raw_client import Packet, RawClient, packet
from tests.support.vectors import vectors_of
from upriver.node import EmbeddedNode

END = 2**64 - 1
STREAM, LOG, START, STREAM_END, SNAPSHOT_START, SNAPSHOT_END = 0x50, 0x51, 0x52, 0x53, 0x54, 0x55
MUTATION, DELETION, EXPIRATION, FLUSH, STATE = 0x56, 0x57, 0x58, 0x59, 0x5A
VBUCKET, OPAQUE = 12, 45  # of the printed packets
MESSAGES = [vector.wire for vector in vectors_of("upr_draft3") if vector.kind == "message" and vector.wire]


def printed(opcode: int, magic: int = 0x80, status: int | None = None) -> bytes:
    """A printed packet of the text, with the lengths that its bytes have."""
    return next(
        wire
        for wire in MESSAGES
        if wire[:2] == bytes((magic, opcode)) and (status is None or wire[6:8] == status.to_bytes(2, "big"))
    )


def request(
    vbucket: int = VBUCKET,
    start: int = 0,
    end: int = END,
    uuid: int = 0,
    high: int = 0,
    *,
    flags: int = 0,
    group: bytes = b"",
    opaque: int = OPAQUE,
) -> bytes:
    fields = struct.pack(">IIQQQQ", flags, 0, start, end, uuid, high)
    return packet(STREAM, fields, group, vbucket=vbucket, opaque=opaque)


@pytest.fixture
def consumer(node: EmbeddedNode) -> Iterator[RawClient]:
    with RawClient(node.port) as client:
        yield client


def stream(consumer: RawClient, end: int) -> list[Packet]:
    """Everything behind the answer to a stream request, up to the end."""
    assert consumer.ask(request(end=end)).status == 0
    return list(consumer.until(STREAM_END))


@pytest.mark.shows(
    "upr_draft3:consumer",
    "upr_draft3:producer",
    "upr_draft3:stream",
    "upr_draft3:streams-meaning",
    "upr_draft3:magic",
    "upr_draft3:opcode-stream",
    "upr_draft3:opcode-start",
    "upr_draft3:opcode-end",
    "upr_draft3:opcode-snapshot-start",
    "upr_draft3:opcode-snapshot-end",
    "upr_draft3:opcode-mutation",
    "upr_draft3:opcode-deletion",
    "upr_draft3:opcode-expiration",
    "upr_draft3:opaque",
    "upr_draft3:vbucket",
    "upr_draft3:start-first",
    "upr_draft3:snapshots-framed",
    "upr_draft3:changes",
    "upr_draft3:end-told",
    "upr_draft3:end-ok",
)
def test_a_stream_from_its_start_to_its_end(consumer: RawClient, store: Store) -> None:
    for key in (b"a", b"b"):
        store.set(key, vbucket=VBUCKET)
    store.expire(b"e", VBUCKET)
    store.delete(b"a", VBUCKET)
    received = stream(consumer, 5)
    kinds = [START, SNAPSHOT_START, MUTATION, EXPIRATION, DELETION, SNAPSHOT_END, STREAM_END]
    assert [each.opcode for each in received] == kinds
    assert [each.key for each in received[2:5]] == [b"b", b"e", b"a"]
    assert {(each.magic, each.vbucket, each.opaque) for each in received} == {(0x80, VBUCKET, OPAQUE)}
    assert received[0].raw == printed(START)
    assert received[1].raw == printed(SNAPSHOT_START)
    assert received[-2].raw == printed(SNAPSHOT_END)
    assert received[-1].raw == printed(STREAM_END)


@pytest.mark.shows(
    "upr_draft3:request-header",
    "upr_draft3:key-length",
    "upr_draft3:extra-length",
    "upr_draft3:total-body",
    "upr_draft3:cas",
    "upr_draft3:snapshot-start-printed",
    "upr_draft3:snapshot-end-printed",
    "upr_draft3:mutation-printed",
)
def test_the_printed_mutation_between_the_printed_snapshot_messages(consumer: RawClient, store: Store) -> None:
    for _ in range(2250):  # the printed seqno is 2251
        store.send(packet(0x01, bytes(8), b"other", b"v", vbucket=VBUCKET))
    for _ in range(2250):
        assert store.take().status == 0
    store.set_with_meta(b"mykey", b"myvalue", VBUCKET, revision=3, cas=0xA5)
    start, began, other, mutation, ended, _ = stream(consumer, 2251)
    assert (began.raw, ended.raw) == (printed(SNAPSHOT_START), printed(SNAPSHOT_END))
    assert mutation.raw == printed(MUTATION)
    assert len(other.key) == 5
    for message in (start, began, ended):
        assert (message.key, message.extras, message.cas) == (b"", b"", 0)


@pytest.mark.shows("upr_draft3:deletion-printed", "upr_draft3:expiration-printed")
def test_the_printed_deletion_and_expiration(consumer: RawClient, store: Store) -> None:
    store.delete_with_meta(b"mykey", VBUCKET, revision=3, cas=0xA5)
    store.expire(b"other", VBUCKET, revision=2)
    received = {each.opcode: each for each in stream(consumer, 3)}
    for opcode, seqno in ((DELETION, 1), (EXPIRATION, 3)):
        found, drawn = received[opcode], printed(opcode)
        assert (found.raw[:12], len(found.raw)) == (drawn[:12], len(drawn))
        assert struct.unpack(">QQI", found.extras[:20]) == (seqno, 3, 0)
        assert int.from_bytes(found.extras[24:28], "big") == 0, "no lock time"
    assert received[DELETION].cas == 0xA5
    assert received[DELETION].raw[52:] == printed(DELETION)[52:]


@pytest.mark.shows("upr_draft3:snapshot", "upr_draft3:snapshot-unique")
def test_no_key_occurs_twice_in_a_snapshot(consumer: RawClient, store: Store) -> None:
    for number in range(30):
        store.set(b"k%d" % (number % 4), vbucket=VBUCKET)
    keys = [each.key for each in stream(consumer, 30) if each.opcode == MUTATION]
    assert sorted(keys) == [b"k0", b"k1", b"k2", b"k3"]


@pytest.mark.shows("upr_draft3:flush-printed", "upr_draft3:opcode-flush", "upr_draft3:end-state")
def test_the_printed_flush_and_the_end_by_a_changed_state(consumer: RawClient, store: Store) -> None:
    store.set(b"a", vbucket=VBUCKET)
    consumer.ask(request())
    list(consumer.until(SNAPSHOT_END))
    store.flush()
    assert consumer.take().raw == printed(FLUSH)
    assert consumer.take().raw == MESSAGES[[wire[:2] for wire in MESSAGES].index(b"\x80\x53") + 1]
    assert consumer.ask(request()).status == 0
    store.set_state(REPLICA, VBUCKET)
    end = list(consumer.until(STREAM_END))[-1]
    assert end.extras == (1).to_bytes(4, "big")


@pytest.mark.shows(
    "upr_draft3:stream-printed",
    "upr_draft3:ok-printed",
    "upr_draft3:response-header",
    "upr_draft3:request-types",
    "upr_draft3:request-answered",
    "upr_draft3:error-ok",
    "upr_draft3:status",
    "upr_draft3:stream-group",
)
def test_the_printed_request_and_its_answers(consumer: RawClient, store: Store) -> None:
    """With our uuid for the printed one: the log of the printed server has another."""
    drawn = printed(STREAM)
    for number in range(3):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    assert consumer.ask(drawn).raw == printed(STREAM, 0x81, 0), "it starts at 0, where no branch counts"
    groups = [value for name, value in store.statistics(b"upr").items() if name.endswith("_group_id")]
    assert groups == ["replication_12"]
    assert drawn[5] == 0, "byte 5 is the data type"


@pytest.mark.shows("upr_draft3:rollback-printed", "upr_draft3:error-rollback", "upr_draft3:stream-high")
def test_a_rollback(consumer: RawClient, store: Store) -> None:
    old = store.uuid(VBUCKET)
    for number in range(5):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    store.set_state(REPLICA, VBUCKET)
    store.set_state(1, VBUCKET)
    answer = consumer.ask(request(start=5, uuid=store.uuid(VBUCKET), high=4))
    assert (answer.status, answer.extras + answer.value) == (0x23, bytes(8)), "another high seqno than the branch has"
    store.set(b"k5", vbucket=VBUCKET)
    answer = consumer.ask(request(start=6, uuid=old))
    drawn = printed(STREAM, 0x81, 0x23)
    assert answer.raw[:24] == drawn[:24]
    assert (answer.extras, answer.value) == (b"", (5).to_bytes(8, "big"))


@pytest.mark.shows("upr_draft3:rollback-meaning")
def test_a_consumer_that_is_ahead_rolls_back_to_the_high_seqno(consumer: RawClient, store: Store) -> None:
    for number in range(6):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    answer = consumer.ask(request(start=100, uuid=store.uuid(VBUCKET)))
    assert (answer.status, answer.value) == (0x23, (6).to_bytes(8, "big"))


@pytest.mark.shows(
    "upr_draft3:log-printed",
    "upr_draft3:log-pairs",
    "upr_draft3:log-answer-printed",
    "upr_draft3:opcode-log",
    "upr_draft3:stream-uuid",
    "upr_draft3:log-count",
)
def test_the_printed_failover_log(consumer: RawClient, store: Store) -> None:
    first = store.uuid(VBUCKET)
    store.set(b"a", vbucket=VBUCKET)
    store.set_state(REPLICA, VBUCKET)
    store.set_state(1, VBUCKET)
    answer, drawn = consumer.ask(printed(LOG)), printed(LOG, 0x81)
    assert answer.raw[:24] == drawn[:24]
    assert len(answer.raw) == len(drawn), "two pairs"
    assert list(struct.iter_unpack(">QQ", answer.value)) == [(store.uuid(VBUCKET), 1), (first, 0)]
    assert first != store.uuid(VBUCKET)


@pytest.mark.shows("upr_draft3:error-not-mine", "upr_draft3:not-mine-printed")
def test_a_vbucket_that_is_not_there(consumer: RawClient) -> None:
    assert consumer.ask(request(1024)).raw == printed(STREAM, 0x81, 7)
    answer = consumer.ask(packet(LOG, vbucket=1024, opaque=OPAQUE))
    assert (answer.opcode, answer.status, answer.opaque) == (LOG, 7, OPAQUE)


@pytest.mark.shows("upr_draft3:stream-each", "upr_draft3:stream-vbucket")
def test_each_stream_has_its_request(consumer: RawClient, store: Store) -> None:
    for vbucket in (1, 2):
        store.set(b"key", vbucket=vbucket)
        assert consumer.ask(request(vbucket, opaque=vbucket)).status == 0
        received = list(consumer.until(SNAPSHOT_END))
        assert {(each.vbucket, each.opaque) for each in received} == {(vbucket, vbucket)}


@pytest.mark.shows("upr_draft3:stream-start", "upr_draft3:stream-end-seqno")
def test_a_stream_goes_from_behind_its_start_to_its_end(consumer: RawClient, store: Store) -> None:
    for number in range(1, 7):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    consumer.ask(request(start=2, end=4, uuid=store.uuid(VBUCKET)))
    received = list(consumer.until(STREAM_END))
    assert [each.key for each in received if each.opcode == MUTATION] == [b"k3", b"k4"]


@pytest.mark.shows(
    "upr_draft3:state-takeover", "upr_draft3:opcode-state", "upr_draft3:state-printed", "upr_draft3:stream-flags"
)
def test_a_takeover_and_the_printed_state(consumer: RawClient, store: Store) -> None:
    store.set(b"a", vbucket=VBUCKET)
    consumer.send(request(flags=1))
    pending = list(consumer.until(STATE))[-1]
    assert pending.extras == b"\x02"
    active = consumer.ask(packet(STATE, magic=0x81, opaque=OPAQUE))
    assert active.raw == printed(STATE)
    assert store.state(VBUCKET) == DEAD
    end = consumer.ask(packet(STATE, magic=0x81, opaque=OPAQUE))
    assert (end.opcode, end.extras) == (STREAM_END, bytes(4))
