"""The pytest fixture ``upriver_node``: a node of its own for each test that asks for one.

Options go through a marker::

    @pytest.mark.upriver(vbuckets=4, ack="disk")
    def test_my_consumer(upriver_node):
        consume(upriver_node.address)

The first test that uses the fixture imports the node: test suites that do not use it pay nothing.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from upriver.node import EmbeddedNode

#: Fewer vbuckets than a production cluster's 1,024: a test looks at each of them.
VBUCKETS = 64


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "upriver(**options): options of the node that upriver_node starts")


@pytest.fixture
def upriver_node(request: pytest.FixtureRequest) -> "Iterator[EmbeddedNode]":
    """A fresh node on a free port of the loopback interface, in memory unless the marker names a directory."""
    from upriver.node import start

    options: dict[str, object] = {"vbuckets": VBUCKETS}
    for marker in reversed(list(request.node.iter_markers("upriver"))):  # the closest one wins
        if marker.args:
            raise pytest.UsageError("pytest.mark.upriver takes options by name: upriver(vbuckets=4)")
        options |= marker.kwargs
    with start(**options) as node:
        yield node
