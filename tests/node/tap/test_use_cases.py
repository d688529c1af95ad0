"""The five uses that the text names for TAP, each from end to end over real sockets; and a ring of three nodes."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.support.node_process import Client, wait_until
from tests.support.tap_peer import ACK, BACKFILL, FUTURE, KEYS_ONLY, LIST, TAKEOVER, connect
from tests.support.tap_sockets import Listener, Relay
from upriver.engine import Vbucket
from upriver.model import VbucketState
from upriver.model.record import size_at, unpack
from upriver.node import EmbeddedNode, start
from upriver.wire import Message, tap
from upriver.wire.dialects.memcached import Delete, Flush, Set


def node(states: str = "all") -> EmbeddedNode:
    return start(vbuckets=4, initial_vbuckets=states)


def copy_of(which: EmbeddedNode, vbucket: int = 1, state: VbucketState = VbucketState.REPLICA) -> None:
    which.call(which.bucket.create_vbucket, vbucket, state)


def contents(which: EmbeddedNode, vbucket: int = 1) -> dict[bytes, tuple[bytes, int, int, int]]:
    """Value, flags, CAS and revision of every key."""

    def read() -> dict[bytes, tuple[bytes, int, int, int]]:
        table = which.bucket.vbucket(vbucket).table
        found = {key: table.find(key) for key in table.live_keys()}
        return {key: (i.value, i.flags, i.cas, i.rev_seqno) for key, i in found.items() if i is not None}

    return which.call(read)


def clients_of(which: EmbeddedNode) -> int:
    """How many TAP clients are connected."""
    return which.call(lambda: len(list(which.node.state.tap or ())))


def stands_at(nodes: list[EmbeddedNode], total: int) -> bool:
    """Have all of them together seen this many changes?"""
    return sum(ask(each, lambda vbucket: vbucket.high_seqno) for each in nodes) == total


def ask(which: EmbeddedNode, function: Callable[[Vbucket], int], vbucket: int = 1) -> int:
    return which.call(lambda: function(which.bucket.vbucket(vbucket)))


@pytest.fixture
def source() -> Iterator[EmbeddedNode]:
    with node() as made:
        yield made


@pytest.fixture
def writer(source: EmbeddedNode) -> Iterator[Client]:
    with Client(source.port) as made:
        yield made


def is_key(key: bytes) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, tap.Mutation | tap.Delete) and message.key == key


@pytest.mark.shows("tap:use-replication", "tap:use-replay")
def test_replication(source: EmbeddedNode, writer: Client) -> None:
    for number in range(500):
        writer.set(b"k%d" % number, b"v%d" % number, vbucket=1)
    with node("none") as destination:
        copy_of(destination)
        with Relay(source.port, destination.port, connect(b"replica", BACKFILL | ACK | LIST, vbuckets=(1,))):
            for number in range(400, 600):
                writer.set(b"k%d" % number, b"w%d" % number, vbucket=1)
            for number in range(50):
                assert writer.ask(Delete(key=b"k%d" % number, vbucket=1)).status == 0
            wait_until(lambda: contents(destination) == contents(source), "the replica holds what the source holds")
            assert len(contents(source)) == 550
            assert writer.ask(Flush()).status == 0
            writer.set(b"after", b"the flush", vbucket=1)
            wait_until(lambda: contents(destination) == contents(source) != {}, "after the flush too")


@pytest.mark.shows("tap:use-observation")
def test_observation(source: EmbeddedNode, writer: Client) -> None:
    writer.set(b"old:1", b"v", vbucket=1)
    with Listener(source.port, connect(b"observer", BACKFILL, FUTURE)) as listener:
        wait_until(partial(clients_of, source), "the observer is connected")
        for number in range(300):
            writer.set(b"%s:%d" % ((b"user", b"order", b"session")[number % 3], number), b"v", vbucket=number % 4)
        assert writer.ask(Delete(key=b"old:1", vbucket=1)).status == 0
        seen = Counter(m.key.split(b":")[0] for m in listener.until(is_key(b"old:1")))  # type: ignore[attr-defined]
        while sum(seen.values()) < 301:  # other vbuckets may come after it
            message = listener.next()
            assert isinstance(message, tap.Mutation)
            seen[message.key.split(b":")[0]] += 1
    assert seen == {b"user": 100, b"order": 100, b"session": 100, b"old": 1}


@pytest.mark.shows("tap:use-invalidation")
def test_cache_invalidation(source: EmbeddedNode, writer: Client) -> None:
    cache = {b"k%d" % number: b"cached" for number in range(20)}
    for key in cache:
        writer.set(key, b"v" * 1000, vbucket=1)
    with Listener(source.port, connect(b"cache", KEYS_ONLY)) as listener:
        wait_until(partial(clients_of, source), "the cache is connected")
        writer.set(b"k3", b"changed", vbucket=1)
        assert writer.ask(Delete(key=b"k4", vbucket=1)).status == 0
        for message in listener.until(is_key(b"k4")):
            assert isinstance(message, tap.Mutation | tap.Delete)
            assert message.value == b""
            cache.pop(message.key, None)
        assert set(cache) == {b"k%d" % number for number in range(20)} - {b"k3", b"k4"}
        assert writer.ask(Flush()).status == 0
        assert isinstance(listener.next(), tap.Flush)


@pytest.mark.shows("tap:use-indexing")
def test_external_indexing(source: EmbeddedNode, writer: Client) -> None:
    """A full-text index that is always up to date: who holds a word now, and not who ever did."""
    texts = {b"a": b"the quick brown fox", b"b": b"the lazy dog", b"c": b"a fox again"}
    for key, text in texts.items():
        writer.set(key, text, vbucket=1)
    index: dict[bytes, set[bytes]] = {}

    def take(message: Message) -> None:
        if isinstance(message, tap.Mutation | tap.Delete):
            for keys in index.values():
                keys.discard(message.key)
            for word in message.value.split():
                index.setdefault(word, set()).add(message.key)

    with Listener(source.port, connect(b"indexer", BACKFILL | ACK | LIST, vbuckets=(1,))) as listener:
        for message in listener.until(is_key(b"c")):
            take(message)
        assert (index[b"fox"], index[b"the"]) == ({b"a", b"c"}, {b"a", b"b"})
        writer.set(b"a", b"only a dog", vbucket=1)
        assert writer.ask(Delete(key=b"c", vbucket=1)).status == 0
        for message in listener.until(is_key(b"c")):
            take(message)
        assert (index[b"fox"], index[b"dog"], index[b"the"]) == (set(), {b"a", b"b"}, {b"b"})


@pytest.mark.shows("tap:use-transition")
def test_vbucket_transition(source: EmbeddedNode, writer: Client) -> None:
    for number in range(300):
        writer.set(b"k%d" % number, b"v", vbucket=1)
    with node("none") as destination:
        relay = Relay(source.port, destination.port, connect(b"mover", TAKEOVER | ACK | LIST, vbuckets=(1,)))
        written = 0
        while writer.ask(Set(key=b"during%d" % written, value=b"v", vbucket=1)).status == 0:
            written += 1
        wait_until(lambda: relay.ended, "the source closes")
        relay.join()
        assert source.call(lambda: source.bucket.vbucket(1).state) is VbucketState.DEAD
        assert destination.call(lambda: destination.bucket.vbucket(1).state) is VbucketState.ACTIVE
        assert contents(destination) == contents(source)
        assert len(contents(destination)) == 300 + written


# The ring


@pytest.fixture
def ring() -> Iterator[list[EmbeddedNode]]:
    """Three nodes, each of which passes vbucket 1 on to the next."""
    nodes = [node("none") for _ in range(3)]
    relays = []
    try:
        for each in nodes:
            copy_of(each)
        for place, each in enumerate(nodes):
            request = connect(b"ring", ACK | LIST, vbuckets=(1,))
            relays.append(Relay(each.port, nodes[(place + 1) % 3].port, request))
            wait_until(partial(clients_of, each), "connected")
        yield nodes
        assert not any(relay.ended for relay in relays)
    finally:
        for relay in relays:
            relay.cut()
            relay.join()
        for each in nodes:
            each.close()


def ttls(which: EmbeddedNode) -> list[int]:
    """The hops that each change may still make, in the order of the history."""

    def read() -> list[int]:
        found = []
        with which.bucket.vbucket(1).open_cursor("look") as cursor:
            while cursor.next_snapshot() is not None:
                data, at = cursor.read_records(), 0
                while at < len(data):
                    found.append(unpack(data, at).ttl)
                    at += size_at(data, at)
        return found

    return which.call(read)


@pytest.mark.shows("tap:response-ttl")
def test_a_change_makes_so_many_hops_in_a_ring_and_no_more(ring: list[EmbeddedNode]) -> None:
    """Copies take whatever they are told: only the hops that are left stop a change from going round for ever."""
    with Client(ring[0].port) as peer:
        for number, hops in enumerate((5, 1, 7)):
            before = sum(ask(each, lambda v: v.high_seqno) for each in ring)
            peer.send(tap.Mutation(vbucket=1, key=b"k", value=b"%d" % number, ttl=hops, cas=9, rev_seqno=9, nru=0))
            wait_until(partial(stands_at, ring, before + hops), f"{hops} hops")
            value, *_ = contents(ring[0])[b"k"]
            assert value == b"%d" % number
        # One more that goes all the way round proves that nothing is on its way any more.
        before = sum(ask(each, lambda v: v.high_seqno) for each in ring)
        peer.send(tap.Mutation(vbucket=1, key=b"last", value=b"v", ttl=3, cas=9, rev_seqno=9, nru=0))
        wait_until(lambda: all(b"last" in contents(each) for each in ring), "the last one came round")
        assert sum(ask(each, lambda v: v.high_seqno) for each in ring) == before + 3
    assert [ttls(each)[-1] for each in ring] == [2, 1, 0]


def test_three_nodes_that_all_write_converge_and_fall_silent(ring: list[EmbeddedNode]) -> None:
    for each in ring:
        each.call(each.bucket.vbucket(1).set_state, VbucketState.ACTIVE)
    clients = [Client(each.port) for each in ring]
    for number in range(60):
        clients[number % 3].set(b"own%d" % number, b"v%d" % number, vbucket=1)
        clients[number % 3].set(b"shared%d" % (number // 3), b"by %d" % (number % 3), vbucket=1)
    wait_until(lambda: contents(ring[0]) == contents(ring[1]) == contents(ring[2]), "all three hold the same")
    assert len(contents(ring[0])) == 80
    wait_until(lambda: all(min(ttls(each)) >= 253 for each in ring), "nothing goes round a second time")
    highs = [ask(each, lambda v: v.high_seqno) for each in ring]
    clients[0].set(b"last", b"v", vbucket=1)
    wait_until(lambda: all(b"last" in contents(each) for each in ring), "the last one came round")
    assert [ask(each, lambda v: v.high_seqno) for each in ring] == [high + 1 for high in highs]
    for client in clients:
        client.close()
