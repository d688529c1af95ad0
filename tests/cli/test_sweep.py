"""Commands that read, against raw gets: each kind of data, default options, restarts of the node in between.

The commands run in processes of their own. A reader passes only if it has exactly what raw gets of every key in every
vbucket find, or fails and says what it leaves out.
"""

import json
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.every_kind_of_data import KEYS, VBUCKETS, Documents, own, raw, write_everything
from tests.support.node_process import wait_until
from tests.support.restartable_node import RestartableNode
from upriver.client.consumer import DIALECTS
from upriver.node import EmbeddedNode, start

pytestmark = [pytest.mark.slow]

TIMEOUT_S = 300


def command(*arguments: str | Path, given: bytes | None = None, code: int = 0) -> bytes:
    process = subprocess.run(
        [sys.executable, "-m", "upriver", *map(str, arguments)],
        input=given,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == code, (arguments, process.returncode, process.stderr[-2000:])
    return process.stdout


def of_lines(lines: bytes) -> Documents:
    """The documents that lines of a dump or of tail leave, the last line of each winning."""
    found: Documents = {}
    now = time.time()
    for line in lines.splitlines():
        document = json.loads(line)
        if "key" not in document and "key_base64" not in document:  # an event of a vbucket
            assert document["event"] in ("flush", "reset"), document
            found = {place: value for place, value in found.items() if place[0] != document["vbucket"]}
            continue
        place = document["vbucket"], _bytes(document, "key")
        found.pop(place, None)
        if not document.get("deleted") and not 0 < document["expiry"] <= now:
            found[place] = _bytes(document, "value"), document["flags"]
    return found


def _bytes(document: dict[str, str], name: str) -> bytes:
    return b64decode(document[f"{name}_base64"]) if f"{name}_base64" in document else document[name].encode()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[RestartableNode]:
    node = RestartableNode(tmp_path / "source", "disk", "upr_draft1", VBUCKETS)
    try:
        write_everything(node.port)
        wait_until(lambda: (own(b"expired"), b"expired") not in raw(node.port), "the item has expired")
        node.kill()
        node.start()
        yield node
    finally:
        node.kill()


def restarted(node: RestartableNode) -> Documents:
    node.kill()
    node.start()
    return raw(node.port)


def test_what_is_there(source: RestartableNode) -> None:
    found = raw(source.port)
    gone = {b"before flush", b"expired", b"deleted", b"deleted with meta"}
    assert {key for _, key in found} == set(KEYS) - gone
    assert len(found) == len(KEYS) - len(gone) + 1  # the twin


def test_dump(source: RestartableNode, tmp_path: Path) -> None:
    expected = raw(source.port)
    assert of_lines(command("dump", source.address)) == expected
    path = tmp_path / "all.parquet"
    command("dump", "-o", path, source.address)
    columns = pq.read_table(path).to_pylist()
    assert {(row["vbucket"], row["key"]): (row["value"], row["flags"]) for row in columns} == expected
    keys = map(json.loads, command("dump", "--keys-only", source.address).splitlines())
    assert {(document["vbucket"], _bytes(document, "key")) for document in keys} == set(expected)
    assert of_lines(command("dump", "--deletions", source.address)) == expected
    assert restarted(source) == expected
    assert of_lines(command("dump", source.address)) == expected


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tail(source: RestartableNode, dialect: str, tmp_path: Path) -> None:
    expected = raw(source.port)
    read_all = ["tail", "--from", "earliest", "--until-now", "--json", "--dialect", dialect]
    if dialect == "upr_draft1":
        read_all += ["--stream-port", str(source.settings["stream_port"])]
    assert of_lines(command(*read_all, source.address)) == expected
    if dialect == "tap":
        return
    # In two parts, with a restart between them.
    read_all += ["--checkpoint", str(tmp_path / "seen")]
    lines = command(*read_all, "--limit", "50", source.address)
    assert restarted(source) == expected
    assert of_lines(lines + command(*read_all, source.address)) == expected


@pytest.fixture
def target() -> Iterator[EmbeddedNode]:
    with start(vbuckets=VBUCKETS) as node:
        yield node


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_dump_and_load(source: RestartableNode, target: EmbeddedNode, tmp_path: Path, name: str) -> None:
    expected = raw(source.port)
    path = tmp_path / name
    command("dump", "-o", path, source.address)
    command("load", "--with-meta", path, target.address)
    assert raw(target.port) == expected
    command("diff", source.address, target.address)
    with start(vbuckets=VBUCKETS) as plain:
        command("load", path, plain.address, code=1)  # two documents are refused, which the exit code says
        placed = {place: value for place, value in expected.items() if own(place[1]) == place[0]}
        assert raw(plain.port) == placed
        command("diff", source.address, plain.address, code=1)


def test_tail_into_load(source: RestartableNode, target: EmbeddedNode) -> None:
    lines = command("tail", "--from", "earliest", "--until-now", "--json", source.address)
    command("load", "--with-meta", "-", target.address, given=lines)
    assert raw(target.port) == raw(source.port)


def test_backup_and_restore(source: RestartableNode, tmp_path: Path) -> None:
    expected = raw(source.port)
    command("backup", source.directory, tmp_path / "backup")
    command("restore", tmp_path / "backup", tmp_path / "restored")
    restored = RestartableNode(tmp_path / "restored", "disk", "dcp", VBUCKETS)
    try:
        assert raw(restored.port) == expected
        assert restarted(restored) == expected
    finally:
        restored.kill()


@pytest.mark.parametrize("how", ["replicate", "move"])
def test_to_another_node(source: RestartableNode, tmp_path: Path, how: str) -> None:
    expected = raw(source.port)
    destination = RestartableNode(tmp_path / "to", "disk", "dcp", VBUCKETS, "--initial-vbuckets", "none")
    try:
        numbers = f"0-{VBUCKETS - 1}"
        if how == "move":
            command("move", numbers, "--to", destination.address, source.address)
        else:
            command("replicate", "--once", numbers, "--to", destination.address, source.address)
            command("diff", source.address, destination.address)
            assert of_lines(command("dump", "--replicas", destination.address)) == expected
            command("dump", destination.address, code=1)
            for number in range(VBUCKETS):
                command("vbucket", "set", str(number), "active", destination.address)
        assert raw(destination.port) == expected
        assert restarted(destination) == expected
        assert of_lines(command("dump", destination.address)) == expected
    finally:
        destination.kill()
