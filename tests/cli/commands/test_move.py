"""``upriver move``."""

import json
import subprocess
from pathlib import Path

from tests.support.command_runner import Run
from tests.support.terminal import COMMAND, PATIENCE_S, piped
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start


def states(*nodes: EmbeddedNode, vbucket: int) -> list[str | None]:
    found = [node.bucket.existing(vbucket) for node in nodes]
    return [None if each is None else each.state.value for each in found]


def test_half_of_a_node_moves(run: Run, node: EmbeddedNode) -> None:
    run("load", "--sample", "1000")
    with start(vbuckets=8, initial_vbuckets="none") as other:
        result = run("move", "0-3", "--to", other.address, "--parallel", "2")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "4 moved\n")
        assert [states(node, other, vbucket=number) for number in (0, 3)] == [["dead", "active"]] * 2
        assert states(node, other, vbucket=4) == ["active", None]
        # Either node knows now where everything is.
        for address in (node.address, other.address):
            assert len(run("dump", address).stdout.splitlines()) == 1000
        again = run("move", "0-3", "--to", other.address)
        assert (again.exit_code, again.stderr) == (0, "4 moved\n")


def test_each_step_as_json(run: Run, node: EmbeddedNode) -> None:
    with start(vbuckets=8, initial_vbuckets="none") as other:
        result = run("move", "5", "--to", other.address, "--json")
        assert result.exit_code == 0
        steps = [json.loads(line) for line in result.stdout.splitlines()]
        phases = [step["phase"] for step in steps if not step["told"]]
        assert phases == ["asking", "preparing", "streaming", "announcing", "ending", "moved"]
        assert [step["told"] for step in steps if step["phase"] == "streaming"] == ["", "pending", "active"]


def test_what_fails(run: Run, node: EmbeddedNode) -> None:
    with start(vbuckets=8) as other:
        result = run("move", "1", "--to", other.address)
        assert result.exit_code == 1
        assert "both nodes are active" in result.stderr
    unreachable = run("move", "1", "--to", "127.0.0.1:1", "--patience", "0.5")
    assert unreachable.exit_code == 1
    assert unreachable.stderr.count("\n") == 1
    assert "cannot connect" in unreachable.stderr
    with start(vbuckets=4, initial_vbuckets="none") as smaller:
        result = run("move", "1", "--to", smaller.address)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "has 8 vbuckets and" in result.stderr
    assert run("move", "1").exit_code == 2
    assert run("move", "x", "--to", node.address).exit_code == 2
    for command in ("move", "replicate"):
        result = run(command, "1", "--to", node.address)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "choose another destination" in result.stderr
    assert states(node, vbucket=1) == ["active"]


def test_undo(run: Run, node: EmbeddedNode) -> None:
    with start(vbuckets=8, initial_vbuckets="none") as other:
        node.call(node.bucket.vbucket(2).set_state, VbucketState.DEAD)
        copy = other.call(other.bucket.create_vbucket, 2, VbucketState.REPLICA)
        other.call(copy.replace_failover_log, node.bucket.vbucket(2).failover_log)
        other.call(copy.set_state, VbucketState.PENDING)
        result = run("move", "2", "--to", other.address, "--undo")
        assert (result.exit_code, result.stderr) == (0, "1 undone\n")
        assert states(node, other, vbucket=2) == ["active", "replica"]


def test_killed_at_each_step_and_typed_again(node: EmbeddedNode, run: Run, tmp_path: Path) -> None:
    run("load", "--sample", "2000")
    before = {number: node.bucket.vbucket(number).high_seqno for number in range(8)}
    with start(vbuckets=8, initial_vbuckets="none") as other:
        for number, last in enumerate(("preparing", "streaming", "announcing", "ending")):
            command = [*COMMAND, "move", str(number), "--to", other.address, "--json", node.address]
            mover = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert mover.stdout is not None
            for line in mover.stdout:
                if json.loads(line)["phase"] == last:
                    break
            mover.kill()
            mover.wait(PATIENCE_S)
            mover.stdout.close()
            assert states(node, other, vbucket=number).count("active") <= 1
        done = piped("move", "0-3", "--to", other.address, node.address)
        assert (done.returncode, done.stderr) == (0, b"4 moved\n")
        for number in range(4):
            assert states(node, other, vbucket=number) == ["dead", "active"]
            assert other.bucket.vbucket(number).high_seqno == before[number]
