"""``upriver replicate``."""

import asyncio
import time
from pathlib import Path
from typing import Any

from tests.support.command_runner import Run
from tests.support.terminal import PATIENCE_S, Terminal
from upriver.cli.commands.replicate import stop_when_there
from upriver.client import Address, Mover, SyncKvClient
from upriver.node import EmbeddedNode, start
from upriver.protocol.move.mover import Goal


def test_once(run: Run, node: EmbeddedNode) -> None:
    run("load", "--sample", "1000")
    with start(vbuckets=8, initial_vbuckets="none") as other:
        result = run("replicate", "0-7", "--once", "--to", other.address)
        assert (result.exit_code, result.output) == (0, "")
        assert {copy.state.value for copy in other.bucket} == {"replica"}
        compared = run("diff", node.address, other.address)
        assert compared.exit_code == 0, compared.output


def test_once_does_not_wait_for_what_a_flush_has_taken_back(run: Run, node: EmbeddedNode) -> None:
    with start(vbuckets=8, initial_vbuckets="none") as other:
        assert run("replicate", "0", "--once", "--to", other.address).exit_code == 0
        addresses = Address.parse(node.address), Address.parse(other.address)
        mover = Mover(*addresses, [0], Goal.REPLICATE)
        asyncio.run(asyncio.wait_for(stop_when_there(mover, *addresses, {0: 10}, {0}), PATIENCE_S))


def test_once_more(run: Run, node: EmbeddedNode) -> None:
    """Copies that have everything already, or much that is not of their source."""
    run("load", "--sample", "100")
    with start(vbuckets=8) as other:
        run("load", "--sample", "2000", other.address)
        run("vbucket", "set", "0-7", "replica", other.address)
        for _ in range(3):
            result = run("replicate", "0-7", "--once", "--to", other.address)
            assert (result.exit_code, result.output) == (0, "")
            compared = run("diff", node.address, other.address)
            assert compared.exit_code == 0, compared.output


def test_once_with_a_node_that_is_away_for_a_while(node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"key{n}": "value" for n in range(1000)})
    settings: dict[str, Any] = {"vbuckets": 8, "data": str(tmp_path / "copy"), "initial_vbuckets": "none"}
    with start(**settings) as other:
        port = other.port
    with Terminal("replicate", "0-7", "--once", "--to", f"127.0.0.1:{port}", node.address) as terminal:
        time.sleep(2)
        with start(**settings, port=port) as other:
            assert terminal.finish() == 0, terminal.output
            assert sum(copy.high_seqno for copy in other.bucket) == 1000


def test_until_ctrl_c(run: Run, node: EmbeddedNode) -> None:
    with (
        start(vbuckets=8, initial_vbuckets="none") as other,
        Terminal("replicate", "0-7", "--to", other.address, node.address) as terminal,
    ):
        run("load", "--sample", "500")
        # Somebody must read what it shows, or it waits at its terminal.
        terminal.wait_for(lambda _: sum(copy.high_seqno for copy in other.bucket) >= 500)
        terminal.interrupt()
        assert terminal.finish() == 130
        assert b"Traceback" not in terminal.output
        compared = run("diff", node.address, other.address)
        assert compared.exit_code == 0, compared.output


def test_what_fails(run: Run, node: EmbeddedNode) -> None:
    with start(vbuckets=8) as other:
        result = run("replicate", "1", "--to", other.address)
        assert result.exit_code == 1
        assert "the destination is active" in result.stderr or "both nodes are active" in result.stderr
    with start(vbuckets=8, initial_vbuckets="none") as other:
        other.call(other.bucket.create_vbucket, 1)
        result = run("replicate", "0-2", "--once", "--to", other.address)
        assert result.exit_code == 1
        assert "vbucket 1 is not replicated: both nodes are active" in result.stderr
        assert other.bucket.vbucket(2).state.value == "replica"
    unknown = run("replicate", "900", "--to", node.address)
    assert unknown.exit_code == 1
    assert "no vbucket 900" in unknown.stderr
    assert run("replicate", "1", "--to", "127.0.0.1:1", "--patience", "0.3").exit_code == 1
