"""``upriver stats``."""

import json

from tests.support.command_runner import Run
from tests.support.terminal import Terminal
from upriver.node import EmbeddedNode


def test_all_and_groups(run: Run) -> None:
    run("set", "fruit", "apple")
    lines = dict(line.split("\t") for line in run("stats").stdout.splitlines())
    assert lines["curr_items"] == "1"
    assert json.loads(run("stats", "--json").stdout)["curr_items"] == "1"
    assert run("stats", "--group", "vbucket").stdout.splitlines()[0] == "vb_0\tactive"


def test_an_unknown_group(run: Run) -> None:
    result = run("stats", "--group", "nonsense")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_at_a_terminal(node: EmbeddedNode) -> None:
    with Terminal("stats", node.address) as terminal:
        assert terminal.finish() == 0
    assert b"curr_items" in terminal.output
    assert b"name" in terminal.output
