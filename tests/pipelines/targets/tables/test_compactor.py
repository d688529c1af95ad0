"""Compaction beside batches: what it merges, what it carries over, and what it drops."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.table_model import TableRun
from tests.support.table_parts import SEED, PartTable, number
from upriver.pipelines.core.workers import LocalWorkers, Work, Workers
from upriver.pipelines.targets.tables import compactor as module
from upriver.pipelines.targets.tables.compactor import Compactor, compact_table
from upriver.pipelines.targets.tables.table_keeper import SEED as SEED_PROPERTY
from upriver.tables import Edit, Table, read, vacuum_table
from upriver.tables.log import load


class Meanwhile(Workers):
    """Something happens after the merge and before its commit."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self._happen = happen

    def map(self, work: Work, items: Sequence[bytes], *rest: Any) -> list[bytes]:
        found = LocalWorkers().map(work, items, *rest)
        self._happen()
        return found


@pytest.fixture
def run(tmp_path: Path) -> TableRun:
    """Three files with two rows each."""
    run = TableRun(tmp_path, is_quiet=True)
    for vbucket in range(3):
        run.cluster.put(vbucket, "k", b'{"n": 1}')
        run.cluster.put(vbucket, "l", b'{"n": 2}')
        run.catch_up()
    assert len(run.keeper.table.snapshot.files) == 3
    return run


def compactor_of(run: TableRun) -> Compactor:
    keeper = run.keeper
    return Compactor(keeper.table, keeper.lock, keeper.record)


def test_small_files_become_one(run: TableRun) -> None:
    compactor = compactor_of(run)
    assert compactor.compact(LocalWorkers()) == 0  # three are not enough
    assert compactor.compact(LocalWorkers(), everything=True) == 3
    assert compactor.compact(LocalWorkers(), everything=True) == 0
    assert compactor.counts.merged_files == 3
    assert len(run.keeper.table.snapshot.files) == 1
    commit = DeltaTable(run.table.url).history(1)[0]
    assert (commit["operation"], commit["engineInfo"].partition("/")[0]) == ("OPTIMIZE", "upriver")
    run.check()


def test_rows_that_a_batch_hides_meanwhile_are_hidden_in_the_merged_file(run: TableRun) -> None:
    def batch() -> None:
        run.cluster.put(0, "k", b'{"n": 7}')
        run.cluster.put(1, "l", None)
        run.catch_up()

    assert compactor_of(run).compact(Meanwhile(batch), everything=True) == 3
    assert len(run.keeper.table.snapshot.files) == 2
    run.check()


def test_rows_of_a_batch_that_has_no_commit_yet_are_found_in_the_merged_file(run: TableRun) -> None:
    run.cluster.put(0, "k", b'{"n": 7}')
    compactor = compactor_of(run)
    run.meanwhile = lambda: compactor.compact(LocalWorkers(), everything=True)  # type: ignore
    run.catch_up()
    assert compactor.counts.merged_files >= 3
    assert run.keeper.counts.conflicts > 0
    run.check()


def test_a_merge_whose_input_is_gone_is_dropped(run: TableRun) -> None:
    compactor = compactor_of(run)
    merge = Meanwhile(lambda: DeltaTable(run.table.url).optimize.compact())
    assert compactor.compact(merge, everything=True) == 0
    files = {path.name for path in Path(run.table.url).glob("*.parquet")}
    assert len(files) == 4  # three that are gone from the table, one of delta-rs, none of ours
    run.keeper.look(LocalWorkers())
    run.check()
    assert run.keeper.counts.read_again == 0


def test_rows_that_another_program_deletes_meanwhile_are_repaired(run: TableRun) -> None:
    def hide() -> None:
        run._foreign_hide(load(run.table))

    compactor_of(run).compact(Meanwhile(hide), everything=True)
    run.keeper.look(LocalWorkers())
    run.check()
    assert run.keeper.counts.read_again > 0


def test_without_vectors_a_merge_that_is_too_late_is_dropped(tmp_path: Path) -> None:
    table = PartTable(tmp_path, vectors=False)
    for key in b"abc":
        table.add([(0, bytes([key]), number(1)), (1, bytes([key]), number(1))])
    table.table.commit(Edit("SET", properties={SEED_PROPERTY: SEED.hex()}, data_change=False))
    before = set(table.table.snapshot.files)
    late = Meanwhile(lambda: table.add([(0, b"a", number(2))]))
    assert compact_table(table.table, late) == 0
    assert len(set(table.table.snapshot.files) & before) == 2
    assert compact_table(table.table, LocalWorkers()) == 4
    assert table.contents()[0, b"a"] == number(2)


def test_it_runs_beside_spark_in_a_thread_and_here_at_once(run: TableRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose", lambda files, **_: [tuple(files)] if len([*files]) > 1 else [])
    compactor = compactor_of(run)
    running, resume = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert resume.wait(60)

    compactor.start(Meanwhile(wait))
    assert running.wait(60)
    compactor.start(LocalWorkers())  # one is running
    run.cluster.put(0, "k", b'{"n": 7}')
    run.catch_up()  # the table can be used meanwhile
    resume.set()
    compactor.stop()
    assert compactor.counts.merged_files == 3
    compactor.start(LocalWorkers())
    assert compactor.counts.merged_files == 3  # it was stopped
    later = compactor_of(run)
    later.start(LocalWorkers())
    assert later.counts.merged_files == 2
    run.check()


def test_a_failure_is_told_and_does_no_harm(
    run: TableRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("the disk is full\nand more")

    monkeypatch.setattr(module, "choose", lambda files, **_: [tuple(files)])
    with caplog.at_level(logging.WARNING, "upriver.pipelines"):
        compactor_of(run)._run(Meanwhile(fail))
    assert caplog.messages == [f"the table {run.table.url} could not be compacted: the disk is full"]
    run.check()


def test_files_that_no_version_needs_are_removed_now_and_then(run: TableRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VACUUM_S", 0.0)
    run.keeper.table.commit(
        Edit("SET", properties={"delta.deletedFileRetentionDuration": "interval 0 seconds"}, data_change=False)
    )
    compactor = compactor_of(run)
    compactor.compact(LocalWorkers(), everything=True)
    compactor.start(LocalWorkers())
    assert compactor.counts.vacuumed_files >= 3
    assert {path.name for path in Path(run.table.url).glob("*.parquet")} == run.keeper.table.snapshot.files.keys()
    run.check()


def test_batches_do_not_wait_for_vacuum(run: TableRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VACUUM_S", 0.0)
    compactor = compactor_of(run)
    vacuum, free = vacuum_table, list[bool]()

    def observed(table: Table) -> Any:
        def look() -> None:  # in another thread: the lock is for all uses in one
            if run.keeper.lock.acquire(blocking=False):
                run.keeper.lock.release()
                free.append(table is not run.keeper.table)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return vacuum(table)

    monkeypatch.setattr(module, "vacuum_table", observed)
    compactor.start(LocalWorkers())
    assert free == [True]


def test_a_table_without_its_mirror_is_compacted_too(run: TableRun) -> None:
    assert compact_table(Table.open(run.table), LocalWorkers()) == 3
    run.cluster.put(0, "k", b'{"n": 7}')
    run.catch_up()
    run.check()
    assert run.keeper.counts.read_again == 0


def test_columns_are_filled_for_rows_that_are_older_than_the_column(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, share=0.5)
    for key in range(10):
        run.cluster.put(0, f"k{key}", b'{"n": 1, "late": "x"}' if key == 9 else b'{"n": 1}')
    run.catch_up()
    assert "late" not in read(run.table.url).column_names
    for key in range(10):
        run.cluster.put(1, f"k{key}", b'{"n": 2, "late": "y"}')
    run.catch_up()
    assert read(run.table.url)["late"].to_pylist().count("x") == 0
    compactor_of(run).compact(LocalWorkers(), everything=True)
    rows = read(run.table.url)
    assert rows["late"].to_pylist().count("x") == 1
    assert rows["_raw"].null_count == 20
    run.check()


# A history


def test_a_history_is_compacted_while_batches_are_appended(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, history=True)

    def batch() -> None:
        run.cluster.put(0, "k", b'{"n": %d}' % run.number)
        run.catch_up()

    for _ in range(8):
        batch()
    history = run.keeper.history
    assert history is not None
    before = len(history.table.snapshot.files)
    assert before >= 8
    assert Compactor(history.table, run.keeper.lock).compact(Meanwhile(batch)) == before
    files = history.table.snapshot.files
    assert 1 < len(files) < before
    assert not history.table.storage.local("_upriver").exists()  # type: ignore[union-attr] # no key index is needed
    assert sorted(read(history.table.storage.url)["seqno"].to_pylist()) == list(range(1, 10))
    batch()
    run.check()
    run.start()
    batch()
    run.check()


def test_a_history_with_columns_and_rows_of_another_program(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, history=True)
    for _ in range(2):
        run.cluster.put(0, "k", b'{"n": 1}')
        run.catch_up()
    assert run.history is not None
    rows = read(run.history.url).slice(0, 1).append_column("theirs", pa.array([5]))
    write_deltalake(run.history.url, rows, mode="append", schema_mode="merge")
    table = Table.open(run.history)
    files = len(table.snapshot.files)
    assert compact_table(table, LocalWorkers()) == files
    assert len(table.snapshot.files) == 1
    assert sorted(read(run.history.url)["theirs"].to_pylist(), key=str) == [5, None, None]
    assert DeltaTable(run.history.url).to_pyarrow_table().num_rows == 3
