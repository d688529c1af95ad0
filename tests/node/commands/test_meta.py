from typing import Any

import pytest

from tests.support.command_peers import ABSENT, ManualNode, Peer
from upriver.model import Event
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Delete,
    DeleteQWithMeta,
    DeleteWithMeta,
    DeleteWithMetaResponse,
    Feature,
    Get,
    GetLocked,
    GetMeta,
    GetMetaResponse,
    GetResponse,
    MetaOption,
    Set,
    SetQWithMeta,
    SetWithMeta,
    SetWithMetaResponse,
)


def meta(peer: Peer, key: bytes = b"k") -> GetMetaResponse:
    answer = peer.ask(GetMeta(key=key))
    assert isinstance(answer, GetMetaResponse)
    return answer


def test_get_meta(peer: Peer) -> None:
    peer.refused(GetMeta(key=b"k"), Status.KEY_ENOENT)
    stored = peer.ask(Set(key=b"k", value=b"v", flags=7, expiration=4_000_000_000))
    assert meta(peer) == GetMetaResponse(flags=7, expiration=4_000_000_000, rev_seqno=1, cas=stored.cas)
    peer.ask(Delete(key=b"k"))
    deleted = meta(peer)
    assert (deleted.deleted, deleted.rev_seqno, deleted.item_datatype) == (1, 2, None)
    assert deleted.cas > stored.cas


def test_get_meta_with_the_data_type(peer: Peer) -> None:
    peer.hello(Feature.JSON)
    peer.ask(Set(key=b"k", value=b"{}", datatype=1))
    for version, datatype in ((None, None), (1, None), (2, 1)):
        answer = peer.ask(GetMeta(key=b"k", version=version))
        assert isinstance(answer, GetMetaResponse)
        assert answer.item_datatype == datatype


def test_an_expired_item_is_a_deleted_one(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"k", expiration=10))
    manual.time.pass_by(10)
    assert meta(peer).deleted == 1


def test_set_with_meta_keeps_everything(peer: Peer) -> None:
    answer = peer.ask(
        SetWithMeta(key=b"k", value=b"v", flags=3, expiration=4_000_000_000, rev_seqno=77, item_cas=12345)
    )
    assert answer == SetWithMetaResponse(cas=12345)
    assert meta(peer) == GetMetaResponse(flags=3, expiration=4_000_000_000, rev_seqno=77, cas=12345)
    assert peer.ask(Get(key=b"k")) == GetResponse(value=b"v", flags=3, cas=12345)


def test_delete_with_meta_keeps_everything(peer: Peer) -> None:
    answer = peer.ask(DeleteWithMeta(key=b"k", rev_seqno=77, item_cas=12345))
    assert answer == DeleteWithMetaResponse(cas=12345)
    deleted = meta(peer)
    assert (deleted.deleted, deleted.rev_seqno, deleted.cas) == (1, 77, 12345)
    peer.refused(Get(key=b"k"), Status.KEY_ENOENT)


def test_the_quiet_forms_tell_only_refusals(peer: Peer) -> None:
    stored = SetQWithMeta(key=b"k", value=b"v", rev_seqno=5, item_cas=9, opaque=1)
    deleted = DeleteQWithMeta(key=b"l", rev_seqno=5, item_cas=9, opaque=2)
    answers = peer.send(stored, deleted, stored, deleted, GetMeta(key=b"k", opaque=3), GetMeta(key=b"l", opaque=4))
    assert [(answer.opaque, answer.status) for answer in answers] == [
        (1, Status.KEY_EEXISTS), (2, Status.KEY_EEXISTS), (3, Status.SUCCESS), (4, Status.SUCCESS)
    ]  # fmt: skip
    assert [getattr(answer, "deleted", None) for answer in answers[2:]] == [0, 1]


#: Ours, theirs, and whether theirs wins: revision, then CAS, then expiry, then flags, then the greater bytes.
CONFLICTS = [
    ((5, 50, 4_000_000_000, 1), (6, 1, 0, 0), True),
    ((5, 50, 4_000_000_000, 1), (4, 99, 4_000_000_009, 9), False),
    ((5, 50, 4_000_000_000, 1), (5, 51, 0, 0), True),
    ((5, 50, 4_000_000_000, 1), (5, 49, 4_000_000_009, 9), False),
    ((5, 50, 4_000_000_000, 1), (5, 50, 4_000_000_001, 0), True),
    ((5, 50, 4_000_000_001, 1), (5, 50, 4_000_000_000, 9), False),
    ((5, 50, 4_000_000_000, 1), (5, 50, 4_000_000_000, 2), True),
    ((5, 50, 4_000_000_000, 1), (5, 50, 4_000_000_000, 1), True),
    ((5, 50, 4_000_000_000, 1), (5, 50, 4_000_000_000, 0), False),
]


def with_meta(version: tuple[int, int, int, int], value: bytes, options: MetaOption | None = None) -> SetWithMeta:
    rev_seqno, cas, expiration, flags = version
    return SetWithMeta(
        key=b"k", value=value, rev_seqno=rev_seqno, item_cas=cas, expiration=expiration, flags=flags, options=options
    )


@pytest.mark.parametrize(("ours", "theirs", "wins"), CONFLICTS)
def test_conflict_resolution(
    peer: Peer, ours: tuple[int, int, int, int], theirs: tuple[int, int, int, int], wins: bool
) -> None:
    peer.ask(with_meta(ours, b"ours"))
    if wins:
        assert peer.ask(with_meta(theirs, b"theirs")).cas == theirs[1]
    else:
        peer.refused(with_meta(theirs, b"theirs"), Status.KEY_EEXISTS)
        forced = peer.ask(with_meta(theirs, b"theirs", MetaOption.SKIP_CONFLICT_RESOLUTION))
        assert forced.cas == theirs[1]
    assert meta(peer).cas == theirs[1]


def test_deletions_take_part_in_conflicts(peer: Peer) -> None:
    peer.ask(DeleteWithMeta(key=b"k", rev_seqno=5, item_cas=50))
    peer.refused(with_meta((4, 60, 0, 0), b"older"), Status.KEY_EEXISTS)
    peer.refused(DeleteWithMeta(key=b"k", rev_seqno=5, item_cas=49), Status.KEY_EEXISTS)
    peer.ask(with_meta((6, 60, 0, 0), b"newer"))
    peer.refused(DeleteWithMeta(key=b"k", rev_seqno=6, item_cas=59), Status.KEY_EEXISTS)
    assert peer.ask(DeleteWithMeta(key=b"k", rev_seqno=6, item_cas=59, options=MetaOption.SKIP_CONFLICT_RESOLUTION)).cas


def test_force_accept_does_not_skip_the_conflict_resolution(peer: Peer) -> None:
    peer.ask(with_meta((5, 50, 0, 0), b"ours"))
    peer.refused(with_meta((4, 50, 0, 0), b"theirs", MetaOption.FORCE_ACCEPT), Status.KEY_EEXISTS)


def test_a_new_cas_on_request(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k"))
    both = MetaOption.REGENERATE_CAS | MetaOption.SKIP_CONFLICT_RESOLUTION
    answer = peer.ask(with_meta((9, 50, 0, 0), b"v", both))
    assert answer.cas > stored.cas
    assert (meta(peer).cas, meta(peer).rev_seqno) == (answer.cas, 9)
    peer.refused(with_meta((10, 50, 0, 0), b"v", MetaOption.REGENERATE_CAS), Status.EINVAL)


def test_the_cas_of_the_header_is_the_one_expected(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"k"))
    newer: dict[str, Any] = {"key": b"k", "rev_seqno": 9, "item_cas": 99}
    peer.refused(SetWithMeta(**newer, cas=stored.cas + 1), Status.KEY_EEXISTS)
    peer.refused(DeleteWithMeta(**newer, cas=stored.cas + 1), Status.KEY_EEXISTS)
    assert peer.ask(SetWithMeta(**newer, cas=stored.cas)).cas == 99
    peer.refused(SetWithMeta(key=b"none", rev_seqno=1, item_cas=1, cas=5), Status.KEY_ENOENT)


@pytest.mark.parametrize("request_type", [SetWithMeta, DeleteWithMeta])
def test_bad_requests(peer: Peer, request_type: Any) -> None:
    peer.refused(request_type(key=b"k", rev_seqno=0, item_cas=1), Status.EINVAL)
    peer.refused(request_type(key=b"k", rev_seqno=1, item_cas=0), Status.EINVAL)
    peer.refused(request_type(key=b"", rev_seqno=1, item_cas=1), Status.EINVAL)
    peer.refused(request_type(key=b"k" * 251, rev_seqno=1, item_cas=1), Status.EINVAL)
    peer.refused(request_type(key=b"k", rev_seqno=1, item_cas=1, datatype=1), Status.EINVAL)
    for vbucket in (2, 3, 4, ABSENT):
        peer.refused(request_type(key=b"k", rev_seqno=1, item_cas=1, vbucket=vbucket), Status.NOT_MY_VBUCKET)


def test_get_meta_of_bad_keys_and_vbuckets(peer: Peer) -> None:
    peer.refused(GetMeta(key=b""), Status.EINVAL)
    peer.refused(GetMeta(key=b"k" * 251), Status.EINVAL)
    for vbucket in (2, 3, 4, ABSENT):
        peer.refused(GetMeta(key=b"k", vbucket=vbucket), Status.NOT_MY_VBUCKET)


def test_a_lock_holds_against_versions_from_elsewhere(peer: Peer) -> None:
    peer.hello(Feature.XERROR)
    peer.ask(Set(key=b"k"))
    peer.ask(GetLocked(key=b"k"))
    peer.refused(SetWithMeta(key=b"k", rev_seqno=9, item_cas=9), Status.LOCKED)
    peer.refused(DeleteWithMeta(key=b"k", rev_seqno=9, item_cas=9), Status.LOCKED)


@pytest.mark.parametrize("form", [{}, {"meta": b"extended"}, {"options": MetaOption.SKIP_CONFLICT_RESOLUTION}])
def test_every_length_of_the_extras(peer: Peer, form: dict[str, Any]) -> None:
    peer.ask(SetWithMeta(key=b"k", value=b"v", rev_seqno=1, item_cas=1, **form))
    answer = peer.ask(Get(key=b"k"))
    assert isinstance(answer, GetResponse)
    assert answer.value == b"v"
    peer.ask(DeleteWithMeta(key=b"k", rev_seqno=2, item_cas=2, **form))


def test_a_deletion_that_was_an_expiration(manual: ManualNode) -> None:
    manual.peer().ask(DeleteWithMeta(key=b"k", rev_seqno=1, item_cas=1, options=MetaOption.DELETE_IS_EXPIRATION))
    item = manual.bucket.vbucket(0).table.find(b"k")
    assert item is not None
    assert item.event == Event.EXPIRATION


def test_tokens_and_the_disk(manual_on_disk: ManualNode) -> None:
    peer = manual_on_disk.peer()
    peer.hello(Feature.MUTATION_SEQNO)
    assert (
        peer.send(SetWithMeta(key=b"k", rev_seqno=1, item_cas=1), DeleteWithMeta(key=b"k", rev_seqno=2, item_cas=2))
        == []
    )
    manual_on_disk.commit()
    stored, deleted = peer.receive()
    assert isinstance(stored, SetWithMetaResponse)
    assert isinstance(deleted, DeleteWithMetaResponse)
    assert (stored.seqno, deleted.seqno) == (1, 2)
    uuid = manual_on_disk.bucket.vbucket(0).failover_log.newest.vbucket_uuid
    assert stored.vbucket_uuid == deleted.vbucket_uuid == uuid
