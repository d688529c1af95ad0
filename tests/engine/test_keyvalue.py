from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Vbucket
from upriver.engine.keyvalue import JSON
from upriver.engine.table import LOCKED_CAS, VALUE_BYTES_MAX
from upriver.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    NotANumber,
    NotLocked,
    NotMyVbucket,
    NotStored,
    OutOfMemory,
    TemporaryFailure,
    TooBig,
)
from upriver.model import Event, VbucketState
from upriver.model.compression import INFLATED_BYTES_MAX, SNAPPY


@pytest.fixture
def vbucket(bucket: Bucket) -> Vbucket:
    return bucket.vbucket(0)


def test_set_and_get(vbucket: Vbucket) -> None:
    cas, seqno = vbucket.set(b"k", b"v", flags=7, datatype=1)
    item = vbucket.get(b"k")
    assert (item.value, item.flags, item.datatype, item.cas, item.seqno) == (b"v", 7, 1, cas, seqno)
    assert (seqno, item.rev_seqno, item.event) == (1, 1, Event.MUTATION)


def test_cas_grows_even_while_the_clock_stands_still(vbucket: Vbucket) -> None:
    seen = [vbucket.set(b"k%d" % i, b"")[0] for i in range(100)]
    assert seen == sorted(set(seen))


def test_set_with_cas_replaces_only_that_version(vbucket: Vbucket) -> None:
    first, _ = vbucket.set(b"k", b"1")
    second, _ = vbucket.set(b"k", b"2", cas=first)
    assert second > first
    with pytest.raises(KeyExists):
        vbucket.set(b"k", b"3", cas=first)
    with pytest.raises(KeyNotFound):
        vbucket.set(b"other", b"3", cas=first)
    assert vbucket.get(b"k").value == b"2"


def test_delete_leaves_a_tombstone_and_the_revision_goes_on(vbucket: Vbucket) -> None:
    vbucket.set(b"k", b"1")
    cas, _ = vbucket.delete(b"k")
    with pytest.raises(KeyNotFound):
        vbucket.get(b"k")
    with pytest.raises(KeyNotFound):
        vbucket.delete(b"k")
    meta = vbucket.get_meta(b"k")
    assert (meta.event, meta.rev_seqno, meta.cas) == (Event.DELETION, 2, cas)
    vbucket.set(b"k", b"2")
    assert vbucket.get(b"k").rev_seqno == 3


def test_a_new_key_starts_above_every_deleted_revision(vbucket: Vbucket) -> None:
    """It may be the return of a key whose tombstone was purged, and must still win elsewhere."""
    for value in (b"1", b"2", b"3"):
        vbucket.set(b"old", value)
    vbucket.delete(b"old")
    vbucket.set(b"new", b"")
    assert vbucket.get(b"new").rev_seqno == 5


def test_delete_with_a_wrong_cas(vbucket: Vbucket) -> None:
    cas, _ = vbucket.set(b"k", b"1")
    with pytest.raises(KeyExists):
        vbucket.delete(b"k", cas=cas + 1)
    vbucket.delete(b"k", cas=cas)


def test_add_and_replace(vbucket: Vbucket) -> None:
    with pytest.raises(KeyNotFound):
        vbucket.replace(b"k", b"x")
    cas, _ = vbucket.add(b"k", b"1")
    with pytest.raises(KeyExists):
        vbucket.add(b"k", b"2")
    with pytest.raises(KeyExists):
        vbucket.replace(b"k", b"2", cas=cas + 1)
    vbucket.replace(b"k", b"2", cas=cas)
    assert vbucket.get(b"k").value == b"2"


def test_append_and_prepend_keep_flags_and_expiry(vbucket: Vbucket, clock: Clock) -> None:
    with pytest.raises(NotStored):
        vbucket.append(b"k", b"x")
    vbucket.set(b"k", b"b", flags=3, expiry=100)
    vbucket.append(b"k", b"c")
    vbucket.prepend(b"k", b"a")
    item = vbucket.get(b"k")
    assert (item.value, item.flags, item.expiry) == (b"abc", 3, int(clock.now) + 100)


def snappy(value: bytes) -> bytes:
    return bytes(pa.Codec("snappy").compress(value))


def test_what_is_joined_is_neither_compressed_nor_json(vbucket: Vbucket) -> None:
    long = b'{"a": "%s"}' % (b"x" * 1000)
    vbucket.set(b"k", snappy(long), datatype=SNAPPY | JSON | 4)
    vbucket.append(b"k", b" behind")
    vbucket.prepend(b"k", b"before ")
    item = vbucket.get(b"k")
    assert (item.value, item.datatype) == (b"before " + long + b" behind", 4)


def test_what_would_be_too_large_without_its_compression_is_not_joined(vbucket: Vbucket) -> None:
    value = bytes(pa.Codec("snappy").compress(bytes(INFLATED_BYTES_MAX + 1)))
    vbucket.set(b"k", value, datatype=SNAPPY)
    with pytest.raises(TooBig):
        vbucket.append(b"k", b"x")
    assert vbucket.get(b"k").value == value


def test_what_only_claims_to_be_compressed_is_joined_as_it_is(vbucket: Vbucket) -> None:
    vbucket.set(b"k", b"\xff" * 8, datatype=SNAPPY)
    vbucket.append(b"k", b"x")
    item = vbucket.get(b"k")
    assert (item.value, item.datatype) == (b"\xff" * 8 + b"x", 0)


def test_what_is_joined_is_no_longer_than_a_value(vbucket: Vbucket) -> None:
    vbucket.set(b"k", snappy(bytes(VALUE_BYTES_MAX)), datatype=SNAPPY)
    with pytest.raises(TooBig):
        vbucket.append(b"k", b"x")
    assert vbucket.get(b"k").datatype == SNAPPY


def test_a_compressed_number_is_counted(vbucket: Vbucket) -> None:
    vbucket.set(b"n", snappy(b"41"), datatype=SNAPPY | JSON)
    assert vbucket.increment(b"n")[0] == 42
    item = vbucket.get(b"n")
    assert (item.value, item.datatype) == (b"42", JSON)


def test_counters(vbucket: Vbucket) -> None:
    with pytest.raises(KeyNotFound):
        vbucket.increment(b"n")
    assert vbucket.increment(b"n", initial=5)[0] == 5
    assert vbucket.increment(b"n", 3)[0] == 8
    assert vbucket.decrement(b"n", 100)[0] == 0
    vbucket.set(b"n", b"%d" % (2**64 - 1))
    assert vbucket.increment(b"n")[0] == 0
    for value, number, left in (
        (b"100", 99, b"99 "),
        (b"99 ", 98, b"98 "),
        (b" 1", 0, b"0 "),
        (b"5 5", 4, b"4  "),
        (b"\t+3\0x", 2, b"2    "),
        (b"0" * 30 + b"1", 0, b"0" + b" " * 30),
        (b"-%d" % (2**64 - 1), 0, b"0" + b" " * 20),  # the digits wrap around to 1, as in C
    ):
        vbucket.set(b"n", value)
        assert vbucket.decrement(b"n")[0] == number
        assert vbucket.get(b"n").value == left
    for value in (b"x", b"", b" ", b"9x", b"-1", b"1.5", b"%d" % 2**64, b"9" * 100_000, b"+", b"+-1"):
        vbucket.set(b"n", value)
        with pytest.raises(NotANumber):
            vbucket.increment(b"n")


def test_an_expiry_beyond_all_times_that_can_be_told(vbucket: Vbucket, clock: Clock) -> None:
    clock.now = 2**32 - 100.5
    vbucket.set(b"set", b"", expiry=1000)
    vbucket.add(b"added", b"", expiry=1000)
    vbucket.set(b"near", b"", expiry=50)
    assert vbucket.get(b"set").expiry == vbucket.get(b"added").expiry == 2**32 - 1
    assert vbucket.get(b"near").expiry == 2**32 - 101 + 50


def test_the_highest_revision_is_not_followed_by_the_lowest(vbucket: Vbucket) -> None:
    vbucket.set_with_meta(b"k", b"theirs", cas=5, rev_seqno=2**64 - 1)
    cas, _ = vbucket.set(b"k", b"ours")
    assert vbucket.get_meta(b"k").rev_seqno == 2**64 - 1
    with pytest.raises(KeyExists):  # the CAS decides
        vbucket.set_with_meta(b"k", b"theirs", cas=5, rev_seqno=2**64 - 1)
    vbucket.delete(b"k", cas)
    vbucket.set(b"other", b"")
    assert vbucket.get_meta(b"other").rev_seqno == 2**64 - 1


def test_the_seqno_of_a_write_is_its_own(vbucket: Vbucket) -> None:
    """Also where somebody who was told of it has written since."""
    writes: tuple[Callable[[], tuple[int, int]], ...] = (
        lambda: vbucket.set(b"k", b"v"),
        lambda: vbucket.append(b"k", b"w"),
        lambda: vbucket.delete(b"k"),
        lambda: vbucket.add(b"k", b"v"),
    )
    for write in writes:
        before = vbucket.high_seqno
        vbucket.when_changed(lambda: vbucket.set(b"another", b""))
        assert write()[1] == before + 1
        assert vbucket.high_seqno == before + 2


def test_relative_and_absolute_expiry(vbucket: Vbucket, clock: Clock) -> None:
    month = 30 * 24 * 3600
    vbucket.set(b"relative", b"", expiry=month)
    vbucket.set(b"absolute", b"", expiry=int(clock.now) + 5)
    vbucket.set(b"past", b"", expiry=month + 1)
    assert vbucket.get(b"relative").expiry == int(clock.now) + month
    assert vbucket.get(b"absolute").expiry == int(clock.now) + 5
    with pytest.raises(KeyNotFound):
        vbucket.get(b"past")


def test_an_item_expires_exactly_once(vbucket: Vbucket, clock: Clock) -> None:
    vbucket.set(b"k", b"v", expiry=10)
    clock.pass_by(9.5)
    vbucket.get(b"k")
    clock.pass_by(1)
    for _ in range(3):
        with pytest.raises(KeyNotFound):
            vbucket.get(b"k")
    assert vbucket.high_seqno == 2
    assert vbucket.get_meta(b"k").event == Event.EXPIRATION


def test_touch_is_a_change(vbucket: Vbucket, clock: Clock) -> None:
    vbucket.set(b"k", b"v", flags=1)
    flags, _, seqno = vbucket.touch(b"k", 50)
    assert (flags, seqno) == (1, 2)
    item = vbucket.get_and_touch(b"k", 0)
    assert (item.value, item.flags, item.expiry, item.seqno) == (b"v", 1, 0, 3)


def test_a_lock_keeps_others_out_and_is_no_change(vbucket: Vbucket, clock: Clock) -> None:
    vbucket.set(b"k", b"1")
    locked = vbucket.get_and_lock(b"k", 10)
    assert vbucket.high_seqno == 1
    assert vbucket.get(b"k").cas == LOCKED_CAS
    for refused in (
        lambda: vbucket.set(b"k", b"2"),
        lambda: vbucket.delete(b"k"),
        lambda: vbucket.touch(b"k", 1),
        lambda: vbucket.append(b"k", b"x"),
        lambda: vbucket.get_and_lock(b"k"),
        lambda: vbucket.unlock(b"k", locked.cas + 1),
        lambda: vbucket.set_with_meta(b"k", b"", cas=1, rev_seqno=9),
    ):
        with pytest.raises(Locked):
            refused()
    vbucket.set(b"k", b"2", cas=locked.cas)
    vbucket.set(b"k", b"3")


def test_a_lock_ends_by_itself_or_by_unlocking(vbucket: Vbucket, clock: Clock) -> None:
    vbucket.set(b"k", b"1")
    vbucket.get_and_lock(b"k", 10)
    clock.pass_by(10)
    vbucket.set(b"k", b"2")
    locked = vbucket.get_and_lock(b"k", 10)
    vbucket.unlock(b"k", locked.cas)
    with pytest.raises(NotLocked):
        vbucket.unlock(b"k", locked.cas)
    vbucket.delete(b"k")


def test_a_write_that_fails_keeps_the_lock(vbucket: Vbucket) -> None:
    vbucket.set(b"n", b"1")
    cas = vbucket.get_and_lock(b"n", 10).cas
    large = bytes(20 * 2**20 + 1)
    for too_big in (vbucket.set, vbucket.replace, vbucket.append, vbucket.prepend):
        with pytest.raises(TooBig):
            too_big(b"n", large, cas=cas)
        with pytest.raises(Locked):
            vbucket.set(b"n", b"2")
    vbucket.table.ledger.refusal = "not now"
    for refused in (
        lambda: vbucket.replace(b"n", b"2", cas=cas),
        lambda: vbucket.increment(b"n", cas=cas),
        lambda: vbucket.delete(b"n", cas=cas),
    ):
        with pytest.raises(TemporaryFailure):
            refused()
    vbucket.table.ledger.refusal = ""
    with pytest.raises(Locked):
        vbucket.set(b"n", b"2")
    assert vbucket.increment(b"n", cas=cas)[0] == 2
    vbucket.set(b"n", b"3")


def test_a_write_that_makes_no_sense_keeps_the_lock(vbucket: Vbucket) -> None:
    vbucket.set(b"k", b"1")
    cas = vbucket.get_and_lock(b"k", 10).cas
    with pytest.raises(TypeError):
        vbucket.replace(b"k", "text", cas=cas)  # type: ignore[arg-type]
    with pytest.raises(Locked):
        vbucket.get_and_lock(b"k")
    vbucket.replace(b"k", b"2", cas=cas)
    assert vbucket.get(b"k").value == b"2"


def test_waiters_for_a_change_find_it_unlocked(vbucket: Vbucket) -> None:
    vbucket.set(b"k", b"1")
    cas = vbucket.get_and_lock(b"k", 10).cas
    seen = []
    vbucket.when_changed(lambda: seen.append(vbucket.get(b"k").cas))
    stored, _ = vbucket.replace(b"k", b"2", cas=cas)
    assert seen == [stored]


@pytest.mark.parametrize(
    ("theirs", "wins"),
    [
        ({"rev_seqno": 6, "cas": 1}, True),
        ({"rev_seqno": 4, "cas": 999}, False),
        ({"rev_seqno": 5, "cas": 101}, True),
        ({"rev_seqno": 5, "cas": 99, "expiry": 4000000000}, False),
        ({"rev_seqno": 5, "cas": 100, "expiry": 3000000001}, True),
        ({"rev_seqno": 5, "cas": 100, "expiry": 3000000000, "flags": 8}, True),
        ({"rev_seqno": 5, "cas": 100, "expiry": 3000000000, "flags": 7}, True),  # by its bytes
        ({"rev_seqno": 5, "cas": 100, "expiry": 3000000000, "flags": 6}, False),
    ],
)
def test_conflict_resolution(vbucket: Vbucket, theirs: dict[str, Any], wins: bool) -> None:
    vbucket.set_with_meta(b"k", b"ours", cas=100, rev_seqno=5, expiry=3000000000, flags=7)
    if wins:
        vbucket.set_with_meta(b"k", b"theirs", **theirs)
    else:
        with pytest.raises(KeyExists):
            vbucket.set_with_meta(b"k", b"theirs", **theirs)
        vbucket.set_with_meta(b"k", b"theirs", force=True, **theirs)
    item = vbucket.get(b"k")
    assert (item.value, item.rev_seqno, item.cas) == (b"theirs", theirs["rev_seqno"], theirs["cas"])


def test_a_tombstone_takes_part_in_conflicts(vbucket: Vbucket) -> None:
    vbucket.delete_with_meta(b"k", cas=50, rev_seqno=9, expiry=123)
    with pytest.raises(KeyExists):
        vbucket.set_with_meta(b"k", b"late", cas=60, rev_seqno=8)
    assert vbucket.get_meta(b"k").time == 123
    with pytest.raises(InvalidArguments):
        vbucket.set_with_meta(b"k", b"", cas=0, rev_seqno=1)


VERSIONS = st.fixed_dictionaries(
    {
        "rev_seqno": st.integers(1, 2),
        "cas": st.integers(1, 2),
        "expiry": st.sampled_from([0, 3_000_000_000]),
        "flags": st.integers(0, 1),
        "datatype": st.integers(0, 1),
        "value": st.sampled_from([None, b"", b"a", b"b"]),
    }
)


@given(one=VERSIONS, other=VERSIONS)
def test_two_that_are_told_of_each_others_version_end_with_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    def take(vbucket: Vbucket, version: dict[str, Any]) -> None:
        rest = dict(version)
        value = rest.pop("value")
        with suppress(KeyExists):
            if value is None:
                vbucket.delete_with_meta(b"k", cas=rest["cas"], rev_seqno=rest["rev_seqno"])
            else:
                vbucket.set_with_meta(b"k", value, **rest)

    with Bucket.open(None, vbuckets=2, background=False) as bucket:
        ends = []
        for number, order in enumerate(([one, other], [other, one])):
            vbucket = bucket.create_vbucket(number)
            for version in order:
                take(vbucket, version)
            item = vbucket.table.find(b"k")
            assert item is not None
            shown = (item.expiry, item.flags, item.datatype, item.value) if item.event == Event.MUTATION else None
            ends.append((item.rev_seqno, item.cas, shown))
        assert ends[0] == ends[1]


def test_a_cas_from_elsewhere_is_followed(vbucket: Vbucket, clock: Clock) -> None:
    ahead = int((clock.now + 100) * 1e9)
    vbucket.set_with_meta(b"k", b"", cas=ahead, rev_seqno=1)
    assert vbucket.set(b"k", b"")[0] > ahead
    vbucket.set_with_meta(b"j", b"", cas=2**64 - 2, rev_seqno=1)
    assert vbucket.set(b"x", b"")[0] < 2**63


def test_limits(vbucket: Vbucket) -> None:
    vbucket.set(b"k" * 250, b"")
    for key in (b"", b"k" * 251):
        with pytest.raises(InvalidArguments):
            vbucket.set(key, b"")
    with pytest.raises(TooBig):
        vbucket.set(b"k", bytes(20 * 2**20 + 1))
    big = bytes(20 * 2**20)
    vbucket.set(b"k", big)
    assert vbucket.get(b"k").value == big


def test_scan_is_ordered_and_random_is_among_the_keys(vbucket: Vbucket) -> None:
    with pytest.raises(KeyNotFound):
        vbucket.random_key()
    keys = {b"key-%03d" % (i * 37 % 100) for i in range(100)}
    for key in keys:
        vbucket.set(key, b"")
    vbucket.delete(b"key-050")
    keys.discard(b"key-050")
    assert vbucket.scan() == sorted(keys)
    assert vbucket.scan(b"key-049", 2) == [b"key-049", b"key-051"]
    assert {vbucket.random_key() for _ in range(200)} <= keys
    assert len({vbucket.random_key() for _ in range(200)}) > 10


@pytest.mark.parametrize("state", [VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD])
def test_only_an_active_vbucket_serves(vbucket: Vbucket, state: VbucketState) -> None:
    vbucket.set(b"k", b"1")
    vbucket.set_state(state)
    for refused in (
        lambda: vbucket.get(b"k"),
        lambda: vbucket.set(b"k", b""),
        lambda: vbucket.delete(b"k"),
        lambda: vbucket.add(b"j", b""),
        lambda: vbucket.increment(b"k"),
        lambda: vbucket.get_meta(b"k"),
        lambda: vbucket.scan(),
        lambda: vbucket.flush(),
    ):
        with pytest.raises(NotMyVbucket):
            refused()


def test_a_replica_expires_nothing(vbucket: Vbucket, clock: Clock) -> None:
    vbucket.set(b"k", b"1", expiry=5)
    vbucket.set_state(VbucketState.REPLICA)
    clock.pass_by(100)
    assert not vbucket.table.expire(b"k")
    assert vbucket.high_seqno == 1


@pytest.mark.parametrize(
    "impossible",
    [
        lambda vbucket: vbucket.set(b"k", b"v", flags=-1),
        lambda vbucket: vbucket.set(b"k", b"v", flags=2**32),
        lambda vbucket: vbucket.set(b"k", b"v", expiry=-1),
        lambda vbucket: vbucket.set(b"k", b"v", cas=-1),
        lambda vbucket: vbucket.set(b"k", b"v", datatype=256),
        lambda vbucket: vbucket.delete(b"k", cas=2**64),
        lambda vbucket: vbucket.replace(b"k", b"v", flags=-1),
        lambda vbucket: vbucket.add(b"other", b"v", expiry=2**32),
        lambda vbucket: vbucket.touch(b"k", -1),
        lambda vbucket: vbucket.increment(b"other", initial=1, expiry=-1),
        lambda vbucket: vbucket.increment(b"other", initial=-1),
        lambda vbucket: vbucket.decrement(b"other", initial=2**64),
        lambda vbucket: vbucket.increment(b"k", -1),
        lambda vbucket: vbucket.increment(b"k", 2**64),
        lambda vbucket: vbucket.decrement(b"k", -1),
        lambda vbucket: vbucket.decrement(b"k", 2**64),
        lambda vbucket: vbucket.set_with_meta(b"k", b"v", cas=2**64, rev_seqno=9),
        lambda vbucket: vbucket.delete_with_meta(b"k", cas=1, rev_seqno=2**64),
        lambda vbucket: vbucket.scan(limit=-1),
    ],
)
def test_numbers_that_cannot_be_are_refused(vbucket: Vbucket, impossible: Callable[[Vbucket], object]) -> None:
    vbucket.set(b"k", b"1")
    with pytest.raises(InvalidArguments):
        impossible(vbucket)
    assert (vbucket.get(b"k").value, vbucket.high_seqno) == (b"1", 1)


def test_a_refused_write_leaves_the_lock(vbucket: Vbucket) -> None:
    vbucket.set(b"k", b"1")
    held = vbucket.get_and_lock(b"k")
    with pytest.raises(InvalidArguments):
        vbucket.replace(b"k", b"2", flags=-1, cas=held.cas)
    with pytest.raises(Locked):
        vbucket.set(b"k", b"2")


#: What there is to be said of an item that is past its time, by who cannot write.
ASKING: list[Callable[[Vbucket], object]] = [
    lambda v: v.get(b"k"),
    lambda v: v.get_meta(b"k"),
    lambda v: v.get_and_lock(b"k"),
    lambda v: v.get_and_touch(b"k", 0),
    lambda v: v.touch(b"k", 0),
    lambda v: v.unlock(b"k", 1),
    lambda v: v.replace(b"k", b"w"),
    lambda v: v.increment(b"k"),
]
WRITING: list[Callable[[Vbucket], object]] = [
    lambda v: v.set(b"k", b""),
    lambda v: v.add(b"k", b""),
    lambda v: v.set_with_meta(b"k", b"", cas=1, rev_seqno=9),
    # It would lose against the version that is past its time, but that is not what it will be compared with.
    lambda v: v.set_with_meta(b"k", b"", cas=1, rev_seqno=1),
    lambda v: v.delete_with_meta(b"k", cas=1, rev_seqno=9, force=True),
]


@pytest.mark.parametrize("limit", ["the queue", "the quota", "a failed write", "a closed bucket"])
def test_without_room_an_expiration_waits_but_the_item_is_gone(bucket: Bucket, clock: Clock, limit: str) -> None:
    vbucket, ledger = bucket.vbucket(0), bucket.ledger
    vbucket.set(b"k", b"1", expiry=10)
    clock.pass_by(10)
    if limit == "the queue":
        ledger.queue_bytes_max = ledger.pending_bytes
    elif limit == "the quota":
        ledger.quota_bytes = ledger.memory_bytes // 2
    elif limit == "a failed write":
        ledger.refusal = "not now"
    else:
        bucket.close()
    for ask in ASKING:
        with pytest.raises(KeyNotFound):
            ask(vbucket)
    assert (vbucket.newest(b"k"), vbucket.scan()) == (None, [])
    for write in WRITING:
        with pytest.raises((TemporaryFailure, OutOfMemory)):
            write(vbucket)
    bucket.maintenance.run_all()
    assert (vbucket.high_seqno, ledger.expirations) == (1, 0)
    ledger.queue_bytes_max = ledger.quota_bytes = 0
    ledger.refusal = ""
    with pytest.raises(KeyNotFound):
        vbucket.get(b"k")
    assert (vbucket.high_seqno, ledger.expirations) == (2, 1)
    assert vbucket.get_meta(b"k").event == Event.EXPIRATION


def test_expirations_may_take_the_reserve_of_deletions(bucket: Bucket, clock: Clock) -> None:
    """In the end they make room."""
    vbucket, ledger = bucket.vbucket(0), bucket.ledger
    vbucket.set(b"k", b"1", expiry=10)
    clock.pass_by(10)
    ledger.quota_bytes = ledger.memory_bytes
    with pytest.raises(KeyNotFound):
        vbucket.get(b"k")
    assert ledger.expirations == 1


def test_a_lock_does_not_outlive_an_item_whose_expiration_waits(bucket: Bucket, clock: Clock) -> None:
    vbucket, ledger = bucket.vbucket(0), bucket.ledger
    vbucket.set(b"k", b"1", expiry=5)
    vbucket.get_and_lock(b"k", 20)
    clock.pass_by(5)
    ledger.refusal = "not now"
    with pytest.raises(KeyNotFound):
        vbucket.get(b"k")
    ledger.refusal = ""
    vbucket.set(b"k", b"2")
    assert vbucket.get(b"k").rev_seqno == 3


@pytest.mark.parametrize(
    "operation",
    [
        lambda v: v.get_meta(b"k"),
        lambda v: v.newest(b"k"),
        lambda v: suppressed(KeyExists, v.add, b"k", b"w"),
        lambda v: v.replace(b"k", b"w"),
        lambda v: suppressed(NotLocked, v.unlock, b"k", 1),
        lambda v: v.delete(b"k"),
        lambda v: v.set_with_meta(b"k", b"w", cas=2**62, rev_seqno=1),
        lambda v: suppressed(KeyExists, v.set_with_meta, b"k", b"w", cas=1, rev_seqno=1),
        lambda v: v.set_with_meta(b"k", b"w", cas=v.get_meta(b"k").cas, rev_seqno=1, force=True),
        lambda v: v.delete_with_meta(b"k", cas=1, rev_seqno=2),
    ],
)
def test_no_value_is_read_from_disk_for_nothing(bucket: Bucket, operation: Callable[[Vbucket], object]) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"v")
    bucket.flusher.step()
    vbucket.table.sweep(0, 0, 0, 0, 1)
    assert vbucket.table.evicted == 1
    vbucket.table.fetch = Mock(return_value=b"v")
    operation(vbucket)
    vbucket.table.fetch.assert_not_called()


def test_a_value_on_disk_decides_between_versions_that_are_otherwise_the_same(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    cas, _ = vbucket.set(b"k", b"v")
    bucket.flusher.step()
    vbucket.table.sweep(0, 0, 0, 0, 1)
    vbucket.table.fetch = Mock(return_value=b"v")
    with pytest.raises(KeyExists):
        vbucket.set_with_meta(b"k", b"u", cas=cas, rev_seqno=1)
    vbucket.set_with_meta(b"k", b"w", cas=cas, rev_seqno=1)
    assert vbucket.get(b"k").value == b"w"


def suppressed(error: type[Exception], call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    with suppress(error):
        call(*arguments, **options)
