"""The mover's decisions: what it does next after each answer. The test plays both nodes."""

import pytest

from tests.support.played_nodes import DESTINATION, SOURCE, STREAM_OPAQUE, PlayedNodes
from upriver.model import VbucketState
from upriver.protocol.move.mover import (
    ATTEMPTS_MAX,
    Announce,
    Connect,
    Disconnect,
    Goal,
    Link,
    MoverSteps,
    Phase,
    Rest,
    Send,
    moved_map,
)
from upriver.wire import AnyResponse, Status, dcp, upr

ACTIVE, DEAD, PENDING, REPLICA = VbucketState.ACTIVE, VbucketState.DEAD, VbucketState.PENDING, VbucketState.REPLICA


# What follows from the roles of the two copies


@pytest.mark.parametrize(
    ("source", "destination", "goal", "did", "phase"),
    [
        (ACTIVE, None, Goal.TAKE_OVER, ["destination replica", "takeover stream"], Phase.STREAMING),
        (ACTIVE, REPLICA, Goal.TAKE_OVER, ["takeover stream"], Phase.STREAMING),
        (ACTIVE, PENDING, Goal.TAKE_OVER, ["takeover stream"], Phase.STREAMING),
        (ACTIVE, DEAD, Goal.TAKE_OVER, ["destination replica", "takeover stream"], Phase.STREAMING),
        (ACTIVE, None, Goal.REPLICATE, ["destination replica", "stream"], Phase.STREAMING),
        (DEAD, PENDING, Goal.TAKE_OVER, ["takeover stream"], Phase.STREAMING),
        (DEAD, PENDING, Goal.UNDO, ["source active", "destination replica"], Phase.UNDONE),
        (ACTIVE, PENDING, Goal.UNDO, ["source active", "destination replica"], Phase.UNDONE),
        (ACTIVE, REPLICA, Goal.UNDO, ["source active"], Phase.UNDONE),
        (DEAD, ACTIVE, Goal.TAKE_OVER, ["destination active", "source dead"], Phase.MOVED),
        (None, ACTIVE, Goal.TAKE_OVER, ["destination active"], Phase.MOVED),
        (DEAD, ACTIVE, Goal.UNDO, ["destination active", "source dead"], Phase.MOVED),
    ],
)
def test_the_roles_decide_what_is_done(
    source: VbucketState | None, destination: VbucketState | None, goal: Goal, did: list[str], phase: Phase
) -> None:
    played = PlayedNodes(source, destination, goal).run()
    assert (played.did, played.move.phase) == (did, phase)
    assert played.mover.over == phase.over


@pytest.mark.parametrize(
    ("source", "destination", "goal", "reason"),
    [
        (ACTIVE, ACTIVE, Goal.TAKE_OVER, "both nodes are active"),
        (ACTIVE, ACTIVE, Goal.UNDO, "both nodes are active"),
        (DEAD, ACTIVE, Goal.REPLICATE, "the destination is active"),
        (REPLICA, REPLICA, Goal.TAKE_OVER, "does not own"),
        (PENDING, None, Goal.TAKE_OVER, "does not own"),
        (None, None, Goal.TAKE_OVER, "does not own"),
        (DEAD, REPLICA, Goal.TAKE_OVER, "not pending"),
        (DEAD, None, Goal.UNDO, "not pending"),
        (DEAD, PENDING, Goal.REPLICATE, "not pending"),
    ],
)
def test_what_cannot_be_moved_is_left_alone(
    source: VbucketState | None, destination: VbucketState | None, goal: Goal, reason: str
) -> None:
    played = PlayedNodes(source, destination, goal).run()
    assert (played.did, played.move.phase) == ([], Phase.FAILED)
    assert reason in played.move.reason


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.UNDO])
def test_a_destination_on_a_branch_that_the_source_does_not_know_was_active(goal: Goal) -> None:
    played = PlayedNodes(DEAD, PENDING, goal)
    played.uuids[DESTINATION] = [8, 7]
    played.run()
    assert (played.did, played.move.phase) == ([], Phase.FAILED)
    assert "was active since" in played.move.reason


@pytest.mark.parametrize(("uuid", "held", "is_fed"), [(7, 5, True), (7, 6, False), (8, 1, False), (8, 0, True)])
def test_a_dead_destination_is_fed_only_if_the_source_holds_all_of_it(uuid: int, held: int, is_fed: bool) -> None:
    played = PlayedNodes(ACTIVE, DEAD)
    played.uuids[DESTINATION], played.high_seqnos[DESTINATION] = [uuid], held
    played.run()
    assert played.move.phase is (Phase.STREAMING if is_fed else Phase.FAILED)
    if not is_fed:
        assert "holds what the source does not" in played.move.reason


# Streams


def test_the_answer_to_active_waits_for_the_new_map() -> None:
    played = PlayedNodes(ACTIVE, REPLICA, has_others=True).run()
    told = upr.SetVbucketState(state=upr.VbucketState.ACTIVE, opaque=STREAM_OPAQUE)
    assert played.say(SOURCE, told) == [Send(DESTINATION, told.encode())]
    answer = AnyResponse(opcode=told.code, opaque=STREAM_OPAQUE)
    *others, first, second = played.say(DESTINATION, answer)
    assert others == [Announce(0, b"{}")]
    assert played.phases[-1:] == [Phase.ANNOUNCING]
    for push in (first, second):
        assert isinstance(push, Send)
        played.answer(push.link, bytes(push.data))
    assert played.mover.actions() == []
    played.mover.announced(0, b"{}")
    assert played.mover.actions() == [Send(SOURCE, answer.encode())]
    assert played.phases[-1:] == [Phase.ENDING]
    played.say(SOURCE, dcp.StreamEnd(opaque=STREAM_OPAQUE))
    assert played.move.phase is Phase.MOVED


def test_a_takeover_that_breaks_off_is_begun_a_few_times() -> None:
    played = PlayedNodes(ACTIVE, REPLICA).run()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        assert (played.move.attempts, played.move.phase) == (attempt, Phase.STREAMING)
        played.mover.received(SOURCE, dcp.StreamEnd(reason=dcp.EndReason.STATE_CHANGED, opaque=STREAM_OPAQUE).encode())
        played.run()
    assert played.move.phase is Phase.FAILED
    assert "state changed" in played.move.reason


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.REPLICATE])
def test_a_stream_that_is_refused_for_now_is_asked_for_after_a_rest(goal: Goal) -> None:
    played = PlayedNodes(ACTIVE, REPLICA, goal)
    played.add_stream = Status.ETMPFAIL
    played.run()
    assert (played.move.phase, played.other_actions) == (Phase.RESTING, [Rest(0)])
    assert "later" in played.move.reason
    played.add_stream = Status.SUCCESS
    played.mover.rested(0)
    played.run()
    assert (played.move.phase, played.move.refusal) == (Phase.STREAMING, "")


def test_a_stream_that_is_refused_for_good_fails() -> None:
    played = PlayedNodes(ACTIVE, REPLICA)
    played.add_stream = Status.NOT_MY_VBUCKET
    assert played.run().move.phase is Phase.FAILED


def test_the_end_of_a_replicated_stream_is_followed_by_a_rest() -> None:
    played = PlayedNodes(ACTIVE, REPLICA, Goal.REPLICATE).run()
    played.mover.received(SOURCE, dcp.StreamEnd(reason=dcp.EndReason.STATE_CHANGED, opaque=STREAM_OPAQUE).encode())
    played.run()
    assert (played.move.phase, played.other_actions) == (Phase.RESTING, [Rest(0)])


# Connections


def test_a_lost_connection_begins_everything_again_on_both() -> None:
    played = PlayedNodes(ACTIVE, REPLICA).run()
    played.mover.lost(SOURCE, "cut")
    assert played.mover.actions() == [Disconnect(DESTINATION), Connect(SOURCE), Connect(DESTINATION)]
    assert (played.move.phase, played.move.reason) == (Phase.WAITING, "the source cannot be reached: cut")


def test_bytes_that_make_no_sense_end_the_connection() -> None:
    played = PlayedNodes(ACTIVE, REPLICA).run()
    played.mover.received(SOURCE, b"GET / HTTP/1.1\r\n\r\n      ")
    assert Disconnect(SOURCE) in played.mover.actions()
    assert played.move.phase is Phase.WAITING


def test_a_source_that_is_still_active_is_undone_without_the_destination() -> None:
    played = PlayedNodes(ACTIVE, None, Goal.UNDO)
    played.mover.actions()
    played.mover.connected(SOURCE)
    played.run()
    assert (played.did, played.move.phase) == (["source active"], Phase.UNDONE)


def test_a_refused_open_is_tried_again() -> None:
    mover = MoverSteps("", [0])
    mover.start()
    mover.actions()
    mover.connected(Link.SOURCE)
    (send,) = mover.actions()
    assert isinstance(send, Send)
    refusal = bytes([0x81, 0x50, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]) + bytes(send.data)[12:16] + bytes(8)
    mover.received(Link.SOURCE, refusal)
    assert mover.moves[0].phase is Phase.WAITING
    assert "refused" in mover.moves[0].reason


def test_the_map_after_a_move() -> None:
    config = {"rev": 7, "vBucketServerMap": {"vBucketMap": [[0, 1], [0, 1]], "serverList": ["a", "b"]}}
    moved = moved_map(config, 1, 1)
    assert (moved["rev"], moved["revEpoch"]) == (8, 2)
    assert moved["vBucketServerMap"]["vBucketMap"] == [[0, 1], [1, -1]]
    assert config["rev"] == 7
