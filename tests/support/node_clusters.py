"""Clusters of several nodes for the client's tests: who has what is said by a map that is pushed to all of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from upriver.node import EmbeddedNode, start


def push_map(nodes: Sequence[EmbeddedNode], owners: Sequence[int], rev: int, ports: Sequence[int] = ()) -> None:
    """Tell all nodes who has which vbucket; ``ports`` where clients shall go instead of the nodes' own."""
    servers = [f"$HOST:{port}" for port in ports or [node.port for node in nodes]]
    config = {
        "rev": rev,
        "revEpoch": 2,
        "name": "default",
        "vBucketServerMap": {"serverList": servers, "vBucketMap": [[owner] for owner in owners]},
    }
    for node in nodes:
        node.call(node.node.state.cluster.push, json.dumps(config).encode())


@contextmanager
def two_nodes(vbuckets: int = 8) -> Iterator[tuple[EmbeddedNode, EmbeddedNode]]:
    """The first has the lower half, the second the upper one."""
    half = vbuckets // 2
    with ExitStack() as stack:
        first = stack.enter_context(start(vbuckets=vbuckets, initial_vbuckets=f"0-{half - 1}"))
        second = stack.enter_context(start(vbuckets=vbuckets, initial_vbuckets=f"{half}-{vbuckets - 1}"))
        push_map([first, second], [0] * half + [1] * half, rev=1)
        yield first, second
