"""``upriver tail``."""

import json
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.command_runner import Run
from tests.support.terminal import COMMAND, PATIENCE_S, Terminal
from upriver.client import SyncKvClient
from upriver.client.consumer.settings import DIALECTS, DRAFTS
from upriver.node import EmbeddedNode, start


@pytest.mark.parametrize("dialect", DIALECTS)
def test_from_the_beginning_in_every_dialect(run: Run, dialect: str) -> None:
    with start(vbuckets=8, listen=f"127.0.0.1:0,dialect={dialect}") as node:
        _, port = node.node.listen_addresses[1].address.split(":")
        for command in (("set", "fruit", "apple"), ("set", "gone", "soon"), ("delete", "gone")):
            assert run(*command, node.address).exit_code == 0
        where = ("--stream-port", port, node.address) if dialect in DRAFTS else (node.address,)
        result = run("tail", "--dialect", dialect, "--from", "earliest", "--until-now", "--json", *where)
    assert result.exit_code == 0, result.output
    told = {(line["key"], line["event"]) for line in map(json.loads, result.stdout.splitlines())}
    assert {("fruit", "mutation"), ("gone", "deletion")} <= told


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_without_a_listener_of_its_own(run: Run, dialect: str) -> None:
    for command in (("set", "fruit", "apple"), ("delete", "fruit")):
        assert run(*command).exit_code == 0
    result = run("tail", "--dialect", dialect, "--from", "earliest", "--until-now", "--json")
    if dialect == "upr_draft1":
        assert (result.exit_code, result.stdout) == (1, "")
        assert "--listen HOST:PORT,dialect=upr_draft1" in result.stderr
        assert "--stream-port" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        (line,) = map(json.loads, result.stdout.splitlines())
        assert (line["key"], line["event"]) == ("fruit", "deletion")


def test_plain_lines(run: Run) -> None:
    run("set", "fruit", "ap\tple")
    vbucket, seqno, *rest = run("tail", "--from", "earliest", "--until-now").stdout.rstrip("\n").split("\t")
    assert (int(vbucket) in range(8), seqno) == (True, "1")
    assert rest == ["mutation", "fruit", "ap\\tple"]


def test_from_a_position(run: Run, node: EmbeddedNode) -> None:
    run("load", "--sample", "200")
    vbucket = node.bucket.vbucket(5)
    uuid, high = vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno
    for spelled in (f"5:{uuid}:{high - 2}", f"5:{uuid:#x}:{high - 2}:{high - 2}:{high - 2}"):
        result = run("tail", "--from", spelled, "--vbuckets", "5", "--until-now", "--json")
        seqnos = [json.loads(line)["seqno"] for line in result.stdout.splitlines()]
        assert seqnos == [high - 1, high]


def test_filters_and_limit(run: Run) -> None:
    run("load", "--sample", "200")
    few = run("tail", "--from", "earliest", "--until-now", "--key-filter", "7$", "--keys-only", "--json")
    documents = [json.loads(line) for line in few.stdout.splitlines()]
    assert len(documents) == 20
    assert all(document["key"].endswith("7") and document.get("value", "") == "" for document in documents)
    assert len(run("tail", "--from", "earliest", "-n", "7").stdout.splitlines()) == 7
    bad = run("tail", "--from", "earliest", "--key-filter", "(")
    assert bad.exit_code == 1
    assert bad.stderr.count("\n") == 1


def test_a_checkpoint_goes_on(run: Run, tmp_path: Path) -> None:
    arguments = ("tail", "--from", "earliest", "--until-now", "--checkpoint", str(tmp_path / "seen"), "--json")
    run("set", "first", "1")
    assert json.loads(run(*arguments).stdout)["key"] == "first"
    assert run(*arguments).stdout == ""
    run("set", "second", "2")
    assert json.loads(run(*arguments).stdout)["key"] == "second"


def test_a_lost_position_is_a_reset_or_an_error(run: Run) -> None:
    run("load", "--sample", "100")
    position = ("tail", "--from", "0:4711:5", "--vbuckets", "0", "--until-now", "--json")
    first = json.loads(run(*position).stdout.splitlines()[0])
    assert (first["event"], first["vbucket"]) == ("reset", 0)
    refused = run(*position, "--on-rollback", "fail")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("upriver tail: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dialect", "morse"), ("--from", "tomorrow"), ("--from", "1:2"), ("--from", "1:2:3:4:2"), ("-n", "0"),
        ("--on-rollback", "cry"), ("--vbuckets", "x"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("tail", *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_an_unknown_vbucket(run: Run) -> None:
    result = run("tail", "--vbuckets", "900")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_an_end_is_not_waited_for_for_ever(run: Run) -> None:
    run("set", "fruit", "apple")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = str(closed.getsockname()[1])
    result = run("tail", "--from", "earliest", "--until-now", "--patience", "0.3", "--stream-port", port)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no stream for 0.3 s" in result.stderr


def test_live_at_a_terminal_until_ctrl_c(node: EmbeddedNode) -> None:
    with Terminal("tail", "--from", "earliest", node.address) as terminal, SyncKvClient(node.address) as kv:
        kv.set("fruit", "apple")
        terminal.wait_for(lambda output: b"apple" in output)
        kv.set("fruit", "pear")
        terminal.wait_for(lambda output: b"pear" in output)
        terminal.interrupt()
        assert terminal.finish() == 130
    assert b"Traceback" not in terminal.output
    assert b"\x1b[32mmutation" in terminal.output


def test_live_in_a_pipe(node: EmbeddedNode) -> None:
    with SyncKvClient(node.address) as kv:
        command = [*COMMAND, "tail", "--from", "earliest", "--json", node.address]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert tail.stdout is not None
        kv.set("fruit", "apple")
        assert json.loads(tail.stdout.readline())["value"] == "apple"
        kv.set("fruit", "pear")
        assert json.loads(tail.stdout.readline())["value"] == "pear"
        tail.send_signal(2)
        _, complaints = tail.communicate(timeout=PATIENCE_S)
    assert (tail.returncode, complaints) == (130, b"")


def test_filters_are_written_as_the_help_says(run: Run) -> None:
    shown = " ".join(run("tail", "--help").stdout.split())
    example = re.search(r"upriver (tail --key-filter .*?) upriver tail", shown)
    assert example is not None
    run("set", "order:1", '{"state": "paid"}')
    run("set", "order:2", '{"state": "open"}')
    run("set", "basket", '{"state": "paid"}')
    result = run(*shlex.split(example[1]), "--from", "earliest", "--until-now")
    assert [line.split("\t")[3] for line in result.stdout.splitlines()] == ["order:1"], result.output


def test_keys_without_values_overwrite_nothing(run: Run) -> None:
    run("set", "fruit", "apple")
    run("set", "empty", "")
    lines = run("tail", "--from", "earliest", "--until-now", "--keys-only", "--json").stdout
    assert [json.loads(line).get("value") for line in lines.splitlines()] == [None, None]
    loaded = run("load", "-", given=lines)
    assert (loaded.exit_code, "the value is missing" in loaded.stderr) == (1, True)
    assert run("get", "fruit").stdout == "apple"
    plain = run("tail", "--from", "earliest", "--until-now", "--keys-only").stdout.splitlines()
    assert sorted(line.split("\t")[2:] for line in plain) == [["mutation", "empty"], ["mutation", "fruit"]]


def test_a_checkpoint_that_skipped_superseded_versions_is_not_continued_with_history(run: Run, tmp_path: Path) -> None:
    base = ("tail", "--from", "earliest", "--until-now", "--json", "--checkpoint")
    for number, options in enumerate(((), ("--history",))):
        path = str(tmp_path / f"seen{number}")
        run("set", "fruit", "apple")
        assert run(*base, path, *options).exit_code == 0
        refused = run(*base, path, *(() if options else ("--history",)))
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "with history" in refused.stderr
        run("set", "fruit", "pear")
        assert run(*base, path, *options).stdout.count("\n") == 1


def test_a_checkpoint_is_not_continued_with_other_filters(run: Run, tmp_path: Path) -> None:
    run("load", "--sample", "100")
    path = str(tmp_path / "seen")
    base = ("tail", "--from", "earliest", "--until-now", "--json", "--checkpoint", path)
    assert len(run(*base, "--key-filter", "7$").stdout.splitlines()) == 10
    for other in ((), ("--key-filter", "8$"), ("--key-filter", "7$", "--keys-only")):
        refused = run(*base, *other)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "it was written with key_filter '7$' and cannot be continued" in refused.stderr
        assert refused.stderr.count("\n") == 1
    run("set", "sample:7", "new")
    assert len(run(*base, "--key-filter", "7$").stdout.splitlines()) == 1
    copy = str(tmp_path / "copy")
    assert run("checkpoint", "backup", path, copy).exit_code == 0
    assert run(*base[:-1], copy).exit_code == 1
    assert run("checkpoint", "reset", path).exit_code == 0
    assert len(run(*base).stdout.splitlines()) == 101
