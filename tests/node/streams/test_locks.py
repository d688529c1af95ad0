"""The locks of keys over real sockets: they reach copies and successors, and end by a clock that never goes back."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.mover_socket import MoverSocket
from tests.support.node_process import wait_until
from tests.support.stream_client import StreamClient
from upriver.client import Mover, SyncKvClient
from upriver.errors import Locked, NotLocked, StatusError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.protocol.move import Phase
from upriver.wire import DIALECTS, dcp, upr, upr_draft1, upr_draft3

DRAFT1 = "127.0.0.1:0,dialect=upr_draft1"


@pytest.fixture(params=[True, False], ids=["replicate-locks", "default"])
def node(request: pytest.FixtureRequest) -> Iterator[EmbeddedNode]:
    with start(vbuckets=1, listen=DRAFT1, replicate_locks=request.param) as node:
        yield node


def live_client(node: EmbeddedNode, dialect: str) -> StreamClient:
    """A client whose stream has nothing more to read."""
    opened = dialect in ("dcp", "upr")
    port = node.node.listen_addresses[1].port if dialect == "upr_draft1" else node.port
    wire = dcp.dcp if opened else DIALECTS[dialect]
    client = StreamClient(node, b"live" if opened else b"", wire=wire, port=port)
    requests: dict[str, Any] = {
        "dcp": dcp.StreamRequest,
        "upr": upr.StreamRequest,
        "upr_draft3": upr_draft3.StreamRequest,
    }
    client.send(requests.get(dialect, upr_draft1.StreamRequest)(vbucket=0))
    return client


def next_change(client: StreamClient) -> Any:
    return next(message for message in iter(client.next, None) if hasattr(message, "by_seqno"))


@pytest.mark.shows("open_issues:lock-time")
@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft1", "upr_draft2", "upr_draft3"])
def test_a_lock_that_is_taken_while_a_stream_is_live(node: EmbeddedNode, dialect: str) -> None:
    replicates = node.node.options.replicate_locks
    with SyncKvClient(node.address) as kv, live_client(node, dialect) as client:
        kv.set("fruit", "apple")
        before = next_change(client)
        began = time.monotonic()
        item = kv.lock("fruit", 20)
        assert item.value == b"apple"
        if replicates:
            locked = next_change(client)
            assert (locked.by_seqno, locked.rev_seqno, locked.value) == (2, before.rev_seqno, b"apple")
            assert locked.cas == item.cas
            assert 20 - (time.monotonic() - began) <= locked.lock_time <= 20  # no copy ends it earlier than promised
        kv.unlock("fruit", item.cas)
        if replicates:
            unlocked = next_change(client)
            assert (unlocked.by_seqno, unlocked.rev_seqno, unlocked.value) == (3, before.rev_seqno, b"apple")
            assert (unlocked.cas, unlocked.lock_time) == (item.cas, 0)
        kv.set("fruit", "pear")
        last = next_change(client)
        assert (last.by_seqno, last.rev_seqno) == ((4 if replicates else 2), before.rev_seqno + 1)


def check_held(address: str, cas: int, how: str) -> None:
    """The lock's holder can use it, and no one else."""
    with SyncKvClient(address) as kv:
        for refused in (lambda: kv.set("fruit", "plum"), lambda: kv.delete("fruit"), lambda: kv.lock("fruit")):
            with pytest.raises(StatusError) as caught:
                refused()
            assert caught.value.status in (Locked.status, 0x86)
        with pytest.raises(StatusError):
            kv.unlock("fruit", cas + 1)
        item = kv.get("fruit")
        assert item is not None
        assert (item.value, item.cas) == (b"apple", 2**64 - 1)
        if how == "set":
            kv.set("fruit", "plum", cas=cas)
        else:
            kv.unlock("fruit", cas)
            with pytest.raises((NotLocked, StatusError)):
                kv.unlock("fruit", cas)
        kv.set("fruit", "free")


@pytest.mark.shows("open_issues:lock-time")
@pytest.mark.parametrize("how", ["set", "unlock"])
@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_a_lock_is_usable_after_a_failover(dialect: str, how: str) -> None:
    with start(vbuckets=1, initial_vbuckets="none") as node:
        node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
        with MoverSocket(node) as mover:
            mover.add_stream(speaks=dialect)
            mutation = dcp.Mutation if dialect == "dcp" else upr.Mutation
            markers = dcp.SnapshotMarker(start_seqno=0, end_seqno=2) if dialect == "dcp" else upr.SnapshotMarker()
            for number, (cas, lock_time) in enumerate(((10, 0), (77, 20)), 1):
                if number == 1:
                    mover.tell(markers)
                mover.tell(mutation(by_seqno=number, key=b"fruit", value=b"apple", cas=cas, lock_time=lock_time))
            wait_until(lambda: node.call(lambda: node.bucket.vbucket(0).high_seqno) == 2)
        node.call(node.bucket.vbucket(0).set_state, VbucketState.ACTIVE)
        check_held(node.address, 77, how)


@pytest.mark.shows("open_issues:lock-time")
@pytest.mark.parametrize("how", ["set", "unlock"])
@pytest.mark.parametrize("replicates", [True, False], ids=["replicate-locks", "default"])
def test_a_move_hands_over_the_locks(replicates: bool, how: str) -> None:
    options: dict[str, Any] = {"vbuckets": 1, "replicate_locks": replicates}
    with start(**options) as first, start(**options, initial_vbuckets="none") as second:
        with SyncKvClient(first.address) as kv:
            for key in ("fruit", "free", "ended"):
                kv.set(key, "apple")
            item = kv.lock("fruit", 25)
            kv.unlock("ended", kv.lock("ended", 25).cas)
            revision = first.call(lambda: first.bucket.vbucket(0).get_meta(b"fruit").rev_seqno)
        steps = asyncio.run(Mover(first.address, second.address, [0]).carry_out())
        assert {step.phase for step in steps} == {Phase.MOVED}
        assert second.call(lambda: second.bucket.vbucket(0).get_meta(b"fruit").rev_seqno) == revision
        with SyncKvClient(second.address) as kv:
            kv.set("free", "yes")
            kv.set("ended", "yes")
        check_held(second.address, item.cas, how)


def test_a_lock_ends_though_the_wall_clock_goes_back(node: EmbeddedNode) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set("fruit", "apple")
        kv.lock("fruit", 2)
        began = time.monotonic()

        def set_back() -> None:
            node.bucket.ledger.clock = lambda: time.time() - 3600

        node.call(set_back)
        with pytest.raises(StatusError):
            kv.set("fruit", "plum")

        def is_free() -> bool:
            try:
                kv.set("fruit", "plum")
            except StatusError:
                return False
            return True

        wait_until(is_free, "the lock does not end", 5)
        assert time.monotonic() - began > 1.5


def test_a_lock_does_not_end_early_when_the_wall_clock_goes_forward() -> None:
    with start(vbuckets=1) as node, SyncKvClient(node.address) as kv:
        kv.set("fruit", "apple")
        item = kv.lock("fruit", 20)

        def set_forward() -> None:
            node.bucket.ledger.clock = lambda: time.time() + 3600

        node.call(set_forward)
        with pytest.raises(StatusError):
            kv.set("fruit", "plum")
        kv.unlock("fruit", item.cas)
