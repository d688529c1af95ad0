"""What the driver sees of a cluster."""

import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.node_clusters import push_map, two_nodes
from upriver.client import SyncKvClient
from upriver.client.cluster.node_queries import failover_logs
from upriver.client.transport.address import Address
from upriver.client.transport.connection import Connection
from upriver.errors import ClusterMapError, NodeUnavailable
from upriver.model import FailoverLog, VbucketState, vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.node.commands import statistics
from upriver.spark import cluster_view as view_module
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import Offset, VbucketOffset


def test_where_the_active_copies_stand(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        written = kv.set("a", "1")
    assert written.vbucket_uuid is not None
    number = vbucket_of(b"a", 64)
    view = ClusterView(Address.parse(upriver_node.address), None)
    assert view.vbuckets() == list(range(64))
    states = view.states()
    assert len(states) == 64
    assert (states[number].vbucket_uuid, states[number].high_seqno) == (written.vbucket_uuid, 1)
    assert states[number].exact_from == 0
    assert view.bytes_per_change() > 1
    view.close()


def test_how_far_ranges_go_that_deliver_few_changes(
    upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node looks at some records for each answer, and is asked again."""
    monkeypatch.setattr(statistics, "COUNTED_RECORDS_MAX", 10)
    vbucket = upriver_node.bucket.vbucket(3)

    def write() -> None:
        for n in range(5):
            vbucket.set(b"k%d" % n, b"v")
        for _ in range(60):
            vbucket.set(b"hot", b"v")
        for n in range(5, 50):
            vbucket.set(b"k%d" % n, b"v")

    upriver_node.call(write)
    with closing(ClusterView(Address.parse(upriver_node.address), None)) as view:
        assert view.item_counts()[3] == 51
        assert view.visible_ends({3: (0, 5), 4: (0, 5)}) == {3: (5, 5), 4: (0, 0)}
        # Each answer counts the hot key again, because it does not know the ones before.
        end_seqno, changes = view.visible_ends({3: (0, 12)})[3]
        assert (end_seqno, changes) == (65, 12)
        monkeypatch.setattr(view_module, "COUNTING_ROUNDS_MAX", 2)
        assert view.visible_ends({3: (0, 12)})[3] == (20, 7)


def test_the_branches_are_told_where_they_matter(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        written = kv.set("a", "1")
    assert written.vbucket_uuid is not None
    number = vbucket_of(b"a", 64)
    vbucket = upriver_node.bucket.vbucket(number)
    upriver_node.call(vbucket.set_state, VbucketState.REPLICA)
    upriver_node.call(vbucket.set_state, VbucketState.ACTIVE)
    view = ClusterView(Address.parse(upriver_node.address), (number,))
    state = view.states(Offset([VbucketOffset.consistent_at(number, written.vbucket_uuid, 1)]))[number]
    assert state.failover_log == vbucket.failover_log
    assert len(state.failover_log) == 2
    view.close()


def test_a_vbucket_that_goes_while_it_is_asked_about_is_no_loss(
    upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was active a moment ago and the node has it no more: a log that is not told says nothing of its history."""
    vbucket = upriver_node.bucket.vbucket(3)
    old = vbucket.failover_log.newest.vbucket_uuid
    upriver_node.call(vbucket.set, b"k", b"v")
    upriver_node.call(vbucket.set_state, VbucketState.REPLICA)
    upriver_node.call(vbucket.set_state, VbucketState.ACTIVE)
    asked: list[int] = []

    async def gone_at_first(connection: Connection, numbers: Iterable[int]) -> dict[int, FailoverLog]:
        asked.append(len(asked))
        return {} if len(asked) == 1 else await failover_logs(connection, numbers)

    monkeypatch.setattr(view_module, "failover_logs", gone_at_first)
    view = ClusterView(Address.parse(upriver_node.address), (3, 4))
    states = view.states(Offset([VbucketOffset.consistent_at(3, old, 1), VbucketOffset(4)]))
    assert (sorted(states), states[3].failover_log, len(asked)) == ([3, 4], vbucket.failover_log, 2)
    view.close()


def test_two_nodes() -> None:
    with two_nodes() as (one, other):
        view = ClusterView(Address.parse(one.address), None)
        assert {str(endpoint): numbers for endpoint, numbers in view.owners([1, 2, 7]).items()} == {
            one.address: [1, 2],
            other.address: [7],
        }
        assert sorted(view.states()) == list(range(8))
        view.close()


def test_the_query_waits_once_for_a_vbucket_without_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MOVING_S", 0.3)
    with two_nodes() as (one, other):
        push_map([one, other], [0] * 4 + [-1] + [1] * 3, rev=2)
        view = ClusterView(Address.parse(one.address), None)
        began = time.monotonic()
        assert sorted(view.states()) == [0, 1, 2, 3, 5, 6, 7]
        assert time.monotonic() - began > 0.3
        monkeypatch.setattr(view_module, "MOVING_S", 3600.0)
        assert len(view.states()) == 7
        push_map([one, other], [0] * 4 + [1] * 4, rev=3)
        assert len(view.states()) == 8
        view.close()


def test_a_node_that_starts_again_is_waited_for() -> None:
    node = start(vbuckets=4)
    port = node.port
    view = ClusterView(Address.parse(node.address), None)
    before = view.states()
    node.close()
    again: list[EmbeddedNode] = []
    waiting = threading.Timer(0.5, lambda: again.append(start(vbuckets=4, port=port)))
    waiting.start()
    after = view.states()
    waiting.join()
    assert before.keys() == after.keys()
    assert before[0].vbucket_uuid != after[0].vbucket_uuid
    view.close()
    again[0].close()


def test_a_node_that_has_started_again_is_asked_over_another_connection(tmp_path: Path) -> None:
    node = start(vbuckets=4, data=tmp_path)
    with closing(ClusterView(Address.parse(node.address), None)) as view:
        before, port = view.bucket(), node.port
        node.close()
        node = start(vbuckets=4, data=tmp_path, port=port)
        assert view.bucket() == before
        node.close()
        with pytest.raises(NodeUnavailable):
            view.bucket()


def test_an_estimate_does_not_need_the_nodes(tmp_path: Path) -> None:
    with start(vbuckets=4, data=tmp_path) as node, closing(ClusterView(Address.parse(node.address), None)) as view:
        assert view.bytes_per_change() == 1
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b"x" * 10_000 for n in range(10)})
        size = view.bytes_per_change()
        assert size > 10_000
        node.close()
        assert view.bytes_per_change() == size


def test_a_bucket_is_known_by_its_uuid_and_whether_a_restart_empties_it(tmp_path: Path) -> None:
    found = []
    for data in (tmp_path, tmp_path, None, None):
        with start(vbuckets=4, data=data) as node, closing(ClusterView(Address.parse(node.address), None)) as view:
            found.append(view.bucket())
    on_disk, again, in_memory, other = found
    assert on_disk == again
    assert (on_disk.is_in_memory, in_memory.is_in_memory) == (False, True)
    assert len({on_disk.uuid, in_memory.uuid, other.uuid}) == 3


def test_a_node_without_vbuckets_does_not_say_which_bucket_it_is() -> None:
    """Its map is its own: the node that has the vbuckets may be down."""
    with start(vbuckets=4) as first, start(vbuckets=4, initial_vbuckets="none") as second:
        found = []
        for addresses in (first.address, f"{second.address},{first.address}"):
            with closing(ClusterView(Address.parse(addresses), None)) as view:
                found.append(view.bucket())
        assert found[0] == found[1]
        first.close()
        with closing(ClusterView(Address.parse(addresses), None)) as view, pytest.raises(ClusterMapError):
            view.bucket()
