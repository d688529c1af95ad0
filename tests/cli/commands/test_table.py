"""``upriver table``."""

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("deltalake", reason="the pipelines extra is not installed")
pytest.importorskip("pyspark", reason="the pipelines extra is not installed")

from click.testing import Result
from deltalake import write_deltalake
from pyroaring import BitMap
from pyspark.sql import SparkSession

from tests.support.command_runner import Run
from tests.support.mirrored_tables import mirror_now
from tests.support.object_store import ObjectStore, object_store
from upriver.cli.commands.table import _size
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.core.workers import ProcessWorkers
from upriver.pipelines.targets.tables import verification
from upriver.pipelines.targets.tables.history import PROPERTY, HistorySchema
from upriver.tables import Edit, Table, TableStorage, read

__all__ = ["object_store"]


@pytest.fixture
def table(node: EmbeddedNode, tmp_path: Path) -> Path:
    """A table of what the node held."""
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d, "tags": [1]}' % n for n in range(20)})
    mirror_now(node.address, tmp_path / "t")
    return tmp_path / "t"


def change(node: EmbeddedNode, table: Path) -> None:
    """Give the table a second file, and dead rows in the first: half of the vbuckets are read again."""
    mirror_now(node.address, table, options={"vbuckets": "0-3"})


def one_line(result: Result, code: int, *parts: str) -> None:
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


# show


def test_show_says_what_a_table_is_like(run: Run, node: EmbeddedNode, table: Path) -> None:
    found = json.loads(run("table", "show", "--json", str(table)).stdout)
    assert (found["path"], found["kind"], found["rows"], found["dead_rows"]) == (str(table), "latest state", 20, 0)
    assert (found["files"], found["deletion_vectors"], found["query"]) == (1, True, "query")
    assert found["size"] == sum(path.stat().st_size for path in table.glob("*.parquet"))
    assert found["log_files"] == len(list((table / "_delta_log").iterdir()))
    assert found["columns"] | {"_key": "string", "_vbucket": "integer", "n": "long", "tags": "json"} == found["columns"]
    assert (found["last_batch"], found["reads_ahead"], found["foreign_changes"]) == (None, list(range(8)), [])
    text = run("table", "show", str(table)).stdout
    for line in ("rows             20 live, 0 dead", "query            query", "                 tags json"):
        assert line in text.splitlines()
    assert f"bucket           {found['bucket']}" in text
    assert "reads ahead      8 vbuckets: 0, 1, 2" in text


def test_show_knows_batches_and_dead_rows(run: Run, table: Path) -> None:
    held = Table.open(TableStorage.of(table))
    (path,) = held.snapshot.files
    held.commit(
        Edit("BATCH", dead={path: BitMap([0, 3])}, txn=("upriver-query", 7), properties={"upriver.due": "[1, 5]"})
    )
    text = run("table", "show", str(table)).stdout
    assert "rows             18 live, 2 dead" in text
    assert "last batch       7" in text
    assert "foreign changes  2 vbuckets: 1, 5" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (15.37e6, "15.4 MB"), (2e15, "2,000.0 TB")],
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert _size(count) == text


# compact and vacuum


def test_compact_merges_files_and_purges_dead_rows(run: Run, node: EmbeddedNode, table: Path) -> None:
    change(node, table)
    result = run("table", "compact", str(table))
    before, after = (line.split("\t") for line in result.stdout.splitlines())
    assert (before[:2], before[3]) == (["before", "2 files"], "20 rows")
    assert before[4] != "0 dead"
    assert (after[:2], after[3:]) == (["after", "1 files"], ["20 rows", "0 dead"])
    assert result.stderr == "2 files were replaced\n"
    assert run("table", "verify", str(table)).exit_code == 0
    assert run("table", "compact", str(table)).stderr == "nothing to compact\n"


def test_vacuum_deletes_what_no_version_needs(run: Run, node: EmbeddedNode, table: Path) -> None:
    change(node, table)
    run("table", "compact", str(table))
    files = {path.name for path in table.glob("*.parquet")}
    assert run("table", "vacuum", str(table)).stderr == "0 files, 0 bytes deleted\n"
    dry = run("table", "vacuum", "--retention", "0s", "--dry-run", str(table))
    assert {path.name for path in table.glob("*.parquet")} == files
    assert len(files & set(dry.stdout.split())) == 2
    assert "would be deleted" in dry.stderr
    result = run("table", "vacuum", "--retention", "0s", str(table))
    assert result.stdout == ""
    assert result.stderr.endswith(" deleted\n")
    assert len(list(table.glob("*.parquet"))) == 1
    assert read(table).num_rows == 20
    one_line(run("table", "vacuum", "--retention", "999h", str(table)), 2, "remembers removed files for 604800 s")


# verify


def test_equal_and_not(run: Run, node: EmbeddedNode, table: Path) -> None:
    result = run("table", "verify", str(table), node.address)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no differences\n")
    with SyncKvClient(node.address) as kv:
        kv.set("k3", b'{"n": 99}')
        vbucket = kv.set("new", b"{}").vbucket
    result = run("table", "verify", str(table))
    assert result.exit_code == 1
    assert f"{vbucket}\tmissing\tnew\n" in result.stdout
    assert result.stderr == "2 differences\n"
    lines = [json.loads(line) for line in run("table", "verify", "--json", str(table)).stdout.splitlines()]
    assert {(line["key"], line["difference"]) for line in lines} == {("k3", "different"), ("new", "missing")}
    assert "value" in next(line["columns"] for line in lines if line["key"] == "k3")
    other = "0" if vbucket else "1"
    assert "new" not in run("table", "verify", "--vbuckets", other, str(table)).stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [("key_prefix", "k1"), ("key_filter", "^k[1-3]$"), ("value_filter", '{"field": "n", "equals": 7}')],
)
def test_a_table_of_a_filter_is_compared_with_the_same(
    run: Run, node: EmbeddedNode, tmp_path: Path, name: str, text: str
) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(20)})
    mirror_now(node.address, tmp_path / "t", options={name: text})
    rows = read(tmp_path / "t").num_rows
    assert 0 < rows < 20
    option = f"--{name.replace('_', '-')}"
    result = run("table", "verify", option, text, str(tmp_path / "t"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no differences\n")
    assert f"{20 - rows} differences" in run("table", "verify", str(tmp_path / "t")).stderr


def test_a_large_table_is_compared_in_processes(
    run: Run, node: EmbeddedNode, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_SMALL_BYTES", 0)
    monkeypatch.setattr(ProcessWorkers, "count", 2)
    with SyncKvClient(node.address) as kv:
        kv.set("new", b"{}")
    result = run("table", "verify", str(table))
    assert (result.exit_code, result.stderr) == (1, "1 differences\n")


def test_a_killed_process_is_one_line(run: Run, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_SMALL_BYTES", 0)
    monkeypatch.setattr(ProcessWorkers, "count", 2)
    monkeypatch.setattr(verification, "Comparison", _Killed)
    one_line(run("table", "verify", str(table)), 1, "was killed, perhaps for lack of memory")


class _Killed:
    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, item: bytes) -> bytes:
        signal.raise_signal(signal.SIGKILL)
        return item


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_tables_are_verified_and_compacted_in_sparks_tasks(
    spark: SparkSession, run: Run, node: EmbeddedNode, table: Path
) -> None:
    assert spark.sparkContext.defaultParallelism == 2  # the command uses the session of this process
    change(node, table)
    result = run("table", "compact", "--master", "local[2]", str(table))
    assert (result.exit_code, result.stderr) == (0, "2 files were replaced\n")
    with SyncKvClient(node.address) as kv:
        kv.set("new", b"{}")
    result = run("table", "verify", "--master", "local[2]", str(table))
    assert (result.exit_code, result.stderr) == (1, "1 differences\n")
    for path in table.glob("*.parquet"):
        path.unlink()
    one_line(run("table", "verify", "--master", "local[2]", str(table)), 1, "No such file", ".parquet")


# Object stores


def test_a_table_in_an_object_store(run: Run, node: EmbeddedNode, object_store: ObjectStore) -> None:
    storage = object_store.new_storage()
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": 1}' for n in range(20)})
    mirror_now(node.address, storage)
    options = ("--storage-options", ",".join(f"{name}={value}" for name, value in storage.options.items()))
    assert json.loads(run("table", "show", "--json", *options, storage.url).stdout)["rows"] == 20
    assert run("table", "verify", *options, storage.url).exit_code == 0
    assert run("table", "compact", *options, storage.url).exit_code == 0
    assert run("table", "vacuum", *options, storage.url).exit_code == 0


# Errors

EVERY = [("show",), ("compact",), ("vacuum",), ("verify",)]


@pytest.mark.parametrize("words", EVERY)
def test_a_directory_without_a_table_is_one_line(run: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    one_line(run("table", *words, str(tmp_path / "nowhere")), 1, "nowhere: there is no table")
    one_line(run("table", *words, str(tmp_path)), 1, "there is no table")
    (tmp_path / "notes.txt").write_text("mine")
    one_line(run("table", *words, str(tmp_path)), 1, "not a table of Upriver; name one that")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("words", EVERY)
def test_a_table_of_another_program_is_one_line(run: Run, tmp_path: Path, table: Path, words: tuple[str, ...]) -> None:
    write_deltalake(tmp_path / "other", read(table).select(["_key"]))
    one_line(run("table", *words, str(tmp_path / "other")), 1, "not a table of Upriver; name one that")
    write_deltalake(tmp_path / "old", read(table).select(["_key"]).append_column("upriver_part", [["0"] * 20]),
                    partition_by=["upriver_part"])  # fmt: skip
    one_line(run("table", *words, str(tmp_path / "old")), 1, "build it again with: upriver run mirror --adopt --to")


def test_a_history_is_shown_and_compacted_but_not_verified(run: Run, tmp_path: Path) -> None:
    Table.create(TableStorage.of(tmp_path), HistorySchema(), {PROPERTY: "true"}, vectors=False)
    found = json.loads(run("table", "show", "--json", str(tmp_path)).stdout)
    assert (found["kind"], found["columns"]["event"]) == ("history", "string")
    for command in ("vacuum", "compact"):
        assert run("table", command, str(tmp_path)).exit_code == 0
    one_line(run("table", "verify", str(tmp_path)), 1, "the table is a history")


def test_invalid_options_are_one_line(run: Run, table: Path) -> None:
    one_line(run("table", "verify", "--value-filter", "{", str(table)), 2, "option valueFilter = '{': it must be JSON")
    one_line(run("table", "show", "--storage-options", "region", str(table)), 2, "'region' must be options such as")
    one_line(run("table", "show", "hdfs://host/table"), 1, "tables cannot be stored at hdfs:// addresses")
    one_line(run("table", "verify", str(table), "127.0.0.1:1"), 1, "cannot connect")
