"""Connections that are opened for streams."""

import asyncio
from typing import Any

import pytest

from upriver.client import Cluster
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.errors import InvalidArguments
from upriver.node import EmbeddedNode


def opened(node: EmbeddedNode, **settings: Any) -> tuple[Feed, Endpoint]:
    async def look() -> tuple[Feed, Endpoint]:
        cluster = Cluster(node.address)
        tracked = TrackedVbuckets({}, "fail", on_event=print, on_move=print)
        factory: Any = FeedFactory(cluster, tracked, receiver=None)  # type: ignore[arg-type]
        feed = await factory.open(Endpoint(node.host, node.port), ConsumerSettings(**settings), owner=None)
        await feed.close()
        await cluster.close()
        return feed, feed.endpoint

    return asyncio.run(look())


def test_the_dialect_decides_what_a_feed_can_do(upriver_node: EmbeddedNode) -> None:
    kinds = {dialect: opened(upriver_node, dialect=dialect)[0] for dialect in ("dcp", "upr", "upr_draft2")}
    assert [feed.speaks_dcp for feed in kinds.values()] == [True, False, False]
    assert [feed.is_draft for feed in kinds.values()] == [False, False, True]


def test_a_setting_that_the_node_refuses_is_named(upriver_node: EmbeddedNode) -> None:
    with pytest.raises(InvalidArguments, match="key_filter = "):
        opened(upriver_node, key_filter="(")
