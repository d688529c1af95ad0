import os
from pathlib import Path

import pytest

from tests.support.command_peers import ABSENT, STATES, ManualNode, Peer, SessionPeer, open_manual_node
from upriver.engine.cursor import Options
from upriver.model import VbucketState
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.commands.statistics import GROUPS
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Add,
    CreateCheckpoint,
    Delete,
    Flush,
    Gat,
    Get,
    SaslAuth,
    Set,
    Stat,
    StatResponse,
    Touch,
)


def stats(peer: Peer, key: bytes = b"") -> dict[str, str]:
    answers = peer.send(Stat(key=key, opaque=7))
    assert all(isinstance(answer, StatResponse) for answer in answers), answers
    assert {(answer.opaque, answer.cas) for answer in answers} == {(7, 0)}
    pairs = [(answer.key.decode(), answer.value.decode()) for answer in answers if isinstance(answer, StatResponse)]
    assert pairs.pop() == ("", "")
    assert len(dict(pairs)) == len(pairs)
    assert all(key for key, _ in pairs)
    return dict(pairs)


def test_the_names_that_tools_read(peer: Peer) -> None:
    peer.ask(Set(key=b"k"))
    found = stats(peer)
    names = {
        "pid", "uptime", "version", "curr_connections", "curr_items", "cmd_get", "cmd_set", "cmd_flush", "mem_used",
        "ep_queue_size", "ep_flusher_todo", "ep_flusher_state", "ep_commit_num", "ep_dbname", "vb_active_expired",
    }  # fmt: skip
    assert names <= set(found)
    assert found["pid"] == str(os.getpid())
    assert found["curr_items"] == "1"
    assert found["version"][0].isdigit()


def test_copies_count_only_in_the_total(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Set(key=b"b", vbucket=1))
    manual.bucket.vbucket(1).set_state(VbucketState.REPLICA)
    found = stats(peer)
    assert (found["curr_items"], found["curr_items_tot"]) == ("1", "2")


def test_what_is_counted(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a", expiration=10), Add(key=b"b"), Get(key=b"a"), Get(key=b"c"), Delete(key=b"b"))
    peer.send(Touch(key=b"a", expiration=10), Gat(key=b"a", expiration=10))
    found = stats(peer)
    assert (found["cmd_set"], found["cmd_get"], found["get_hits"], found["get_misses"]) == ("2", "2", "1", "1")
    assert (found["cmd_delete"], found["cmd_touch"], found["curr_items"]) == ("1", "2", "1")
    assert (found["ep_queue_size"], found["ep_flusher_todo"]) == ("5", "5")
    assert found["ep_flusher_state"] == "paused"
    manual.commit()
    manual.time.pass_by(10)
    peer.send(Get(key=b"a"), Flush())
    found = stats(peer)
    assert (found["vb_active_expired"], found["cmd_flush"], found["curr_items"]) == ("1", "1", "0")
    assert found["uptime"] == "10"
    assert {name: found[name] for name in found if name.endswith("_num") and name.startswith("vb_")} == {
        "vb_active_num": "2", "vb_replica_num": "1", "vb_pending_num": "1", "vb_dead_num": "1"
    }  # fmt: skip


def test_vbucket(peer: Peer) -> None:
    assert stats(peer, b"vbucket") == {f"vb_{number}": state.value for number, state in STATES.items()}
    assert stats(peer, b"vbucket 2") == {"vb_2": "replica"}


def test_vbucket_details(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Set(key=b"b"), Delete(key=b"b"))
    found = stats(peer, b"vbucket-details 0")
    assert found["vb_0"] == "active"
    assert (found["vb_0:num_items"], found["vb_0:num_tombstones"], found["vb_0:high_seqno"]) == ("1", "1", "3")
    assert found["vb_0:uuid"] == str(manual.bucket.vbucket(0).failover_log.newest.vbucket_uuid)
    assert set(found) < set(stats(peer, b"vbucket-details"))


def test_vbucket_seqnos(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.ask(Set(key=b"a"))
    found = stats(peer, b"vbucket-seqno 0")
    assert (found["vb_0:high_seqno"], found["vb_0:last_persisted_seqno"], found["vb_0:purge_seqno"]) == ("1", "0", "0")
    manual.commit()
    assert stats(peer, b"vbucket-seqno 0")["vb_0:last_persisted_seqno"] == "1"
    assert {name.partition(":")[0] for name in stats(peer, b"vbucket-seqno")} == {f"vb_{number}" for number in STATES}


def test_failovers(manual: ManualNode) -> None:
    vbucket = manual.bucket.vbucket(0)
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.set_state(VbucketState.ACTIVE)
    found = stats(manual.peer(), b"failovers 0")
    assert found["vb_0:num_entries"] == str(len(vbucket.failover_log))
    for place, entry in enumerate(vbucket.failover_log):
        assert found[f"vb_0:{place}:id"] == str(entry.vbucket_uuid)
        assert found[f"vb_0:{place}:seq"] == str(entry.seqno)
    assert "vb_2:0:id" in stats(manual.peer(), b"failovers")


def test_checkpoints(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Set(key=b"b"), CreateCheckpoint())
    with manual.bucket.vbucket(0).open_cursor("reader", 0, options=Options()):
        found = stats(peer, b"checkpoint 0")
        assert found["vb_0:num_checkpoint_items"] == "2"
        assert found["vb_0:num_conn_cursors"] == "1"
        assert found["vb_0:reader:cursor_seqno"] == "0"
    closed = found["vb_0:last_closed_checkpoint_id"]
    assert int(found["vb_0:open_checkpoint_id"]) == int(closed) + 1
    assert found["vb_0:persisted_checkpoint_id"] == "0"
    manual.commit()
    found = stats(peer, b"checkpoint")
    assert (found["vb_0:num_checkpoint_items"], found["vb_0:persisted_checkpoint_id"]) == ("0", closed)


def test_memory_and_connections(peer: Peer) -> None:
    peer.ask(Set(key=b"k"))
    assert int(stats(peer, b"memory")["mem_used"]) > 0
    for group in (b"tap", b"upr", b"dcp"):
        assert stats(peer, group)[f"ep_{group.decode()}_count"] == "0"


def test_reset(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(Set(key=b"a"), Get(key=b"a"), Get(key=b"b"), Flush(), Add(key=b"c"))
    assert stats(peer, b"reset") == {}
    found = stats(peer)
    for name in ("cmd_get", "cmd_set", "cmd_flush", "get_misses", "bytes_read"):
        assert found[name] == "0", name
    assert found["curr_items"] == "1"


@pytest.mark.parametrize("key", [b"nothing", b"vbuckets", b"\xff", b"VBUCKET"])
def test_other_groups_do_not_exist(peer: Peer, key: bytes) -> None:
    assert "vbucket-details" in peer.refused(Stat(key=key), Status.KEY_ENOENT)


@pytest.mark.parametrize("group", ["vbucket", "vbucket-details", "vbucket-seqno", "failovers", "checkpoint"])
def test_vbuckets_that_are_none(session_peer: SessionPeer, group: str) -> None:
    session_peer.refused(Stat(key=f"{group} {ABSENT}".encode()), Status.NOT_MY_VBUCKET)
    session_peer.refused(Stat(key=f"{group} 99999999999".encode()), Status.NOT_MY_VBUCKET)
    for text in ("x", "-1", "1.0", "²"):
        session_peer.refused(Stat(key=f"{group} {text}".encode()), Status.EINVAL)
    session_peer.refused(Stat(key=b"vbucket " + b"9" * 5000), Status.EINVAL)


def test_every_group_is_served(session_peer: SessionPeer) -> None:
    for name in GROUPS:
        stats(session_peer, name.encode())


def test_only_administrators_reset() -> None:
    users = Users(Path("unused"))
    users.add(User.create("u", "p", Role.STREAM, iterations=4096))
    manual = open_manual_node(users=users)
    with manual.bucket:
        peer = manual.peer()
        peer.refused(Stat(), Status.AUTH_ERROR)
        peer.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0u\0p"))
        assert stats(peer, b"vbucket-seqno")
        peer.refused(Stat(key=b"reset"), Status.EACCESS)


def test_how_far_a_range_goes_that_delivers_few_changes(manual: ManualNode) -> None:
    peer = manual.peer()
    peer.send(*(Set(key=key) for key in (b"a", b"b", b"b", b"b", b"c")), Set(key=b"d", vbucket=1))
    assert stats(peer, b"vbucket-ends 0:0:3 1:0:5 999:0:1") == {"0": "5 3", "1": "1 1"}
    assert stats(peer, b"vbucket-ends 0:0:2") == {"0": "4 2"}
    assert stats(peer, b"vbucket-ends") == {}
    for wrong in (b"0:0", b"0:0:x", b"0:-1:2", b"0:0:" + b"9" * 20):
        (answer,) = peer.send(Stat(key=b"vbucket-ends " + wrong))
        assert answer.status == Status.EINVAL, answer
    lines = stats(peer, b"vbucket-items")["items"].split("\n")
    assert lines[:2] == ["0 3 0", "1 1 0"]
