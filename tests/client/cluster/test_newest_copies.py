"""Reading replicas where no node has the active copy."""

import asyncio
from functools import partial

from upriver.client import SyncKvClient
from upriver.client.cluster import NewestCopies
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start


def owners(*addresses: str) -> dict[int, int]:
    """The port of the node that each vbucket is read from."""

    async def ask() -> dict[int, int]:
        cluster = NewestCopies(",".join(addresses))
        try:
            known = await cluster.open()
            found = {number: known.owner(number) for number in range(known.vbuckets)}
        finally:
            await cluster.close()
        return {number: endpoint.port for number, endpoint in found.items() if endpoint is not None}

    return asyncio.run(ask())


def become(node: EmbeddedNode, state: VbucketState, *numbers: int) -> None:
    for number in numbers:
        node.call(partial(node.bucket.vbucket(number).set_state, state))


def test_the_newest_readable_copy_of_each_vbucket() -> None:
    with start(vbuckets=4) as first, start(vbuckets=4) as second:
        for node, count in ((first, 10), (second, 200)):
            with SyncKvClient(node.address) as kv:
                kv.set_many({b"%d" % number: b"x" for number in range(count)})
        assert owners(first.address) == dict.fromkeys(range(4), first.port)
        become(first, VbucketState.REPLICA, 1, 2, 3)
        become(second, VbucketState.REPLICA, 0, 1)
        become(second, VbucketState.DEAD, 2, 3)
        become(first, VbucketState.PENDING, 2)
        become(first, VbucketState.DEAD, 3)
        # An active copy wins, then the newest replica or pending copy; a dead copy is not read.
        assert owners(first.address, second.address) == {0: first.port, 1: second.port, 2: first.port}
        second.close()
        assert owners(first.address, second.address) == {0: first.port, 1: first.port, 2: first.port}
