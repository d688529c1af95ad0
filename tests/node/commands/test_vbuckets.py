import struct
from typing import Any

import pytest

from tests.support.command_peers import ABSENT, STATES, ManualNode, Peer
from upriver.model import VbucketState as ModelState
from upriver.node.commands.vbuckets import model_state, wire_state
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    CreateCheckpoint,
    CreateCheckpointResponse,
    DeleteVbucket,
    DeregisterTapClient,
    Flush,
    Get,
    GetAllVbucketSeqnos,
    GetAllVbucketSeqnosResponse,
    GetFailoverLog,
    GetFailoverLogResponse,
    GetVbucket,
    GetVbucketResponse,
    LastClosedCheckpoint,
    LastClosedCheckpointResponse,
    Set,
    SetVbucket,
    VbucketState,
)


def state(peer: Peer, vbucket: int) -> VbucketState:
    answer = peer.ask(GetVbucket(vbucket=vbucket))
    assert isinstance(answer, GetVbucketResponse)
    return answer.state


def seqnos(peer: Peer, asked: VbucketState | None = None) -> dict[int, int]:
    answer = peer.ask(GetAllVbucketSeqnos(state=asked))
    assert isinstance(answer, GetAllVbucketSeqnosResponse)
    return {entry.vbucket: entry.seqno for entry in answer.seqnos}


# States


def test_every_state_has_its_number() -> None:
    for model in ModelState:
        assert model_state(wire_state(model)) is model
    assert [int(wire_state(model)) for model in (ModelState.REPLICA, ModelState.PENDING)] == [2, 3]


def test_the_states(peer: Peer) -> None:
    assert {number: model_state(state(peer, number)) for number in STATES} == STATES
    peer.refused(GetVbucket(vbucket=ABSENT), Status.NOT_MY_VBUCKET)


@pytest.mark.parametrize("wanted", list(VbucketState))
def test_set_every_state(peer: Peer, wanted: VbucketState) -> None:
    for vbucket in (0, 2, ABSENT):
        assert peer.ask(SetVbucket(vbucket=vbucket, state=wanted)).status is Status.SUCCESS
        assert state(peer, vbucket) is wanted
    status = Status.KEY_ENOENT if wanted is VbucketState.ACTIVE else Status.NOT_MY_VBUCKET
    peer.refused(Get(key=b"k", vbucket=ABSENT), status)


def test_the_state_may_stand_in_the_value(peer: Peer) -> None:
    packet = SetVbucket(vbucket=1, state=VbucketState.REPLICA, opaque=7).encode()
    assert packet[4] == 4
    (answer,) = peer.send(packet[:4] + b"\0" + packet[5:])
    assert (answer.status, answer.opaque) == (Status.SUCCESS, 7)
    assert state(peer, 1) is VbucketState.REPLICA


@pytest.mark.parametrize("number", [0, 5, 0xFFFFFFFF])
def test_other_states_do_not_exist(peer: Peer, number: int) -> None:
    assert str(number) in peer.refused(SetVbucket(vbucket=1, state=VbucketState(number)), Status.EINVAL)
    assert state(peer, 1) is VbucketState.ACTIVE


@pytest.mark.parametrize("length", [0, 1, 3, 5, 8])
def test_a_state_has_4_bytes(peer: Peer, length: int) -> None:
    for extras in {0, length}:
        header = bytes((0x80, 0x3D, 0, 0, extras, 0, 0, 1)) + length.to_bytes(4, "big") + bytes(12)
        (answer,) = peer.send(header + bytes(length))
        assert answer.status is Status.EINVAL


def test_a_number_beyond_the_bucket_is_not_mine(peer: Peer) -> None:
    for number in (8, 1024, 0xFFFF):
        peer.refused(SetVbucket(vbucket=number, state=VbucketState.ACTIVE), Status.NOT_MY_VBUCKET)


def test_a_state_is_answered_when_it_is_on_disk(manual: ManualNode) -> None:
    peer = manual.peer()
    assert peer.send(SetVbucket(vbucket=0, state=VbucketState.DEAD, opaque=1)) == []
    assert manual.bucket.vbucket(0).state is ModelState.DEAD  # it holds at once
    assert peer.send(GetVbucket(vbucket=0, opaque=2)) == []
    manual.commit()
    assert [answer.opaque for answer in peer.receive()] == [1, 2]


def test_a_copy_that_becomes_active_starts_a_branch(manual: ManualNode) -> None:
    before = manual.bucket.vbucket(0).failover_log
    peer = manual.peer()
    peer.send(
        Set(key=b"k"),
        SetVbucket(vbucket=0, state=VbucketState.REPLICA),
        SetVbucket(vbucket=0, state=VbucketState.ACTIVE),
    )
    after = manual.bucket.vbucket(0).failover_log
    assert (len(after), after.newest.seqno) == (len(before) + 1, 1)


def test_delete(peer: Peer) -> None:
    assert "active" in peer.refused(DeleteVbucket(vbucket=0), Status.EINVAL)
    peer.send(Set(key=b"k"), SetVbucket(vbucket=0, state=VbucketState.DEAD))
    assert peer.ask(DeleteVbucket(vbucket=0)).status is Status.SUCCESS
    peer.refused(GetVbucket(vbucket=0), Status.NOT_MY_VBUCKET)
    peer.refused(DeleteVbucket(vbucket=0), Status.NOT_MY_VBUCKET)
    peer.ask(SetVbucket(vbucket=0, state=VbucketState.ACTIVE))
    peer.refused(Get(key=b"k"), Status.KEY_ENOENT)


def test_delete_with_an_argument(peer: Peer) -> None:
    assert peer.ask(DeleteVbucket(vbucket=4, argument=b"async=0")).status is Status.SUCCESS


# Seqnos and failover logs


@pytest.mark.shows("open_issues:all-seqnos")
def test_all_seqnos(peer: Peer) -> None:
    peer.send(Set(key=b"a"), Set(key=b"a"), Set(key=b"b", vbucket=1))
    assert seqnos(peer) == {0: 2, 1: 1, 2: 0, 3: 0}  # all but the dead
    assert seqnos(peer, VbucketState.ACTIVE) == {0: 2, 1: 1}
    assert seqnos(peer, VbucketState.REPLICA) == {2: 0}
    assert seqnos(peer, VbucketState.PENDING) == {3: 0}
    assert seqnos(peer, VbucketState.DEAD) == {4: 0}
    assert seqnos(peer, VbucketState(0)) == seqnos(peer)
    peer.refused(GetAllVbucketSeqnos(state=VbucketState(9)), Status.EINVAL)


def test_the_failover_log(manual: ManualNode) -> None:
    peer = manual.peer()
    vbucket = manual.bucket.vbucket(0)
    peer.ask(Set(key=b"k"))
    vbucket.set_state(ModelState.REPLICA)
    vbucket.set_state(ModelState.ACTIVE)
    answer = peer.ask(GetFailoverLog(vbucket=0))
    assert isinstance(answer, GetFailoverLogResponse)
    assert [(entry.vbucket_uuid, entry.seqno) for entry in answer.log] == [
        (entry.vbucket_uuid, entry.seqno) for entry in vbucket.failover_log
    ]
    assert [entry.seqno for entry in answer.log] == [1, 0]
    peer.refused(GetFailoverLog(vbucket=ABSENT), Status.NOT_MY_VBUCKET)


# Checkpoints


def closed(peer: Peer, vbucket: int = 0) -> int:
    answer = peer.ask(LastClosedCheckpoint(vbucket=vbucket))
    assert isinstance(answer, LastClosedCheckpointResponse)
    return answer.checkpoint


def create(peer: Peer, vbucket: int = 0) -> tuple[int, int]:
    answer = peer.ask(CreateCheckpoint(vbucket=vbucket))
    assert isinstance(answer, CreateCheckpointResponse)
    return answer.checkpoint, answer.persisted_checkpoint


def test_checkpoints(manual: ManualNode) -> None:
    peer = manual.peer()
    first, other = (manual.node.bucket.vbucket(number).checkpoints.open_id for number in (0, 1))
    assert closed(peer) == 0
    peer.ask(Set(key=b"a"))
    assert create(peer) == (first + 1, 0)
    assert closed(peer) == first
    peer.ask(Set(key=b"b"))
    assert create(peer) == (first + 2, 0)
    manual.commit()
    peer.ask(Set(key=b"c"))
    assert create(peer) == (first + 3, first + 1)
    assert (closed(peer), closed(peer, 1)) == (first + 2, 0)
    assert create(peer, 1) == (other + 1, other)  # there was nothing to be written


def test_the_answer_has_the_form_that_real_servers_send(peer: Peer) -> None:
    answer = peer.ask(CreateCheckpoint(opaque=0)).encode()
    assert answer[:24] == bytes.fromhex("81aa00000000000000000010") + bytes(12)
    opened, persisted = struct.unpack(">QQ", answer[24:])
    assert persisted == closed(peer) == opened - 1


def test_checkpoint_ids_go_on_after_a_flush(manual: ManualNode) -> None:
    """A TAP client that names a checkpoint from before the flush must not be taken for one that is up to date."""
    peer = manual.peer()
    peer.ask(Set(key=b"a"))
    create(peer)
    manual.commit()
    before = closed(peer)
    peer.ask(Flush())
    assert closed(peer) > before


@pytest.mark.parametrize(
    ("request_type", "refused"), [(LastClosedCheckpoint, [ABSENT]), (CreateCheckpoint, [2, 3, 4, ABSENT])]
)
def test_checkpoints_of_other_copies_are_refused(peer: Peer, request_type: Any, refused: list[int]) -> None:
    for vbucket in refused:
        peer.refused(request_type(vbucket=vbucket), Status.NOT_MY_VBUCKET)


def test_checkpoints_over_any_connection(peer: Peer) -> None:
    peer.ask(Set(key=b"a"))
    assert create(peer)[0] == closed(peer) + 1


# TAP clients


def test_no_client_is_registered(peer: Peer) -> None:
    assert "replicator" in peer.refused(DeregisterTapClient(name=b"replicator"), Status.KEY_ENOENT)
    peer.refused(DeregisterTapClient(name=b""), Status.EINVAL)
