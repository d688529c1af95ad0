"""Run commands in this process, against a node of the test."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from upriver.cli import main
from upriver.node import EmbeddedNode, start

Run = Callable[..., Result]


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    """A node with a few vbuckets."""
    with start(vbuckets=8) as node:
        yield node


@pytest.fixture
def run(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the node, in this process."""
    monkeypatch.setenv("UPRIVER_ADDRESS", node.address)
    monkeypatch.delenv("UPRIVER_PASSWORD", raising=False)

    def run(*arguments: str, given: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=given, prog_name="upriver")

    return run
