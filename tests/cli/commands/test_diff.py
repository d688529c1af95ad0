"""``upriver diff``."""

import asyncio
import json
from collections.abc import Iterator, Mapping

import pytest

from tests.support.command_runner import Run
from tests.support.terminal import piped
from upriver.cli.commands import diff
from upriver.client import Address
from upriver.client.cluster.node_queries import VbucketStatus
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    """The node to compare with."""
    with start(vbuckets=8) as other:
        yield other


def test_equal_nodes(run: Run, node: EmbeddedNode, other: EmbeddedNode) -> None:
    assert run("diff", node.address, other.address).exit_code == 0
    for address in (node.address, other.address):
        run("load", "--sample", "2000", address)
    run("set", "sample:00000007", "x", other.address)
    run("load", "--sample", "10", other.address)  # another history, the same documents
    result = run("diff", node.address, other.address)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no differences\n")


def test_missing_extra_different(
    run: Run, node: EmbeddedNode, other: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.cli.commands.diff.CHANGES_MAX", 100)
    for address in (node.address, other.address):
        run("load", "--sample", "1000", address)
    run("delete", "sample:00000001", other.address)
    run("set", "sample:00000002", "different", other.address)
    run("set", "new", "extra", other.address)
    result = run("diff", "--json", node.address, other.address)
    assert result.exit_code == 1
    found = {line["key"]: line["difference"] for line in map(json.loads, result.stdout.splitlines())}
    assert found == {"sample:00000001": "missing", "sample:00000002": "different", "new": "extra"}
    assert result.stderr == "3 differences\n"
    plain = run("diff", node.address, other.address).stdout.splitlines()
    assert sorted(line.split("\t")[1] for line in plain) == ["different", "extra", "missing"]


def test_copies_and_missing_vbuckets(run: Run, node: EmbeddedNode, other: EmbeddedNode) -> None:
    run("load", "--sample", "100")
    run("load", "--sample", "100", other.address)
    run("vbucket", "set", "0-3", "replica", other.address)
    assert run("diff", node.address, other.address).exit_code == 0
    node.call(other.bucket.vbucket(2).set_state, VbucketState.DEAD)
    result = run("diff", node.address, other.address)
    assert (result.exit_code, result.stdout) == (1, "2\tmissing\t\n")
    assert run("diff", "--vbuckets", "3-7", node.address, other.address).exit_code == 0
    unknown = run("diff", "--vbuckets", "7-9", node.address, other.address)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert unknown.stderr == "upriver diff: neither node has vbucket 8, 9, except as a dead copy\n"


def test_as_typed(node: EmbeddedNode) -> None:
    assert piped("set", "fruit", "apple", node.address).returncode == 0
    with start(vbuckets=8) as other:
        done = piped("diff", node.address, other.address)
    assert done.returncode == 1
    assert done.stdout.endswith(b"\tmissing\tfruit\n")


def test_a_node_that_is_gone_for_good(
    run: Run, node: EmbeddedNode, other: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (node.address, other.address):
        run("load", "--sample", "100", address)
    asked = diff._held

    async def then_gone(address: Address) -> Mapping[int, VbucketStatus]:
        held = await asked(address)
        if str(address) == other.address:
            await asyncio.to_thread(other.close)
        return held

    monkeypatch.setattr(diff, "_held", then_gone)
    result = run("diff", "--patience", "0.3", node.address, other.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no stream for 0.3 s" in result.stderr
