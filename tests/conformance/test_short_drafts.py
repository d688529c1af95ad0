"""The first and the second draft, with the node as producer: raw bytes over a real socket."""

import struct
from collections.abc import Iterator

import pytest

from tests.conformance.store import REPLICA, Store
from tests.support.raw_client import ShortClient, ShortPacket, short_packet
from tests.support.vectors import vectors_of
from upriver.node import EmbeddedNode

END = 2**64 - 1
REQUEST, RESPONSE, BEGIN, MESSAGE, CLOSE, REQUEST_ERROR, DECODE_ERROR = range(1, 8)
SNAPSHOT_START, SNAPSHOT_END, MUTATION, DELETION, EXPIRATION, FLUSH = range(1, 7)
OK, NOT_MINE, ROLLBACK = 1, 2, 3
VBUCKET, REQUEST_ID = 12, 0x2D  # of the printed packets
DRAFTS = ["upr_draft1", "upr_draft2"]
both = pytest.mark.parametrize("draft", DRAFTS)


def printed(draft: str, opcode: int, first: int | None = None, *, longest: bool = False) -> bytes:
    """A printed packet of the text with the lengths that its bytes have; ``first`` is the first byte of its body."""
    found = [
        vector.wire
        for vector in vectors_of(draft)
        if vector.kind == "message" and vector.wire and vector.wire[0] == opcode
        if first is None or vector.wire[12] == first
    ]
    return max(found, key=len) if longest else min(found, key=len)


def request(
    vbucket: int = VBUCKET,
    start: int = 0,
    end: int = END,
    uuid: int = 0,
    high: int = 0,
    *,
    group: bytes = b"",
    request_id: int = REQUEST_ID,
) -> bytes:
    return short_packet(
        REQUEST, struct.pack(">BBHQQQQ", 1, 0, vbucket, start, end, uuid, high) + group, request_id=request_id
    )


@pytest.fixture
def consumer(node: EmbeddedNode, draft: str) -> Iterator[ShortClient]:
    """On the listener of the first draft, or on the ordinary port, where these bytes mean the second."""
    ports = {address.dialect: address.port for address in node.node.listen_addresses}
    with ShortClient(ports.get(draft, node.port)) as client:
        yield client


def until_close(consumer: ShortClient) -> list[ShortPacket]:
    received = [consumer.take()]
    while received[-1].opcode != CLOSE:
        received.append(consumer.take())
    return received


def stream(consumer: ShortClient, end: int) -> list[ShortPacket]:
    """Everything behind the answer to a stream request, up to the end."""
    accepted = consumer.ask(request(end=end))
    assert (accepted.opcode, accepted.body) == (RESPONSE, bytes((OK,)))
    return until_close(consumer)


def kinds(received: list[ShortPacket]) -> list[tuple[int, ...]]:
    return [(each.opcode, each.body[0]) if each.opcode == MESSAGE else (each.opcode,) for each in received]


@pytest.mark.shows(
    "upr_draft1:consumer",
    "upr_draft1:producer",
    "upr_draft1:stream",
    "upr_draft1:header-layout",
    "upr_draft1:header-request-id",
    "upr_draft1:header-length",
    "upr_draft1:opcode-request",
    "upr_draft1:opcode-response",
    "upr_draft1:opcode-begin",
    "upr_draft1:opcode-message",
    "upr_draft1:opcode-close",
    "upr_draft1:response-ok",
    "upr_draft1:type-stream",
    "upr_draft1:message-types",
    "upr_draft2:consumer",
    "upr_draft2:producer",
    "upr_draft2:stream",
    "upr_draft2:streams-meaning",
    "upr_draft2:header-layout",
    "upr_draft2:header-request-id",
    "upr_draft2:header-length",
    "upr_draft2:opcode-request",
    "upr_draft2:opcode-response",
    "upr_draft2:opcode-begin",
    "upr_draft2:opcode-message",
    "upr_draft2:opcode-close",
    "upr_draft2:response-ok",
    "upr_draft2:type-stream",
    "upr_draft2:type-numbers",
    "upr_draft2:start-first",
    "upr_draft2:snapshots-framed",
    "upr_draft2:changes",
)
@both
def test_a_stream_from_its_start_to_its_end(consumer: ShortClient, store: Store, draft: str) -> None:
    for key in (b"a", b"b"):
        store.set(key, vbucket=VBUCKET)
    store.expire(b"e", VBUCKET)
    store.delete(b"a", VBUCKET)
    received = stream(consumer, 5)
    assert kinds(received) == [
        (BEGIN,),
        (MESSAGE, SNAPSHOT_START),
        (MESSAGE, MUTATION),
        (MESSAGE, EXPIRATION),
        (MESSAGE, DELETION),
        (MESSAGE, SNAPSHOT_END),
        (CLOSE,),
    ]
    assert {(each.reserved, each.request_id) for each in received} == {(0, REQUEST_ID)}
    assert [each.body[-1:] for each in received[2:5]] == [b"v", b"e", b"a"]
    if draft == "upr_draft2":
        assert received[0].raw == printed(draft, BEGIN)


@pytest.mark.shows(
    "upr_draft1:header-reserved",
    "upr_draft1:mutation-fields",
    "upr_draft1:messages-unfinished",
    "upr_draft2:header-reserved",
    "upr_draft2:mutation-printed",
    "upr_draft2:snapshot-start-printed",
    "upr_draft2:snapshot-end-printed",
)
@both
def test_the_printed_mutation(consumer: ShortClient, store: Store, draft: str) -> None:
    store.set_with_meta(b"mykey", b"myvalue", VBUCKET, revision=3, cas=0xA5)
    begin, first, mutation, last, _ = stream(consumer, 1)
    assert begin.key_length == first.key_length == last.key_length == 0
    assert mutation.key_length == len(b"mykey")
    drawn = printed("upr_draft2", MESSAGE, MUTATION)
    seqno = (1).to_bytes(8, "big")
    assert mutation.raw == drawn[:21] + seqno + drawn[29:], "all but the printed seqno 2251"
    assert first.raw == printed("upr_draft2", MESSAGE, SNAPSHOT_START)
    assert last.raw == printed("upr_draft2", MESSAGE, SNAPSHOT_END)


@pytest.mark.shows("upr_draft1:deletion-fields", "upr_draft2:deletion-printed", "upr_draft2:expiration-printed")
@both
def test_the_printed_deletion_and_expiration(consumer: ShortClient, store: Store, draft: str) -> None:
    store.delete_with_meta(b"mykey", VBUCKET, revision=3, cas=0xA5)
    store.expire(b"other", VBUCKET, revision=2)
    received = {each.body[0]: each for each in stream(consumer, 3) if each.opcode == MESSAGE}
    lock_time = b"" if draft == "upr_draft1" else bytes(4)
    for kind, key, seqno in ((DELETION, b"mykey", 1), (EXPIRATION, b"other", 3)):
        body = received[kind].body
        assert struct.unpack(">QQI", body[9:29]) == (seqno, 3, 0)
        assert int.from_bytes(body[29:33], "big") > 1_700_000_000, "the second of the deletion"
        assert body[33:] == lock_time + key
    drawn = printed("upr_draft2", MESSAGE, DELETION)
    assert received[DELETION].body[:9] == drawn[12:21], "type and CAS"
    if draft == "upr_draft2":
        assert len(received[DELETION].raw) == len(drawn)
        assert received[DELETION].raw[:12] == drawn[:12]


@pytest.mark.shows("upr_draft2:snapshot")
@both
def test_no_key_occurs_twice_in_a_snapshot(consumer: ShortClient, store: Store, draft: str) -> None:
    for number in range(30):
        store.set(b"k%d" % (number % 4), vbucket=VBUCKET)
    keys = [each.body[37 : 37 + each.key_length] for each in stream(consumer, 30) if each.key_length]
    assert sorted(keys) == [b"k0", b"k1", b"k2", b"k3"]


@pytest.mark.shows("upr_draft2:flush")
@pytest.mark.parametrize("draft", ["upr_draft2"])
def test_a_flush(consumer: ShortClient, store: Store, draft: str) -> None:
    store.set(b"a", vbucket=VBUCKET)
    consumer.ask(request())
    while consumer.take().body != bytes((SNAPSHOT_END,)):
        pass
    store.flush()
    assert kinds(until_close(consumer)) == [(MESSAGE, FLUSH), (CLOSE,)]


@pytest.mark.shows(
    "upr_draft1:stream-printed",
    "upr_draft1:ok-printed",
    "upr_draft1:stream-vbucket",
    "upr_draft1:stream-group",
    "upr_draft2:stream-printed",
    "upr_draft2:ok-printed",
    "upr_draft2:stream-vbucket",
    "upr_draft2:stream-group",
)
@both
def test_the_printed_request(consumer: ShortClient, store: Store, draft: str) -> None:
    assert consumer.ask(printed(draft, REQUEST, longest=True)).raw == printed(draft, RESPONSE, OK)
    groups = {name: value for name, value in store.statistics(b"upr").items() if name.endswith("_group_id")}
    assert list(groups.values()) == ["replication_12"]
    assert next(iter(groups)).endswith("stream_12_group_id")


@pytest.mark.shows(
    "upr_draft1:not-mine-printed",
    "upr_draft1:response-not-mine",
    "upr_draft2:not-mine-printed",
    "upr_draft2:response-not-mine",
)
@both
def test_a_vbucket_that_is_not_there(consumer: ShortClient, draft: str) -> None:
    assert consumer.ask(request(1024)).raw == printed(draft, RESPONSE, NOT_MINE)


@pytest.mark.shows(
    "upr_draft1:rollback-printed",
    "upr_draft1:response-rollback",
    "upr_draft1:stream-uuid",
    "upr_draft2:rollback-printed",
    "upr_draft2:response-rollback",
    "upr_draft2:stream-uuid",
)
@both
def test_a_rollback(consumer: ShortClient, store: Store, draft: str) -> None:
    old = store.uuid(VBUCKET)
    for number in range(5):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    store.set_state(REPLICA, VBUCKET)
    store.set_state(1, VBUCKET)
    store.set(b"k5", vbucket=VBUCKET)
    drawn = printed(draft, RESPONSE, ROLLBACK)
    assert consumer.ask(request(start=6, uuid=old)).raw == drawn[:13] + (5).to_bytes(8, "big")
    assert consumer.ask(request(start=6, uuid=0xBAD)).raw == drawn[:13] + bytes(8), "an unknown uuid"
    wrong = request(start=6, uuid=store.uuid(VBUCKET), high=4)
    assert consumer.ask(wrong).raw == drawn[:13] + bytes(8), "a high seqno that its uuid does not have"


@pytest.mark.shows("upr_draft1:rollback-meaning", "upr_draft2:rollback-meaning")
@both
def test_a_consumer_that_is_ahead_rolls_back_to_the_high_seqno(consumer: ShortClient, store: Store, draft: str) -> None:
    for number in range(6):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    answer = consumer.ask(request(start=100, uuid=store.uuid(VBUCKET)))
    assert answer.body == bytes((ROLLBACK,)) + (6).to_bytes(8, "big")


@pytest.mark.shows(
    "upr_draft1:stream-start", "upr_draft1:stream-end-seqno", "upr_draft2:stream-start", "upr_draft2:stream-end-seqno"
)
@both
def test_a_stream_goes_from_behind_its_start_to_its_end(consumer: ShortClient, store: Store, draft: str) -> None:
    for number in range(1, 7):
        store.set(b"k%d" % number, vbucket=VBUCKET)
    consumer.ask(request(start=2, end=4, uuid=store.uuid(VBUCKET)))
    assert [each.body[-3:-1] for each in until_close(consumer) if each.key_length] == [b"k3", b"k4"]


@pytest.mark.shows("upr_draft1:stream-each", "upr_draft2:stream-each", "open_issues:request-id")
@both
def test_each_stream_has_its_request(consumer: ShortClient, store: Store, draft: str) -> None:
    for vbucket in (1, 2):
        store.set(b"key", vbucket=vbucket)
        consumer.send(request(vbucket, request_id=vbucket, end=1))
        assert {each.request_id for each in until_close(consumer)} == {vbucket}


@pytest.mark.shows(
    "upr_draft1:log-printed",
    "upr_draft1:log-pairs",
    "upr_draft1:log-answer-printed",
    "upr_draft1:type-log",
    "upr_draft2:log-printed",
    "upr_draft2:log-pairs",
    "upr_draft2:log-answer-printed",
    "upr_draft2:type-log",
)
@both
def test_the_printed_failover_log(consumer: ShortClient, store: Store, draft: str) -> None:
    first = store.uuid(VBUCKET)
    store.set(b"a", vbucket=VBUCKET)
    store.set_state(REPLICA, VBUCKET)
    store.set_state(1, VBUCKET)
    asked = printed(draft, REQUEST)
    assert consumer.ask(asked).body == bytes((NOT_MINE,)), "no stream request came before, so no vbucket is named"
    consumer.send(request(1024))
    consumer.send(request(end=0), asked)
    received = [consumer.take()]
    while len(received[-1].body) < 17:
        received.append(consumer.take())
    answer, drawn = received[-1], printed(draft, RESPONSE, OK, longest=True)
    assert answer.raw[:13] == drawn[:13]
    assert list(struct.iter_unpack(">QQ", answer.body[1:])) == [(store.uuid(VBUCKET), 1), (first, 0)]
    named = consumer.ask(short_packet(REQUEST, b"\x02\0" + VBUCKET.to_bytes(2, "big"), request_id=9))
    while len(named.body) < 17:  # what is left of the stream
        named = consumer.take()
    assert (named.request_id, named.body) == (9, answer.body)


@pytest.mark.shows(
    "upr_draft1:request-answered",
    "upr_draft1:opcode-request-error",
    "upr_draft2:request-answered",
    "upr_draft2:opcode-request-error",
    "open_issues:error-opcodes",
)
@both
def test_a_refused_request_says_why(consumer: ShortClient, store: Store, draft: str) -> None:
    answer = consumer.ask(request(start=5, end=4))
    assert (answer.opcode, answer.request_id, answer.body[:2]) == (REQUEST_ERROR, REQUEST_ID, b"\x00\x22")
    assert answer.body[2:] == b"start seqno 5 is greater than end seqno 4"
    assert consumer.ask(request()).body == bytes((OK,)), "the connection lives"


@pytest.mark.shows("upr_draft1:opcode-decode-error", "upr_draft2:opcode-decode-error", "open_issues:error-opcodes")
@both
def test_bytes_that_cannot_be_decoded(consumer: ShortClient, draft: str) -> None:
    answer = consumer.ask(short_packet(REQUEST, b"\x09", request_id=REQUEST_ID))
    assert (answer.opcode, answer.body[:4]) == (DECODE_ERROR, (12).to_bytes(4, "big"))
    assert answer.body[4:].startswith(b"at byte 12: expected type 1 or 2")
    assert consumer.closed


@pytest.mark.shows("upr_draft1:messages-unfinished")
@pytest.mark.parametrize("draft", ["upr_draft1"])
def test_the_placeholders_of_the_first_draft_are_refused(consumer: ShortClient, draft: str) -> None:
    placeholder = next(vector.printed for vector in vectors_of(draft) if vector.wire is None)
    answer = consumer.ask(placeholder)
    assert (answer.opcode, answer.body[:4]) == (DECODE_ERROR, bytes(4))
    assert consumer.closed
