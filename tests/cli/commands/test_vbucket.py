"""``upriver vbucket``."""

import json

from tests.support.command_runner import Run
from upriver.model import VbucketState
from upriver.node import EmbeddedNode


def test_list(run: Run, node: EmbeddedNode) -> None:
    run("load", "--sample", "100")
    rows = [json.loads(line) for line in run("vbucket", "list", "--json").stdout.splitlines()]
    assert [row["vbucket"] for row in rows] == list(range(8))
    assert sum(row["high_seqno"] for row in rows) == 100
    assert rows[2]["vbucket_uuid"] == node.bucket.vbucket(2).failover_log.newest.vbucket_uuid
    assert len(run("vbucket", "list").stdout.splitlines()) == 8


def test_set_the_state(run: Run, node: EmbeddedNode) -> None:
    assert run("vbucket", "set", "1,3-4", "replica").exit_code == 0
    states = [node.bucket.vbucket(number).state for number in range(8)]
    assert [number for number, state in enumerate(states) if state is VbucketState.REPLICA] == [1, 3, 4]
    listed = run("vbucket", "list", "--state", "replica").stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["1", "3", "4"]


def test_delete_dead_ones(run: Run, node: EmbeddedNode) -> None:
    run("vbucket", "set", "1,3-4", "dead")
    assert run("vbucket", "delete", "1,3").exit_code == 0
    assert [vbucket.number for vbucket in node.bucket] == [0, 2, 4, 5, 6, 7]
    refused = run("vbucket", "delete", "4-5")
    assert refused.exit_code == 1
    assert refused.stderr == "upriver vbucket delete: vbucket 5: the vbucket is active; make it dead first\n"
    assert [vbucket.number for vbucket in node.bucket] == [0, 2, 5, 6, 7]
    assert run("vbucket", "delete", "1").stderr == "upriver vbucket delete: vbucket 1: Not my vbucket\n"


def test_what_cannot_be(run: Run) -> None:
    beyond = run("vbucket", "set", "900", "active")
    assert beyond.exit_code == 1
    assert beyond.stderr.count("\n") == 1
    for arguments in (("set", "0", "sleepy"), ("set", "x", "active"), ("list", "--state", "none"), ("what",)):
        result = run("vbucket", *arguments)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
