import pytest

from tests.support.command_peers import ABSENT, ManualNode, Peer
from upriver.engine.table import LOCKED_CAS
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Feature, Get, GetLocked, GetLockedResponse, Set, Unlock


@pytest.fixture
def modern(peer: Peer) -> Peer:
    """A client that agreed on extended errors, with an item."""
    peer.hello(Feature.XERROR)
    peer.ask(Set(key=b"k", value=b"v", flags=9))
    return peer


def test_lock_and_unlock(modern: Peer) -> None:
    locked = modern.ask(GetLocked(key=b"k", lock_time=10))
    assert locked == GetLockedResponse(value=b"v", flags=9, cas=locked.cas)
    assert locked.cas not in (0, LOCKED_CAS)
    assert modern.ask(Get(key=b"k")).cas == LOCKED_CAS
    modern.refused(GetLocked(key=b"k"), Status.LOCKED)
    modern.refused(Unlock(key=b"k", cas=locked.cas + 1), Status.LOCKED)
    assert modern.ask(Unlock(key=b"k", cas=locked.cas)).status is Status.SUCCESS
    modern.refused(Unlock(key=b"k", cas=locked.cas), Status.NOT_LOCKED)
    assert modern.ask(GetLocked(key=b"k")).status is Status.SUCCESS


def test_what_is_not_there_cannot_be_locked(peer: Peer) -> None:
    peer.refused(GetLocked(key=b"k"), Status.KEY_ENOENT)
    peer.refused(Unlock(key=b"k", cas=1), Status.KEY_ENOENT)


def test_a_peer_without_extended_errors_gets_temporary_failures(peer: Peer) -> None:
    peer.ask(Set(key=b"k"))
    assert peer.refused(Unlock(key=b"k", cas=1), Status.ETMPFAIL) == "Not locked"
    locked = peer.ask(GetLocked(key=b"k"))
    assert peer.refused(GetLocked(key=b"k"), Status.ETMPFAIL) == "Locked"
    peer.refused(Unlock(key=b"k", cas=locked.cas + 1), Status.ETMPFAIL)
    assert peer.ask(Unlock(key=b"k", cas=locked.cas)).status is Status.SUCCESS


@pytest.mark.parametrize(("asked", "seconds"), [(None, 15), (0, 15), (1, 1), (30, 30), (31, 15), (0xFFFFFFFF, 15)])
def test_a_lock_ends_by_itself(manual: ManualNode, asked: int | None, seconds: int) -> None:
    peer = manual.peer()
    peer.hello(Feature.XERROR)
    peer.ask(Set(key=b"k"))
    locked = peer.ask(GetLocked(key=b"k", lock_time=asked))
    manual.time.pass_by(seconds - 0.5)
    peer.refused(Set(key=b"k"), Status.LOCKED)
    manual.time.pass_by(0.5)
    peer.refused(Unlock(key=b"k", cas=locked.cas), Status.NOT_LOCKED)
    assert peer.ask(Set(key=b"k")).status is Status.SUCCESS


def test_the_data_type_comes_along(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.hello(Feature.JSON)
    peer.ask(Set(key=b"k", value=b"{}", datatype=1))
    assert peer.ask(GetLocked(key=b"k")).datatype == 1


@pytest.mark.parametrize("request_type", [GetLocked, Unlock])
def test_bad_keys_and_vbuckets(peer: Peer, request_type: type[GetLocked] | type[Unlock]) -> None:
    peer.refused(request_type(key=b""), Status.EINVAL)
    peer.refused(request_type(key=b"k" * 251), Status.EINVAL)
    for vbucket in (2, 3, 4, ABSENT):
        peer.refused(request_type(key=b"k", vbucket=vbucket), Status.NOT_MY_VBUCKET)
