"""What the conformance tests share."""

from collections.abc import Iterator

import pytest

from tests.conformance.store import Store
from upriver.node import EmbeddedNode, start


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    """A node with all vbuckets active, and a listener for the first draft."""
    with start(vbuckets=1024, listen="127.0.0.1:0,dialect=upr_draft1") as running:
        yield running


@pytest.fixture
def store(node: EmbeddedNode) -> Iterator[Store]:
    """A connection to it for ordinary commands."""
    with Store(node.port) as made:
        yield made
