"""What a task writes for a table, and the small result that the driver gets."""

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.broken_writer import refuse_keys
from tests.support.crashing_storage import CrashingStorage, StorageCrash
from tests.support.table_model import RULES, TableRun
from upriver.pipelines.apply.task_source import NodeTaskSource
from upriver.pipelines.targets.tables.error_file import ErrorPlace
from upriver.pipelines.targets.tables.table_keeper import table_task
from upriver.pipelines.targets.tables.table_task import (
    SAMPLE,
    Growth,
    TableTask,
    TaskResult,
    packed_vbuckets,
    unpacked_vbuckets,
)
from upriver.pipelines.targets.target import ReadAhead
from upriver.spark import ReadOptions, packed_ranges
from upriver.spark.batch_planner import next_offset, ranges
from upriver.tables import Column, FieldReport, PartWriter, TableSchema, TableStorage, read, vacuum_table


@pytest.fixture
def run(tmp_path: Path) -> TableRun:
    """An empty table with the column n."""
    return TableRun(tmp_path, is_quiet=True, schema=TableSchema([Column("n", "int")]), history=True)


def task_of(run: TableRun, **changed: Any) -> TableTask:
    table = run.keeper.table
    return replace(table_task(table, run.connect, run.settings, run.history), **changed)


def item(run: TableRun) -> bytes:
    """All changes that the stream has not brought yet."""
    return packed_ranges(list(ranges(run.offset, next_offset(run.offset, run.cluster.states, RULES))))


def result_of(run: TableRun, **changed: Any) -> TaskResult:
    return TaskResult.of_bytes(task_of(run, **changed)(item(run)))


def files(run: TableRun) -> set[str]:
    """Files of table and history outside of their logs."""
    assert run.history is not None
    return {file.path for each in (run.table, run.history) for file in each.list() if "_delta_log" not in file.path}


def test_a_result_names_files_and_dead_rows(run: TableRun) -> None:
    for number in range(5):
        run.cluster.put(0, f"k{number}", b'{"n": %d}' % number)
    run.catch_up()
    before = files(run)
    (old,) = run.keeper.table.snapshot.files
    run.cluster.put(0, "k3", b'{"n": 1, "x": 2}')
    run.cluster.put(0, "k4", None)
    run.cluster.put(1, "k3", b"{}")
    result = result_of(run)
    assert result.part is not None
    assert (result.part.live_rows, result.part.deleted_keys, result.outcome.changes) == (2, 1, 3)
    assert result.dead.keys() == {old}
    assert dict(result.report.unknown) == {"x": {"int": 1}}
    assert (result.version, result.schema) == (run.keeper.table.snapshot.version, run.keeper.table.schema)
    assert result.history is not None
    assert result.history.rows == 3
    added = files(run) - before
    assert {result.part.keys, result.history.path, *(file.path for file in result.part.files)} <= added
    assert all(path.startswith("_upriver/") or path.endswith(".parquet") for path in added)


def test_a_result_does_not_grow_with_the_documents(run: TableRun) -> None:
    """The driver receives nothing else."""

    def size(value: bytes) -> int:
        for number in range(200):
            run.cluster.put(number % 3, f"k{number}", value)
        size = len(task_of(run)(item(run)))
        run.catch_up()
        return size

    size(b"{}")
    small, large = (size(b'{"n": 1, "text": "%s"}' % (b"x" * length)) for length in (100, 20_000))
    assert large < small + 100
    assert large < 4000


def test_the_work_travels(run: TableRun) -> None:
    connect = partial(NodeTaskSource, ReadOptions.read({"address": "127.0.0.1:1"}))
    task = task_of(run, connect=connect)
    copy = pickle.loads(pickle.dumps(replace(task, storage=run.table)))
    assert (copy.schema, copy.basis, copy.connect.args) == (task.schema, task.basis, connect.args)


def test_a_replaced_vbucket_hides_all_its_rows(run: TableRun) -> None:
    for vbucket in (0, 1):
        run.cluster.put(vbucket, "k", b"{}")
        run.cluster.put(vbucket, "gone", b"{}")
    run.catch_up()
    run.cluster.vbuckets[0].fail_over(1)
    result = TaskResult.of_bytes(task_of(run).repair(packed_vbuckets([0])))
    assert result.outcome.replaced == {0: ReadAhead(2, 1, 1)}
    assert result.part is not None
    assert result.part.replaced == (0,)
    assert sum(len(BitMap.deserialize(each)) for each in result.dead.values()) == 2
    assert pickle.loads(task_of(run).relocate(result.part.keys.encode())) == result.dead


def test_a_task_that_fails_leaves_nothing(run: TableRun) -> None:
    run.cluster.put(0, "k", b"{}")
    run.catch_up()
    run.cluster.put(0, "k", b"new")
    before = files(run)

    class Failing(Exception):
        pass

    def connect(columns: Any) -> Any:
        source: Any = run.connect(columns)
        rows = source.rows

        def failing(asked: Any) -> Any:
            yield from rows(asked)
            raise Failing

        source.rows = failing
        return source

    with pytest.raises(Failing):
        task_of(run, connect=connect)(item(run))
    assert files(run) == before


def test_a_task_that_ends_leaves_only_files_that_nothing_references(run: TableRun) -> None:
    run.cluster.put(0, "k", b"{}")
    run.catch_up()
    run.cluster.put(0, "k", b"new")
    assert run.history is not None
    for operation in range(100):
        storage = CrashingStorage.of(run.table, operation)
        try:
            task_of(run, storage=storage, history=storage.beside(run.history))(item(run))
        except StorageCrash:
            continue
        break
    assert operation == 4, "a data file, its index, the keys and the history"
    assert run.keeper.history is not None
    left = files(run)
    for table in (run.keeper.table, run.keeper.history.table):
        vacuum_table(table, retention_s=0, now_s=2.0**32)
    assert files(run) < left, "vacuum removes what the attempts have left"
    assert read(run.table.url)["_seqno"].to_pylist() == [1]
    run.catch_up()
    run.check()


def test_several_refused_documents_cost_one_more_read(
    run: TableRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = PartWriter.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "chunk_bytes", 1)  # each row is a chunk of its own
    bad = [f"k{number}" for number in (2, 5, 6, 11)]
    refuse_keys(monkeypatch, *bad)
    for number in range(12):
        run.cluster.put(number % 3, f"k{number}", b'{"n": %d}' % number)
    reads = 0

    def connect(columns: Any) -> Any:
        source: Any = run.connect(columns)
        rows = source.rows

        def counted(asked: Any) -> Any:
            nonlocal reads
            reads += bool(asked)
            return rows(asked)

        source.rows = counted
        return source

    place = ErrorPlace(TableStorage.of(tmp_path / "errors"), "query", 1)
    result = result_of(run, connect=connect, errors=place)
    assert reads == 2
    assert result.part is not None
    assert (result.part.live_rows, result.refused, result.errors) == (8, 4, place.path(item(run)))
    found = pq.read_table(tmp_path / "errors" / result.errors)
    assert sorted(found["key"].to_pylist()) == sorted(map(str.encode, bad))


def test_a_task_stops_early_if_a_column_must_change(run: TableRun) -> None:
    for number in range(10):
        run.cluster.put(0, f"k{number}", b'{"n": 1.5, "x": %d}' % number)
    before = files(run)
    growth = Growth(share=0.01, at_least=1)
    stopped = result_of(run, growth=growth)
    assert (stopped.part, stopped.history) == (None, None)
    assert files(run) == before
    assert stopped.sample.decimals == {"n"}
    assert growth.grown(stopped.schema, stopped.sample).columns == (Column("n", "float"), Column("x", "int"))
    assert result_of(run, growth=replace(growth, at_least=SAMPLE)).part is None  # decimals are enough
    fits = growth.grown(stopped.schema, stopped.sample)
    assert result_of(run, growth=growth, schema=fits).part is not None


def test_deletions_are_no_sample(run: TableRun) -> None:
    run.cluster.put(0, "a", None)
    run.cluster.put(0, "b", b'{"x": 1}')
    chosen = result_of(run, growth=Growth(share=0.01, at_least=1))
    assert chosen.schema.columns == (Column("n", "int"), Column("x", "int"))
    assert (chosen.sample.documents, chosen.report.documents, chosen.report.unknown) == (1, 1, {})
    report = FieldReport(100, {"x": {"int": 1}})
    assert not Growth(share=0.02, at_least=1).grown(TableSchema(), report).columns
    assert not Growth(share=0.01, at_least=2).grown(TableSchema(), report).columns
    assert Growth(share=0.01, at_least=1).grown(TableSchema(), report).columns


@given(st.sets(st.integers(0, 65535)))
def test_vbuckets_survive_packing(vbuckets: set[int]) -> None:
    assert unpacked_vbuckets(packed_vbuckets(vbuckets)) == sorted(vbuckets)


def test_a_result_has_no_keys_and_no_values(run: TableRun) -> None:
    run.cluster.put(0, "a key of the user", b'{"n": 7777777, "field": "a value of the user"}')
    data = task_of(run)(item(run))
    assert b"a value of the user" not in data
    assert b"a key of the user" not in data
    assert json.dumps(7777777).encode() not in data
