"""TAP: raw bytes over a real socket, with the node on either side."""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.conformance.store import DEAD, PENDING, REPLICA, Store
from tests.support.node_process import wait_until
from tests.support.raw_client import RawClient, packet
from tests.support.vectors import vectors_of
from upriver.node import EmbeddedNode

CONNECT, MUTATION, DELETE, FLUSH, OPAQUE, STATE, CHECKPOINT_START, CHECKPOINT_END = range(0x40, 0x48)
BACKFILL, DUMP, LIST, TAKEOVER, ACK, KEYS_ONLY, CHECKPOINTS, REGISTERED = (1 << bit for bit in range(8))
AUTO_NACK, INITIAL, CHECKPOINT_SYNC, OPEN_CHECKPOINT, START, STOP, REVERT, CLOSE, CLOSE_BACKFILL = range(9)
ASKS_ACK, NO_VALUE = 1, 2
FUTURE = b"\xff" * 8
MESSAGES = [vector.wire for vector in vectors_of("tap") if vector.kind == "message" and vector.wire]


def printed(opcode: int, flags: int | None = None) -> bytes:
    """A printed packet of the text, with the lengths that its bytes have; a connect by its flags."""
    return next(
        wire for wire in MESSAGES if wire[1] == opcode and (flags is None or wire[24:28] == flags.to_bytes(4, "big"))
    )


class TapPacket(NamedTuple):
    """A message of a stream: engine-private data is between extras and key."""

    raw: bytes
    opcode: int
    vbucket: int
    opaque: int
    cas: int
    flags: int
    ttl: int
    #: What follows the eight common bytes of the extras.
    extras: bytes
    private: bytes
    key: bytes
    value: bytes

    @property
    def control(self) -> int:
        return int.from_bytes(self.private, "big") if self.opcode == OPAQUE else -1


def connect(flags: int, value: bytes = b"", name: bytes = b"node1") -> bytes:
    return packet(CONNECT, struct.pack(">I", flags), name, value)


def listed(*vbuckets: int) -> bytes:
    return struct.pack(f">H{len(vbuckets)}H", len(vbuckets), *vbuckets)


def message(
    opcode: int,
    key: bytes = b"",
    value: bytes = b"",
    *,
    private: bytes = b"",
    extras: bytes = b"",
    vbucket: int = 0,
    opaque: int = 9,
    cas: int = 0,
) -> bytes:
    """A message of a stream that asks for an acknowledgement."""
    common = struct.pack(">HHB3x", len(private), ASKS_ACK, 255) + extras
    body = common + private + key + value
    header = struct.pack(">BBHBBHIIQ", 0x80, opcode, len(key), len(common), 0, vbucket, len(body), opaque, cas)
    return header + body


class TapClient(RawClient):
    """A client of a stream: it acknowledges what asks for that."""

    def __enter__(self) -> "TapClient":
        return self

    def message(self) -> TapPacket | None:
        """The next message of the stream; None at the end of the connection."""
        while (found := self.next()) is not None:
            if found.magic == 0x80 and CONNECT < found.opcode <= CHECKPOINT_END:
                break
        if found is None:
            return None
        length, flags, ttl = struct.unpack(">HHB", found.extras[:5])
        rest = found.key + found.value
        key_length = len(found.key)
        if flags & ASKS_ACK:
            self.send(packet(found.opcode, magic=0x81, opaque=found.opaque))
        return TapPacket(
            found.raw,
            found.opcode,
            found.vbucket,
            found.opaque,
            found.cas,
            flags,
            ttl,
            found.extras[8:],
            rest[:length],
            rest[length : length + key_length],
            rest[length + key_length :],
        )

    def rest(self) -> list[TapPacket]:
        """Everything until the node closes the connection."""
        return list(iter(self.message, None))

    def until_key(self, key: bytes) -> list[TapPacket]:
        """The messages up to the one of this key, that one included."""
        return self.until_message(lambda each: each.key == key)

    def until_message(self, wanted: Callable[[TapPacket], bool]) -> list[TapPacket]:
        received: list[TapPacket] = []
        while not received or not wanted(received[-1]):
            found = self.message()
            assert found is not None, "the node closed the connection"
            received.append(found)
        return received


@pytest.fixture
def client(node: EmbeddedNode) -> Iterator[TapClient]:
    with TapClient(node.port) as made:
        yield made


def follows(store: Store, name: str = "node1") -> None:
    """Wait until the node serves this client."""
    wait_until(lambda: any(f":{name}:" in each for each in store.statistics(b"tap")), f"{name} is connected")


def keys(received: list[TapPacket]) -> list[bytes]:
    return [each.key for each in received if each.opcode in (MUTATION, DELETE)]


def controls(received: list[TapPacket]) -> list[int]:
    return [each.control for each in received if each.opcode == OPAQUE]


# Connect


@pytest.mark.shows(
    "tap:observe",
    "tap:bucket-type",
    "tap:begins-with-command",
    "tap:server-commands",
    "tap:connect-opcode",
    "tap:connect-printed",
    "tap:response-commands",
)
def test_the_printed_base_message_starts_a_stream(client: TapClient, store: Store) -> None:
    client.send(printed(CONNECT, 0))
    follows(store)
    for number in range(3):
        store.set(b"k%d" % number, vbucket=number)
        assert client.until_key(b"k%d" % number)[-1].raw[0] == 0x80, "a command, without a request"


@pytest.mark.shows("tap:flags-omitted", "tap:flags-extras")
def test_flags_may_be_left_out(client: TapClient, store: Store) -> None:
    client.send(packet(CONNECT, b"", b"node1"))
    follows(store)
    store.set(b"k", b"value")
    found = client.until_key(b"k")[-1]
    assert (found.value, found.flags) == (b"value", 0), "neither keys only nor acknowledgements"


@pytest.mark.shows("tap:connect-name")
def test_a_client_resumes_under_its_name(node: EmbeddedNode, store: Store) -> None:
    for number in range(3):
        store.set(b"k%d" % number, vbucket=1)
    request = connect(BACKFILL | LIST | ACK, bytes(8) + listed(1))
    with TapClient(node.port) as first:
        first.send(request)
        first.until_message(lambda each: each.control == CLOSE_BACKFILL)
        store.set(b"k3", vbucket=1)
        first.until_key(b"k3")
        wait_until(lambda: store.statistics(b"tap")["eq_tapq:node1:unacked"] == "0", "everything is acknowledged")
    store.set(b"k4", vbucket=1)
    with TapClient(node.port) as again:
        again.send(request)
        assert keys(again.until_key(b"k4")) == [b"k4"], "nothing twice and nothing left out"


# Backfill


@pytest.mark.shows("tap:backfill-value", "tap:backfill-printed", "tap:backfill-future", "tap:use-observation")
def test_the_printed_backfill_gets_new_changes_only(client: TapClient, store: Store) -> None:
    store.set(b"old", vbucket=1)
    client.send(printed(CONNECT, BACKFILL))
    follows(store)
    store.set(b"new", vbucket=1)
    assert keys(client.until_key(b"new")) == [b"new"]


@pytest.mark.shows("tap:backfill-date", "tap:backfill-future", "tap:use-replication", "tap:opaque-initial-snapshot")
@pytest.mark.parametrize("date", [0, 1, 2**40], ids=["everything", "since 1970", "the year 36812"])
def test_a_date_says_how_old_changes_may_be(client: TapClient, store: Store, date: int) -> None:
    for number in range(20):
        store.set(b"old%d" % number, vbucket=1)
    client.send(connect(BACKFILL | LIST, struct.pack(">Q", date) + listed(1)))
    follows(store)
    store.set(b"new", vbucket=1)
    expected = [] if date == 2**40 else [b"old%d" % number for number in range(20)]
    assert keys(client.until_key(b"new")) == [*expected, b"new"]


# Dump, list, order of values


@pytest.mark.shows(
    "tap:dump-value",
    "tap:dump-printed",
    "tap:dump-existing",
    "tap:dump-disconnects",
    "tap:opaque-close",
)
def test_the_printed_dump_ends_with_the_last_item(client: TapClient, store: Store) -> None:
    for number in range(5):
        store.set(b"k%d" % number, vbucket=number)
    client.send(printed(CONNECT, DUMP))
    received = client.rest()
    assert sorted(keys(received)) == [b"k%d" % number for number in range(5)]
    assert received[-1].control == CLOSE


@pytest.mark.shows("tap:list-value", "tap:list-only")
def test_only_the_listed_vbuckets_are_sent(client: TapClient, store: Store) -> None:
    for number in range(5):
        store.set(b"k%d" % number, vbucket=number)
    client.send(connect(DUMP | LIST, listed(1, 3)))
    received = client.rest()
    assert sorted(keys(received)) == [b"k1", b"k3"]
    assert {each.vbucket for each in received if each.control not in (CLOSE, AUTO_NACK)} == {1, 3}


@pytest.mark.shows("tap:list-printed")
def test_the_printed_list(client: TapClient, store: Store) -> None:
    client.send(printed(CONNECT, LIST))
    follows(store)
    store.set(b"other", vbucket=3)
    for number in range(3):
        store.set(b"k%d" % number, vbucket=number)
        assert keys(client.until_key(b"k%d" % number)) == [b"k%d" % number]


@pytest.mark.shows("tap:values-order", "tap:mix")
def test_the_printed_mix_of_options(client: TapClient, store: Store) -> None:
    """The date 5, five vbuckets, acknowledgements and keys only: values in the order of the flags."""
    for number in range(6):
        store.set(b"k%d" % number, b"value", vbucket=number)
    client.send(printed(CONNECT, BACKFILL | LIST | ACK | KEYS_ONLY))
    received = client.until_message(lambda each: each.control == CLOSE_BACKFILL and each.vbucket == 4)
    store.set(b"last", vbucket=0)
    received += client.until_key(b"last")
    assert sorted(keys(received)) == [*(b"k%d" % number for number in range(5)), b"last"]
    assert {each.value for each in received} == {b""}
    assert AUTO_NACK in controls(received)


# Takeover


@pytest.mark.shows(
    "tap:takeover-value", "tap:takeover-list", "tap:takeover-ownership", "tap:takeover-printed", "tap:use-transition"
)
def test_the_printed_takeover_transfers_three_vbuckets(client: TapClient, store: Store) -> None:
    for number in range(4):
        store.set(b"k%d" % number, vbucket=number)
    client.send(printed(CONNECT, LIST | TAKEOVER))
    received = client.rest()
    assert sorted(keys(received)) == [b"k0", b"k1", b"k2"]
    states = [(each.vbucket, int.from_bytes(each.private, "big")) for each in received if each.opcode == STATE]
    assert sorted(states) == sorted([(n, PENDING) for n in range(3)] + [(n, 1) for n in range(3)])
    assert [store.state(number) for number in range(4)] == [DEAD, DEAD, DEAD, 1]


@pytest.mark.shows("tap:takeover-list")
def test_a_takeover_without_a_list_is_of_all_vbuckets(client: TapClient, store: Store) -> None:
    client.send(connect(TAKEOVER))
    handed_over = {each.vbucket for each in client.rest() if each.opcode == STATE}
    assert handed_over == set(range(len(handed_over)))
    assert {store.state(number) for number in handed_over} == {DEAD}


# Acknowledgements, keys only, registered clients


@pytest.mark.shows("tap:ack-value", "tap:ack-printed", "tap:ack-meaning", "tap:opaque-auto-nack", "tap:opaque-control")
def test_the_printed_request_with_acknowledgements(node: EmbeddedNode, client: TapClient, store: Store) -> None:
    client.send(printed(CONNECT, ACK))
    first = client.message()
    assert first is not None
    assert (first.control, first.flags & ASKS_ACK, first.private) == (AUTO_NACK, ASKS_ACK, bytes(4))
    for _ in range(len(node.bucket)):
        client.until_message(lambda each: each.control == CLOSE_BACKFILL)
    store.set(b"k", vbucket=1)
    change = client.until_key(b"k")[-1]
    assert change.flags & ASKS_ACK, "the last message asks, so that its arrival is known"
    wait_until(lambda: store.statistics(b"tap")["eq_tapq:node1:unacked"] == "0", "the answer arrived")


@pytest.mark.shows("tap:ack-meaning")
def test_what_was_not_acknowledged_comes_again(node: EmbeddedNode, store: Store) -> None:
    store.set(b"k", vbucket=1)
    request = connect(BACKFILL | LIST | ACK, bytes(8) + listed(1))
    for _ in range(2):
        with RawClient(node.port) as silent:
            silent.send(request)
            assert [each.opcode for each in silent.until(MUTATION)][-1] == MUTATION


@pytest.mark.shows(
    "tap:keys-value", "tap:keys-printed", "tap:keys-preference", "tap:use-invalidation", "open_issues:keys-only"
)
def test_the_printed_request_for_keys(client: TapClient, store: Store) -> None:
    client.send(printed(CONNECT, KEYS_ONLY))
    follows(store)
    store.set(b"k", b"a value", vbucket=1)
    found = client.until_key(b"k")[-1]
    assert (found.value, found.flags & NO_VALUE) == (b"", NO_VALUE)


@pytest.mark.shows(
    "tap:registered-value", "tap:registered-printed", "tap:registered-stays", "tap:registered-deregister"
)
def test_the_printed_registered_client_stays_until_it_is_deregistered(node: EmbeddedNode, store: Store) -> None:
    def registered() -> bool:
        return any(each.startswith("eq_tapq:node1:") for each in store.statistics(b"tap"))

    with TapClient(node.port) as client:
        client.send(printed(CONNECT, REGISTERED))
        follows(store)
    wait_until(lambda: store.statistics(b"tap").get("eq_tapq:node1:connected") == "false", "it has left")
    assert registered()
    store.do(packet(0x9E, b"", b"node1"))  # deregister
    wait_until(lambda: not registered(), "it is forgotten")


# Messages that the node sends


@pytest.mark.shows(
    "tap:mutation-all",
    "tap:mutation-layout",
    "tap:mutation-meta",
    "tap:response-private",
    "tap:response-ttl",
    "tap:delete-private",
    "tap:delete-meta",
)
def test_each_field_of_a_mutation_and_a_delete(client: TapClient, store: Store) -> None:
    store.set(b"k", b"old", 102)
    cas = store.set(b"k", b"value", 102, flags=0xCAFE, expiry=2_000_000_000)
    store.set(b"gone", vbucket=102)
    store.delete(b"gone", 102)
    client.send(connect(BACKFILL | LIST, bytes(8) + listed(102)))
    received = {each.key: each for each in client.until_key(b"gone")}
    mutation, delete = received[b"k"], received[b"gone"]
    assert (mutation.opcode, delete.opcode) == (MUTATION, DELETE)
    assert struct.unpack(">II", mutation.extras) == (0xCAFE, 2_000_000_000)
    assert mutation.private[:8] == (2).to_bytes(8, "big"), "the revision, between the expiry and the key"
    assert delete.private[:8] == (2).to_bytes(8, "big")
    assert (mutation.cas, mutation.value, mutation.ttl, delete.ttl, delete.extras) == (cas, b"value", 255, 255, b"")


@pytest.mark.shows("tap:flush-replicates")
def test_a_flush_is_passed_on(client: TapClient, store: Store) -> None:
    store.set(b"k", vbucket=1)
    client.send(connect(BACKFILL, FUTURE))
    follows(store)
    store.flush()
    assert client.until_message(lambda each: each.opcode == FLUSH)[-1].key == b""


@pytest.mark.shows("tap:opaque-initial", "tap:opaque-close-backfill", "tap:opaque-initial-snapshot")
def test_a_backfill_has_a_begin_and_an_end(client: TapClient, store: Store) -> None:
    for number in range(10):
        store.set(b"k%d" % number, vbucket=1)
    client.send(connect(BACKFILL | LIST, bytes(8) + listed(1)))
    received = client.until_message(lambda each: each.control == CLOSE_BACKFILL)
    assert received[0].control == INITIAL
    assert len(keys(received[1:-1])) == 10


@pytest.mark.shows(
    "tap:opaque-checkpoints",
    "tap:opaque-open-checkpoint",
    "tap:opaque-open-registered",
    "tap:checkpoint-start",
    "tap:checkpoint-end",
)
@pytest.mark.parametrize("registered", [0, REGISTERED])
def test_checkpoints(client: TapClient, store: Store, registered: int) -> None:
    store.set(b"a", vbucket=1)
    client.send(connect(BACKFILL | LIST | CHECKPOINTS | registered, bytes(8) + listed(1) + listed()))
    received = client.until_key(b"a")
    assert CHECKPOINT_SYNC in controls(received)
    store.do(packet(0xAA, vbucket=1))  # create checkpoint
    store.set(b"b", vbucket=1)
    received += client.until_key(b"b")
    in_order = [
        each.key or (each.opcode, int.from_bytes(each.private, "big"))
        for each in received
        if each.opcode in (MUTATION, CHECKPOINT_START, CHECKPOINT_END)
    ]
    # A backfill comes before the open checkpoint and is not part of it.
    first = next(each[1] for each in in_order if not isinstance(each, bytes))
    assert in_order == [b"a", (CHECKPOINT_START, first), (CHECKPOINT_END, first), (CHECKPOINT_START, first + 1), b"b"]
    assert (OPEN_CHECKPOINT in controls(received)) is bool(registered)


# Messages that the node receives


@pytest.fixture
def sender(node: EmbeddedNode, store: Store) -> Iterator[RawClient]:
    """A peer that feeds two copies."""
    for vbucket in (56, 102):
        store.set_state(REPLICA, vbucket)
    with RawClient(node.port) as made:
        yield made


@pytest.mark.shows("tap:mutation-printed", "tap:delete-printed", "tap:use-replay")
def test_the_printed_mutation_and_delete_are_replayed(sender: RawClient, store: Store) -> None:
    sender.send(printed(MUTATION))
    assert sender.ask(packet(0x0A, opaque=1)).opaque == 1, "it asks for no answer"
    store.set_state(1, 102)
    assert store.get(b"mykey", 102) == b"value"
    assert store.ask(packet(0x00, b"", b"mykey", vbucket=102)).cas == 3
    store.set_state(REPLICA, 102)
    sender.send(printed(DELETE))
    assert sender.ask(packet(0x0A, opaque=2)).opaque == 2
    store.set_state(1, 102)
    assert store.get(b"mykey", 102) is None


@pytest.mark.shows("tap:mutation-meta", "tap:use-replay")
def test_the_metadata_of_a_mutation_is_kept(sender: RawClient, store: Store) -> None:
    sent = message(MUTATION, b"k", b"v", private=(7).to_bytes(8, "big"), extras=bytes(8), vbucket=102, cas=55)
    assert sender.ask(sent).status == 0
    store.set_state(1, 102)
    meta = store.do(packet(0xA0, b"", b"k", vbucket=102))
    assert (struct.unpack(">IIIQ", meta.extras[:20])[3], meta.cas) == (7, 55)


@pytest.mark.shows("tap:state-sets", "tap:state-layout", "tap:state-printed")
def test_the_printed_state(sender: RawClient, store: Store) -> None:
    answer = sender.ask(printed(STATE))
    assert (answer.opcode, answer.status, answer.opaque) == (STATE, 0, 57)
    assert store.state(56) == PENDING
    for state in (1, DEAD):
        store.set_state(REPLICA, 56)
        assert sender.ask(message(STATE, private=state.to_bytes(4, "big"), vbucket=56)).status == 0
        assert store.state(56) == state


@pytest.mark.shows("tap:checkpoint-start-printed", "tap:checkpoint-end-printed")
@pytest.mark.parametrize("opcode", [CHECKPOINT_START, CHECKPOINT_END])
def test_the_printed_checkpoints(sender: RawClient, opcode: int) -> None:
    answer = sender.ask(printed(opcode))
    assert (answer.opcode, answer.status, answer.opaque) == (opcode, 0, 57)


@pytest.mark.shows("tap:flush-printed", "tap:flush-private")
@pytest.mark.parametrize("private", [None, b"", bytes(8)], ids=["printed", "empty", "eight bytes"])
def test_the_printed_flush_empties_a_copy(sender: RawClient, store: Store, private: bytes | None) -> None:
    sent = message(MUTATION, b"k", b"v", extras=bytes(8), vbucket=102)
    assert sender.ask(sent).status == 0
    sender.send(printed(FLUSH) if private is None else message(FLUSH, private=private))
    if private is not None:
        assert sender.take().status == 0
    assert sender.ask(packet(0x0A, opaque=3)).opaque == 3
    store.set_state(1, 102)
    assert store.get(b"k", 102) is None


@pytest.mark.shows("tap:opaque-control", "tap:opaque-start", "tap:opaque-revert", "tap:opaque-revert-all")
def test_an_online_update_can_be_taken_back(sender: RawClient, store: Store) -> None:
    def control(code: int) -> bytes:
        return message(OPAQUE, private=code.to_bytes(4, "big"))

    store.set(b"before", vbucket=1)
    assert sender.ask(control(START)).status == 0
    store.set(b"from another connection", vbucket=1)
    sent = message(MUTATION, b"from this one", b"v", extras=bytes(8), vbucket=2)
    assert sender.ask(sent).status == 0
    assert store.get(b"from another connection", 1) == b"v"
    assert sender.ask(control(REVERT)).status == 0
    found = [store.get(*each) for each in ((b"before", 1), (b"from another connection", 1), (b"from this one", 2))]
    assert found == [b"v", None, None]
    assert sender.ask(control(STOP)).status != 0, "there is none any more"
