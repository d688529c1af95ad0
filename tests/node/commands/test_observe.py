import socket

import pytest

from tests.support.command_peers import ABSENT, ManualNode, Peer, SocketPeer, open_manual_node
from tests.support.node_process import wait_until
from upriver.model import VbucketState
from upriver.node.commands.observe import PERSISTENCE_WAIT_S
from upriver.node.embedded import start
from upriver.node.state import Limits
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Delete,
    Feature,
    KeyObservation,
    KeyState,
    Noop,
    Observe,
    ObservedKey,
    ObserveResponse,
    ObserveSeqno,
    ObserveSeqnoResponse,
    SeqnoPersistence,
    Set,
    SetResponse,
    StartPersistence,
    StopPersistence,
)


def observed(peer: Peer, key: bytes, vbucket: int = 0) -> tuple[KeyState, int]:
    answer = peer.ask(Observe(keys=(ObservedKey(vbucket=vbucket, key=key),)))
    assert isinstance(answer, ObserveResponse)
    (found,) = answer.keys
    assert (found.vbucket, found.key) == (vbucket, key)
    return found.state, found.cas


@pytest.mark.shows("open_issues:observe")
def test_the_states_of_a_key(manual: ManualNode) -> None:
    peer = manual.peer()
    assert observed(peer, b"k") == (KeyState.NOT_FOUND, 0)
    stored = peer.ask(Set(key=b"k"))
    assert observed(peer, b"k") == (KeyState.FOUND, stored.cas)
    manual.commit()
    assert observed(peer, b"k") == (KeyState.PERSISTED, stored.cas)
    peer.ask(Delete(key=b"k"))
    assert observed(peer, b"k")[0] is KeyState.LOGICALLY_DELETED
    manual.commit()
    assert observed(peer, b"k")[0] is KeyState.NOT_FOUND


def test_an_expired_key_is_deleted(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"k", expiration=10))
    manual.commit()
    manual.time.pass_by(10)
    assert observed(peer, b"k")[0] is KeyState.LOGICALLY_DELETED


def test_an_expired_key_is_not_there_while_its_expiration_cannot_be_written(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"k", expiration=10))
    manual.commit()
    manual.time.pass_by(10)
    manual.node.bucket.ledger.refusal = "not now"
    assert observed(peer, b"k") == (KeyState.NOT_FOUND, 0)


def test_many_keys_in_many_vbuckets(peer: Peer) -> None:
    stored = peer.ask(Set(key=b"b", vbucket=1))
    keys = (ObservedKey(vbucket=0, key=b"a"), ObservedKey(vbucket=1, key=b"b"), ObservedKey(vbucket=2, key=b"c"))
    answer = peer.ask(Observe(keys=keys))
    assert isinstance(answer, ObserveResponse)
    assert [(found.vbucket, found.key) for found in answer.keys] == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert answer.keys[1].cas == stored.cas
    assert answer.keys[2] == KeyObservation(vbucket=2, key=b"c", state=KeyState.NOT_FOUND, cas=0)


@pytest.mark.parametrize("vbucket", [4, ABSENT])
def test_what_is_dead_is_not_observed(peer: Peer, vbucket: int) -> None:
    peer.refused(Observe(keys=(ObservedKey(vbucket=vbucket, key=b"k"),)), Status.NOT_MY_VBUCKET)
    peer.refused(ObserveSeqno(vbucket=vbucket, vbucket_uuid=1), Status.NOT_MY_VBUCKET)
    peer.refused(SeqnoPersistence(vbucket=vbucket, seqno=1), Status.NOT_MY_VBUCKET)


def test_half_a_key_is_malformed(peer: Peer) -> None:
    packet = bytearray(Observe(keys=(ObservedKey(vbucket=0, key=b"key"),)).encode())
    packet[11] -= 1
    (answer,) = peer.send(bytes(packet[:-1]))
    assert answer.status is Status.EINVAL


@pytest.mark.shows("open_issues:observe")
def test_observe_a_seqno(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.hello(Feature.MUTATION_SEQNO)
    stored = peer.ask(Set(key=b"k"))
    assert isinstance(stored, SetResponse)
    assert stored.vbucket_uuid is not None
    asked = ObserveSeqno(vbucket_uuid=stored.vbucket_uuid)
    expected = ObserveSeqnoResponse(vbucket=0, vbucket_uuid=stored.vbucket_uuid, persisted_seqno=0, current_seqno=1)
    assert peer.ask(asked) == expected
    manual.commit()
    expected.persisted_seqno = 1
    assert peer.ask(asked) == expected
    peer.refused(ObserveSeqno(vbucket_uuid=stored.vbucket_uuid ^ 1), Status.KEY_ENOENT)


def test_observe_a_branch_that_was_left(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Set(key=b"b"))
    vbucket = manual.bucket.vbucket(0)
    old = vbucket.failover_log.newest.vbucket_uuid
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.set_state(VbucketState.ACTIVE)
    peer.ask(Set(key=b"c"))
    answer = peer.ask(ObserveSeqno(vbucket_uuid=old))
    assert isinstance(answer, ObserveSeqnoResponse)
    assert (answer.format, answer.old_vbucket_uuid, answer.last_seqno, answer.current_seqno) == (1, old, 2, 3)
    assert answer.vbucket_uuid == vbucket.failover_log.newest.vbucket_uuid != old


# The disk


@pytest.mark.shows("open_issues:observe")
def test_wait_for_the_disk(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Set(key=b"b"))
    assert peer.send(SeqnoPersistence(seqno=2, opaque=1), Noop(opaque=2)) == []
    manual.commit()
    answers = peer.receive()
    assert [(answer.opaque, answer.status) for answer in answers] == [(1, Status.SUCCESS), (2, Status.SUCCESS)]
    assert peer.wakes == 1
    assert peer.ask(SeqnoPersistence(seqno=2)).status is Status.SUCCESS
    manual.time.pass_by(2 * PERSISTENCE_WAIT_S)
    assert peer.receive() == []


def test_nothing_is_always_on_disk(peer: Peer) -> None:
    assert peer.ask(SeqnoPersistence(seqno=0)).status is Status.SUCCESS


def test_the_seqno_may_stand_in_the_value(peer: Peer) -> None:
    packet = SeqnoPersistence(seqno=0, opaque=7).encode()
    (answer,) = peer.send(packet[:4] + b"\0" + packet[5:])
    assert (answer.status, answer.opaque) == (Status.SUCCESS, 7)


def test_no_peer_waits_forever(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"a"))
    assert peer.send(SeqnoPersistence(seqno=1, opaque=1)) == []
    manual.time.pass_by(PERSISTENCE_WAIT_S - 1)
    assert peer.receive() == []
    manual.time.pass_by(1)
    (answer,) = peer.receive()
    assert (answer.opaque, answer.status, answer.cas) == (1, Status.ETMPFAIL, 0)
    manual.commit()
    assert peer.receive() == []


def test_a_wait_that_is_over_leaves_nothing_behind(manual: ManualNode) -> None:
    """Neither in the node's timers nor with the flusher, however it ended."""

    def waits() -> int:
        return manual.time.timers + len(manual.bucket.flusher.waiting)

    peer = manual.peer()
    for end in (manual.commit, lambda: manual.time.pass_by(PERSISTENCE_WAIT_S), peer.session.give_up, peer.session.end):
        before = waits()
        peer.put(Set(key=b"a"))
        peer.put(*[SeqnoPersistence(seqno=manual.bucket.vbucket(0).high_seqno, opaque=n) for n in range(10)])
        assert peer.session.disk_waits == 10
        assert waits() >= before + 20
        end()
        assert peer.session.disk_waits == 0
        assert waits() == before
        assert peer.session.waiting == 0


def test_a_connection_waits_only_so_often_at_once() -> None:
    manual = open_manual_node(limits=Limits(disk_waits_max=3))
    with manual.bucket:
        peer, other = manual.peer(), manual.peer()
        peer.put(Set(key=b"a"), *[SeqnoPersistence(seqno=1, opaque=number) for number in range(5)])
        other.put(SeqnoPersistence(seqno=1, opaque=9))
        manual.commit()
        answers = {answer.opaque: answer.status for answer in peer.receive()[1:]}
        assert answers == {0: 0, 1: 0, 2: 0, 3: Status.ETMPFAIL, 4: Status.ETMPFAIL}
        assert [answer.status for answer in other.receive()] == [Status.SUCCESS]


def test_a_peer_that_leaves_does_not_stay_for_what_it_waited_for() -> None:
    """Its requests are answered in as few writes as possible, because it does not read them."""
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as other:
        other.ask(Set(key=b"a"))
        assert other.ask(SeqnoPersistence(seqno=1)).status is Status.SUCCESS
        leaver = SocketPeer(node.host, node.port)
        leaver.socket.sendall(b"".join(SeqnoPersistence(seqno=9, opaque=n).encode() for n in range(1000)))
        state = node.node.state
        wait_until(
            lambda: node.call(lambda: any(c.session and c.session.disk_waits == 1000 for c in state.connections))
        )
        leaver.close()
        wait_until(lambda: node.call(lambda: state.counters.connections) == 1)
        assert node.call(lambda: len(node.bucket.flusher.waiting)) == 0


def test_a_peer_that_half_closes_is_told_that_the_change_is_not_on_disk_yet() -> None:
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as peer:
        peer.ask(Set(key=b"a"))
        assert peer.ask(SeqnoPersistence(seqno=1)).status is Status.SUCCESS
        peer.socket.sendall(SeqnoPersistence(seqno=9, opaque=1).encode() + Noop(opaque=2).encode())
        peer.socket.shutdown(socket.SHUT_WR)
        answers = [(answer.opaque, answer.status) for answer in peer.answers()]
        assert answers == [(1, Status.ETMPFAIL), (2, Status.SUCCESS)]


def test_one_may_wait_for_what_is_not_here_yet(manual: ManualNode) -> None:
    peer, writer = manual.peer(), manual.peer()
    assert peer.send(SeqnoPersistence(seqno=2)) == []
    writer.ask(Set(key=b"a"))
    manual.commit()
    assert peer.receive() == []
    writer.ask(Set(key=b"b"))
    manual.commit()
    (answer,) = peer.receive()
    assert answer.status is Status.SUCCESS


def test_the_first_commit_of_a_new_vbucket_ends_no_wait(manual: ManualNode) -> None:
    """It cuts off what an older vbucket of this number may have left on disk, and a cut ends waits."""
    peer, writer = manual.peer(), manual.peer()
    manual.bucket.create_vbucket(ABSENT)
    assert peer.send(SeqnoPersistence(vbucket=ABSENT, seqno=2, opaque=1)) == []
    writer.ask(Set(key=b"a", vbucket=ABSENT))
    manual.commit()
    assert peer.receive() == []
    writer.ask(Set(key=b"b", vbucket=ABSENT))
    manual.commit()
    assert [(answer.opaque, answer.status) for answer in peer.receive()] == [(1, Status.SUCCESS)]


def test_a_flush_ends_no_wait(manual: ManualNode) -> None:
    peer, writer = manual.peer(), manual.peer()
    writer.ask(Set(key=b"a"))
    manual.commit()
    assert peer.send(SeqnoPersistence(seqno=2, opaque=1)) == []
    manual.bucket.vbucket(0).flush()
    manual.commit()
    assert peer.receive() == []
    writer.send(Set(key=b"a"), Set(key=b"b"))
    manual.commit()
    assert [(answer.opaque, answer.status) for answer in peer.receive()] == [(1, Status.SUCCESS)]


def test_waiters_for_a_vbucket_that_is_deleted_are_told(manual: ManualNode) -> None:
    peer = manual.peer()
    assert peer.send(SeqnoPersistence(seqno=2, opaque=1)) == []
    manual.bucket.delete_vbucket(0)
    manual.bucket.create_vbucket(0)
    manual.commit()
    assert [(answer.opaque, answer.status) for answer in peer.receive()] == [(1, Status.NOT_MY_VBUCKET)]
    assert (peer.session.disk_waits, len(manual.bucket.flusher.waiting)) == (0, 0)


def test_persistence_stops_and_starts() -> None:
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as peer:
        peer.refused(StartPersistence(), Status.EINVAL)
        assert peer.ask(StopPersistence()).status is Status.SUCCESS
        peer.refused(StopPersistence(), Status.EINVAL)
        peer.ask(Set(key=b"k"))
        assert observed(peer, b"k")[0] is KeyState.FOUND
        assert peer.ask(StartPersistence()).status is Status.SUCCESS
        assert peer.ask(SeqnoPersistence(seqno=1)).status is Status.SUCCESS
        assert observed(peer, b"k")[0] is KeyState.PERSISTED
