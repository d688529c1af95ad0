"""``upriver dump``."""

import json
import os
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.command_runner import Run
from tests.support.terminal import COMMAND, PATIENCE_S, Terminal, piped
from upriver.cli.commands.dump import live
from upriver.client import SyncKvClient
from upriver.client.consumer import DIALECTS
from upriver.model import Change, Event, VbucketState, change_batch
from upriver.node import EmbeddedNode, start


def test_one_document_a_line(run: Run) -> None:
    run("set", "fruit", "apple", "--flags", "7")
    run("set", "gone", "soon")
    run("delete", "gone")
    result = run("dump")
    assert result.exit_code == 0
    (document,) = map(json.loads, result.stdout.splitlines())
    assert list(document) == ["key", "value", "flags", "expiry", "cas", "seqno", "vbucket", "rev_seqno"]
    assert (document["key"], document["value"], document["flags"]) == ("fruit", "apple", 7)
    told = [json.loads(line) for line in run("dump", "--deletions").stdout.splitlines()]
    assert {document["key"]: document.get("deleted", False) for document in told} == {"fruit": False, "gone": True}


def test_some_vbuckets_and_keys_only(run: Run, node: EmbeddedNode) -> None:
    assert run("load", "--sample", "200").exit_code == 0
    documents = [json.loads(line) for line in run("dump", "--vbuckets", "2-3", "--keys-only").stdout.splitlines()]
    assert {document["vbucket"] for document in documents} == {2, 3}
    assert all("value" not in document for document in documents)
    expected = sum(node.bucket.vbucket(number).high_seqno for number in (2, 3))
    assert len(documents) == expected


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_byte_survives_dump_and_load(run: Run, tmp_path: Path, form: str) -> None:
    held = {bytes([1 + n % 255]) * 3 + b"%d" % n: bytes([n % 256, 255, 0]) for n in range(300)}
    for node_key, value in held.items():
        assert run("set", os.fsdecode(node_key), "-", given=value).exit_code == 0
        if len(held) > 40 and node_key.endswith(b"40"):
            break
    path = str(tmp_path / f"all.{form}")
    assert run("dump", "-o", path).exit_code == 0
    with start(vbuckets=4) as other:
        assert run("load", path, other.address).exit_code == 0
        theirs = run("dump", other.address).stdout.splitlines()
    mine = run("dump").stdout.splitlines()

    def bare(lines: list[str]) -> list[dict[str, object]]:
        documents = [json.loads(line) for line in lines]
        rest = [{k: v for k, v in each.items() if k not in ("cas", "seqno", "vbucket")} for each in documents]
        return sorted(rest, key=str)

    assert bare(theirs) == bare(mine)
    assert len(mine) > 40


def test_parquet_in_several_groups(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.cli.commands.dump.ROWS_MAX", 100)
    run("load", "--sample", "1000")
    path = tmp_path / "all.parquet"
    assert run("dump", "-o", str(path)).exit_code == 0
    table = pq.read_table(path)
    assert table.num_rows == 1000
    assert table.column("key").to_pylist()[0].startswith(b"sample:")
    assert {"vbucket", "seqno", "cas", "flags", "expiry", "value"} <= set(table.schema.names)


def test_an_empty_node(run: Run, tmp_path: Path) -> None:
    assert run("dump").output == ""
    path = tmp_path / "none.parquet"
    assert run("dump", "-o", str(path)).exit_code == 0
    assert pq.read_table(path).num_rows == 0


def test_where_it_cannot_go(run: Run, tmp_path: Path) -> None:
    for arguments in (("--format", "parquet"), ("-o", str(tmp_path)), ("-o", str(tmp_path / "no" / "x.parquet"))):
        result = run("dump", *arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.count("\n") == 1
    unknown = run("dump", "--vbuckets", "900")
    assert unknown.exit_code == 1
    assert unknown.stderr.count("\n") == 1


def test_what_has_expired_is_left_out() -> None:
    now = int(time.time())
    rows = [
        Change(vbucket=0, event=Event.MUTATION, seqno=n + 1, key=b"%d" % n, expiry=expiry)
        for n, expiry in enumerate((0, now - 10, now + 100))
    ]
    assert live(change_batch(rows), now).column("key").to_pylist() == [b"0", b"2"]


def test_a_reader_who_goes_away(node: EmbeddedNode, run: Run) -> None:
    run("load", "--sample", "50000")
    dump = subprocess.Popen([*COMMAND, "dump", node.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert dump.stdout is not None
    assert dump.stderr is not None
    assert dump.stdout.readline().startswith(b'{"key":')
    dump.stdout.close()
    assert dump.wait(PATIENCE_S) == 1
    assert dump.stderr.read() == b""
    dump.stderr.close()


def test_at_a_terminal(node: EmbeddedNode, run: Run) -> None:
    run("set", "fruit", "apple")
    with Terminal("dump", node.address) as terminal:
        assert terminal.finish() == 0
    assert b'"value":"apple"' in terminal.output


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("documents", ["1", "5000"])
def test_a_full_disk_is_one_line(run: Run, node: EmbeddedNode, form: str, documents: str) -> None:
    assert run("load", "--sample", documents).exit_code == 0
    done = piped("dump", "--format", form, "-o", "/dev/full", node.address)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"No space left on device" in done.stderr


def test_a_node_that_is_gone_for_good() -> None:
    with start(vbuckets=8) as node:
        # More than is gathered for one piece and on its way behind it: while that is not read nothing goes on.
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"key{n}": b"v" * 1024 * 1024 for n in range(80)})
        command = [*COMMAND, "dump", "--patience", "0.3", node.address]
        dump = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert dump.stdout is not None
        assert dump.stdout.read(1) == b"{"
    _, said = dump.communicate(timeout=PATIENCE_S)
    assert dump.returncode == 1
    assert re.search(rb"upriver dump: vbucket \d: no stream for 0\.3 s: .*\n$", said), said


def lose_active_copies(node: EmbeddedNode, *numbers: int, state: VbucketState = VbucketState.REPLICA) -> None:
    for number in numbers:
        node.call(partial(node.bucket.vbucket(number).set_state, state))


@pytest.mark.parametrize("command", [("dump",), ("tail", "--from", "earliest", "--until-now", "--json")])
def test_vbuckets_without_an_active_copy_are_no_success(
    run: Run, node: EmbeddedNode, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.client.consumer.start_positions.OWNER_WAIT_S", 0.1)
    run("load", "--sample", "500")
    lose_active_copies(node, 0, 1, 2, 5)
    result = run(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "active copy of vbucket 0-2,5;" in result.stderr
    assert "--replicas" in result.stderr
    some = run(*command, "--vbuckets", "3,4,6,7")
    assert some.exit_code == 0
    lose_active_copies(node, *range(8))
    assert "active copy of vbucket 0-7;" in run(*command).stderr
    all_of_them = run(*command, "--replicas")
    assert all_of_them.exit_code == 0, all_of_them.stderr
    assert len({json.loads(line)["key"] for line in all_of_them.stdout.splitlines()}) == 500
    lose_active_copies(node, 4, state=VbucketState.DEAD)
    said = run(*command, "--replicas")
    assert (said.exit_code, said.stdout) == (1, "")
    assert "no node has an active copy, a replica or a pending copy of vbucket 4; make a copy active" in said.stderr
    assert "--replicas" not in said.stderr


def test_replicas_in_every_dialect(run: Run) -> None:
    with start(vbuckets=2, listen="127.0.0.1:0,dialect=upr_draft1") as node:
        run("load", "--sample", "50", node.address)
        lose_active_copies(node, 1)
        port = str(node.node.listen_addresses[1].port)
        for dialect in DIALECTS:
            where = ("--stream-port", port) if dialect == "upr_draft1" else ()
            read = ("tail", "--replicas", "--dialect", dialect, "--from", "earliest", "--until-now", "--json")
            result = run(*read, *where, node.address)
            if dialect == "tap":
                assert (result.exit_code, "tap has no seqnos and cannot do: replicas" in result.stderr) == (2, True)
                continue
            assert result.exit_code == 0, (dialect, result.stderr)
            assert len({json.loads(line)["key"] for line in result.stdout.splitlines()}) == 50, dialect


def test_the_newest_replica_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.client.consumer.start_positions.OWNER_WAIT_S", 0.1)
    with start(vbuckets=2) as behind, start(vbuckets=2) as ahead:
        run("load", "--sample", "10", behind.address)
        run("load", "--sample", "30", ahead.address)
        for node in (behind, ahead):
            lose_active_copies(node, 0, 1)
        both = f"{behind.address},{ahead.address}"
        result = run("dump", "--replicas", both)
        assert (result.exit_code, len(result.stdout.splitlines())) == (0, 30), result.stderr
