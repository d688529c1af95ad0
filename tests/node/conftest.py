"""What the node's tests share."""

from collections.abc import Iterator

import pytest

from tests.support.command_peers import (
    VBUCKETS,
    ManualNode,
    Peer,
    SessionPeer,
    SocketPeer,
    make_states,
    open_manual_node,
)
from upriver.node.embedded import start


@pytest.fixture
def manual() -> Iterator[ManualNode]:
    """A node without I/O."""
    opened = open_manual_node()
    with opened.bucket:
        yield opened


@pytest.fixture
def manual_on_disk() -> Iterator[ManualNode]:
    """A node without I/O that answers writes when they are on disk."""
    opened = open_manual_node(ack="disk")
    with opened.bucket:
        yield opened


@pytest.fixture
def session_peer(manual: ManualNode) -> SessionPeer:
    """A client of the node without I/O."""
    return manual.peer()


@pytest.fixture(params=["session", "compiled", "socket"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A client: of a session, of one with the compiled loop before it, and on a real socket."""
    if request.param == "socket":
        with start(vbuckets=VBUCKETS, initial_vbuckets="0-1") as node:
            make_states(node)
            with SocketPeer(node.host, node.port) as connected:
                yield connected
        return
    opened = open_manual_node(compiled=request.param == "compiled")
    with opened.bucket:
        yield SessionPeer(opened.node, after_send=opened.commit)
