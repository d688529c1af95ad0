from typing import Any

import pyarrow as pa
import pytest

from tests.support.command_peers import ABSENT, ManualNode, Peer, assert_refusal, encoded, open_manual_node
from upriver.engine.table import RELATIVE_EXPIRY_S_MAX
from upriver.errors import StorageError
from upriver.model.compression import SNAPPY
from upriver.wire import AnyResponse, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Add,
    AddQ,
    Append,
    AppendQ,
    Decrement,
    DecrementQ,
    DecrementResponse,
    Delete,
    DeleteQ,
    DeleteResponse,
    Feature,
    Flush,
    FlushQ,
    Gat,
    GatQ,
    GatQResponse,
    GatResponse,
    Get,
    GetK,
    GetKQ,
    GetKQResponse,
    GetKResponse,
    GetLocked,
    GetQ,
    GetQResponse,
    GetResponse,
    Increment,
    IncrementQ,
    IncrementResponse,
    Prepend,
    PrependQ,
    Replace,
    ReplaceQ,
    Set,
    SetQ,
    SetResponse,
    SetVbucket,
    Touch,
    TouchResponse,
    VbucketState,
)

#: Every request of one key, ready to be sent with a key of one's choice.
REQUESTS: list[type[Request]] = [
    Get, GetQ, GetK, GetKQ, Set, SetQ, Add, AddQ, Replace, ReplaceQ, Delete, DeleteQ, Increment, IncrementQ, Decrement,
    DecrementQ, Append, AppendQ, Prepend, PrependQ, Touch, Gat, GatQ,
]  # fmt: skip


def value(peer: Peer, key: bytes = b"k") -> bytes:
    answer = peer.ask(Get(key=key))
    assert isinstance(answer, GetResponse)
    return answer.value


# What all have in common


@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize("length", [0, 251, 1000])
def test_keys_have_1_to_250_bytes(manual: ManualNode, request_type: Any, length: int) -> None:
    answer = manual.peer().send(request_type(key=b"k" * length, opaque=9))
    assert len(answer) == 1
    assert_refusal(answer[0], Status.EINVAL)
    assert answer[0].opaque == 9


@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize("vbucket", [2, 3, 4, ABSENT, 0xFFFF])
def test_other_vbuckets_are_not_mine(manual: ManualNode, request_type: Any, vbucket: int) -> None:
    manual.peer().refused(request_type(key=b"k", vbucket=vbucket, opaque=9), Status.NOT_MY_VBUCKET)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_a_data_type_must_have_been_agreed_on(manual: ManualNode, request_type: Any) -> None:
    peer = manual.peer()
    assert "0x01" in peer.refused(request_type(key=b"k", datatype=1), Status.EINVAL)
    peer.hello(Feature.JSON)
    peer.refused(request_type(key=b"k", datatype=2), Status.EINVAL)
    peer.refused(request_type(key=b"k", datatype=3), Status.EINVAL)
    answers = peer.send(request_type(key=b"k", datatype=1))
    assert all(answer.status is not Status.EINVAL for answer in answers)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_a_malformed_body_is_refused_and_the_connection_lives_on(peer: Peer, request_type: Any) -> None:
    good = request_type(key=b"k", opaque=3).encode()
    extras = (good[4] + 1).to_bytes(1, "big")
    body = (int.from_bytes(good[8:12], "big") + 1).to_bytes(4, "big")
    answers = peer.send(good[:4] + extras + good[5:8] + body + good[12:] + b"x", Set(key=b"after", opaque=4))
    assert_refusal(answers[0], Status.EINVAL)
    assert (answers[0].code, answers[0].opaque) == (good[1], 3)
    assert (answers[1].status, answers[1].opaque) == (Status.SUCCESS, 4)


# Reading


def test_get(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k", value=b"v", flags=0xDEADBEEF))
    answer = peer.ask(Get(key=b"k", opaque=0x01020304))
    assert answer == GetResponse(flags=0xDEADBEEF, value=b"v", cas=stored.cas, opaque=0x01020304)


@pytest.mark.parametrize("compiled", [False, True])
def test_get_what_was_stored_compressed_elsewhere(compiled: bool) -> None:
    """Clients cannot agree on compression here, so none can be expected to inflate."""
    manual = open_manual_node(compiled=compiled)
    manual.bucket.vbucket(0).set(b"k", bytes(pa.Codec("snappy").compress(b"plain")), datatype=SNAPPY)
    peer = manual.peer()
    for request in (Get(key=b"k"), GetK(key=b"k"), Gat(key=b"k", expiration=100)):
        (answer,) = peer.send(request)
        assert isinstance(answer, GetResponse | GetKResponse | GatResponse)
        assert answer.value == b"plain"
        assert answer.datatype == 0
    manual.bucket.close()


def test_get_what_is_not_there(peer: Peer) -> None:
    assert peer.refused(Get(key=b"k"), Status.KEY_ENOENT) == "Not found"


def test_get_with_its_key(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k", value=b"v", flags=5))
    assert peer.ask(GetK(key=b"k")) == GetKResponse(flags=5, key=b"k", value=b"v", cas=stored.cas)
    miss = peer.ask(GetK(key=b"other"))
    assert_refusal(miss, Status.KEY_ENOENT)
    assert isinstance(miss, AnyResponse)
    assert miss.key == b"other"


def test_quiet_gets_answer_hits_only(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k", value=b"v"))
    answers = peer.send(
        GetQ(key=b"no", opaque=1), GetQ(key=b"k", opaque=2), GetKQ(key=b"no", opaque=3), GetKQ(key=b"k", opaque=4)
    )
    assert answers == [
        GetQResponse(value=b"v", cas=stored.cas, opaque=2),
        GetKQResponse(key=b"k", value=b"v", cas=stored.cas, opaque=4),
    ]


def test_a_cas_in_a_get_means_nothing(peer: Peer) -> None:
    peer.ask(Set(key=b"k", value=b"v"))
    assert peer.ask(Get(key=b"k", cas=1)).status is Status.SUCCESS


def test_the_longest_key_and_an_empty_value(peer: Peer) -> None:
    peer.ask(Set(key=b"k" * 250))
    assert value(peer, b"k" * 250) == b""


def test_a_large_value(peer: Peer) -> None:
    large = bytes(range(256)) * 8192  # 2 MiB, more than one read
    peer.ask(Set(key=b"k", value=large))
    assert value(peer) == large


def test_a_value_over_the_limit_is_too_big(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.refused(Set(key=b"k", value=bytes(20 * 2**20 + 1)), Status.E2BIG)
    assert peer.ask(Set(key=b"k", value=bytes(20 * 2**20))).status is Status.SUCCESS
    peer.refused(Append(key=b"k", value=b"!"), Status.E2BIG)


def test_vbuckets_have_their_own_keys(peer: Peer) -> None:
    peer.ask(Set(key=b"k", value=b"0"))
    peer.ask(Set(key=b"k", value=b"1", vbucket=1))
    assert value(peer) == b"0"


# Storing


def test_cas_of_a_set_is_the_items(peer: Peer) -> None:
    first = peer.ask(Set(key=b"k", value=b"1"))
    second = peer.ask(Set(key=b"k", value=b"2", cas=first.cas))
    assert 0 < first.cas < second.cas
    peer.refused(Set(key=b"k", value=b"3", cas=first.cas), Status.KEY_EEXISTS)
    peer.refused(Set(key=b"other", value=b"3", cas=first.cas), Status.KEY_ENOENT)
    assert value(peer) == b"2"


def test_add(peer: Peer) -> None:
    assert peer.ask(Add(key=b"k", value=b"1")).cas
    peer.refused(Add(key=b"k", value=b"2"), Status.KEY_EEXISTS)
    assert value(peer) == b"1"
    peer.ask(Delete(key=b"k"))
    assert peer.ask(Add(key=b"k", value=b"3")).status is Status.SUCCESS


def test_replace(peer: Peer) -> None:
    peer.refused(Replace(key=b"k", value=b"1"), Status.KEY_ENOENT)
    first = peer.ask(Set(key=b"k", value=b"1"))
    peer.refused(Replace(key=b"k", value=b"2", cas=first.cas + 1), Status.KEY_EEXISTS)
    assert peer.ask(Replace(key=b"k", value=b"2", cas=first.cas)).cas > first.cas
    assert value(peer) == b"2"


def test_delete(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k", value=b"1"))
    peer.refused(Delete(key=b"k", cas=stored.cas + 1), Status.KEY_EEXISTS)
    assert peer.ask(Delete(key=b"k", cas=stored.cas)) == DeleteResponse()  # the CAS of a plain delete is 0
    peer.refused(Delete(key=b"k"), Status.KEY_ENOENT)
    peer.refused(Get(key=b"k"), Status.KEY_ENOENT)


def test_append_and_prepend(peer: Peer) -> None:
    peer.refused(Append(key=b"k", value=b"1"), Status.NOT_STORED)
    peer.refused(Prepend(key=b"k", value=b"1"), Status.NOT_STORED)
    stored = peer.ask(Set(key=b"k", value=b"b", flags=7))
    appended = peer.ask(Append(key=b"k", value=b"c", cas=stored.cas))
    assert peer.ask(Prepend(key=b"k", value=b"a")).cas > appended.cas > stored.cas
    peer.refused(Append(key=b"k", value=b"!", cas=stored.cas), Status.KEY_EEXISTS)
    peer.refused(Prepend(key=b"k", value=b"!", cas=stored.cas), Status.KEY_EEXISTS)
    answer = peer.ask(Get(key=b"k"))
    assert isinstance(answer, GetResponse)
    assert (answer.value, answer.flags) == (b"abc", 7)


def test_quiet_stores_answer_refusals_only(peer: Peer) -> None:
    answers = peer.send(
        SetQ(key=b"a", value=b"1"),
        AddQ(key=b"b", value=b"1"),
        ReplaceQ(key=b"a", value=b"2"),
        AppendQ(key=b"a", value=b"3"),
        PrependQ(key=b"a", value=b"1"),
        IncrementQ(key=b"b", delta=41),
        DecrementQ(key=b"b", delta=2),
        DeleteQ(key=b"a"),
    )
    assert answers == []
    assert value(peer, b"b") == b"40"
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)
    refusals = peer.send(
        SetQ(key=b"b", cas=1, opaque=1),
        AddQ(key=b"b", opaque=2),
        ReplaceQ(key=b"a", opaque=3),
        AppendQ(key=b"a", opaque=4),
        PrependQ(key=b"a", opaque=5),
        IncrementQ(key=b"a", expiration=0xFFFFFFFF, opaque=6),
        DecrementQ(key=b"a", expiration=0xFFFFFFFF, opaque=7),
        DeleteQ(key=b"a", opaque=8),
    )
    statuses = [
        Status.KEY_EEXISTS, Status.KEY_EEXISTS, Status.KEY_ENOENT, Status.NOT_STORED, Status.NOT_STORED,
        Status.KEY_ENOENT, Status.KEY_ENOENT, Status.KEY_ENOENT,
    ]  # fmt: skip
    for answer, opaque, status in zip(refusals, range(1, 9), statuses, strict=True):
        assert_refusal(answer, status)
        assert answer.opaque == opaque
    assert [answer.code for answer in refusals] == [0x11, 0x12, 0x13, 0x19, 0x1A, 0x15, 0x16, 0x14]


# Numbers


def test_increment_creates_with_the_initial_value(peer: Peer) -> None:
    created = peer.ask(Increment(key=b"n", delta=5, initial=10))
    assert isinstance(created, IncrementResponse)
    assert (created.number, value(peer, b"n")) == (10, b"10")
    added = peer.ask(Increment(key=b"n", delta=5, initial=10))
    assert isinstance(added, IncrementResponse)
    assert (added.number, value(peer, b"n")) == (15, b"15")
    assert added.cas > created.cas > 0


def test_increment_does_not_create_when_told(peer: Peer) -> None:
    peer.refused(Increment(key=b"n", initial=10, expiration=0xFFFFFFFF), Status.KEY_ENOENT)
    peer.refused(Decrement(key=b"n", initial=10, expiration=0xFFFFFFFF), Status.KEY_ENOENT)


def test_increment_wraps_and_decrement_stops(peer: Peer) -> None:
    peer.ask(Set(key=b"n", value=b"%d" % (2**64 - 1)))
    assert peer.ask(Increment(key=b"n", delta=2)) == IncrementResponse(number=1, cas=peer.ask(Get(key=b"n")).cas)
    assert peer.ask(Decrement(key=b"n", delta=7)) == DecrementResponse(number=0, cas=peer.ask(Get(key=b"n")).cas)


@pytest.mark.parametrize("text", [b"", b"x", b"-1", b"1.0", b"1" * 21, b"18446744073709551616"])
def test_what_is_no_number_cannot_be_counted(peer: Peer, text: bytes) -> None:
    peer.ask(Set(key=b"n", value=text))
    peer.refused(Increment(key=b"n"), Status.DELTA_BADVAL)
    peer.refused(Decrement(key=b"n"), Status.DELTA_BADVAL)
    assert value(peer, b"n") == text


def test_counting_with_a_cas(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"n", value=b"1", flags=3))
    peer.refused(Increment(key=b"n", cas=stored.cas + 1), Status.KEY_EEXISTS)
    assert peer.ask(Increment(key=b"none", cas=stored.cas, initial=7)).status is Status.SUCCESS
    assert value(peer, b"none") == b"7"
    answer = peer.ask(Increment(key=b"n", cas=stored.cas))
    assert isinstance(answer, IncrementResponse)
    assert answer.number == 2
    got = peer.ask(Get(key=b"n"))
    assert isinstance(got, GetResponse)
    assert got.flags == 3


# Time


def test_items_expire(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"relative", expiration=10))
    peer.ask(Add(key=b"absolute", expiration=int(manual.time.now) + 10))
    peer.ask(Increment(key=b"number", expiration=10))
    peer.ask(Set(key=b"forever"))
    manual.time.pass_by(9)
    for key in (b"relative", b"absolute", b"number", b"forever"):
        assert peer.ask(Get(key=key)).status is Status.SUCCESS
    manual.time.pass_by(1)
    for key in (b"relative", b"absolute", b"number"):
        peer.refused(Get(key=key), Status.KEY_ENOENT)
    assert peer.ask(Get(key=b"forever")).status is Status.SUCCESS


def test_expiries_beyond_30_days_count_from_the_epoch(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"past", expiration=RELATIVE_EXPIRY_S_MAX + 1))
    peer.refused(Get(key=b"past"), Status.KEY_ENOENT)
    peer.ask(Set(key=b"month", expiration=RELATIVE_EXPIRY_S_MAX))
    manual.time.pass_by(RELATIVE_EXPIRY_S_MAX - 1)
    assert peer.ask(Get(key=b"month")).status is Status.SUCCESS


def test_append_keeps_the_expiry_and_counting_too(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a", value=b"1", expiration=10), Append(key=b"a", value=b"2"), Increment(key=b"a"))
    manual.time.pass_by(10)
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)


def test_touch(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.refused(Touch(key=b"k", expiration=10), Status.KEY_ENOENT)
    stored = peer.ask(Set(key=b"k", value=b"v", flags=3))
    touched = peer.ask(Touch(key=b"k", expiration=10))
    assert touched.cas > stored.cas
    answer = peer.ask(Get(key=b"k"))
    assert answer == GetResponse(value=b"v", flags=3, cas=touched.cas)
    manual.time.pass_by(10)
    peer.refused(Touch(key=b"k", expiration=0), Status.KEY_ENOENT)


def test_touch_with_0_takes_the_expiry_away(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"k", expiration=10), Touch(key=b"k", expiration=0))
    manual.time.pass_by(1000)
    assert peer.ask(Get(key=b"k")).status is Status.SUCCESS


def test_get_and_touch(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.refused(Gat(key=b"k", expiration=10), Status.KEY_ENOENT)
    assert peer.send(GatQ(key=b"k", expiration=10)) == []
    stored = peer.ask(Set(key=b"k", value=b"v", flags=3))
    first = peer.ask(Gat(key=b"k", expiration=10))
    assert first == GatResponse(value=b"v", flags=3, cas=first.cas)
    second = peer.ask(GatQ(key=b"k", expiration=20))
    assert second == GatQResponse(value=b"v", flags=3, cas=second.cas)
    assert stored.cas < first.cas < second.cas
    manual.time.pass_by(19)
    assert peer.ask(Get(key=b"k")).status is Status.SUCCESS
    manual.time.pass_by(1)
    peer.refused(Get(key=b"k"), Status.KEY_ENOENT)


def test_touch_over_any_connection(peer: Peer) -> None:
    peer.ask(Set(key=b"k", value=b"v"))
    assert peer.ask(Touch(key=b"k", expiration=100)).cas
    assert peer.ask(Gat(key=b"k", expiration=100)).cas
    assert peer.ask(GatQ(key=b"k", expiration=100)).cas


# Flush


@pytest.mark.parametrize("expiration", [None, 0])
def test_flush(peer: Peer, expiration: int | None) -> None:
    peer.send(Set(key=b"a"), Set(key=b"b", vbucket=1))
    assert peer.ask(Flush(expiration=expiration)).status is Status.SUCCESS
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)
    peer.refused(Get(key=b"b", vbucket=1), Status.KEY_ENOENT)


def test_quiet_flush(peer: Peer) -> None:
    assert peer.send(Set(key=b"a"), FlushQ())[1:] == []
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)


def test_flush_with_a_delay(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Flush(expiration=10), Set(key=b"b"))
    manual.time.pass_by(9)
    assert [answer.status for answer in peer.send(Get(key=b"a"), Get(key=b"b"))] == [Status.SUCCESS] * 2
    manual.time.pass_by(1)
    assert [answer.status for answer in peer.send(Get(key=b"a"), Get(key=b"b"))] == [Status.KEY_ENOENT] * 2
    peer.ask(Set(key=b"a"))
    manual.time.pass_by(100)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS


def test_a_flush_is_refused_as_other_writes_are_while_the_disk_takes_none(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"a"))
    manual.bucket.ledger.refusal = "the disk does not take writes"
    peer.refused(Flush(), Status.ETMPFAIL)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS
    assert manual.node.counters.flushes == 0


def test_a_flush_that_was_put_off_is_tried_until_the_disk_takes_it(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Flush(expiration=10))
    manual.bucket.ledger.refusal = "the disk does not take writes"
    manual.time.pass_by(10)
    manual.time.pass_by(60)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS
    manual.bucket.ledger.refusal = ""
    manual.time.pass_by(1)
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)
    assert manual.node.counters.flushes == 1


def test_flush_at_a_moment(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), FlushQ(expiration=int(manual.time.now) + 10))
    manual.time.pass_by(9)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS
    manual.time.pass_by(1)
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)
    peer.send(Set(key=b"a"), Flush(expiration=int(manual.time.now) - 10))
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS


def test_a_later_flush_replaces_one_that_was_put_off(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Flush(expiration=10), Flush(expiration=20), Set(key=b"a"))
    manual.time.pass_by(10)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS
    manual.time.pass_by(10)
    peer.refused(Get(key=b"a"), Status.KEY_ENOENT)
    peer.send(Flush(expiration=10), Flush(), Set(key=b"a"))
    manual.time.pass_by(10)
    assert peer.ask(Get(key=b"a")).status is Status.SUCCESS


def test_flush_touches_active_vbuckets_only(manual: ManualNode) -> None:
    before = {vbucket.number: vbucket.failover_log for vbucket in manual.bucket}
    manual.peer().ask(Flush())
    changed = [number for number, log in before.items() if manual.bucket.vbucket(number).failover_log != log]
    assert changed == [0, 1]


# What was agreed on


def test_mutation_tokens(peer: Peer) -> None:
    peer.hello(Feature.MUTATION_SEQNO)
    first = peer.ask(Set(key=b"k", value=b"1"))
    assert isinstance(first, SetResponse)
    assert first.vbucket_uuid
    token = {"vbucket_uuid": first.vbucket_uuid}
    assert first.seqno == 1
    requests: list[Request] = [
        Replace(key=b"k", value=b"1"), Append(key=b"k", value=b"1"), Prepend(key=b"k", value=b"1"),
        Increment(key=b"k"), Decrement(key=b"k"), Delete(key=b"k"), Add(key=b"k"),
    ]  # fmt: skip
    for seqno, request in enumerate(requests, 2):
        answer = peer.ask(request)
        assert isinstance(answer, SetResponse | IncrementResponse)
        assert (answer.vbucket_uuid, answer.seqno) == (token["vbucket_uuid"], seqno)
        assert answer.cas  # also the CAS of a deletion
    touched = peer.ask(Touch(key=b"k", expiration=100))
    assert isinstance(touched, TouchResponse)
    assert touched.flags == 0  # and no token


def test_tokens_name_the_newest_branch(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.hello(Feature.MUTATION_SEQNO)
    answer = peer.ask(Set(key=b"k", vbucket=1))
    assert isinstance(answer, SetResponse)
    assert answer.vbucket_uuid == manual.bucket.vbucket(1).failover_log.newest.vbucket_uuid


def test_data_types_are_kept_and_shown_to_who_knows_them(manual: ManualNode) -> None:
    json, plain = manual.peer(), manual.peer()
    json.hello(Feature.JSON)
    for store in (Set, Replace):
        json.ask(store(key=b"k", value=b"{}", datatype=1))
        for request in (Get(key=b"k"), GetK(key=b"k"), Gat(key=b"k")):
            assert json.ask(request).datatype == 1
            assert plain.ask(request).datatype == 0
    json.ask(Add(key=b"new", value=b"{}", datatype=1))
    assert json.ask(Get(key=b"new")).datatype == 1
    plain.ask(Set(key=b"k", value=b"{}"))
    assert json.ask(Get(key=b"k")).datatype == 0


def test_what_is_joined_is_not_called_json(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.hello(Feature.JSON)
    for request in (Append(key=b"k", value=b"x", datatype=1), Prepend(key=b"k", value=b"x")):
        peer.ask(Set(key=b"k", value=b"{}", datatype=1))
        peer.ask(request)
        assert peer.ask(Get(key=b"k")).datatype == 0


# Locks


def test_a_locked_item_is_not_written_by_others(manual: ManualNode) -> None:
    modern, old = manual.peer(), manual.peer()
    modern.hello(Feature.XERROR)
    modern.ask(Set(key=b"k", value=b"1"))
    locked = modern.ask(GetLocked(key=b"k"))
    requests: list[Request] = [
        Set(key=b"k"), Replace(key=b"k"), Append(key=b"k"), Prepend(key=b"k"), Increment(key=b"k"), Decrement(key=b"k"),
        Delete(key=b"k"), Touch(key=b"k"), Gat(key=b"k"), Set(key=b"k", cas=locked.cas + 1), SetQ(key=b"k"),
        GatQ(key=b"k"),
    ]  # fmt: skip
    for request in requests:
        assert modern.refused(request, Status.LOCKED)
        assert old.refused(request, Status.KEY_EEXISTS)  # who knows no extended errors knows no locks either
    for peer in (modern, old):
        peer.refused(Add(key=b"k"), Status.KEY_EEXISTS)
    assert modern.ask(Set(key=b"k", value=b"2", cas=locked.cas)).status is Status.SUCCESS
    assert old.ask(Set(key=b"k", value=b"3")).status is Status.SUCCESS


# On disk first


def test_writes_are_answered_when_they_are_on_disk(manual_on_disk: ManualNode) -> None:
    peer = manual_on_disk.peer()
    assert peer.send(Set(key=b"k", value=b"1", opaque=1)) == []
    assert peer.send(Get(key=b"k", opaque=2)) == []
    manual_on_disk.commit()
    answers = peer.receive()
    assert [answer.opaque for answer in answers] == [1, 2]
    assert answers[0].cas == answers[1].cas


@pytest.mark.parametrize(
    "request_type", [Set, Replace, Append, Prepend, Increment, Decrement, Delete, Touch, Gat, GatQ]
)
def test_every_write_waits_for_the_disk(manual_on_disk: ManualNode, request_type: Any) -> None:
    peer = manual_on_disk.peer()
    peer.send(Set(key=b"k", value=b"1"))
    manual_on_disk.commit()
    assert len(peer.receive()) == 1
    assert peer.send(request_type(key=b"k", opaque=5)) == []
    manual_on_disk.commit()
    (answer,) = peer.receive()
    assert (answer.status, answer.opaque) == (Status.SUCCESS, 5)


def test_refusals_and_misses_keep_their_place_behind_writes(manual_on_disk: ManualNode) -> None:
    peer = manual_on_disk.peer()
    sent = peer.send(
        Get(key=b"none", opaque=1),
        Set(key=b"k", opaque=2),
        Get(key=b"none", opaque=3),
        SetQ(key=b"k", opaque=4),
        AddQ(key=b"k", opaque=5),
        b"\x80\xee" + bytes(22),
        Delete(key=b"k", opaque=6),
    )
    assert [answer.opaque for answer in sent] == [1]
    manual_on_disk.commit()
    answers = peer.receive()
    assert [(answer.opaque, int(answer.status)) for answer in answers] == [(2, 0), (3, 1), (5, 2), (0, 0x81), (6, 0)]


def test_the_order_holds_across_commits(manual_on_disk: ManualNode) -> None:
    peer = manual_on_disk.peer()
    peer.send(Set(key=b"a", opaque=1))
    manual_on_disk.commit()
    answers = peer.send(Set(key=b"b", vbucket=1, opaque=2), GetQ(key=b"none", opaque=3), Set(key=b"c", opaque=4))
    manual_on_disk.commit()
    assert [answer.opaque for answer in answers + peer.receive()] == [1, 2, 4]


def test_flush_waits_for_the_disk_too(manual_on_disk: ManualNode) -> None:
    peer = manual_on_disk.peer()
    peer.send(Set(key=b"a"))
    manual_on_disk.commit()
    peer.receive()
    assert peer.send(Flush(opaque=7), FlushQ(opaque=8)) == []
    manual_on_disk.commit()
    (answer,) = peer.receive()
    assert (answer.opaque, answer.status) == (7, Status.SUCCESS)


# Room


def test_a_full_quota_is_no_memory(manual: ManualNode) -> None:
    peer = manual.peer()
    manual.bucket.ledger.quota_bytes = 1
    for request in (Set(key=b"k"), Set(key=b"l"), Add(key=b"m")):
        (answer,) = peer.send(request)
    assert_refusal(answer, Status.ENOMEM)


def test_a_full_queue_and_a_broken_disk_are_temporary(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"k"))
    manual.bucket.ledger.queue_bytes_max = 1
    for request in (Set(key=b"k"), Add(key=b"l"), Delete(key=b"k"), Touch(key=b"k"), Increment(key=b"n")):
        assert "queue" in peer.refused(request, Status.ETMPFAIL)
    manual.bucket.ledger.queue_bytes_max = 0
    manual.bucket.ledger.refusal = "the disk is on fire"
    assert peer.refused(Set(key=b"k"), Status.ETMPFAIL) == "the disk is on fire"
    assert peer.ask(Get(key=b"k")).status is Status.SUCCESS


# Pipelines


def test_a_pipeline_is_answered_in_order(peer: Peer) -> None:
    requests: list[Request] = []
    for number in range(500):
        requests += [Set(key=b"%d" % number, value=b"v%d" % number, opaque=2 * number)]
        requests += [Get(key=b"%d" % number, opaque=2 * number + 1)]
    answers = peer.send(encoded(*requests))
    assert [answer.opaque for answer in answers] == list(range(1000))
    assert all(answer.status is Status.SUCCESS for answer in answers)


# A disk that fails


def test_waiters_for_a_disk_that_fails_are_told(manual_on_disk: ManualNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change may still be stored later: the answer is not a success, and the change is not undone."""

    def full(batch: object) -> None:
        raise StorageError("store", "No space left on device")

    peer = manual_on_disk.peer()
    peer.put(
        Set(key=b"k", value=b"v", opaque=1),
        SetQ(key=b"l", opaque=2),
        SetVbucket(vbucket=1, state=VbucketState.DEAD, opaque=3),
    )
    with monkeypatch.context() as broken:
        broken.setattr(manual_on_disk.bucket.storage, "commit", full)
        with pytest.raises(StorageError):
            manual_on_disk.commit()
    answers = peer.receive()
    assert [answer.opaque for answer in answers] == [1, 2, 3]
    for answer in answers:  # a role may be set twice, so that a mover may repeat it
        assert_refusal(answer, Status.ETMPFAIL if answer.opaque == 3 else Status.SYNC_WRITE_AMBIGUOUS)
        assert isinstance(answer, AnyResponse)
        assert "No space left on device" in answer.text
    manual_on_disk.commit()
    assert peer.receive() == []
    assert manual_on_disk.bucket.vbucket(0).get(b"k").value == b"v"
    peer.put(Set(key=b"k", value=b"w", opaque=4))
    manual_on_disk.commit()
    assert [(answer.opaque, answer.status) for answer in peer.receive()] == [(4, Status.SUCCESS)]


# Where memcached has the command


def test_a_touch_returns_the_flags(peer: Peer) -> None:
    for size in (1, 5000):  # the compiled loop leaves long values to the session
        peer.ask(Set(key=b"k", value=bytes(size), flags=77))
        answer = peer.ask(Touch(key=b"k", expiration=1000))
        assert isinstance(answer, TouchResponse)
        assert answer.flags == 77


def test_an_add_with_a_cas_replaces_that_version(peer: Peer) -> None:
    peer.refused(Add(key=b"k", value=b"new", cas=5), Status.KEY_ENOENT)
    stored = peer.ask(Set(key=b"k", value=b"old"))
    peer.refused(Add(key=b"k", value=b"new", cas=stored.cas + 1), Status.KEY_EEXISTS)
    assert peer.ask(Add(key=b"k", value=b"new", cas=stored.cas)).status is Status.SUCCESS
    assert value(peer, b"k") == b"new"


def test_a_number_keeps_its_length(peer: Peer) -> None:
    for before, after in ((b"100", b"99 "), (b" 1", b"0 "), (b"5 5", b"4  "), (b"0", b"0"), (b"10\0", b"9  ")):
        peer.ask(Set(key=b"n", value=before))
        peer.ask(Decrement(key=b"n"))
        assert value(peer, b"n") == after


def test_a_wrong_cas_on_what_is_no_number(peer: Peer) -> None:
    for text, status in ((b"words", Status.KEY_EEXISTS), (b"", Status.DELTA_BADVAL)):
        stored = peer.ask(Set(key=b"n", value=text))
        peer.refused(Increment(key=b"n", cas=stored.cas + 1), status)


def test_a_flush_at_a_past_time_removes_nothing(peer: Peer) -> None:
    """It still takes the place of a delayed flush."""
    peer.ask(Set(key=b"k", value=b"v"))
    peer.ask(Flush(expiration=60))
    assert peer.ask(Flush(expiration=1_600_000_000)).status is Status.SUCCESS
    assert value(peer, b"k") == b"v"
