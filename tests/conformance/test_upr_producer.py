"""The UPR transport specification, with the node as producer: raw bytes over a real socket."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.store import DEAD, REPLICA, Store
from tests.support.node_process import NodeProcess
from tests.support.raw_client import Packet, RawClient, packet
from tests.support.vectors import Vector, vectors_of
from upriver.node import EmbeddedNode

END = 2**64 - 1
OPEN, ADD, CLOSE, STREAM, LOG, STREAM_END = 0x50, 0x51, 0x52, 0x53, 0x54, 0x55
MARKER, MUTATION, DELETION, EXPIRATION, FLUSH, STATE = 0x56, 0x57, 0x58, 0x59, 0x5A, 0x5B
EINVAL, KEY_ENOENT, KEY_EEXISTS, NOT_MY_VBUCKET, ERANGE, ROLLBACK = 4, 1, 2, 7, 0x22, 0x23
PRINTED = {vector.id: vector for vector in vectors_of("upr")}


def printed(opcode: int, magic: int = 0x80, *, number: int = 0) -> bytes:
    """A printed packet of the text, corrected where its errata say so."""
    found = [v.wire for v in PRINTED.values() if v.wire and v.wire[0] == magic and v.wire[1] == opcode]
    return found[number]


def open_packet(flags: int = 1, name: bytes = b"conformance") -> bytes:
    return packet(OPEN, struct.pack(">II", 0, flags), name)


def request(
    vbucket: int = 0,
    start: int = 0,
    end: int = END,
    uuid: int = 0,
    high: int = 0,
    *,
    flags: int = 0,
    opaque: int = 0x1000,
) -> bytes:
    return packet(STREAM, struct.pack(">IIQQQQ", flags, 0, start, end, uuid, high), vbucket=vbucket, opaque=opaque)


def log_of(value: bytes) -> list[tuple[int, int]]:
    assert len(value) % 16 == 0
    return list(struct.iter_unpack(">QQ", value))


def keys(packets: Iterator[Packet] | list[Packet]) -> list[bytes]:
    return [each.key for each in packets if each.opcode in (MUTATION, DELETION, EXPIRATION)]


@pytest.fixture
def producer(node: EmbeddedNode) -> Iterator[RawClient]:
    """An opened producer connection."""
    with RawClient(node.port) as client:
        assert client.ask(open_packet()).status == 0
        yield client


def test_the_text_prints_what_is_compared_here() -> None:
    assert {vector.wire[1] for vector in PRINTED.values() if vector.wire} == set(range(OPEN, STATE + 1))
    assert isinstance(next(iter(PRINTED.values())), Vector)


# Terminology and messages


@pytest.mark.shows(
    "upr:consumer",
    "upr:producer",
    "upr:stream",
    "upr:transport",
    "upr:commands-come-back",
    "upr:request-role",
    "upr:request-opaque",
    "upr:marker-meaning",
    "upr:end-meaning",
)
def test_a_consumer_gets_what_it_asks_a_producer_for(producer: RawClient, store: Store) -> None:
    for key in (b"a", b"b", b"c"):
        store.set(key, b"value of " + key)
    accepted = producer.ask(request(end=3, opaque=77))
    assert (accepted.magic, accepted.opcode, accepted.status, accepted.opaque) == (0x81, STREAM, 0, 77)
    received = list(producer.until(STREAM_END))
    assert [each.opcode for each in received] == [MARKER, MUTATION, MUTATION, MUTATION, STREAM_END]
    assert {(each.magic, each.vbucket, each.opaque, each.datatype) for each in received} == {(0x80, 0, 77, 0)}
    assert [(each.key, each.value) for each in received[1:4]] == [(k, b"value of " + k) for k in (b"a", b"b", b"c")]
    assert producer.ask(packet(0x0A, opaque=5)).opaque == 5, "nothing more came for the stream"


@pytest.mark.shows("upr:snapshot", "upr:marker-unique")
def test_no_key_occurs_twice_in_a_snapshot(producer: RawClient, store: Store) -> None:
    for number in range(60):
        store.set(b"k%d" % (number % 7))
    producer.ask(request())
    for number in range(60, 90):
        store.set(b"k%d" % (number % 7))
    store.set(b"last")
    snapshots: list[list[bytes]] = []
    while not snapshots or b"last" not in snapshots[-1]:
        received = producer.take()
        if received.opcode == MARKER:
            snapshots.append([])
        else:
            snapshots[-1].append(received.key)
    assert all(len(inside) == len(set(inside)) for inside in snapshots)
    assert {key for inside in snapshots for key in inside} == {b"k%d" % n for n in range(7)} | {b"last"}


@pytest.mark.shows("upr:full-duplex", "upr:more-streams", "upr:request-each")
def test_both_sides_speak_at_any_time(producer: RawClient, store: Store) -> None:
    store.set(b"first", vbucket=1)
    producer.ask(request(1, opaque=1))
    assert [each.key for each in producer.until(MUTATION)][-1] == b"first"
    store.set(b"unasked", vbucket=1)
    assert [each.key for each in producer.until(MUTATION)][-1] == b"unasked", "sent without another request"
    store.set(b"second", vbucket=2)
    producer.send(request(2, opaque=2))
    received = list(producer.until(MUTATION))
    assert (received[0].opcode, received[0].status, received[0].opaque) == (STREAM, 0, 2)
    assert (received[-1].key, received[-1].opaque) == (b"second", 2)
    store.set(b"third", vbucket=1)
    assert [each.opaque for each in producer.until(MUTATION)][-1] == 1, "the first stream goes on"


# Open connection


@pytest.mark.shows("upr:open-both", "upr:open-type", "upr:open-layout")
def test_a_connection_is_opened_as_a_producer_or_a_consumer(node: EmbeddedNode, store: Store) -> None:
    store.set_state(REPLICA, 9)
    with RawClient(node.port) as client:
        assert client.ask(packet(OPEN, struct.pack(">II", 7, 1), b"p")).status == 0  # any sequence number
        assert client.ask(request()).status == 0, "a producer streams"
    with RawClient(node.port) as client:
        assert client.ask(packet(OPEN, struct.pack(">II", 0, 0), b"c")).status == 0
        client.send(packet(ADD, bytes(4), vbucket=9))
        assert list(client.until(STREAM))[-1].magic == 0x80, "a consumer asks for streams"


@pytest.mark.shows("upr:open-printed", "upr:open-answer")
def test_the_printed_open(node: EmbeddedNode) -> None:
    with RawClient(node.port) as client:
        assert client.ask(printed(OPEN)).raw == printed(OPEN, 0x81)
        client.send(request())
        assert client.closed, "it was opened for a consumer"


# Parts of each request


@pytest.mark.shows(
    "upr:open-extras",
    "upr:open-key",
    "upr:open-value",
)
@pytest.mark.parametrize(
    "wrong",
    [packet(OPEN, b"", b"n"), packet(OPEN, bytes(8)), packet(OPEN, bytes(8), b"n", b"v"), packet(OPEN, bytes(4), b"n")],
    ids=["no extras", "no key", "a value", "half of the extras"],
)
def test_an_open_has_extras_and_a_key_and_no_value(node: EmbeddedNode, wrong: bytes) -> None:
    with RawClient(node.port) as client:
        assert client.ask(wrong).status == EINVAL
        assert client.ask(open_packet()).status == 0, "the connection can still be opened"


@pytest.mark.shows(
    "upr:close-extras",
    "upr:close-key",
    "upr:close-value",
    "upr:log-extras",
    "upr:log-key",
    "upr:log-value",
)
@pytest.mark.parametrize("opcode", [CLOSE, LOG], ids=["close stream", "failover log"])
def test_a_close_and_a_log_request_have_no_body(producer: RawClient, opcode: int) -> None:
    producer.ask(request(opaque=1))
    for wrong in (packet(opcode, bytes(4)), packet(opcode, b"", b"k"), packet(opcode, b"", b"", b"v")):
        answer = producer.ask(wrong)
        assert (answer.opcode, answer.status) == (opcode, EINVAL)
    assert producer.ask(packet(opcode)).status == 0


@pytest.mark.shows("upr:request-extras", "upr:request-key", "upr:request-value", "upr:request-layout")
def test_a_stream_request_has_40_bytes_of_extras_only(producer: RawClient, store: Store) -> None:
    good = struct.pack(">IIQQQQ", 0, 0, 0, END, 0, 0)
    for wrong in (
        packet(STREAM),
        packet(STREAM, good[:39]),
        packet(STREAM, good, b"k"),
        packet(STREAM, good, b"", b"v"),
    ):
        assert producer.ask(wrong).status == EINVAL
    for key in (b"a", b"b", b"c"):
        store.set(key)
    # Flags, reserved, start, end, uuid and high seqno each at their place: (1, 2] of this branch.
    assert producer.ask(packet(STREAM, struct.pack(">IIQQQQ", 0, 0, 1, 2, store.uuid(), 0))).status == 0
    assert keys(producer.until(STREAM_END)) == [b"b"]


# Close stream


@pytest.mark.shows(
    "upr:close-both", "upr:close-printed", "upr:close-producer", "upr:close-late-answers", "open_issues:stop-streams"
)
def test_a_producer_that_closes_sends_nothing_more(producer: RawClient, store: Store) -> None:
    producer.ask(request(5, opaque=3))
    store.set(b"before", vbucket=5)
    assert [each.key for each in producer.until(MUTATION)][-1] == b"before"
    answer = producer.ask(printed(CLOSE))
    assert (answer.opcode, answer.status, answer.opaque) == (CLOSE, 0, 0xDEADBEEF)
    store.set(b"after", vbucket=5)
    producer.send(packet(STATE, magic=0x81, opaque=3), packet(MARKER, magic=0x81, opaque=3))  # late responses
    assert producer.ask(packet(0x0A, opaque=8)).opaque == 8, "and the connection lives"
    assert producer.ask(request(5, opaque=4)).status == 0, "the vbucket can be asked for again"


# Failover log


@pytest.mark.shows(
    "upr:log-ids",
    "upr:log-answer-extras",
    "upr:log-answer-key",
    "upr:log-answer-value",
    "upr:log-printed",
    "upr:log-layout",
    "upr:request-uuid-active",
    "upr:request-high",
)
def test_the_failover_log_has_every_branch(producer: RawClient, store: Store) -> None:
    uuids, seqnos = [store.uuid()], [0]
    for key in (b"a", b"b", b"c"):
        store.set(key)
        store.set_state(REPLICA)
        store.set_state(1)
        uuids.append(store.uuid())
        seqnos.append(len(seqnos))
    answer = producer.ask(printed(LOG))
    assert (answer.opcode, answer.status, answer.opaque, answer.cas) == (LOG, 0, 0xDEADBEEF, 0)
    assert (answer.extras, answer.key) == (b"", b"")
    assert log_of(answer.value) == list(zip(reversed(uuids), reversed(seqnos), strict=True))
    assert len(set(uuids)) == 4, "a new uuid each time that it became active"
    drawn = printed(LOG, 0x81)
    assert len(answer.raw) == len(drawn), "four entries, as in the printed response"
    assert answer.raw[:24] == drawn[:24]


@pytest.mark.shows("upr:log-not-mine", "upr:request-not-mine")
def test_a_vbucket_that_is_not_there(producer: RawClient, store: Store) -> None:
    assert producer.ask(packet(LOG, vbucket=1024)).status == NOT_MY_VBUCKET
    assert producer.ask(request(1024)).status == NOT_MY_VBUCKET
    store.set_state(DEAD, 7)
    store.do(packet(0x3F, vbucket=7))  # delete vbucket
    assert producer.ask(packet(LOG, vbucket=7)).status == NOT_MY_VBUCKET
    assert producer.ask(request(7)).status == NOT_MY_VBUCKET


@pytest.mark.shows("upr:request-uuid-crash")
def test_a_crash_begins_a_branch(tmp_path: Path) -> None:
    def log(served: NodeProcess) -> list[tuple[int, int]]:
        with RawClient(served.port) as client:
            client.ask(open_packet())
            return log_of(client.ask(packet(LOG)).value)

    options = ("--data", str(tmp_path), "--vbuckets", "2", "--port", "0", "--ack", "disk")
    with NodeProcess(*options) as served:
        first = log(served)
        with Store(served.port) as store:
            store.set(b"a")
        served.process.kill()
        served.process.wait()
    with NodeProcess(*options) as served:
        second = log(served)
    assert second[1:] == first
    assert second[0][1] == 1


# Stream request


@pytest.mark.shows("upr:request-start", "upr:request-end", "upr:end-ok")
def test_a_stream_goes_from_behind_its_start_to_its_end(producer: RawClient, store: Store) -> None:
    for number in range(1, 7):
        store.set(b"k%d" % number)
    producer.ask(request(start=2, end=4, uuid=store.uuid()))
    received = list(producer.until(STREAM_END))
    assert keys(received) == [b"k3", b"k4"]
    assert received[-1].extras == bytes(4)


@pytest.mark.shows("upr:request-flags")
def test_the_takeover_flag_of_a_stream_request(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    producer.send(request(flags=1, opaque=9))
    state = list(producer.until(STATE))[-1]
    assert (state.extras, state.opaque) == (b"\x02", 9), "pending, when everything has been sent"


@pytest.mark.shows("upr:request-zero")
def test_a_consumer_that_has_nothing_asks_without_a_log(producer: RawClient, store: Store) -> None:
    for key in (b"a", b"b"):
        store.set(key)
    store.set_state(REPLICA)
    store.set_state(1)
    assert producer.ask(request(end=2)).status == 0
    assert keys(producer.until(STREAM_END)) == [b"a", b"b"]


@pytest.mark.shows(
    "upr:request-answer-extras", "upr:request-answer-key", "upr:request-answer-value", "upr:request-answer-log"
)
def test_an_accepted_request_is_answered_with_the_log(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    store.set_state(REPLICA)
    store.set_state(1)
    log = producer.ask(packet(LOG)).value
    refused = producer.ask(request(1024))
    assert (refused.status, refused.extras, refused.key) == (NOT_MY_VBUCKET, b"", b"")
    answer = producer.ask(request(opaque=0x1000))
    assert (answer.status, answer.extras, answer.key, answer.value, answer.opaque) == (0, b"", b"", log, 0x1000)
    assert len(log_of(log)) == 2


@pytest.mark.shows(
    "upr:request-answer-rollback", "upr:request-printed-rollback", "upr:request-printed-retry", "upr:request-rollback"
)
def test_the_printed_rollback_and_the_retry(producer: RawClient, store: Store) -> None:
    """The printed request names a branch under a high seqno that the log does not have for it."""

    for number in range(4):
        store.set(b"k%d" % number)
    store.set_state(REPLICA)
    store.set_state(1)  # a branch at 4
    ours = store.uuid().to_bytes(8, "big")

    def named(request_: bytes) -> bytes:
        """The printed request with our uuid in the place of the printed one, and a start within our history."""
        start = request_[32:40] if request_[32:40] == bytes(8) else (3).to_bytes(8, "big")
        return request_[:32] + start + request_[40:48] + ours + request_[56:]

    refused = producer.ask(named(printed(STREAM, number=0)))
    assert refused.raw == printed(STREAM, 0x81, number=0), "byte for byte"
    assert refused.status == ROLLBACK
    assert refused.extras == bytes(8)
    accepted = producer.ask(named(printed(STREAM, number=1)))
    assert accepted.status == 0
    assert accepted.raw[:8] == printed(STREAM, 0x81, number=1)[:8]
    assert accepted.opaque == 0x1000
    assert len(keys(list(producer.until(MUTATION)))) == 1


@pytest.mark.shows("upr:request-rollback", "upr:request-answer-rollback", "open_issues:rollback-debate")
def test_a_consumer_of_a_lost_branch_rolls_back_to_where_it_left(producer: RawClient, store: Store) -> None:
    old = store.uuid()
    for number in range(5):
        store.set(b"k%d" % number)
    store.set_state(REPLICA)
    store.set_state(1)  # a new branch at 5
    for number in range(3):
        store.set(b"new%d" % number)
    answer = producer.ask(request(start=7, uuid=old))
    assert (answer.status, answer.extras + answer.value) == (ROLLBACK, (5).to_bytes(8, "big"))
    assert producer.ask(request(start=5, uuid=old)).status == 0


@pytest.mark.shows("upr:request-enoent")
def test_an_unknown_uuid(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    assert producer.ask(request(start=1, uuid=0xFEEDDECA)).status == KEY_ENOENT


@pytest.mark.shows("upr:request-eexists")
def test_a_second_stream_for_a_vbucket(producer: RawClient) -> None:
    assert producer.ask(request(opaque=1)).status == 0
    refused = producer.ask(request(opaque=2))
    assert (refused.status, refused.opaque) == (KEY_EEXISTS, 2)


@pytest.mark.shows("upr:request-erange-high", "upr:request-erange-order")
def test_a_range_that_makes_no_sense(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    uuid = store.uuid()
    assert producer.ask(request(start=2, uuid=uuid)).status == ERANGE, "beyond the high seqno"
    assert producer.ask(request(start=1, end=0, uuid=uuid)).status == ERANGE
    assert producer.ask(request(start=1, end=1, uuid=uuid)).status == 0, "equal is allowed"
    assert producer.take().opcode == STREAM_END


@pytest.mark.shows("upr:request-disconnect")
def test_a_stream_request_on_a_wrong_connection_closes_it(node: EmbeddedNode) -> None:
    with RawClient(node.port) as client:
        client.send(request())
        assert client.closed, "it was not opened"
    with RawClient(node.port) as client:
        client.ask(open_packet(flags=0))
        client.send(request())
        assert client.closed, "it was opened for a consumer"


# What a stream sends


def changed(producer: RawClient, vbucket: int, opaque: int, end: int) -> dict[int, Packet]:
    """The messages of a stream up to its end, by opcode: the last of each."""
    assert producer.ask(request(vbucket, end=end, opaque=opaque)).status == 0
    return {each.opcode: each for each in producer.until(STREAM_END)}


def without_cas(raw: bytes) -> bytes:
    return raw[:16] + raw[24:]


@pytest.mark.shows(
    "upr:mutation-meaning",
    "upr:mutation-extras",
    "upr:mutation-key",
    "upr:mutation-value",
    "upr:mutation-layout",
    "upr:mutation-printed",
)
def test_the_printed_mutation(producer: RawClient, store: Store) -> None:
    for key in (b"x", b"y", b"z"):
        store.set(key, vbucket=0x210)
    store.set_with_meta(b"hello", b"world", 0x210, revision=1, cas=0x64A5ACEC8A56)
    assert changed(producer, 0x210, 0x1210, 4)[MUTATION].raw == printed(MUTATION)


@pytest.mark.shows("upr:mutation-layout", "upr:mutation-value")
def test_each_field_of_a_mutation(producer: RawClient, store: Store) -> None:
    store.set(b"k", b"old")
    cas = store.set(b"k", b"", flags=0xCAFE, expiry=2_000_000_000)
    found = changed(producer, 0, 1, 2)[MUTATION]
    assert struct.unpack(">QQIIIH", found.extras) == (2, 2, 0xCAFE, 2_000_000_000, 0, 0)
    assert (found.key, found.value, found.cas) == (b"k", b"", cas)


@pytest.mark.shows("upr:mutation-layout", "open_issues:lock-time")
def test_the_lock_time_of_a_mutation(producer: RawClient, store: Store) -> None:
    store.set(b"k", vbucket=1)
    store.lock(b"k", 20, vbucket=1)
    found = changed(producer, 1, 1, 1)[MUTATION]
    assert 10 <= struct.unpack(">QQIIIH", found.extras)[4] <= 20


@pytest.mark.shows(
    "upr:deletion-meaning",
    "upr:deletion-extras",
    "upr:deletion-key",
    "upr:deletion-value",
    "upr:deletion-layout",
    "upr:deletion-printed",
)
def test_the_printed_deletion(producer: RawClient, store: Store) -> None:
    for key in (b"w", b"x", b"y", b"z"):
        store.set(key, vbucket=0x210)
    store.delete_with_meta(b"hello", 0x210, revision=1, cas=77)
    found = changed(producer, 0x210, 0x1210, 5)[DELETION]
    assert without_cas(found.raw) == without_cas(printed(DELETION))
    assert found.cas == 77
    assert struct.unpack(">QQH", found.extras) == (5, 1, 0)
    assert found.value == b""


@pytest.mark.shows(
    "upr:expiration-meaning",
    "upr:expiration-extras",
    "upr:expiration-key",
    "upr:expiration-value",
    "upr:expiration-layout",
    "upr:expiration-printed",
    "open_issues:expirations",
)
def test_the_printed_expiration(producer: RawClient, store: Store) -> None:
    for key in (b"x", b"y", b"z"):
        store.set(key, vbucket=0x210)
    store.expire(b"hello", 0x210)
    found = changed(producer, 0x210, 0x1210, 5)
    assert DELETION not in found
    drawn = printed(EXPIRATION)
    revised = drawn[:32] + (2).to_bytes(8, "big") + drawn[40:]
    assert without_cas(found[EXPIRATION].raw) == without_cas(revised)
    assert found[EXPIRATION].cas != 0


@pytest.mark.shows(
    "upr:marker-extras",
    "upr:marker-key",
    "upr:marker-value",
    "upr:marker-printed",
    "upr:end-extras",
    "upr:end-key",
    "upr:end-value",
    "upr:end-printed",
)
def test_the_printed_marker_and_stream_end(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    found = changed(producer, 0, 0xDEADBEEF, 1)
    assert found[MARKER].raw == printed(MARKER)
    assert found[STREAM_END].raw == printed(STREAM_END)


@pytest.mark.shows("upr:end-state")
@pytest.mark.parametrize("state", [REPLICA, DEAD])
def test_a_stream_ends_when_the_state_changes(producer: RawClient, store: Store, state: int) -> None:
    producer.ask(request())
    store.set_state(state)
    end = producer.take()
    assert (end.opcode, end.extras) == (STREAM_END, (1).to_bytes(4, "big"))


@pytest.mark.shows(
    "upr:flush-extras", "upr:flush-key", "upr:flush-value", "upr:flush-printed", "open_issues:bucket-flush"
)
def test_the_printed_flush(producer: RawClient, store: Store) -> None:
    store.set(b"a")
    producer.ask(request(opaque=0xDEADBEEF))
    assert [each.key for each in producer.until(MUTATION)][-1] == b"a"
    store.flush()
    assert producer.take().raw == printed(FLUSH)
    assert producer.take().opcode == STREAM_END


@pytest.mark.shows(
    "upr:state-takeover",
    "upr:state-extras",
    "upr:state-key",
    "upr:state-value",
    "upr:state-layout",
    "open_issues:ownership",
)
def test_a_takeover_passes_the_ownership_on(producer: RawClient, store: Store) -> None:
    store.set(b"a", vbucket=3)
    producer.send(request(3, flags=1, opaque=6))
    pending = list(producer.until(STATE))[-1]
    assert (pending.extras, pending.key, pending.value, pending.vbucket) == (b"\x02", b"", b"", 3)
    assert store.state(3) == 1, "the source is active until the destination is pending"
    active = producer.ask(packet(STATE, magic=0x81, opaque=6))
    assert (active.opcode, active.extras) == (STATE, b"\x01")
    assert store.state(3) == DEAD
    end = producer.ask(packet(STATE, magic=0x81, opaque=6))
    assert (end.opcode, end.extras) == (STREAM_END, bytes(4))
