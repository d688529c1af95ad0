"""``upriver load``."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.command_runner import Run
from tests.support.node_process import Client
from tests.support.terminal import COMMAND, PATIENCE_S, piped
from upriver.cli.commands.load import sample_batches, taken
from upriver.model import vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.wire.dialects.memcached import Get


def documents(run: Run, *arguments: str) -> dict[str, dict[str, object]]:
    found = map(json.loads, run("dump", *arguments).stdout.splitlines())
    return {document["key"]: document for document in found}


def test_samples_are_the_same_each_time(run: Run) -> None:
    result = run("load", "--sample", "500")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "500 documents are stored\n")
    held = documents(run)
    assert len(held) == 500
    assert json.loads(str(held["sample:00000007"]["value"]))["number"] == 7
    (batch,) = sample_batches(3)
    assert batch.column("key").to_pylist() == [b"sample:00000000", b"sample:00000001", b"sample:00000002"]
    assert run("load", "--sample", "0").stderr == "0 documents are stored\n"


def test_lines_from_standard_input(run: Run) -> None:
    lines = '{"key":"a","value":"first"}\n{"key":"a","value":"last","flags":3}\n{"key":"b","value":{"x":1}}\n'
    assert run("load", "-", given=lines).exit_code == 0
    held = documents(run)
    assert (held["a"]["value"], held["a"]["flags"], held["b"]["value"]) == ("last", 3, '{"x":1}')
    assert run("load", "-", given='{"key":"a","deleted":true}\n').exit_code == 0
    assert list(documents(run)) == ["b"]


def test_csv(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "fruit.csv"
    path.write_text('key,value,flags,colour\napple,"a, ""b""\nc",5,red\npear,,0,green\n')
    assert run("load", str(path)).exit_code == 0
    held = documents(run)
    assert (held["apple"]["value"], held["apple"]["flags"]) == ('a, "b"\nc', 5)
    assert held["pear"]["value"] == ""


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_with_meta_keeps_cas_and_revision(run: Run, tmp_path: Path, name: str) -> None:
    for value in ("first", "second"):
        run("set", "fruit", value)
    run("set", "gone", "soon")
    run("delete", "gone")
    path = str(tmp_path / name)
    assert run("dump", "--deletions", "-o", path).exit_code == 0
    with start(vbuckets=8) as other:
        assert run("load", "--with-meta", path, other.address).exit_code == 0
        held = documents(run, "--deletions", other.address)
    for document in (mine := documents(run, "--deletions")).values():
        assert document["rev_seqno"] == 2
    for document in (*mine.values(), *held.values()):
        del document["seqno"]
    assert held == mine


@pytest.mark.parametrize("given", ['{"key":"a","value":"b","cas":7}\n', '{"key":"a","value":"b","rev_seqno":7}\n'])
def test_with_meta_needs_a_version(run: Run, given: str) -> None:
    result = run("load", "--with-meta", "-", given='{"key":"c","value":"d","cas":7,"rev_seqno":1}\n' + given)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "for --with-meta has empty values" in result.stderr
    result = run("load", "--with-meta", "--sample", "5")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "the column cas for --with-meta is missing" in result.stderr
    assert documents(run) == {}


@pytest.mark.parametrize(
    ("name", "content", "code", "why"),
    [
        ("x.jsonl", b'{"key":"a","value":"b"}\nnonsense\n', 1, "x.jsonl: line 2: invalid JSON"),
        ("x.csv", b"name,value\na,b\n", 1, "the column key is missing"),
        ("x.csv", b"key,value,flags\na,b,many\n", 2, "invalid value 'many'"),
        ("x.csv", b"", 2, "x.csv"),
        ("x.parquet", b"nonsense", 2, "x.parquet"),
    ],
)
def test_what_cannot_be_read(run: Run, tmp_path: Path, name: str, content: bytes, code: int, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = run("load", str(path))
    assert result.exit_code == code, result.output
    assert why in result.stderr
    assert result.stderr.count("\n") == 1
    assert documents(run) == {}


@pytest.mark.parametrize(
    "arguments",
    [(), ("nowhere.jsonl",), ("nowhere.parquet",), ("--format", "parquet", "-"), ("a", "b", "c"), ("--sample", "x")],
)
def test_what_makes_no_sense(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("load", *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_columns_of_another_kind(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "text.parquet")
    pq.write_table(pa.table({"key": ["a"], "value": ["b"], "flags": pa.array([4], pa.int64())}), path)
    assert run("load", path).exit_code == 0
    assert documents(run)["a"]["flags"] == 4
    pq.write_table(pa.table({"key": ["a", None], "value": ["b", "c"]}), path)
    assert "empty values" in run("load", path).stderr
    pq.write_table(pa.table({"key": ["a"], "value": ["b"], "flags": [-1]}), path)
    assert "flags" in run("load", path).stderr
    assert taken(pa.record_batch({"key": [b"a"], "value": [b"b"], "cas": [1]}), False).schema.names == ["key", "value"]


@pytest.mark.parametrize(("event", "key"), [(9, "key"), (1, "k" * 70_000)])
def test_rows_that_no_packet_could_hold(run: Run, tmp_path: Path, event: int, key: str) -> None:
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"key": [key], "value": ["v"], "event": [event]}), path)
    result = run("load", str(path))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"{path}: row 0 cannot be a packet" in result.stderr
    assert documents(run) == {}


def test_refused_documents_are_counted(run: Run) -> None:
    lines = json.dumps({"key": "k" * 300, "value": "v"}) + "\n" + json.dumps({"key": "good", "value": "v"}) + "\n"
    result = run("load", "-", given=lines)
    assert result.exit_code == 1
    assert "1 documents are stored" in result.stderr
    assert "1 documents were refused" in result.stderr
    assert list(documents(run)) == ["good"]


def test_from_one_node_to_another(node: EmbeddedNode, run: Run) -> None:
    run("load", "--sample", "1000")
    with start(vbuckets=4) as other:
        dump = subprocess.Popen([*COMMAND, "dump", node.address], stdout=subprocess.PIPE)
        assert dump.stdout is not None
        load = subprocess.run(
            [*COMMAND, "load", "-", other.address], stdin=dump.stdout, capture_output=True, timeout=PATIENCE_S
        )
        dump.stdout.close()
        assert (dump.wait(PATIENCE_S), load.returncode) == (0, 0)
        assert len(documents(run, other.address)) == 1000
    assert piped("load", "--sample", "1", "127.0.0.1:1").returncode == 1


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_deletions_of_what_is_not_there_are_no_failure(run: Run, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    run("load", "--sample", "10")
    run("delete", "sample:00000003")
    assert run("dump", "--deletions", "-o", path).exit_code == 0
    with start(vbuckets=8) as other:
        result = run("load", path, other.address)
        assert (result.exit_code, result.stderr) == (0, "9 documents are stored\n")
        assert run("get", "sample:00000003", other.address).exit_code == 1


def test_deletions_are_not_counted_as_documents(run: Run) -> None:
    run("load", "--sample", "10")
    lines = '{"key":"new","value":"1"}\n{"key":"sample:00000003","deleted":true}\n{"key":"absent","deleted":true}\n'
    assert run("load", "-", given=lines).stderr == "1 documents are stored, 1 are deleted\n"
    version = '"cas":7,"rev_seqno":9'
    with_meta = f'{{"key":"sample:00000004","deleted":true,{version}}}\n{{"key":"more","value":"2",{version}}}\n'
    assert run("load", "--with-meta", "-", given=with_meta).stderr == "1 documents are stored, 1 are deleted\n"


def put(node: EmbeddedNode, key: bytes, value: bytes, vbucket: int) -> None:
    with Client(node.port) as client:
        client.set(key, value, vbucket)


def copies(node: EmbeddedNode, key: bytes, vbuckets: int) -> dict[int, bytes]:
    """Where a key is, by raw gets."""
    found = {}
    with Client(node.port) as client:
        for number in range(vbuckets):
            reply = client.ask(Get(key=key, vbucket=number))
            if reply.status == 0:
                found[number] = reply.body[4:]
    return found


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
@pytest.mark.parametrize("reader", ["dump", "tail"])
def test_a_key_in_two_vbuckets_keeps_both(run: Run, node: EmbeddedNode, tmp_path: Path, name: str, reader: str) -> None:
    own = vbucket_of(b"twin", 8)
    other = (own + 3) % 8
    put(node, b"twin", b"first", own)
    put(node, b"twin", b"second", other)
    put(node, b"plain", b"value", vbucket_of(b"plain", 8))
    path = tmp_path / name
    if reader == "dump":
        assert run("dump", "-o", str(path)).exit_code == 0
    elif path.suffix == ".jsonl":
        path.write_text(run("tail", "--from", "earliest", "--until-now", "--json").stdout)
    else:
        return
    with start(vbuckets=8) as target:
        result = run("load", "--with-meta", str(path), target.address)
        assert (result.exit_code, result.stderr) == (0, "3 documents are stored\n")
        assert copies(target, b"twin", 8) == {own: b"first", other: b"second"}
        assert copies(target, b"plain", 8) == {vbucket_of(b"plain", 8): b"value"}
    with start(vbuckets=8) as target:
        result = run("load", str(path), target.address)
        assert result.exit_code == 1
        assert "2 documents are stored" in result.stderr
        assert "'twin': it was in another vbucket than its key's; --with-meta" in result.stderr
        assert copies(target, b"twin", 8) == {own: b"first"}
    with start(vbuckets=2) as smaller:  # the keys' vbuckets differ there
        result = run("load", "--with-meta", str(path), smaller.address)
        assert result.exit_code == (1 if other >= 2 else 0)
        assert copies(smaller, b"plain", 2) == {vbucket_of(b"plain", 2): b"value"}


def test_misplaced_is_checked(run: Run) -> None:
    for wrong in ('"misplaced":1,"vbucket":3', '"misplaced":true'):
        result = run("load", "-", given=f'{{"key":"a","value":"b",{wrong}}}\n')
        assert (result.exit_code, "misplaced must be" in result.stderr) == (1, True)
