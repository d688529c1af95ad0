"""TAP from node to node, both without sockets: rings, repeated takeovers, and what an answer promises."""

import logging

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_peer import ACK, BACKFILL, LIST, TAKEOVER, TapPeer, brief, connect
from upriver.errors import KeyNotFound
from upriver.model import VbucketState
from upriver.wire import Message, Request, Response, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import Control, TapFlag


class Crossing:
    """Passes what one node sends on to another, and the answers back."""

    def __init__(self, source: InMemoryNode, destination: InMemoryNode, request: tap.Connect) -> None:
        self.seen: list[str] = []
        self.lose_answers_to = ""
        #: A vbucket that the destination cannot take for the moment.
        self.busy: int | None = None
        self._into = destination.connect()
        self._from = TapPeer(source, request)
        self._from.judge = self._pass_on

    @property
    def closed(self) -> bool:
        return self._from.closed

    def run(self) -> bool:
        """Pass on what there is; False if that is nothing."""
        return bool(self._from.run())

    def leave(self) -> None:
        self._from.leave()

    def _pass_on(self, message: Message) -> Status | None:
        self.seen += brief([message])
        if isinstance(message, Request) and message.vbucket == self.busy:
            return Status.ETMPFAIL
        answers = [answer for answer in self._into.send(message) if isinstance(answer, Response)]
        if not answers or self.seen[-1] == self.lose_answers_to:
            return None
        return answers[-1].status


def node_with(*vbuckets: int) -> InMemoryNode:
    node = InMemoryNode()
    for number in vbuckets:
        node.bucket.create_vbucket(number)
    return node


def value_of(node: InMemoryNode, key: bytes, vbucket: int = 1) -> bytes | None:
    try:
        return node.bucket.vbucket(vbucket).get(key).value
    except KeyNotFound:
        return None


def settle(ring: list[Crossing]) -> None:
    for _ in range(100):
        if not sum(crossing.run() for crossing in ring):
            return
    raise AssertionError("it goes round for ever")


# Rings


@pytest.mark.parametrize("flags", [ACK, ACK | BACKFILL, 0, BACKFILL])
@pytest.mark.parametrize("size", [2, 3])
def test_a_flush_goes_round_once_and_takes_nothing_with_it_that_came_later(flags: int, size: int) -> None:
    nodes = [node_with(1, 2) for _ in range(size)]
    ring = [Crossing(nodes[i], nodes[(i + 1) % size], connect(b"%d" % i, flags)) for i in range(size)]
    settle(ring)
    nodes[0].write(1, b"before")
    settle(ring)
    assert [value_of(each, b"before") for each in nodes] == [b"v"] * size
    nodes[0].bucket.flush()
    ring[0].run()
    nodes[0].write(1, b"behind")  # the flush is on its way and not back yet
    settle(ring)
    nodes[-1].write(2, b"later")
    settle(ring)
    assert [value_of(each, b"before") for each in nodes] == [None] * size
    assert [value_of(each, b"behind") for each in nodes] == [b"v"] * size
    assert [value_of(each, b"later", 2) for each in nodes] == [b"v"] * size
    assert all(crossing.seen.count("flush") <= 1 for crossing in ring)


def test_a_flush_makes_as_many_hops_as_it_may() -> None:
    first, second, third = node_with(1), node_with(1), node_with(1)
    chain = [Crossing(first, second, connect(b"", ACK)), Crossing(second, third, connect(b"", ACK))]
    settle(chain)
    for each in (first, second, third):
        each.write(1, b"own")
    settle(chain)
    first.connect().send(tap.Flush(ttl=2))
    settle(chain)
    assert [value_of(each, b"own") for each in (first, second, third)] == [None, None, b"v"]
    assert [crossing.seen.count("flush") for crossing in chain] == [1, 0]


@pytest.mark.parametrize("flags", [ACK | LIST, ACK | LIST | BACKFILL])
def test_a_flush_on_a_resumed_connection_empties_only_what_it_brought(flags: int) -> None:
    source, destination = node_with(1), node_with(1, 2)
    source.write(1, b"a")
    destination.write(2, b"other")
    first = Crossing(source, destination, connect(b"name", flags, vbuckets=(1,)))
    settle([first])
    first.leave()
    second = Crossing(source, destination, connect(b"name", flags, vbuckets=(1,)))
    settle([second])
    source.bucket.flush()
    settle([second])
    assert second.seen[-1] == "flush"
    assert value_of(destination, b"a") is None
    assert value_of(destination, b"other", 2) == b"v"


# Takeovers


def test_a_takeover_that_is_repeated_leaves_the_new_owner_its_writes(caplog: pytest.LogCaptureFixture) -> None:
    source, destination = node_with(1), InMemoryNode()
    source.write(1, b"a")
    request = connect(b"mover", TAKEOVER | LIST | ACK, vbuckets=(1,))
    first = Crossing(source, destination, request)
    first.lose_answers_to = "state active"
    settle([first])
    first.leave()
    assert destination.bucket.vbucket(1).state is VbucketState.ACTIVE
    destination.write(1, b"precious")
    with caplog.at_level(logging.WARNING):
        second = Crossing(source, destination, request)
        settle([second])
    assert second.seen == ["#enable_auto_nack", "state pending", "#close_tap_stream"]
    assert second.closed
    assert "vbucket 1 stays active" in caplog.text
    assert "vbucket 1 was handed over before" in caplog.text
    assert source.bucket.vbucket(1).state is VbucketState.DEAD
    assert [value_of(destination, key) for key in (b"a", b"precious")] == [b"v", b"v"]


def test_a_takeover_that_is_repeated_without_waiting_for_answers_brings_nothing_back() -> None:
    source, destination = node_with(1), InMemoryNode()
    source.write(1, b"a")
    request = connect(b"mover", TAKEOVER | LIST, vbuckets=(1,))
    settle([Crossing(source, destination, request)])
    assert value_of(destination, b"a") == b"v"
    destination.bucket.flush()
    destination.write(1, b"precious")
    settle([second := Crossing(source, destination, request)])
    assert second.closed
    assert [value_of(destination, key) for key in (b"a", b"precious")] == [None, b"v"]


def test_nothing_is_handed_over_to_who_is_active_already(caplog: pytest.LogCaptureFixture) -> None:
    source, destination = node_with(1), node_with(1)
    destination.write(1, b"own")
    crossing = Crossing(source, destination, connect(b"mover", TAKEOVER | LIST | ACK, vbuckets=(1,)))
    settle([crossing])
    assert "the consumer's copy is active too" in caplog.text
    assert source.bucket.vbucket(1).state is VbucketState.ACTIVE
    assert value_of(destination, b"own") == b"v"


def test_a_flush_does_not_reach_what_was_handed_over() -> None:
    source, destination = node_with(1, 2), InMemoryNode()
    source.write(1, b"a")
    source.write(2, b"b")
    crossing = Crossing(source, destination, connect(b"mover", TAKEOVER | LIST | ACK, vbuckets=(1, 2)))
    crossing.busy = 2
    settle([crossing])
    assert destination.bucket.vbucket(1).state is VbucketState.ACTIVE
    destination.write(1, b"precious")
    source.bucket.flush()  # of what is active still: of vbucket 2
    source.write(2, b"new")
    crossing.busy = None
    source.pass_by(10)
    settle([crossing])
    assert crossing.closed
    assert "flush" not in crossing.seen
    assert [value_of(destination, key) for key in (b"a", b"precious")] == [b"v", b"v"]
    assert [value_of(destination, key, 2) for key in (b"b", b"new")] == [None, b"v"]
    assert [source.bucket.vbucket(number).state for number in (1, 2)] == [VbucketState.DEAD] * 2
    assert [destination.bucket.vbucket(number).state for number in (1, 2)] == [VbucketState.ACTIVE] * 2


# What an answer promises


@pytest.mark.parametrize(
    "asked",
    [
        tap.Mutation(vbucket=1, key=b"k", value=b"w", tap_flags=TapFlag.ACK),
        tap.Delete(vbucket=1, key=b"k", tap_flags=TapFlag.ACK),
        tap.Opaque(vbucket=1, control=Control.CLOSE_BACKFILL, tap_flags=TapFlag.ACK),
        tap.CheckpointStart(vbucket=1, checkpoint=4, tap_flags=TapFlag.ACK),
        tap.Mutation(vbucket=9, key=b"refused", value=b"w"),
        tap.Mutation(vbucket=1, key=b"no hops", value=b"w", ttl=0),
    ],
    ids=["mutation", "deletion", "control", "checkpoint", "refused", "no hops left"],
)
def test_no_answer_goes_out_before_what_it_covers_is_on_disk(asked: Request) -> None:
    node = node_with(1)
    node.settle()
    node.disk_works = False
    peer = node.connect()
    assert peer.send(tap.Mutation(vbucket=1, key=b"k", value=b"v"), asked) == []
    node.disk_works = True
    node.settle()
    assert [type(answer) for answer in peer.take()] != []


def test_what_cannot_be_read_is_not_answered_before_what_came_before() -> None:
    node = node_with(1)
    node.settle()
    node.disk_works = False
    peer = node.connect()
    broken = bytearray(tap.Opaque(vbucket=1, control=Control.CLOSE_BACKFILL).encode())
    broken[24:26] = (99).to_bytes(2, "big")  # more engine-specific data than there is
    assert peer.send(tap.Mutation(vbucket=1, key=b"k", value=b"v"), bytes(broken)) == []
    node.disk_works = True
    node.settle()
    assert [answer.status for answer in peer.take() if isinstance(answer, Response)] == [Status.EINVAL]
