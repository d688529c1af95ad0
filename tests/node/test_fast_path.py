"""The compiled loop gives the same bytes as the session alone, whatever is asked."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_peers import ManualNode, SessionPeer, encoded, open_manual_node
from tests.support.depth import examples
from upriver.engine import StoredItem
from upriver.model import FailoverLog, VbucketState
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.state import Limits
from upriver.wire import AnyRequest, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Decrement,
    DecrementQ,
    Delete,
    DeleteQ,
    DeleteQWithMeta,
    DeleteWithMeta,
    Feature,
    Flush,
    Get,
    GetK,
    GetKQ,
    GetLocked,
    GetMeta,
    GetQ,
    GetResponse,
    Hello,
    Increment,
    IncrementQ,
    MetaOption,
    Noop,
    Set,
    SetQ,
    SetQWithMeta,
    SetResponse,
    SetWithMeta,
    Touch,
    Unlock,
)

KEYS = [b"a", b"b", b"c", b"k" * 250]
GETS, SETS, DELETES = (0x00, 0x09, 0x0C, 0x0D), (0x01, 0x11), (0x04, 0x14)
COUNTS = (0x05, 0x06, 0x15, 0x16)
WITH_META = (0xA2, 0xA3, 0xA8, 0xA9)
FEATURES = (Feature.MUTATION_SEQNO, Feature.JSON, Feature.XERROR)
SIZES = [0, 1, 8, 100, 5000, 70_000, 1024 * 1024 - 300, 1024 * 1024 + 1]


@dataclass
class Plain:
    """A get, set or delete as it should be, or nearly so."""

    opcode: int
    key: bytes
    vbucket: int = 0
    opaque: int = 0
    datatype: int = 0
    #: Which CAS: none, the item's, or another.
    cas: str = ""
    #: None for the extras that belong there.
    extras: bytes | None = None
    expiration: int = 0
    flags: int = 0
    size: int = 0

    def encode(self, manual: ManualNode) -> bytes:
        extras = self.extras
        if extras is None:
            absolute = self.expiration if self.expiration <= 100 else int(manual.time.now) + self.expiration - 200
            extras = (
                b"" if self.opcode in GETS + DELETES else self.flags.to_bytes(4, "big") + absolute.to_bytes(4, "big")
            )
        cas = 0
        if self.cas:
            item = held(manual, self.vbucket, self.key)
            cas = (item.cas if item else 1) + (self.cas == "other")
        value = b"" if self.opcode in GETS + DELETES and self.extras is None else bytes(self.size)
        return AnyRequest(
            opcode=self.opcode,
            vbucket=self.vbucket,
            opaque=self.opaque,
            datatype=self.datatype,
            cas=cas,
            extras=extras,
            key=self.key,
            value=value,
        ).encode()


@dataclass
class WithMeta:
    """A version from elsewhere: newer or older than ours, or the same, by the place at which they differ first."""

    opcode: int
    key: bytes
    opaque: int = 0
    datatype: int = 0
    #: What is added to our revision, CAS, expiry and flags; None for a 0 in its place.
    more: tuple[int | None, int | None, int, int] = (1, 0, 0, 0)
    options: int | None = None
    #: A CAS in the header, or meta of an extended form.
    condition: int = 0
    extended: bool = False
    #: None for our own one.
    value: bytes | None = b""

    def encode(self, manual: ManualNode) -> bytes:
        item = held(manual, 0, self.key)
        ours = (item.rev_seqno, item.cas, item.expiry, item.flags) if item else (1, 2**48, 0, 0)
        rev_seqno, cas, expiry, flags = (
            0 if more is None else max(0, own + more) % 2**bits
            for own, more, bits in zip(ours, self.more, (64, 64, 32, 32), strict=True)
        )
        extras = flags.to_bytes(4, "big") + expiry.to_bytes(4, "big")
        extras += rev_seqno.to_bytes(8, "big") + cas.to_bytes(8, "big")
        if self.options is not None:
            extras += self.options.to_bytes(4, "big")
        if self.extended:
            extras += bytes(2)
        value = self.value if self.value is not None else item.value if item else b""
        head = {"opcode": self.opcode, "opaque": self.opaque, "datatype": self.datatype, "cas": self.condition}
        return AnyRequest(**head, extras=extras, key=self.key, value=value).encode()


@dataclass
class Again:
    """A touch, a count, or the number that is counted on."""

    opcode: int
    key: bytes
    delta: int = 1
    initial: int = 0
    expiration: int = 0
    number: bytes = b"0"
    cas: int = 0
    short: bool = False

    def encode(self, manual: ManualNode) -> bytes:
        expiration, value = self.expiration.to_bytes(4, "big"), b""
        if self.opcode in SETS:
            extras, value = (7).to_bytes(4, "big") + expiration, self.number
        elif self.opcode == 0x1C:
            extras = expiration
        else:
            extras = self.delta.to_bytes(8, "big") + self.initial.to_bytes(8, "big") + expiration
        extras = extras[: len(extras) - self.short]
        return AnyRequest(opcode=self.opcode, extras=extras, key=self.key, value=value, cas=self.cas).encode()


def held(manual: ManualNode, number: int, key: bytes) -> StoredItem | None:
    """What the node has of the key."""
    vbucket = manual.bucket.existing(number)
    return None if vbucket is None or not key else vbucket.table.find(key)


@dataclass
class Other:
    """Anything else that changes what gets and sets meet."""

    name: str
    key: bytes = b""
    number: int = 0

    def encode(self, manual: ManualNode) -> bytes:
        key = self.key
        match self.name:
            case "lock":
                return GetLocked(key=key, lock_time=self.number % 30 + 1).encode()
            case "unlock":
                lock = manual.bucket.vbucket(0).table.locks.get(key)
                return Unlock(key=key, cas=lock[0] if lock else 1).encode()
            case "delete":
                return Delete(key=key).encode()
            case "touch":
                return Touch(key=key, expiration=self.number % 10).encode()
            case "flush":
                return Flush().encode()
            case "hello":
                return Hello(features=FEATURES[: self.number % (len(FEATURES) + 1)]).encode()
            case _:
                return Noop().encode()


@dataclass
class Burst:
    """Requests that are sent together, cut into pieces at some places, and the time that passes before them."""

    requests: list[Plain | WithMeta | Other]
    cuts: list[int] = field(default_factory=list)
    seconds: int = 0


plain = st.builds(
    Plain,
    opcode=st.sampled_from(GETS + SETS + DELETES),
    key=st.sampled_from(KEYS),
    vbucket=st.sampled_from([0, 0, 0, 1]),
    opaque=st.integers(0, 2**32 - 1),
    datatype=st.sampled_from([0, 0, 0, 1]),
    cas=st.sampled_from(["", "", "", "", "item", "other"]),
    expiration=st.sampled_from([0, 0, 0, 3, 100, 195, 203]),
    flags=st.sampled_from([0, 1, 0xFFFFFFFF]),
    size=st.sampled_from(SIZES[:5]),
)
odd = st.builds(
    Plain,
    opcode=st.sampled_from(GETS + SETS + DELETES + WITH_META),
    key=st.sampled_from([*KEYS, b"", b"k" * 251]),
    vbucket=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 0xFFFF]),
    datatype=st.sampled_from([0, 0, 1, 2]),
    extras=st.sampled_from([None, b"", b"1234", b"12345678", b"123456789"]),
    size=st.sampled_from(SIZES),
)
with_meta = st.builds(
    WithMeta,
    opcode=st.sampled_from(WITH_META),
    key=st.sampled_from(KEYS),
    opaque=st.integers(0, 2**32 - 1),
    datatype=st.sampled_from([0, 0, 0, 1]),
    more=st.tuples(
        st.sampled_from([0, 0, 0, 0, 1, -1, None]),
        st.sampled_from([0, 0, 0, 1, -1, None]),
        st.sampled_from([0, 0, 0, 1, -1, 2_000_000_000]),
        st.sampled_from([0, 0, 1, -1]),
    ),
    options=st.sampled_from([None, None, 0, 0x01, 0x02, 0x04, 0x05, 0x10, 0x11, 0x20, 0x80000000]),
    value=st.sampled_from([None, None, b"", bytes(7), bytes(9), b"\xff", bytes(5000)]),
)
odd_with_meta = st.builds(
    WithMeta,
    opcode=st.sampled_from(WITH_META),
    key=st.sampled_from([*KEYS, b"", b"k" * 251]),
    datatype=st.sampled_from([0, 1, 2]),
    options=st.sampled_from([None, 0]),
    condition=st.sampled_from([0, 0, 1]),
    extended=st.booleans(),
    value=st.sampled_from(SIZES).map(bytes),
)
again = st.builds(
    Again,
    opcode=st.sampled_from((*SETS, *COUNTS, *COUNTS, 0x1C, 0x1C)),
    key=st.sampled_from(KEYS),
    delta=st.sampled_from([0, 1, 9, 10**18, 2**63, 2**64 - 1]),
    initial=st.sampled_from([0, 5, 2**64 - 1]),
    expiration=st.sampled_from([0, 0, 3, 100, 2_000_000_000, 2**32 - 1]),
    number=st.sampled_from(
        [
            b"0",
            b"9",
            b"007",
            b"10",
            b"1" * 19,
            b"9" * 19,
            b"1" * 20,
            b"18446744073709551615",
            b"",
            b"x",
            b"1 ",
            b" 1",
            b"5 5",
            b"1000",
            b"-1",
            bytes(1024),
            bytes(1025),
        ]
    ),
    cas=st.sampled_from([0, 0, 0, 0, 1]),
    short=st.sampled_from([False, False, False, True]),
)
other = st.builds(
    Other,
    st.sampled_from(["lock", "unlock", "delete", "touch", "flush", "hello", "noop"]),
    st.sampled_from(KEYS),
    st.integers(0, 100),
)
burst = st.builds(
    Burst,
    st.lists(
        st.one_of(plain, plain, plain, again, again, with_meta, with_meta, odd, odd_with_meta, other),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.integers(0, 6000), max_size=4),
    st.sampled_from([0, 0, 1, 4]),
)


def answers(burst_: Burst, manual: ManualNode, peer: SessionPeer) -> bytes:
    """Send a burst piece by piece; all answers."""
    manual.time.pass_by(burst_.seconds)
    data = b"".join(request.encode(manual) for request in burst_.requests)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in burst_.cuts)})
    return b"".join(peer.send_bytes(data[start:end]) for start, end in itertools.pairwise(places))


def state(manual: ManualNode) -> list[object]:
    ledger = manual.bucket.ledger
    counted: list[object] = [ledger.gets, ledger.get_misses, ledger.sets, ledger.deletes]
    counted += [ledger.expirations, ledger.last_cas]
    tables = [v.table for v in manual.bucket]
    counted.append(dict(manual.bucket.operations))
    # The records, byte for byte: flags, expiry, times and all that no answer shows.
    return [*counted, *((t.high_seqno, t.items, t.tombstones, t.records(0, t.high_seqno, 2**40)) for t in tables)]


def told(bursts: list[Burst], limits: Limits, *, compiled: bool, ack: Literal["memory", "disk"]) -> list[object]:
    """All that a client and the bucket show of the bursts; what is random otherwise is counted."""
    uuids = itertools.count(1)
    with mock.patch("upriver.engine.vbucket.new_uuid", side_effect=uuids):
        manual = open_manual_node(limits=limits, compiled=compiled, ack=ack)
        with manual.bucket:
            assert (manual.node.fast_path is not None) is compiled
            peer = manual.peer()
            peer.hello(*FEATURES)
            seen: list[object] = []
            for sent in bursts:
                seen += (answers(sent, manual, peer), peer.session.unread, peer.session.waiting, peer.session.closing)
                manual.commit()  # what waits for the disk is answered now
                seen.append(peer.session.data_to_send())
            return seen + state(manual)


@settings(max_examples=examples(150), deadline=None)
@given(
    bursts=st.lists(burst, min_size=1, max_size=8),
    unread=st.sampled_from([1024 * 1024, 1024 * 1024, 100]),
    body_bytes_max=st.sampled_from([2**24, 2**24, 80_000]),
    ack=st.sampled_from(["memory", "memory", "disk"]),
)
def test_parity(bursts: list[Burst], unread: int, body_bytes_max: int, ack: Literal["memory", "disk"]) -> None:
    limits = Limits(unread_answer_bytes_max=unread, body_bytes_max=body_bytes_max)
    plainly, fast = (told(bursts, limits, compiled=compiled, ack=ack) for compiled in (False, True))
    assert plainly == fast


def version(key: bytes, **fields: Any) -> SetWithMeta:
    """A stored version, or with ``deleted`` a deletion, that differs from others in these fields."""
    kind = DeleteWithMeta if fields.pop("deleted", False) else SetWithMeta
    return kind(**{"key": key, "rev_seqno": 5, "item_cas": 50, **fields})


def test_every_conflict_ends_alike() -> None:
    """Versions that differ in one thing or two, each over each: the loop decides as the engine does."""
    fields: list[dict[str, Any]] = [
        {}, {"rev_seqno": 4}, {"rev_seqno": 6}, {"item_cas": 49}, {"item_cas": 51}, {"item_cas": 2**63 + 1},
        {"expiration": 4_000_000_000}, {"expiration": 4_000_000_000, "flags": 1}, {"flags": 1}, {"flags": 2**32 - 1},
        {"deleted": True}, {"deleted": True, "expiration": 1000}, {"deleted": True, "flags": 7},
        {"deleted": True, "options": MetaOption.DELETE_IS_EXPIRATION}, {"datatype": 1}, {"datatype": 1, "value": b"a"},
        {"value": b"a"}, {"value": b"b"}, {"value": b"ab"}, {"value": b"\xff"}, {"rev_seqno": 6, "value": b"a"},
    ]  # fmt: skip
    pairs = list(itertools.product(fields, repeat=2))
    seen: list[list[object]] = []
    for compiled in (False, True):
        manual = open_manual_node(compiled=compiled)
        with manual.bucket:
            peer = manual.peer()
            peer.hello(Feature.JSON)
            requests = [version(b"%d" % n, **each) for n, pair in enumerate(pairs) for each in pair]
            seen.append([peer.send_bytes(request.encode()) for request in requests] + state(manual))
    assert seen[0] == seen[1]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0x80, 0x80, 0x80, 0x81, 0x00]),
            st.one_of(st.sampled_from(GETS + SETS + DELETES + COUNTS + WITH_META + (0x1C,)), st.integers(0, 255)),
            st.integers(0, 300),
            st.one_of(st.integers(0, 12), st.sampled_from([20, 24, 26, 28, 30])),
            st.integers(0, 3),
            st.integers(0, 9),
            st.integers(0, 300),
            st.binary(max_size=300),
        ),
        max_size=8,
    )
)
def test_parity_of_nonsense(packets: list[tuple[int, int, int, int, int, int, int, bytes]]) -> None:
    data = b""
    for magic, opcode, key, extras, datatype, vbucket, length, body in packets:
        header = (
            bytes((magic, opcode)) + key.to_bytes(2, "big") + bytes((extras, datatype)) + vbucket.to_bytes(2, "big")
        )
        data += header + length.to_bytes(4, "big") + bytes(12) + body
    without, with_ = open_manual_node(), open_manual_node(compiled=True)
    with without.bucket, with_.bucket:
        for manual in (without, with_):  # what is not the same in two buckets
            manual.node.commands = {
                request: entry
                for request, entry in manual.node.commands.items()
                if request.__name__ not in ("GetFailoverLog", "Stat", "Hello")
            }
        assert without.peer().send_bytes(data) == with_.peer().send_bytes(data)
        assert state(without) == state(with_)


# Permissions


@pytest.fixture(scope="module")
def users() -> Users:
    made = Users(Path("unused"))
    for name, role in (("reader", Role.READ), ("writer", Role.WRITE), ("both", Role.READ | Role.WRITE)):
        made.add(User.create(name, "p", role, iterations=4096))
    return made


@pytest.fixture
def pair(users: Users) -> Iterator[tuple[ManualNode, ManualNode]]:
    without, with_ = open_manual_node(users=users), open_manual_node(users=users, compiled=True)
    with without.bucket, with_.bucket:
        yield without, with_


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        (None, [Status.AUTH_ERROR] * 5),
        ("reader", [Status.EACCESS, Status.KEY_ENOENT, Status.EACCESS, Status.KEY_ENOENT]),
        ("writer", [Status.SUCCESS, Status.EACCESS, Status.EACCESS, Status.EACCESS]),
        ("both", [Status.SUCCESS, Status.SUCCESS, Status.SUCCESS, Status.SUCCESS]),
    ],
)
def test_roles(pair: tuple[ManualNode, ManualNode], users: Users, name: str | None, statuses: list[Status]) -> None:
    data = encoded(Set(key=b"k"), Get(key=b"k"), SetQ(key=b"k"), GetQ(key=b"k"), GetK(key=b"k"))
    seen = []
    for manual in pair:
        peer = manual.peer()
        peer.session.user = None if name is None else users.get(name)
        seen.append(peer.send_bytes(data))
        peer.session.user = None
        peer.refused(Get(key=b"k"), Status.AUTH_ERROR)
    assert seen[0] == seen[1]
    peer.session.user = None if name is None else users.get(name)
    assert [answer.status for answer in peer.send(Set(key=b"k"), Get(key=b"k"))] == statuses[:2]


# What the loop must leave to the session


@pytest.fixture
def manual() -> Iterator[ManualNode]:
    opened = open_manual_node(compiled=True)
    with opened.bucket:
        yield opened


def taken(
    manual: ManualNode,
    *data: bytes,
    datatypes: int = 0,
    tokens: bool = False,
    body_bytes_max: int = 2**24,
    answer_bytes_max: int = 2**20,
) -> int:
    """How many bytes the loop answered."""
    assert manual.node.fast_path is not None
    joined = b"".join(data)
    terms = (datatypes, tokens, body_bytes_max, answer_bytes_max)
    return manual.node.fast_path.serve(joined, 0, len(joined), True, True, *terms)[0]


def test_plain_requests_are_taken(manual: ManualNode) -> None:
    stored = [Set(key=b"k", value=b"v").encode(), SetQ(key=b"l", value=b"v").encode()]
    read = [request(key=key).encode() for request in (Get, GetQ, GetK, GetKQ) for key in (b"k", b"l")]
    missed = [request(key=b"none").encode() for request in (Get, GetQ, GetKQ)]
    deleted = [Delete(key=b"k").encode(), DeleteQ(key=b"l").encode(), Delete(key=b"k").encode()]
    data = [*stored, *read, *missed, *deleted]
    assert taken(manual, *data) == sum(map(len, data))


def test_touches_and_counts_are_taken(manual: ManualNode) -> None:
    data = [Set(key=b"k", value=b"17", flags=3).encode(), Touch(key=b"k", expiration=100).encode()]
    data += [kind(key=b"k", delta=4).encode() for kind in (Increment, IncrementQ, Decrement, DecrementQ, Increment)]
    assert taken(manual, *data) == sum(map(len, data))
    item = manual.bucket.vbucket(0).get(b"k")
    assert (item.value, item.flags, item.expiry, item.seqno) == (b"21", 3, manual.time.now + 100, 7)
    assert manual.bucket.operations == {"touch": 1, "increment": 3, "decrement": 2}


def test_what_is_special_about_a_touch_or_a_count_is_not(manual: ManualNode) -> None:
    touch, count = Touch(key=b"k", expiration=100).encode(), Increment(key=b"k", initial=1).encode()

    def left(value: bytes) -> tuple[bool, bool]:
        manual.bucket.vbucket(0).set(b"k", value)
        return taken(manual, touch) == 0, taken(manual, count) == 0

    assert (taken(manual, touch), taken(manual, count)) == (0, 0)  # it is not there
    assert left(b"1") == (False, False)
    assert left(b"no number") == left(b"") == left(b"1" * 20) == (False, True)
    assert left(bytes(1025)) == (True, True)  # to copy it again and again would take its time
    manual.bucket.vbucket(0).set(b"k", b"1", 0, 10)
    manual.time.pass_by(10)
    assert (taken(manual, touch), taken(manual, count)) == (0, 0)


def test_versions_from_elsewhere_are_taken(manual: ManualNode) -> None:
    kinds = [SetWithMeta, SetQWithMeta, DeleteWithMeta, DeleteQWithMeta] * 2
    data = [
        kind(key=b"k", rev_seqno=number // 2, item_cas=number, expiration=4_000_000_000, options=options).encode()
        for number, kind in enumerate(kinds, 2)
        for options in (None, MetaOption.SKIP_CONFLICT_RESOLUTION, MetaOption.DELETE_IS_EXPIRATION)
    ]
    assert taken(manual, *data) == sum(map(len, data))
    assert manual.bucket.operations == {"set_with_meta": 12, "delete_with_meta": 12}


def test_what_is_special_about_a_version_is_not(manual: ManualNode) -> None:
    def left(**fields: Any) -> bool:
        request = SetWithMeta(**{"key": b"k", "rev_seqno": 9, "item_cas": 9, **fields})
        return taken(manual, request.encode()) == 0

    assert left(rev_seqno=0)
    assert left(item_cas=0)
    assert left(cas=1)
    assert left(meta=b"m")
    assert left(datatype=1)
    assert left(options=MetaOption.REGENERATE_CAS | MetaOption.SKIP_CONFLICT_RESOLUTION)
    assert not left()
    manual.bucket.vbucket(0).get_and_lock(b"k")
    assert left(rev_seqno=10)
    assert taken(manual, Delete(key=b"k").encode()) == 0
    manual.bucket.vbucket(0).table.locks.clear()
    manual.peer().ask(Set(key=b"k", expiration=10))
    manual.time.pass_by(10)
    assert left(rev_seqno=99)
    assert taken(manual, Delete(key=b"k").encode()) == 0


def test_what_sdks_do_is_taken(manual: ManualNode) -> None:
    """Items that expire, data types that were agreed on, tokens, and keys beside one that is locked."""
    vbucket = manual.bucket.vbucket(0)
    stored = Set(key=b"k", value=b"{}", datatype=1, expiration=100).encode()
    assert taken(manual, stored, datatypes=1, tokens=True) == len(stored)
    item = vbucket.get(b"k")
    assert (item.datatype, item.expiry) == (1, manual.time.now + 100)
    vbucket.set(b"locked", b"v")
    vbucket.get_and_lock(b"locked")
    for request in (Get, GetQ, GetK, GetKQ):
        read = request(key=b"k", datatype=1).encode()
        assert taken(manual, read, datatypes=1) == len(read)
        assert taken(manual, request(key=b"k").encode()) == len(read)  # the type is not told to who did not agree
        assert taken(manual, request(key=b"locked").encode()) == 0
    assert taken(manual, Set(key=b"locked").encode()) == 0
    manual.time.pass_by(100)
    assert taken(manual, Get(key=b"k").encode()) == 0


def test_reads_are_taken_where_writes_wait_for_the_disk() -> None:
    opened = open_manual_node(compiled=True, ack="disk")
    with opened.bucket:
        peer = opened.peer()
        assert peer.send(Set(key=b"k", value=b"v")) == []
        opened.commit()
        assert [answer.status for answer in peer.receive()] == [Status.SUCCESS]
        opened.node.commands = {}  # the session could not answer it
        (answer,) = peer.send(Get(key=b"k"))
        assert isinstance(answer, GetResponse)
        assert answer.value == b"v"


def test_room_for_large_answers_is_given_back(manual: ManualNode) -> None:
    fast_path = manual.node.fast_path
    assert fast_path is not None
    assert taken(manual, Set(key=b"k", value=b"v" * 500_000).encode()) > 0
    large = Get(key=b"k").encode() * 40
    assert taken(manual, large, answer_bytes_max=2**30) == len(large)
    assert fast_path.room_bytes <= 256 * 1024
    assert taken(manual, large) > 0
    with pytest.raises(ValueError, match="outside"):
        fast_path.serve(large, 0, len(large) + 1, True, True, 0, False, 2**24, 2**20)
    with pytest.raises(ValueError, match="outside"):
        fast_path.serve(large, -1, 5, True, True, 0, False, 2**24, 2**20)


def test_others_are_not(manual: ManualNode) -> None:
    get, set_ = Get(key=b"k").encode(), Set(key=b"k", value=b"v").encode()
    vbucket = manual.bucket.vbucket(0)
    assert taken(manual, set_) == len(set_)
    assert taken(manual, b"") == 0
    assert taken(manual, get, get[:-1]) == len(get)
    assert taken(manual, get, get[:10]) == len(get)
    assert taken(manual, Noop().encode(), get) == 0
    assert taken(manual, set_, body_bytes_max=9) == 0
    assert taken(manual, get, get, get, answer_bytes_max=1) == len(get)
    vbucket.get_and_lock(b"k")
    assert taken(manual, get) == taken(manual, set_) == 0
    vbucket.table.locks.clear()
    vbucket.touch(b"k", 100)
    manual.time.pass_by(100)
    assert taken(manual, get) == 0
    assert taken(manual, set_) == len(set_)
    assert taken(manual, Set(key=b"k", datatype=3).encode(), datatypes=1) == 0
    assert taken(manual, Get(key=b"k", datatype=2).encode(), datatypes=1) == 0
    vbucket.set_state(VbucketState.REPLICA)
    assert taken(manual, get) == taken(manual, set_) == 0
    manual.bucket.delete_vbucket(0)
    assert taken(manual, get) == taken(manual, set_) == 0


@pytest.mark.parametrize(
    "asked",
    [
        Set(key=b"k", value=b"v"),
        Delete(key=b"k"),
        Touch(key=b"k"),
        Decrement(key=b"k"),
        SetWithMeta(key=b"k", rev_seqno=1, item_cas=1),
        DeleteQWithMeta(key=b"k", rev_seqno=1, item_cas=1),
    ],
)
def test_refusals_are_left_to_the_session(manual: ManualNode, asked: Request) -> None:
    request, ledger = asked.encode(), manual.bucket.ledger
    ledger.refusal = "no disk"
    assert taken(manual, request) == 0
    ledger.refusal, ledger.quota_bytes = "", 1
    ledger.memory_bytes += 1
    assert taken(manual, request) == 0
    ledger.quota_bytes, ledger.queue_bytes_max = 0, 1
    manual.peer().send(Set(key=b"other"))
    assert taken(manual, request) == 0


def test_tokens_name_the_newest_branch(manual: ManualNode) -> None:
    peer, vbucket = manual.peer(), manual.bucket.vbucket(0)
    peer.hello(Feature.MUTATION_SEQNO)
    answers = peer.send(Set(key=b"k", value=b"v"), Get(key=b"k"), SetQ(key=b"k", value=b"w"), Get(key=b"k"))
    assert isinstance(answers[0], SetResponse)
    assert (answers[0].vbucket_uuid, answers[0].seqno) == (vbucket.failover_log.newest.vbucket_uuid, 1)
    assert [answer.value for answer in answers if isinstance(answer, GetResponse)] == [b"v", b"w"]
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.replace_failover_log(FailoverLog.fresh(7).branch(8, 2))
    vbucket.set_state(VbucketState.ACTIVE)
    again = peer.ask(Set(key=b"k", value=b"x"))
    assert isinstance(again, SetResponse)
    assert again.vbucket_uuid == vbucket.failover_log.newest.vbucket_uuid not in (answers[0].vbucket_uuid, 8)
    assert again.seqno == 3


def test_a_value_on_disk_is_read_back(tmp_path: Path) -> None:
    manual = open_manual_node(path=str(tmp_path), compiled=True)
    with manual.bucket:
        peer, table = manual.peer(), manual.bucket.vbucket(0).table
        for number in range(50):
            peer.ask(Set(key=b"%d" % number, value=b"%d" % number * 1000))
        manual.bucket.flusher.request_checkpoint()
        manual.bucket.flusher.drain()
        manual.bucket.ledger.quota_bytes = 1
        for _ in range(10):  # what was read lately is spared at first
            manual.bucket.maintenance.relieve()
        manual.bucket.ledger.quota_bytes = 0
        assert table.evicted_items
        for number in range(50):  # the same version, also where only its value tells that it is the same
            key, value, item = b"%d" % number, b"%d" % number * 1000, peer.ask(GetMeta(key=b"%d" % number))
            again: dict[str, Any] = {"key": key, "rev_seqno": 1, "item_cas": item.cas}
            peer.refused(SetWithMeta(value=value, **again), Status.KEY_EEXISTS)
            answer = peer.ask(Get(key=key))
            assert isinstance(answer, GetResponse)
            assert answer.value == value
            assert peer.ask(SetWithMeta(value=value + b"x", **again)).cas == item.cas


def test_a_client_that_is_woken_by_a_change_may_send_requests(manual: ManualNode) -> None:
    """A change notification runs inside the loop; the loop is not entered twice."""
    sender, reader = manual.peer(), manual.peer()
    seen: list[bytes] = []
    manual.bucket.vbucket(0).when_changed(lambda: seen.append(reader.send_bytes(encoded(Get(key=b"k"), Set(key=b"l")))))
    both = sender.send(Set(key=b"k", value=b"v", opaque=1), Get(key=b"k", opaque=2), Get(key=b"l", opaque=3))
    assert [(answer.opaque, answer.status) for answer in both] == [
        (1, Status.SUCCESS), (2, Status.SUCCESS), (3, Status.SUCCESS)
    ]  # fmt: skip
    assert len(seen) == 1
