"""A mover between two nodes: it ends in one of few ways, and never with two active nodes, whatever breaks when."""

import json
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.depth import examples
from tests.support.in_memory_move import InMemoryMove
from tests.support.in_memory_node import InMemoryNode
from upriver.errors import TemporaryFailure
from upriver.model import VbucketState
from upriver.node.streams.engine_sink import EngineCopy
from upriver.protocol.move.mover import ATTEMPTS_MAX, Announce, Goal, Link, MoverSteps, Phase
from upriver.wire import dcp

ACTIVE, DEAD, PENDING, REPLICA = VbucketState.ACTIVE, VbucketState.DEAD, VbucketState.PENDING, VbucketState.REPLICA


def written(goal: Goal = Goal.TAKE_OVER, count: int = 20) -> InMemoryMove:
    world = InMemoryMove(goal)
    world.source.write(0, *(b"k%d" % number for number in range(count)))
    return world


def test_a_takeover_from_beginning_to_end() -> None:
    world = written()
    world.settle()
    assert world.phases == [
        Phase.ASKING,
        Phase.PREPARING,
        Phase.STREAMING,
        Phase.STREAMING,  # the destination shall be pending
        Phase.STREAMING,  # and active
        Phase.ANNOUNCING,
        Phase.ENDING,
        Phase.MOVED,
    ]
    assert world.states() == (DEAD, ACTIVE)
    assert world.most_active == 1
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)
    source, destination = (node.bucket.vbucket(0) for node in world.nodes.values())
    assert destination.failover_log.entries[1:] == source.failover_log.entries
    assert world.mover.over


def test_the_new_map_is_there_before_the_old_stream_ends() -> None:
    world = written()
    while Phase.ENDING not in world.phases:
        assert world.step()
    for node in world.nodes.values():
        config = json.loads(node.state.cluster.encoded())
        assert config["vBucketServerMap"]["vBucketMap"][0] == [1]
        assert config["revEpoch"] == 2
    world.settle()
    assert world.move.phase is Phase.MOVED


def test_replication_goes_on() -> None:
    world = written(Goal.REPLICATE)
    world.settle()
    assert world.states() == (ACTIVE, REPLICA)
    world.source.write(0, b"later")
    world.settle()
    assert b"later" in world.contents(Link.DESTINATION)
    world.cut(Link.SOURCE)
    world.source.write(0, b"even later")
    world.settle()
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)
    assert not world.mover.over


@pytest.mark.parametrize("goal", [Goal.REPLICATE, Goal.TAKE_OVER])
def test_a_destination_that_has_left_the_stream_is_noticed(goal: Goal) -> None:
    """Somebody made it active and a replica again: the source would go on in vain for ever."""
    world = written(goal)
    while len(world.contents(Link.DESTINATION) if world.states()[1] else ()) < 20:
        assert world.step()
    copy = world.destination.bucket.vbucket(0)
    copy.set_state(ACTIVE)
    copy.set(b"mistake", b"v")
    copy.set_state(REPLICA)
    world.source.write(0, b"later", b"later still")
    world.settle()
    # It is begun again, and the mistake rolled back.
    assert world.move.phase is (Phase.STREAMING if goal is Goal.REPLICATE else Phase.MOVED)
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)


@pytest.mark.parametrize("goal", [Goal.REPLICATE, Goal.TAKE_OVER])
@pytest.mark.parametrize("told", [False, True])
def test_a_stream_that_is_refused_for_now_is_asked_for_again(goal: Goal, told: bool) -> None:
    """Somebody made the copy active while the source was asked, whether or not that is told before the answer comes."""
    world = written(goal)
    request = bytes([0x80, dcp.StreamRequest.declaration.opcode])
    while not any(request in wire.to_node for wire in world.wires.values()):
        assert world.step()
    idle_branch(world)
    while told and world.destination.scheduler.step():
        pass
    world.settle()
    assert world.phases.count(Phase.RESTING) == 1
    assert world.move.phase is (Phase.STREAMING if goal is Goal.REPLICATE else Phase.MOVED)
    assert not world.move.refusal
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)


def test_a_refusal_for_now_counts_as_no_attempt() -> None:
    world = written()
    sink = world.destination.service.sink
    opened, refusals = sink.open, 2 * ATTEMPTS_MAX

    def open_later(number: int) -> EngineCopy:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise TemporaryFailure("not yet", vbucket=number)
        return opened(number)

    sink.open = open_later  # type: ignore[method-assign]
    while world.move.phase is not Phase.RESTING:
        assert world.step()
    assert "not yet" in world.move.reason
    assert world.move.refusal == world.move.reason
    world.settle()
    assert world.phases[-1:] == [Phase.MOVED]
    assert world.phases.count(Phase.RESTING) == 2 * ATTEMPTS_MAX


def idle_branch(world: InMemoryMove) -> None:
    copy = world.destination.bucket.vbucket(0)
    copy.set_state(ACTIVE)
    copy.set(b"mistake", b"v")
    copy.set_state(REPLICA)


def idle_recreate(world: InMemoryMove) -> None:
    world.destination.bucket.delete_vbucket(0)
    world.destination.bucket.create_vbucket(0, REPLICA)


def idle_delete(world: InMemoryMove) -> None:
    world.destination.bucket.delete_vbucket(0)


def idle_dead(world: InMemoryMove) -> None:
    world.destination.bucket.vbucket(0).set_state(DEAD)


@pytest.mark.parametrize("meddle", [idle_branch, idle_recreate, idle_delete, idle_dead])
def test_a_copy_that_was_changed_is_fed_again_though_the_source_is_idle(
    meddle: Callable[[InMemoryMove], None],
) -> None:
    world = InMemoryMove(Goal.REPLICATE, vbuckets=(0, 1))
    for vbucket in (0, 1):
        world.source.write(vbucket, b"a", b"b")
    for _ in range(5):
        world.settle()
        meddle(world)
        world.settle()
        assert world.move.phase is Phase.STREAMING
        assert world.states() == (ACTIVE, REPLICA)
        assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)
    assert Phase.FAILED not in world.phases
    assert world.phases.count(Phase.RESTING) == 5  # and the other vbucket's stream goes on


def meddle_flush(world: InMemoryMove) -> None:
    world.source.bucket.flush()


def meddle_branch(world: InMemoryMove) -> None:
    for state in (REPLICA, ACTIVE):
        world.source.bucket.vbucket(0).set_state(state)


def meddle_delete(world: InMemoryMove) -> None:
    world.destination.bucket.delete_vbucket(0)


@pytest.mark.parametrize("meddle", [meddle_flush, meddle_branch, meddle_delete])
def test_replication_goes_on_whatever_ends_a_stream(meddle: Callable[[InMemoryMove], None]) -> None:
    world = InMemoryMove(Goal.REPLICATE, vbuckets=(0, 1))
    for vbucket in (0, 1):
        world.source.write(vbucket, b"a", b"b")
    for number in range(5):
        world.settle()
        meddle(world)
        world.source.write(0, b"later %d" % number)
        world.settle()
        assert world.move.phase is Phase.STREAMING
        assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)
    assert Phase.RESTING in world.phases
    assert Phase.FAILED not in world.phases
    assert Phase.WAITING not in world.phases


def test_a_rest_that_a_lost_connection_has_ended_is_over() -> None:
    world = written(Goal.REPLICATE)
    world.settle()
    world.mover.rested(0)
    assert world.move.phase is Phase.STREAMING
    assert not world.mover.actions()


def test_several_vbuckets_over_one_pair_of_connections() -> None:
    world = InMemoryMove(vbuckets=(0, 1, 3))
    for vbucket in (0, 1, 3):
        world.source.write(vbucket, *(b"%d-%d" % (vbucket, number) for number in range(10)))
    world.settle()
    assert [world.states(vbucket) for vbucket in (0, 1, 3)] == [(DEAD, ACTIVE)] * 3
    assert all(len(world.contents(Link.DESTINATION, vbucket)) == 10 for vbucket in (0, 1, 3))
    assert world.mover.over


@pytest.mark.parametrize("goal", [Goal.REPLICATE, Goal.TAKE_OVER])
@pytest.mark.parametrize("piece_bytes", [1, 7, 30, 100, 300])
def test_nothing_goes_into_the_middle_of_a_change_that_is_passed_on(goal: Goal, piece_bytes: int) -> None:
    """The first stream has begun while the destination makes the other copies: its disk answers whenever it likes."""
    world = InMemoryMove(goal, vbuckets=(0, 1, 2, 3))
    world.piece_bytes = piece_bytes
    for vbucket in range(4):
        for number in range(5):
            world.source.bucket.vbucket(vbucket).set(b"%d" % number, b"v" * 250)
    world.destination.bucket.create_vbucket(0, REPLICA)
    while world.step():
        if world.contents(Link.DESTINATION):
            world.destination.bucket.flusher.step()
            world.destination.scheduler.step()
    assert all(world.contents(Link.DESTINATION, each) == world.contents(Link.SOURCE, each) for each in range(4))
    assert not any(wire.peer.session.closing for wire in world.wires.values())
    assert Phase.WAITING not in world.phases


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        (ACTIVE, ACTIVE, "both nodes are active"),
        (REPLICA, REPLICA, "does not own"),
        (PENDING, None, "does not own"),
        (DEAD, REPLICA, "not pending"),
        (DEAD, None, "not pending"),
    ],
)
def test_what_cannot_be_moved(source: VbucketState, destination: VbucketState | None, reason: str) -> None:
    world = written()
    world.source.bucket.vbucket(0).set_state(source)
    if destination is not None:
        world.destination.bucket.create_vbucket(0, destination)
    before = world.states()
    world.settle()
    assert world.move.phase is Phase.FAILED
    assert reason in world.move.reason
    assert world.states() == before


def test_a_source_that_is_not_there() -> None:
    world = InMemoryMove(vbuckets=())
    world.mover = MoverSteps("a->b", [0])
    world.mover.start()
    world.settle()
    assert "has no copy" in world.move.reason


def test_what_is_moved_already_is_confirmed_from_disk() -> None:
    world = written()
    world.source.bucket.vbucket(0).set_state(DEAD)
    world.destination.bucket.create_vbucket(0, ACTIVE)
    world.settle()
    assert Phase.CONFIRMING in world.phases
    assert world.move.phase is Phase.MOVED


def test_an_interrupted_takeover_goes_on() -> None:
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.cut(Link.SOURCE)
    world.settle()
    assert world.states() == (DEAD, ACTIVE)
    assert world.move.phase is Phase.MOVED
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.UNDO])
@pytest.mark.parametrize("killed", [False, True])
def test_another_candidate_neither_goes_on_with_a_takeover_nor_undoes_it(goal: Goal, killed: bool) -> None:
    """Its copy is pending too, from a takeover that broke off earlier; but the source has another successor.

    The same holds if an operator made the source dead before, at first without a successor.
    """
    world = written()
    while world.states() != (ACTIVE, PENDING):
        assert world.step()
    for link in Link:
        world.cut(link)
    owner = InMemoryNode(vbuckets=4)
    candidate, world.nodes[Link.DESTINATION] = world.destination, owner
    if killed:
        world.mover = MoverSteps("a->c", [0], Goal.REPLICATE)
        world.mover.start()
        world.settle()
        for link in Link:
            world.cut(link)
        owner.bucket.vbucket(0).set_state(PENDING)
        world.source.bucket.vbucket(0).set_state(DEAD)
    world.mover = MoverSteps("a->c", [0])
    world.mover.start()
    world.settle()
    assert world.states() == (DEAD, ACTIVE)
    for link in Link:
        world.cut(link)
    world.nodes[Link.DESTINATION] = candidate
    world.mover = MoverSteps("a->b", [0], goal)
    world.mover.start()
    world.settle()
    assert world.move.phase is Phase.FAILED
    assert world.states() == (DEAD, PENDING)
    assert owner.bucket.vbucket(0).state is ACTIVE
    assert world.most_active == 1


def test_an_interrupted_takeover_is_undone_after_the_destination_was_asked() -> None:
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.reachable[Link.DESTINATION] = False
    world.cut(Link.DESTINATION)
    world.mover.undo(0)
    world.settle()
    assert world.states() == (DEAD, PENDING)  # the other side may be active, for all we know
    assert not world.mover.over
    world.come_back()
    world.settle()
    assert world.states() == (ACTIVE, REPLICA)
    assert world.move.phase is Phase.UNDONE
    assert world.most_active == 1


@pytest.mark.parametrize("link", Link)
def test_an_undo_that_was_interrupted_goes_on(link: Link) -> None:
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.mover.undo(0)
    while world.states() != (ACTIVE, PENDING):
        assert world.step()
    world.cut(link)
    world.settle()
    assert world.states() == (ACTIVE, REPLICA)
    assert world.move.phase is Phase.UNDONE


@pytest.mark.parametrize("reachable", [False, True])
def test_nothing_is_undone_before_the_disk_knows_it(reachable: bool) -> None:
    """Another mover was about to undo it, and was killed."""
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.source.settle()
    world.source.disk_works = False
    world.source.bucket.vbucket(0).set_state(ACTIVE)
    world.reachable[Link.DESTINATION] = reachable
    world.cut(Link.DESTINATION)
    world.mover.undo(0)
    world.settle()
    assert Phase.UNDONE not in world.phases
    world.source.disk_works = True
    world.settle()
    assert world.phases[-1] is Phase.UNDONE


def test_what_the_source_undoes_alone_is_undone_though_the_destination_comes_back() -> None:
    world = written()
    world.source.disk_works = world.reachable[Link.DESTINATION] = False
    world.mover.undo(0)
    world.settle()
    assert world.phases[-1] is Phase.UNDOING
    world.come_back()
    world.settle()
    world.source.disk_works = True
    world.settle()
    assert world.phases[-1:] == [Phase.UNDONE]
    assert world.phases.count(Phase.UNDONE) == 1
    assert world.mover.over


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.UNDO])
def test_the_takeover_of_a_destination_that_is_no_longer_pending_is_unknown(goal: Goal) -> None:
    """An operator made it a replica, or it was active and handed the vbucket on: only the operator knows."""
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.destination.bucket.vbucket(0).set_state(REPLICA)
    type_again(world, goal)
    assert world.move.phase is Phase.FAILED
    assert "destination is replica, not pending" in world.move.reason
    assert "make the source active" in world.move.reason
    assert world.states() == (DEAD, REPLICA)


@pytest.mark.parametrize("state", [DEAD, REPLICA, PENDING])
def test_what_the_destination_may_have_handed_on_is_not_undone(state: VbucketState) -> None:
    """It was active, with writes of its own; now it is not, and perhaps a third is."""
    world = written()
    while world.states() != (DEAD, ACTIVE):
        assert world.step()
    world.destination.write(0, b"newer")
    world.destination.bucket.vbucket(0).set_state(state)
    world.mover = MoverSteps("a->b", [0], Goal.UNDO)
    world.mover.start()
    world.settle()
    assert world.move.phase is Phase.FAILED
    assert ("was active since" if state is PENDING else "not pending") in world.move.reason
    assert world.states() == (DEAD, state)


def between(source: InMemoryNode, destination: InMemoryNode, goal: Goal = Goal.TAKE_OVER) -> InMemoryMove:
    """Another mover, between these two."""
    world = InMemoryMove(vbuckets=())
    world.nodes = {Link.SOURCE: source, Link.DESTINATION: destination}
    world.mover = MoverSteps(f"{id(source)}->{id(destination)}", [0], goal)
    world.mover.start()
    return world


def type_again(world: InMemoryMove, goal: Goal) -> None:
    """The same two nodes, another mover of the same name, until nothing happens any more."""
    for link in Link:
        world.cut(link)
    world.mover = MoverSteps("a->b", [0], goal)
    world.mover.start()
    world.settle()


def turn_round(world: InMemoryMove, goal: Goal) -> None:
    """The former destination is the source of another mover."""
    for link in Link:
        world.cut(link)
    world.nodes = {Link.SOURCE: world.destination, Link.DESTINATION: world.source}
    world.mover = MoverSteps("b->a", [0], goal)
    world.mover.start()


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.REPLICATE])
@pytest.mark.parametrize("successor", ["a->c", ""])
def test_a_dead_destination_that_may_be_all_that_is_left_is_not_touched(goal: Goal, successor: str) -> None:
    """The source was given up and does not know it; its successor is dead, and no other copy has its writes."""
    world = written(Goal.REPLICATE)
    world.settle()
    destination = world.destination.bucket.vbucket(0)
    destination.set_state(ACTIVE)
    world.destination.write(0, b"acknowledged")
    destination.set_state(DEAD, successor=successor)
    type_again(world, goal)
    assert world.move.phase is Phase.FAILED
    assert "holds what the source does not" in world.move.reason
    assert world.states() == (ACTIVE, DEAD)
    assert destination.successor == successor
    assert b"acknowledged" in world.contents(Link.DESTINATION)


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.REPLICATE])
@pytest.mark.parametrize("more", [False, True])
def test_a_dead_destination_is_fed_by_a_source_that_shares_all_of_it(goal: Goal, more: bool) -> None:
    """The source was promoted from its replica, and may know its branch but not how that ended."""
    world = written(Goal.REPLICATE)
    world.settle()
    if more:
        for link in Link:
            world.cut(link)
        world.source.write(0, b"acknowledged")
    world.source.bucket.vbucket(0).set_state(DEAD)
    world.destination.bucket.vbucket(0).set_state(ACTIVE)
    turn_round(world, goal)
    world.settle()
    if more:
        assert world.move.phase is Phase.FAILED
        assert b"acknowledged" in world.contents(Link.DESTINATION)
    else:
        assert world.move.phase is (Phase.MOVED if goal is Goal.TAKE_OVER else Phase.STREAMING)


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.REPLICATE])
@pytest.mark.parametrize(("count", "newer"), [(20, [b"newer"]), (20, []), (0, [b"newer"]), (0, [])])
def test_what_was_taken_over_may_come_back(goal: Goal, count: int, newer: list[bytes]) -> None:
    world = written(count=count)
    world.settle()
    assert world.states() == (DEAD, ACTIVE)
    world.destination.write(0, *newer)
    turn_round(world, goal)
    world.settle()
    assert world.states() == ((DEAD, ACTIVE) if goal is Goal.TAKE_OVER else (ACTIVE, REPLICA))
    assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)


def test_a_takeover_whose_source_is_not_dead_is_undone_without_its_destination() -> None:
    world = written()
    world.reachable[Link.DESTINATION] = False
    world.mover.undo(0)
    world.settle()
    assert world.states() == (ACTIVE, None)
    assert world.move.phase is Phase.UNDONE


def test_what_is_taken_over_cannot_be_undone() -> None:
    world = written()
    while world.states() != (DEAD, ACTIVE):
        assert world.step()
    world.mover.undo(0)
    world.settle()
    assert world.states() == (DEAD, ACTIVE)
    assert world.move.phase is Phase.MOVED


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.UNDO])
@pytest.mark.parametrize("answer_is_lost", [False, True])
def test_what_is_over_is_not_repeated_though_the_destination_has_forgotten_it(goal: Goal, answer_is_lost: bool) -> None:
    """It has handed the vbucket on, was fed by one who knows nothing of its branch, and waits again."""
    world = written()
    if answer_is_lost:
        while world.states() != (DEAD, ACTIVE):
            assert world.step()
        world.cut(Link.DESTINATION)
    world.settle()
    assert world.phases[-1] is Phase.MOVED
    source = world.source.bucket.vbucket(0)
    assert source.taken_over
    world.destination.bucket.delete_vbucket(0)
    copy = world.destination.bucket.create_vbucket(0, REPLICA)
    copy.replace_failover_log(source.failover_log)
    copy.set_state(PENDING)
    type_again(world, goal)
    assert world.move.phase is Phase.FAILED
    assert "'a->b'" in world.move.reason
    assert (source.state, copy.state) == (DEAD, PENDING)


@pytest.mark.parametrize("goal", [Goal.TAKE_OVER, Goal.UNDO])
def test_a_finished_takeover_is_not_repeated_though_the_source_was_not_told(goal: Goal) -> None:
    """The mover was killed before that; the destination has handed the vbucket on, is about to get it back, and is fed
    by the dead source once more."""
    first, second, third = (InMemoryNode(vbuckets=4) for _ in range(3))
    first.bucket.create_vbucket(0)
    first.write(0, b"old")
    world = between(first, second)
    while world.states() != (DEAD, ACTIVE):
        assert world.step()
    world.kill()
    second.write(0, b"newer")
    world = between(second, third)
    world.settle()
    world.kill()
    third.write(0, b"newest")
    world = between(third, second)
    while world.states() != (ACTIVE, PENDING):
        assert world.step()
    world.kill()
    copy, source = second.bucket.vbucket(0), first.bucket.vbucket(0)
    copy.roll_back(0)
    copy.replace_failover_log(source.failover_log)
    assert not source.taken_over
    world = between(first, second, goal)
    world.settle()
    assert world.move.phase is Phase.FAILED
    assert [node.bucket.vbucket(0).state for node in (first, second, third)] == [DEAD, REPLICA, ACTIVE]
    world.kill()
    world = between(third, second)
    world.settle()
    assert world.states() == (DEAD, ACTIVE)
    assert world.contents(Link.DESTINATION).keys() == {b"old", b"newer", b"newest"}


def test_the_new_map_does_not_wait_for_the_disk_of_a_source_that_has_not_heard_how_it_ended() -> None:
    world = written()
    while world.states() != (DEAD, ACTIVE):
        assert world.step()
    world.cut(Link.DESTINATION)
    world.source.bucket.flusher.pause()
    world.settle()
    for node in world.nodes.values():
        assert json.loads(node.state.cluster.encoded())["vBucketServerMap"]["vBucketMap"][0] == [1]
    assert world.phases[-1] is Phase.ENDING
    world.source.bucket.flusher.resume()
    world.settle()
    assert world.phases[-4:] == [Phase.CONFIRMING, Phase.ANNOUNCING, Phase.ENDING, Phase.MOVED]
    assert world.source.bucket.vbucket(0).taken_over


def test_a_promotion_behind_the_movers_back_is_not_overruled() -> None:
    """A copy that was made a replica while *active* was on its way stays one: the source may be active again."""
    world = written()
    while world.states() != (DEAD, PENDING):
        assert world.step()
    world.destination.bucket.vbucket(0).set_state(REPLICA)
    world.settle()
    assert world.states() == (DEAD, REPLICA)
    assert world.move.phase is Phase.FAILED


@settings(max_examples=examples(150), deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(list(Link))), max_size=6),
    undo_after=st.none() | st.integers(0, 80),
    writes=st.integers(0, 5),
)
def test_whatever_is_cut_when(cuts: list[tuple[int, Link]], undo_after: int | None, writes: int) -> None:
    world = written(count=5)
    number = 0
    for steps, link in [*cuts, (200, Link.SOURCE)]:
        for _ in range(steps):
            if undo_after is not None and number >= undo_after:
                world.mover.undo(0)
                undo_after = None
            if world.states()[0] is ACTIVE and number < writes * 10 and number % 10 == 0:
                world.source.write(0, b"w%d" % number)
            number += 1
            if not world.step():
                break
        world.cut(link)
    world.settle()
    assert world.most_active == 1
    assert world.move.phase in (Phase.MOVED, Phase.UNDONE)
    if world.move.phase is Phase.MOVED:
        assert world.states() == (DEAD, ACTIVE)
        assert world.contents(Link.SOURCE) == world.contents(Link.DESTINATION)
    else:
        assert world.states()[0] is ACTIVE


def test_bytes_that_make_no_sense_cut_the_connection() -> None:
    world = written()
    world.settle()
    world = written(Goal.REPLICATE)
    world.settle()
    world.mover.received(Link.SOURCE, b"GET / HTTP/1.1\r\n\r\n      ")
    assert world.phases[-1] is Phase.WAITING
    world.settle()
    assert world.move.phase is Phase.STREAMING


def test_others_are_told_before_the_stream_ends() -> None:
    world = written()
    world.mover.has_others = True
    announced: list[Announce] = []
    world.on_announce = announced.append
    world.settle()
    (told,) = announced
    assert world.phases[-1:] == [Phase.ANNOUNCING]
    world.mover.announced(0, b"another map")  # of an attempt before this one
    assert world.phases[-1:] == [Phase.ANNOUNCING]
    world.mover.announced(0, told.encoded)
    world.settle()
    assert world.phases[-1:] == [Phase.MOVED]
