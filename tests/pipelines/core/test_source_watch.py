"""Where a source stands, seen beside everything else."""

import socket
import time

from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import wait_until
from upriver.client import SyncKvClient
from upriver.client.transport.address import Address
from upriver.model import VbucketState
from upriver.node import EmbeddedNode
from upriver.pipelines.core.progress import Lag
from upriver.pipelines.core.source_watch import SourceWatch
from upriver.spark import Offset
from upriver.spark.offsets import VbucketOffset


def write(node: EmbeddedNode, vbucket: int, *keys: bytes) -> None:
    for key in keys:
        node.call(node.node.state.bucket.vbucket(vbucket).set, key, b"v")


def test_all_vbuckets_are_seen_wherever_they_are_and_who_is_away_stands_where_it_stood() -> None:
    with two_nodes(4) as (first, second):
        write(first, 0, b"a", b"b")
        write(second, 3, b"c")
        with SourceWatch(Address.parse(first.address)) as watch:
            wait_until(lambda: watch.high_seqnos == {0: 2, 1: 0, 2: 0, 3: 1})
            first.call(first.node.state.bucket.create_vbucket, 2, VbucketState.ACTIVE)
            write(first, 2, b"d", b"e", b"f")
            push_map([first, second], [0, 0, 0, 1], rev=2)
            second.close()
            wait_until(lambda: watch.high_seqnos[2] == 3)
            assert watch.high_seqnos[3] == 1


def test_only_what_is_read_is_seen(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(100)})
    with SourceWatch(Address.parse(upriver_node.address), (1, 5)) as watch:
        wait_until(lambda: watch.high_seqnos)
        assert watch.high_seqnos.keys() == {1, 5}


def test_it_ends_at_once_though_the_source_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with SourceWatch(Address.parse(f"127.0.0.1:{silent.getsockname()[1]}")) as watch:
            silent.accept()[0].close()
        assert time.monotonic() - began < 5.0
        assert watch.high_seqnos == {}


def test_what_a_flush_or_a_branch_has_removed_is_not_held(upriver_node: EmbeddedNode) -> None:
    bucket = upriver_node.node.state.bucket
    write(upriver_node, 0, b"a", b"b", b"c")
    with SourceWatch(Address.parse(upriver_node.address), (0, 1)) as watch:
        wait_until(lambda: watch.high_seqnos == {0: 3, 1: 0})
        uuid = bucket.vbucket(0).failover_log.newest.vbucket_uuid
        read = Offset([VbucketOffset.consistent_at(0, uuid, 3), VbucketOffset(1)])
        assert watch.held(read) == {0: 3, 1: 0}
        upriver_node.call(bucket.vbucket(0).set_state, VbucketState.REPLICA)
        upriver_node.call(bucket.vbucket(0).set_state, VbucketState.ACTIVE)
        write(upriver_node, 0, b"d")
        wait_until(lambda: watch.high_seqnos[0] == 4)
        assert bucket.vbucket(0).failover_log.newest.vbucket_uuid != uuid
        assert watch.held(read) == {0: 3, 1: 0}  # the new branch has all of it
        upriver_node.call(upriver_node.bucket.flush)
        for number in range(4):
            write(upriver_node, 0, b"%d" % number)
        wait_until(lambda: watch.held(read) == {0: 0, 1: 0})
        lag = Lag()
        lag.seen(watch.held(read), watch.high_seqnos)
        assert lag.changes == watch.high_seqnos[0] >= 4
