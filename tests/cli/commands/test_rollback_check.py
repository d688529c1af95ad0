"""``upriver rollback-check``."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.command_runner import Run
from upriver.cli.commands.rollback_check import RollbackInputs, judged, judged_by_logs
from upriver.client import Consumer, FileCheckpoint, Progress
from upriver.client.consumer import DialectName
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.model.position import NO_END
from upriver.model.rollback import rollback_by_snapshot
from upriver.node import EmbeddedNode


@pytest.fixture
def filled(node: EmbeddedNode) -> EmbeddedNode:
    """The node with 50 changes in vbucket 3."""
    for number in range(50):
        node.call(node.bucket.vbucket(3).set, b"k%d" % number, b"v")
    return node


def test_going_on(run: Run, filled: EmbeddedNode) -> None:
    uuid = filled.bucket.vbucket(3).failover_log.newest.vbucket_uuid
    result = run("rollback-check", "--at", f"3:{uuid:#x}:50")
    assert result.exit_code == 0
    assert result.stdout.startswith("vbucket 3: continues: it is on the newest branch")
    assert run("rollback-check", "--at", "3:0:0").exit_code == 0


def test_an_unknown_branch(run: Run, filled: EmbeddedNode) -> None:
    result = run("rollback-check", "--at", "3:0xabc:20")
    assert result.exit_code == 1
    assert result.stdout.startswith("vbucket 3: would be rolled back to 0: the uuid 0xabc is not in the failover log")
    assert result.stderr == ""


def test_beyond_and_inside_a_snapshot(run: Run, filled: EmbeddedNode) -> None:
    uuid = filled.bucket.vbucket(3).failover_log.newest.vbucket_uuid
    told = json.loads(run("rollback-check", "--json", "--at", f"3:{uuid}:80").stdout)
    assert (told["rollback"], told["to_seqno"]) == (True, 50)
    assert "which the node does not have" in told["why"]
    told = json.loads(run("rollback-check", "--json", "--at", f"3:{uuid}:45:40:60").stdout)
    assert (told["rollback"], told["to_seqno"]) == (True, 40)
    assert "middle of a snapshot" in told["why"]


def test_the_positions_of_a_checkpoint(run: Run, filled: EmbeddedNode, tmp_path: Path) -> None:
    path = tmp_path / "seen"
    uuid = filled.bucket.vbucket(3).failover_log.newest.vbucket_uuid
    positions = {3: StreamPosition.at(uuid, 50), 4: StreamPosition.at(99, 1)}
    FileCheckpoint(path, source="any").write({number: Progress.at(each) for number, each in positions.items()})
    result = run("rollback-check", "--checkpoint", str(path))
    assert result.exit_code == 1
    assert [line.split(":")[1] for line in result.stdout.splitlines()] == [" continues", " would be rolled back to 0"]


def test_what_makes_no_sense(run: Run, tmp_path: Path) -> None:
    for arguments in ((), ("--at", "nonsense"), ("--at", "3:1:2", "--checkpoint", "x"), ("--checkpoint", "nothing")):
        result = run("rollback-check", *arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.count("\n") == 1
    unknown = run("rollback-check", "--at", "900:1:2")
    assert unknown.exit_code == 1
    assert "vbucket 900" in unknown.stderr


seqnos = st.integers(0, 30)


@given(st.lists(st.tuples(st.integers(1, 4), seqnos), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_the_words_agree_with_the_rule(entries: list[tuple[int, int]], uuid: int, data: st.DataObject) -> None:
    log = FailoverLog(tuple(FailoverEntry(*entry) for entry in entries))
    start, seqno, end = sorted(data.draw(seqnos) for _ in range(3))
    high, purge = data.draw(seqnos), data.draw(seqnos)
    position = StreamPosition(uuid, seqno, Snapshot(start, end))
    to, why = judged(position, RollbackInputs(log, high, purge))
    goes_on = any(
        words in why for words in ("nothing to roll back", "not beyond that", "which the node has completely")
    )
    assert goes_on == (to is None) == (rollback_by_snapshot(log, high, purge, position) is None)


logs = st.lists(st.tuples(st.integers(1, 4), seqnos), min_size=1, max_size=4, unique_by=lambda entry: entry[0])


@given(logs, logs, st.sampled_from(["upr", "upr_draft1", "upr_draft2", "upr_draft3"]), st.data())
def test_the_words_agree_with_the_rule_of_upr(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], dialect: DialectName, data: st.DataObject
) -> None:
    own, log = (FailoverLog(tuple(FailoverEntry(*entry) for entry in each)) for each in (ours, theirs))
    start, seqno, end = sorted(data.draw(seqnos) for _ in range(3))
    high, purge = data.draw(seqnos), data.draw(seqnos)
    position = StreamPosition(own.newest.vbucket_uuid, seqno, Snapshot(start, end))
    to, why = judged_by_logs(
        position, data.draw(st.sampled_from([own, None])), RollbackInputs(log, high, purge), dialect
    )
    assert to is None or 0 <= to < seqno
    assert (to is None) == ("nothing to roll back" in why or "not beyond that" in why)
    if "starts over" in why:
        assert to == 0
    if "by itself" in why and "further" not in why:
        assert to is not None
        assert to <= position.consistent_seqno


@pytest.mark.parametrize("dialect", ["upr", "upr_draft1", "upr_draft2", "upr_draft3"])
def test_what_it_says_is_what_happens(run: Run, filled: EmbeddedNode, tmp_path: Path, dialect: DialectName) -> None:
    """A consumer stopped in the middle of a snapshot, and a failover after that."""
    path, vbucket = tmp_path / "seen", filled.bucket.vbucket(3)
    log = vbucket.failover_log
    position = StreamPosition(log.newest.vbucket_uuid, 30, Snapshot(20, NO_END))
    FileCheckpoint(path, source="any").write({3: Progress(position, log, 0)})

    def told() -> tuple[int | None, str]:
        found = json.loads(run("rollback-check", "--json", "--dialect", dialect, "--checkpoint", str(path)).stdout)
        return found["to_seqno"], found["why"]

    assert told()[0] is None
    for state in (VbucketState.REPLICA, VbucketState.ACTIVE):
        filled.call(vbucket.set_state, state)
    seqno, why = told()
    assert seqno == 20
    assert "there are newer branches (1)" in why
    if dialect != "upr_draft1":  # which has a listener of its own
        assert rolled_back_to(filled, dialect, Progress(position, log, 0)) == seqno


def rolled_back_to(node: EmbeddedNode, dialect: DialectName, progress: Progress) -> int:
    with Consumer.sync(
        node.address, dialect=dialect, vbuckets=[3], start={3: progress}, end="latest", on_rollback="emit"
    ) as consumer:
        (event,) = [batch.event for batch in consumer if batch.event is not None]
    return int(event.seqno)


def test_a_checkpoint_of_tap_has_no_positions(run: Run, filled: EmbeddedNode, tmp_path: Path) -> None:
    path = tmp_path / "seen"
    FileCheckpoint(path, source="any").write({3: Progress.unplaced(filled.bucket.vbucket(3).failover_log)})
    result = run("rollback-check", "--checkpoint", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "has no positions" in result.stderr
