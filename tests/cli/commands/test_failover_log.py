"""``upriver failover-log``."""

import json

from tests.support.command_runner import Run
from upriver.node import EmbeddedNode


def test_all_and_some(run: Run, node: EmbeddedNode) -> None:
    newest = node.bucket.vbucket(3).failover_log.newest
    assert run("failover-log", "--vbuckets", "3").stdout == f"3\t0\t{newest.vbucket_uuid:#x}\t0\n"
    lines = [json.loads(line) for line in run("failover-log", "--json").stdout.splitlines()]
    assert [line["vbucket"] for line in lines] == list(range(8))
    assert lines[3] == {"vbucket": 3, "entry": 0, "vbucket_uuid": newest.vbucket_uuid, "seqno": 0}


def test_the_newest_comes_first(run: Run) -> None:
    run("load", "--sample", "100")
    for state in ("dead", "active"):
        assert run("vbucket", "set", "0", state).exit_code == 0
    entries = [json.loads(line) for line in run("failover-log", "--json", "--vbuckets", "0").stdout.splitlines()]
    assert [entry["entry"] for entry in entries] == list(range(len(entries)))
    assert entries[0]["seqno"] >= entries[-1]["seqno"] == 0


def test_an_unknown_vbucket(run: Run) -> None:
    result = run("failover-log", "--vbuckets", "0,500")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no vbucket 500" in result.stderr
    assert result.stderr.count("\n") == 1
