"""The pytest fixture ``upriver_node``: a node of its own for each test that asks for one.

Options go through a marker::

    @pytest.mark.upriver(vbuckets=4, data="somewhere")
    def test_my_consumer(upriver_node):
        consume(upriver_node.address)
"""

from collections.abc import Iterator

import pytest

from upriver.node.embedded import EmbeddedNode, start


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "upriver(**options): options of the node that upriver_node starts")


@pytest.fixture
def upriver_node(request: pytest.FixtureRequest) -> Iterator[EmbeddedNode]:
    """A fresh node in memory, on a free port of the loopback interface."""
    options: dict[str, object] = {"vbuckets": 64}
    for marker in reversed(list(request.node.iter_markers("upriver"))):
        options |= marker.kwargs
    with start(**options) as node:
        yield node
