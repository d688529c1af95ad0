"""Where a consumer begins and ends."""

import asyncio

import pytest

from upriver.client import Cluster, Progress, SyncKvClient
from upriver.client.consumer.feed_factory import failover_log, high_seqnos, opening_progress, range_ends, seqnos_in
from upriver.errors import InvalidArguments
from upriver.model import StreamPosition
from upriver.node import EmbeddedNode


def test_begin_and_end(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        written = [kv.set("a", str(n)) for n in range(3)][-1]
    vbucket = written.vbucket
    other = (vbucket + 1) % 64

    async def look() -> None:
        cluster = Cluster(upriver_node.address)
        await cluster.open()
        assert await high_seqnos(cluster, [vbucket, other]) | {} == (await high_seqnos(cluster, [other, vbucket]))
        assert (await high_seqnos(cluster, [vbucket]))[vbucket] == 3
        log = await failover_log(cluster, vbucket)
        assert log.newest.vbucket_uuid == written.vbucket_uuid
        saved = {other: Progress.at(StreamPosition.at(5, 9))}
        latest = await opening_progress(cluster, [vbucket, other], "latest", saved)
        assert latest[vbucket].position == StreamPosition.at(log.newest.vbucket_uuid, 3)
        assert latest[other] is saved[other]
        earliest = await opening_progress(cluster, [vbucket], "earliest", {})
        assert earliest == {vbucket: Progress.beginning()}
        given = await opening_progress(cluster, [vbucket, other], {vbucket: StreamPosition.at(1, 2)}, {})
        assert (given[vbucket].position.seqno, given[other]) == (2, Progress.beginning())
        assert await range_ends(cluster, [vbucket], "never") == {}
        assert await range_ends(cluster, [vbucket], "latest") == {vbucket: 3}
        assert await range_ends(cluster, [vbucket], {vbucket: 2}) == {vbucket: 2}
        with pytest.raises(InvalidArguments, match=f"no end for vbucket {other}"):
            await range_ends(cluster, [other], {vbucket: 2})
        await cluster.close()

    asyncio.run(look())


def test_seqnos_are_read_from_whole_entries_alone() -> None:
    entry = (7).to_bytes(2, "big") + (1234).to_bytes(8, "big")
    assert seqnos_in(entry * 1) == {7: 1234}
    assert seqnos_in(entry + entry[:5]) == {7: 1234}
    assert seqnos_in(b"") == {}
