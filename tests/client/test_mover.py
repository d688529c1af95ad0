"""Vbuckets moved between nodes over real sockets: under write load, and with connections that break."""

import threading

from upriver.client.mover import MoverShell
from upriver.errors import NotMyVbucket
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.protocol.mover import Goal, Link, Mover, Phase

DEADLINE_S = 60.0


def addresses(source: EmbeddedNode, destination: EmbeddedNode) -> dict[Link, tuple[str, int]]:
    return {Link.SOURCE: (source.host, source.port), Link.DESTINATION: (destination.host, destination.port)}


def contents(node: EmbeddedNode, vbucket: int) -> dict[bytes, bytes]:
    table = node.bucket.vbucket(vbucket).table
    return {key: item.value for key in table.live_keys() if (item := table.find(key)) is not None}


def test_a_takeover_under_write_load_loses_no_write() -> None:
    with start(vbuckets=4) as source, start(vbuckets=4) as destination:
        destination.call(destination.bucket.vbucket(1).set_state, VbucketState.DEAD)
        written: list[bytes] = []
        halt = threading.Event()

        def write() -> None:
            number = 0
            while not halt.is_set():
                key = b"key%d" % (number % 5000)
                try:
                    source.call(source.bucket.vbucket(1).set, key, b"%d" % number)
                except NotMyVbucket:
                    return  # not ours any more: whatever was answered before counts
                written.append(key)
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        mover = Mover("test", [1])
        shell = MoverShell(mover, addresses(source, destination))
        try:
            assert shell.run(DEADLINE_S)
        finally:
            halt.set()
            writer.join()
            shell.close()
        assert mover.moves[1].phase is Phase.MOVED
        assert source.bucket.vbucket(1).state is VbucketState.DEAD
        assert destination.bucket.vbucket(1).state is VbucketState.ACTIVE
        assert written
        assert contents(destination, 1) == contents(source, 1)
        assert set(written) == set(contents(destination, 1))


def test_replication_survives_a_node_that_goes_away() -> None:
    with start(vbuckets=2) as source:
        for number in range(100):
            source.call(source.bucket.vbucket(0).set, b"k%d" % number, b"v")
        mover = Mover("test", [0], Goal.REPLICATE)
        destination = start(vbuckets=2)
        destination.call(destination.bucket.vbucket(0).set_state, VbucketState.REPLICA)
        shell = MoverShell(mover, addresses(source, destination))
        assert shell.run(DEADLINE_S, lambda: destination.bucket.vbucket(0).high_seqno == 100)
        destination.close()
        with start(vbuckets=2) as other:
            other.call(other.bucket.vbucket(0).set_state, VbucketState.REPLICA)
            shell.addresses[Link.DESTINATION] = (other.host, other.port)
            source.call(source.bucket.vbucket(0).set, b"later", b"v")
            assert shell.run(DEADLINE_S, lambda: other.bucket.vbucket(0).high_seqno == 101)
            shell.close()
            assert contents(other, 0) == contents(source, 0)
