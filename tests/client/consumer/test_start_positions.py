"""Where a consumer begins and ends."""

import asyncio

import pytest

from upriver.client import Cluster, Progress, SyncKvClient
from upriver.client.consumer.start_positions import end_seqnos, high_seqnos, start_positions
from upriver.errors import InvalidArguments
from upriver.model import StreamPosition
from upriver.node import EmbeddedNode


def test_begin_and_end(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        written = [kv.set("a", str(n)) for n in range(3)][-1]
    assert written.vbucket_uuid is not None
    vbucket, uuid = written.vbucket, written.vbucket_uuid
    other = (vbucket + 1) % 64

    async def look() -> None:
        cluster = Cluster(upriver_node.address)
        await cluster.open()
        assert await high_seqnos(cluster, [vbucket, other]) | {} == (await high_seqnos(cluster, [other, vbucket]))
        assert (await high_seqnos(cluster, [vbucket]))[vbucket] == 3
        saved = {other: Progress.at(StreamPosition.at(5, 9))}
        latest = await start_positions(cluster, [vbucket, other], "latest", saved)
        assert latest[vbucket].position == StreamPosition.at(uuid, 3)
        assert latest[other] is saved[other]
        earliest = await start_positions(cluster, [vbucket], "earliest", {})
        assert earliest == {vbucket: Progress.beginning()}
        given = await start_positions(cluster, [vbucket, other], {vbucket: StreamPosition.at(1, 2)}, {})
        assert (given[vbucket].position.seqno, given[other]) == (2, Progress.beginning())
        assert await end_seqnos(cluster, [vbucket], "never") == {}
        assert await end_seqnos(cluster, [vbucket], "latest") == {vbucket: 3}
        assert await end_seqnos(cluster, [vbucket], {vbucket: 2}) == {vbucket: 2}
        with pytest.raises(InvalidArguments, match=f"no seqno for vbucket {other}"):
            await end_seqnos(cluster, [other], {vbucket: 2})
        await cluster.close()

    asyncio.run(look())
