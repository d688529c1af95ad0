"""``upriver replicate``."""

from tests.cli.conftest import Run
from tests.cli.typed import Terminal
from upriver.node import EmbeddedNode, start


def test_once(run: Run, node: EmbeddedNode) -> None:
    run("load", "--sample", "1000")
    with start(vbuckets=8, initial_vbuckets="none") as other:
        result = run("replicate", "0-7", "--once", "--to", other.address)
        assert (result.exit_code, result.output) == (0, "")
        assert {copy.state.value for copy in other.bucket} == {"replica"}
        compared = run("diff", node.address, other.address)
        assert compared.exit_code == 0, compared.output


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
    unknown = run("replicate", "900", "--to", node.address)
    assert unknown.exit_code == 1
    assert "no vbucket 900" in unknown.stderr
    assert run("replicate", "1", "--to", "127.0.0.1:1", "--patience", "0.3").exit_code == 1
