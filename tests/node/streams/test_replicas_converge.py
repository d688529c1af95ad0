"""A producer and a replica back to back: whatever happens and however bytes are cut, both end with the same contents.

Every transition of the stream table is taken by both sides on the way, in every dialect that has it.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.depth import examples
from tests.support.draft_replication import DraftConnectionPair
from tests.support.in_memory_replication import ConnectionPair, InMemoryReplication, statuses
from upriver.model import VbucketState
from upriver.protocol.consumer.consumer import ConsumerOptions
from upriver.protocol.stream_state import TRANSITIONS, StreamEvent, StreamLife, StreamState

OPTIONS = {
    "dcp": ConsumerOptions(window_bytes=0),
    "narrow": ConsumerOptions(window_bytes=150),
    "upr": ConsumerOptions(dialects=("upr",)),
}
DRAFTS = ("upr_draft1", "upr_draft2", "upr_draft3")
KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
STEPS = st.one_of(
    st.tuples(st.just("write"), KEYS),
    st.tuples(st.just("write"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("deliver"), st.integers(0, 300), st.integers(0, 200)),
    st.tuples(st.just("deliver"), st.integers(0, 300), st.integers(0, 200)),
    st.tuples(st.just("work")),
    st.tuples(st.sampled_from(["cut", "cut", "close", "branch", "flush", "checkpoint", "settle", "time"])),
)


class World(InMemoryReplication):
    """What can happen, by name, between two that speak with some options or in a draft."""

    def __init__(self, speaking: str) -> None:
        self.draft = speaking if speaking in DRAFTS else ""
        super().__init__(OPTIONS.get(speaking))

    def connected(self) -> ConnectionPair:
        return DraftConnectionPair(self, self.draft) if self.draft else super().connected()

    def write(self, key: bytes) -> None:
        self.here.set(key, b"%d" % self.here.high_seqno)

    def delete(self, key: bytes) -> None:
        if key in self.contents(self.here):
            self.here.delete(key)

    def deliver(self, to_consumer: int, to_producer: int) -> None:
        self.wires.collect()
        self.wires.deliver(to_consumer, to_producer)

    def close(self) -> None:
        if 0 in self.wires.producer.streams and 0 in self.wires.replica.consumer.streams:
            self.close_stream()
            if self.draft:  # they cannot close a stream: the consumer disconnects
                self.cut()

    def branch(self) -> None:
        """The source goes on under a new uuid, as after a failover."""
        self.here.set_state(VbucketState.REPLICA)
        self.here.set_state(VbucketState.ACTIVE)

    def flush(self) -> None:
        self.here.flush()

    def checkpoint(self) -> None:
        self.here.checkpoints.create()

    def time(self) -> None:
        self.pass_by(6.0)

    def follow(self) -> None:
        """Ask for a stream if there is none, over new connections if need be."""
        if self.wires.given_up:
            self.cut()
        stream = self.wires.replica.consumer.streams.get(0)
        if stream is None or stream.life.ended:
            self.add_stream()


@pytest.mark.parametrize("speaking", [*OPTIONS, *DRAFTS])
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=12, max_size=50))
def test_a_replica_ends_with_what_its_source_holds(speaking: str, steps: list[tuple[str, ...]]) -> None:
    world = World(speaking)
    for name, *arguments in steps:
        world.follow()
        getattr(world, name)(*arguments)
    for _ in range(3):  # the first may find the old stream at its end
        world.settle()
        world.pass_by(6.0)  # small windows wait for an acknowledgement
        world.follow()
    world.settle()
    assert world.same()
    assert world.there.failover_log == world.here.failover_log
    assert not world.receiving.life.ended
    assert not world.wires.replica.closing


@settings(max_examples=examples(60), deadline=None)
@given(
    writes=st.lists(KEYS, max_size=20),
    pieces=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), max_size=60),
    speaking=st.sampled_from(sorted(OPTIONS)),
)
def test_a_takeover_in_any_pieces(writes: list[bytes], pieces: list[tuple[int, int]], speaking: str) -> None:
    world = World(speaking)
    for key in writes:
        world.write(key)
    world.add_stream(takeover=True)
    for at, (to_consumer, to_producer) in enumerate(pieces):
        world.deliver(to_consumer, to_producer)
        world.work()
        if at % 7 == 0 and world.here.state is VbucketState.ACTIVE:
            world.write(b"a")
        active = [copy.state for copy in (world.here, world.there)].count(VbucketState.ACTIVE)
        assert active <= 1
    for _ in range(6):
        world.settle()
        world.pass_by(6.0)
    assert (world.here.state, world.there.state) == (VbucketState.DEAD, VbucketState.ACTIVE)
    assert world.same()
    if world.here.high_seqno:  # an empty copy has no history to remember branches of
        assert world.there.failover_log.entries[1:] == world.here.failover_log.entries


def moved_through(monkeypatch: pytest.MonkeyPatch) -> set[tuple[StreamState, StreamEvent]]:
    """Note each transition that any stream takes."""
    taken: set[tuple[StreamState, StreamEvent]] = set()
    move = StreamLife.move

    def noting(life: StreamLife, event: StreamEvent) -> None:
        before = life.state
        move(life, event)
        taken.add((before, event))

    monkeypatch.setattr(StreamLife, "move", noting)
    return taken


def replicate(world: World, ends: tuple[str, ...]) -> None:
    """Once for each of these ends: what is there, and what comes later."""
    for last in ends:
        world.write(b"a")
        world.follow()
        world.settle()
        world.write(b"b")
        world.settle()
        getattr(world, last)()
        world.settle()


@pytest.mark.parametrize("speaking", ["dcp", "upr"])
def test_the_ways_of_the_table(speaking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replication, a flush, a close, a cut, a takeover with changes in between, and a refusal."""
    taken = moved_through(monkeypatch)
    world = World(speaking)
    replicate(world, ("flush", "close", "cut", "settle"))
    world.cut()
    world.add_stream(takeover=True)
    world.settle(lambda: world.there.state is VbucketState.PENDING)
    world.write(b"late")
    world.settle()
    world.add_stream(opaque=77)
    world.settle()
    assert statuses(world.wires.answers)[-1:] != ["SUCCESS"]
    assert world.same()
    expected = {
        (StreamState.REQUESTED, StreamEvent.ACCEPT),
        (StreamState.OPEN, StreamEvent.MARKER),
        (StreamState.SNAPSHOT, StreamEvent.MARKER),
        (StreamState.SNAPSHOT, StreamEvent.CHANGE),
        (StreamState.SNAPSHOT, StreamEvent.FLUSH),
        (StreamState.OPEN, StreamEvent.END),
        (StreamState.SNAPSHOT, StreamEvent.CLOSE),
        (StreamState.SNAPSHOT, StreamEvent.LOSE),
        (StreamState.PENDING, StreamEvent.PENDING_ANSWERED),
        (StreamState.DRAINING, StreamEvent.MARKER),
        (StreamState.DRAINING, StreamEvent.CHANGE),
        (StreamState.DRAINING, StreamEvent.SET_ACTIVE),
        (StreamState.ACTIVATING, StreamEvent.END),
    }
    assert expected <= taken
    assert all(event in TRANSITIONS[state] for state, event in taken)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_ways_of_the_table_that_only_drafts_take(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say where a stream begins and where a snapshot ends; the first has no flush, its stream just ends."""
    taken = moved_through(monkeypatch)
    world = World(draft)
    replicate(world, ("flush", "cut", "close", "settle"))
    assert world.same()
    expected = {
        (StreamState.REQUESTED, StreamEvent.ACCEPT),
        (StreamState.OPEN, StreamEvent.START),
        (StreamState.OPEN, StreamEvent.MARKER),
        (StreamState.SNAPSHOT, StreamEvent.CHANGE),
        (StreamState.SNAPSHOT, StreamEvent.SNAPSHOT_END),
        (StreamState.OPEN, StreamEvent.END),
        (StreamState.OPEN, StreamEvent.CLOSE),
        (StreamState.OPEN, StreamEvent.LOSE),
    }
    assert expected <= taken
    assert ((StreamState.OPEN, StreamEvent.FLUSH) in taken) == (draft != "upr_draft1")
    assert all(event in TRANSITIONS[state] for state, event in taken)


@pytest.mark.parametrize("speaking", [*OPTIONS, *DRAFTS])
def test_the_old_owner_goes_back_to_where_its_promoted_replica_branched(speaking: str) -> None:
    world = World(speaking)
    for number in range(10):
        world.write(b"k%d" % number)
    world.follow()
    for _ in range(3):
        world.settle()
        world.pass_by(6.0)
    shared = world.contents(world.here)
    assert world.same()
    world.cut()
    for key in (b"k1", b"lost"):  # only the old owner ever sees these
        world.write(key)
    world.delete(b"k2")
    if speaking == "upr":
        # Without bounds the replica knows only by the next marker, or the end, that it was consistent.
        world.there.complete_snapshot()
    world.there.set_state(VbucketState.ACTIVE)
    world.here.set_state(VbucketState.REPLICA)
    assert world.there.failover_log.newest.seqno == 10
    world.source, world.destination = world.destination, world.source
    world.here, world.there = world.there, world.here
    world.cut()
    world.follow()
    world.settle(lambda: world.there.high_seqno == 10)
    assert world.contents(world.there) == shared
    world.write(b"new")
    for _ in range(3):
        world.settle()
        world.pass_by(6.0)
    assert world.same()
    assert world.there.failover_log == world.here.failover_log


def test_an_ended_stream_can_be_closed_or_replaced() -> None:
    world = InMemoryReplication()
    world.here.set(b"k", b"v")
    world.add_stream()
    world.settle()
    world.here.set_state(VbucketState.REPLICA)
    world.settle()
    assert world.receiving.end_reason == "state changed"
    world.here.set_state(VbucketState.ACTIVE)
    world.add_stream()
    world.settle()
    assert not world.receiving.life.ended
    assert statuses(world.wires.answers) == ["SUCCESS", "SUCCESS"]
    assert world.there.failover_log == world.here.failover_log
