"""A table stays equal to the documents of a cluster, whatever happens to nodes, drivers, tasks and the table."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.crashing_storage import StorageCrash
from tests.support.depth import examples
from tests.support.odd_documents import ODD
from tests.support.sample_tables import READERS
from tests.support.table_model import RULES, TableRun, held
from upriver.errors import (
    CheckpointError,
    FilesLost,
    ForeignData,
    OptionError,
    OtherBucket,
    StorageError,
    TableConflict,
)
from upriver.pipelines.core.range_pipeline import RangeTask
from upriver.pipelines.core.workers import LocalWorkers
from upriver.pipelines.targets.tables import compactor, table_keeper
from upriver.pipelines.targets.tables.description import describe_table
from upriver.pipelines.targets.tables.table_keeper import AHEAD, DUE, TableKeeper, opened, reads_ahead, table_task
from upriver.pipelines.targets.tables.table_task import unpacked_vbuckets
from upriver.spark import BucketIdentity, packed_ranges
from upriver.spark.batch_planner import next_offset, ranges
from upriver.spark.offsets import Offset
from upriver.tables import Column, Edit, Table, TableSchema, TableStorage, read, vacuum_table
from upriver.tables import storage as storage_module
from upriver.tables.log import commit_path, load
from upriver.tables.vacuum import ATTEMPT_S


@pytest.fixture(autouse=True)
def _memory_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power."""
    monkeypatch.setattr(storage_module, "sync", lambda _: None)


@pytest.fixture
def quiet(tmp_path: Path) -> TableRun:
    """A mirror to which nothing happens by itself. Vbuckets 0, 1 and 2; keys k and l in the first, k in the second."""
    run = TableRun(tmp_path, is_quiet=True)
    run.cluster.put(0, "k", b'{"n": 1}')
    run.cluster.put(0, "l", b'{"n": 2}')
    run.cluster.put(1, "k", b'{"n": 3}')
    run.catch_up()
    return run


def operations(run: TableRun) -> list[str]:
    """What the table's history calls its versions, the oldest first."""
    return [each["operation"] for each in DeltaTable(run.table.url).history()][::-1]


# Random histories


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    exact=st.booleans(),
    vectors=st.sampled_from((True, True, True, False)),
    history=st.booleans(),
)
def test_a_table_ends_with_the_contents_of_the_cluster(
    tmp_path_factory: pytest.TempPathFactory, seed: int, exact: bool, vectors: bool, history: bool
) -> None:
    directory = tmp_path_factory.mktemp("run")
    run = TableRun(directory, seed, exact=exact, vectors=vectors, history=history)
    run.run(batches=8)
    run.check()
    shutil.rmtree(directory)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("seed", [3, 4])
def test_all_readers_see_the_same(tmp_path: Path, seed: int, vectors: bool) -> None:
    run = TableRun(tmp_path, seed, exact=bool(seed % 2), vectors=vectors)
    run.cluster.put(0, "k", b'{"n": 1}')
    run.run(batches=8)
    run.check()
    expected = sorted((key.decode(), seqno) for (_, key), (seqno, _) in run.cluster.held.items() if key != b"\xff\xfe")
    assert expected
    for name, rows in readers(run.table).items():
        assert sorted(row for row in rows if row[0] is not None) == expected, name


def readers(storage: TableStorage) -> dict[str, list[tuple[Any, Any]]]:
    return {name: list(found(storage.url, storage.options, "_seqno")) for name, found in READERS.items()}


# Batches


def test_a_batch_that_comes_again_is_known(quiet: TableRun) -> None:
    run, version = quiet, quiet.keeper.table.snapshot.version
    run.number -= 1
    run.start()
    assert run.ends
    assert run.keeper.plan(run.number, LocalWorkers()) is None
    assert (run.keeper.batch_number, run.keeper.table.snapshot.version) == (0, version)
    assert run.keeper.counts.replayed == 1


def test_a_batch_without_changes_costs_no_commit(quiet: TableRun) -> None:
    version = quiet.keeper.table.snapshot.version
    quiet.catch_up()
    quiet.catch_up()
    assert quiet.keeper.table.snapshot.version == version
    quiet.cluster.put(0, "new", b"{}")
    quiet.catch_up()
    assert quiet.keeper.batch_number == 3
    quiet.check()


def test_deletions_of_keys_that_the_table_does_not_have_leave_nothing_behind(quiet: TableRun) -> None:
    version, files = quiet.keeper.table.snapshot.version, [*quiet.table.list()]
    quiet.cluster.put(2, "absent", None)
    quiet.catch_up()
    assert quiet.keeper.table.snapshot.version == version
    assert [*quiet.table.list()] == files


def test_key_lists_are_removed_after_the_commit(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", b"new")
    quiet.catch_up()
    assert [file.path for file in quiet.table.list() if file.path.endswith(".keys")] == []


def test_another_process_that_commits_the_batch_is_told(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", b"new")
    task = quiet.keeper.plan(1, LocalWorkers())
    assert task is not None
    end = next_offset(quiet.offset, quiet.cluster.states, RULES)
    results = [task(packed_ranges(list(ranges(quiet.offset, end))))]
    other = quiet.keeper
    quiet.start()
    quiet.catch_up()
    with pytest.raises(CheckpointError, match="another process has committed this batch"):
        other.commit(results, 1, lambda _: results, LocalWorkers())
    quiet.check()


# Rollbacks, and reads ahead of the stream


def test_a_rollback_replaces_the_vbucket_until_the_stream_has_passed(quiet: TableRun) -> None:
    run, vbucket = quiet, quiet.cluster.vbuckets[0]
    vbucket.fail_over(1)
    run.cluster.put(0, "m", b"{}")
    end = next_offset(run.offset, run.cluster.states, RULES)
    run.cluster.put(0, "o", b"{}")  # after the plan, so the table is ahead
    run.attempt(end)
    run.offset, run.number = end, run.number + 1
    assert held(run.table).keys() == {(0, b"k"), (0, b"m"), (0, b"o"), (1, b"k")}
    assert reads_ahead(run.keeper.table).keys() == {0}
    assert (run.keeper.counts.undone, run.keeper.counts.read_again) == (1, 1)
    run.start()  # it is a property of the table
    run.catch_up()
    assert AHEAD not in run.keeper.table.properties
    run.check()


def test_a_read_whose_branch_is_lost_is_read_again_without_a_batch(quiet: TableRun) -> None:
    quiet.cluster.put(0, "lost", b"{}")
    quiet.keeper.rebuild()
    quiet.keeper.repair(LocalWorkers())
    assert (0, b"lost") in held(quiet.table)
    quiet.cluster.vbuckets[0].fail_over(1)
    quiet.keeper.look(LocalWorkers())
    assert (0, b"lost") not in held(quiet.table)
    quiet.check()


def test_a_read_of_a_vbucket_without_an_owner_is_kept(quiet: TableRun) -> None:
    quiet.cluster.put(0, "m", b"{}")
    quiet.keeper.rebuild()
    quiet.keeper.repair(LocalWorkers())
    read_before = reads_ahead(quiet.keeper.table)[0]
    away = quiet.cluster.vbuckets.pop(0)
    quiet.cluster.vbuckets[2].write("x", delete=False)
    with pytest.MonkeyPatch.context() as patch:
        nodes = quiet.keeper._nodes
        patch.setattr(nodes, "states", lambda vbuckets: {n: quiet.cluster.states[n] for n in vbuckets if n})
        quiet.keeper.repair(LocalWorkers())
    assert reads_ahead(quiet.keeper.table)[0] == read_before
    quiet.cluster.vbuckets = {0: away, **quiet.cluster.vbuckets}
    quiet.catch_up()
    quiet.check()


def test_a_tombstone_that_is_purged_between_plan_and_read(tmp_path: Path) -> None:
    """Neither the read ahead nor the stream from the beginning reports that deletion."""
    run = TableRun(tmp_path, is_quiet=True, exact=False)
    run.cluster.put(0, "k", b"{}")
    run.cluster.put(0, "l", b"{}")
    run.keeper.rebuild()
    run.keeper.repair(LocalWorkers())
    end = next_offset(run.offset, run.cluster.states, RULES)
    task = run.keeper.plan(0, LocalWorkers())
    assert task is not None
    run.cluster.put(0, "k", None)
    run.cluster.put(0, "m", b"{}")
    run.cluster.vbuckets[0].purge()
    asked = packed_ranges(list(ranges(run.offset, end)))
    run.keeper.commit([task(asked)], 0, lambda task: [task(asked)], LocalWorkers())
    run.offset, run.number = end, 1
    run.catch_up()
    run.catch_up()
    run.check()


def test_a_repair_uses_all_workers_if_there_is_enough_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TableRun(tmp_path, is_quiet=True, vbuckets=5)
    for vbucket in range(5):
        for number in range(10 * (vbucket + 1)):
            run.cluster.put(vbucket, f"k{number}", b'{"n": 1}')
    run.catch_up()
    shares: list[list[list[int]]] = []

    class Two(LocalWorkers):
        count = 2

        def map(self, work: Any, items: Any, *rest: Any) -> list[bytes]:
            shares.append([unpacked_vbuckets(item) for item in items])
            return super().map(work, items, *rest)

    for least in (table_keeper.REPAIR_CHANGES_MIN, 10):
        monkeypatch.setattr(table_keeper, "REPAIR_CHANGES_MIN", least)
        run.keeper.rebuild()
        run.keeper.repair(Two())
    assert shares == [[[0, 1, 2, 3, 4]], [[0, 1, 4], [2, 3]]]
    run.check()


def test_results_of_another_basis_are_not_committed(quiet: TableRun) -> None:
    """The rows of a batch are older than a repair that was committed after the tasks had planned."""
    quiet.cluster.put(0, "k", b'{"n": 30}')
    end = next_offset(quiet.offset, quiet.cluster.states, RULES)
    asked = packed_ranges(list(ranges(quiet.offset, end)))
    settings = quiet.settings
    early = table_task(opened(quiet.table, settings), quiet.connect, settings, None)(asked)
    quiet.cluster.put(0, "k", b'{"n": 40}')
    quiet.keeper.rebuild()
    assert quiet.keeper.plan(1, LocalWorkers()) is not None
    assert held(quiet.table)[0, b"k"][0] == 4
    runs = []

    def run(task: Any) -> list[bytes]:
        runs.append(task)
        return [task(asked)]

    quiet.keeper.commit([early], 1, run, LocalWorkers())
    assert len(runs) == 1
    assert held(quiet.table)[0, b"k"][0] == 4
    assert {file.path for file in quiet.table.list() if file.path.endswith(".parquet")} >= set(
        quiet.keeper.table.snapshot.files
    )
    quiet.offset, quiet.number = end, 2
    quiet.catch_up()
    quiet.check()


def test_a_table_that_lost_batches_is_built_again(quiet: TableRun) -> None:
    quiet.save()
    quiet.cluster.put(0, "k", None)
    quiet.cluster.put(1, "new", b"{}")
    quiet.catch_up()
    quiet.lose_batches()
    assert (1, b"new") not in held(quiet.table)
    quiet.catch_up()
    quiet.check()
    assert quiet.keeper.counts.read_again == 3


# Other programs


def test_rows_of_another_program_are_replaced_by_the_nodes_documents(quiet: TableRun) -> None:
    for number, change in enumerate((quiet._foreign_append, quiet._foreign_delete, quiet._foreign_hide)):
        quiet.cluster.put(0, f"more{number}", b"{}")
        change(load(quiet.table))
        assert {(number, key): seqno for (number, key), (seqno, _) in _rows(quiet)} != {
            name: seqno for name, (seqno, _) in quiet.cluster.held.items()
        }
        quiet.catch_up()
        quiet.check()


def _rows(run: TableRun) -> Iterator[Any]:
    """Rows of the table; a key may come twice."""
    rows = read(run.table.url, ["_vbucket", "_key", "_seqno"]).to_pylist()
    return (((row["_vbucket"], row["_key"].encode()), (row["_seqno"], b"")) for row in rows)


def test_a_foreign_append_during_a_batch_is_repaired_after_a_crash_too(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", b'{"n": 50}')
    end = next_offset(quiet.offset, quiet.cluster.states, RULES)
    asked = packed_ranges(list(ranges(quiet.offset, end)))
    task = quiet.keeper.plan(1, LocalWorkers())
    assert task is not None
    results = [task(asked)]
    quiet._foreign_append(load(quiet.table))
    quiet.keeper.commit(results, 1, lambda task: [task(asked)], LocalWorkers())
    assert quiet.keeper.counts.conflicts == 1
    assert json.loads(quiet.keeper.table.properties[DUE])
    quiet.offset, quiet.number = end, 2
    quiet.start()
    quiet.catch_up()
    assert not json.loads(quiet.keeper.table.properties[DUE])
    quiet.check()


def test_an_optimize_during_a_batch_is_no_reason_to_read_again(quiet: TableRun) -> None:
    quiet.cluster.put(2, "x", b"{}")
    quiet.catch_up()
    quiet.cluster.put(0, "k", b'{"n": 50}')
    quiet.meanwhile = DeltaTable(quiet.table.url).optimize.compact  # type: ignore[method-assign, assignment]
    quiet.catch_up()
    assert "OPTIMIZE" in operations(quiet)
    assert (quiet.keeper.counts.conflicts, quiet.keeper.counts.read_again) == (1, 0)
    quiet.check()


def test_a_foreign_change_in_a_version_that_the_log_no_longer_has(quiet: TableRun) -> None:
    quiet._keeper = None
    DeltaTable(quiet.table.url).delete("_vbucket = 0 and _key = 'k'")
    snapshot = load(quiet.table)
    assert snapshot is not None
    quiet._foreign_column(snapshot)
    DeltaTable(quiet.table.url).create_checkpoint()
    quiet.table.delete([commit_path(version) for version in range(snapshot.version + 1)])
    quiet.cluster.put(2, "x", b"{}")
    quiet.catch_up()
    quiet.check()
    assert "NOTE LOST VERSIONS" in operations(quiet)
    version = quiet.keeper.table.snapshot.version
    quiet.start()  # the log has our newest batch now
    assert quiet.keeper.table.snapshot.version == version


@pytest.mark.parametrize("place", ["touched_vbuckets", "Edit"])
def test_the_storage_fails_while_a_merge_looks_what_another_program_changed(
    quiet: TableRun, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    keeper = quiet.keeper
    real = getattr(table_keeper, place)

    def failing(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(table_keeper, place, real)
        raise StorageError(quiet.table.url, "timed out")

    class Meanwhile(LocalWorkers):
        def map(self, *given: Any) -> list[bytes]:
            found = super().map(*given)
            DeltaTable(quiet.table.url).delete("_vbucket = 0 and _key = 'k'")
            monkeypatch.setattr(table_keeper, place, failing)
            return found

    with pytest.raises(StorageError):
        quiet.compact(Meanwhile())
    quiet.cluster.put(2, "x", b"{}")
    assert quiet.keeper is keeper
    quiet.catch_up()
    quiet.check()
    assert keeper.counts.read_again == 1


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("spared_s", [0, 2 * ATTEMPT_S])
def test_vacuum_between_tasks_and_commit(tmp_path: Path, vectors: bool, spared_s: float) -> None:
    """Even without a retention it spares what tasks have just written. If all is gone, the tasks run again."""
    run = TableRun(tmp_path, is_quiet=True, vectors=vectors, history=True)
    for key in "kl":
        run.cluster.put(0, key, b'{"n": 1}')
    run.catch_up()
    runs: list[object] = []

    def vacuum() -> None:
        if len(runs) == 1:  # not before the tasks, but after them
            vacuum_table(Table.open(run.table), retention_s=0, now_s=time.time() + 1 + spared_s)
        runs.append(True)

    run.meanwhile = vacuum  # type: ignore[method-assign]
    run.cluster.put(0, "k", b'{"n": 9}')
    keeper = run.keeper
    run.catch_up()
    run.check()
    run.cluster.put(0, "k", b'{"n": 10}')
    run.catch_up()
    run.check()
    assert operations(run).count("BATCH") == 3
    assert keeper.counts.read_again == 0


@pytest.mark.parametrize("what", [".parquet", ".bin"])
def test_a_table_whose_files_are_lost_is_read_again(quiet: TableRun, what: str) -> None:
    for key in "mop":
        quiet.cluster.put(2, key, b'{"n": 50}')
    quiet.catch_up()
    quiet.cluster.put(2, "m", b"new")
    quiet.catch_up()
    DeltaTable(quiet.table.url).delete("_vbucket = 1")
    lost = [file.path for file in quiet.table.list() if file.path.endswith(what)]
    assert lost
    quiet.table.delete(lost)
    quiet.start()
    quiet.cluster.put(0, "k", b'{"n": 51}')
    quiet.catch_up()
    quiet.check()
    assert operations(quiet).count("NOTE LOST FILES") == 1
    quiet.start()
    assert operations(quiet).count("NOTE LOST FILES") == 1


@pytest.mark.parametrize("vectors", [True, False])
def test_a_file_that_another_program_removes_and_deletes_during_the_tasks(tmp_path: Path, vectors: bool) -> None:
    run = TableRun(tmp_path, is_quiet=True, vectors=vectors)
    for key in "kl":
        run.cluster.put(0, key, b'{"n": 1}')
        run.catch_up()
    run.cluster.put(0, "k", b'{"n": 9}')
    calls: list[object] = []

    def meanwhile() -> None:
        if not calls:
            DeltaTable(run.table.url).optimize.compact()
            run._foreign_sidecars(None)
            vacuum_table(Table.open(run.table), retention_s=0, now_s=time.time() + 1)
        calls.append(True)

    run.meanwhile = meanwhile  # type: ignore[method-assign]
    with contextlib.suppress(FilesLost):  # which the runner takes for a temporary failure
        run.catch_up()
    if run.number == 2:
        run.start()
        run.catch_up()
    run.check()


def test_restore_also_restores_what_was_due(quiet: TableRun) -> None:
    DeltaTable(quiet.table.url).delete("_vbucket = 1")
    deleted = quiet.keeper.table.snapshot.version + 1
    quiet.keeper.record(quiet.keeper.table.refresh())
    assert json.loads(quiet.keeper.table.properties[DUE])
    DeltaTable(quiet.table.url).restore(deleted)
    assert quiet.keeper.plan(1, LocalWorkers()) is not None
    quiet.check()


def test_restore_of_a_smaller_schema_during_a_batch(quiet: TableRun) -> None:
    """The files of the batch have columns that the table has no more, so the batch runs again."""
    before = quiet.keeper.table.snapshot.version
    quiet.cluster.put(0, "k", b'{"n": 5, "later": "x"}')
    quiet.cluster.put(0, "l", b'{"n": 6, "later": "y"}')
    quiet.catch_up()
    assert "later" in dict(quiet.keeper.table.schema.columns)
    quiet.cluster.put(0, "k", b'{"n": 7, "later": "z"}')

    def restore() -> None:
        quiet.meanwhile = lambda: None  # type: ignore[method-assign]
        DeltaTable(quiet.table.url).restore(before)

    quiet.meanwhile = restore  # type: ignore[method-assign]
    with pytest.raises(TableConflict):
        quiet.catch_up()
    quiet.catch_up()
    quiet.check()


def test_a_vector_that_the_table_does_not_need_any_more_may_be_gone(quiet: TableRun) -> None:
    """Then no program can tell which rows a deletion has touched, and all are read again."""
    for key in "mop":
        quiet.cluster.put(2, key, b'{"n": 50}')
    quiet.catch_up()
    quiet.cluster.put(2, "m", b"new")
    quiet.catch_up()
    vectors = [file.path for file in quiet.table.list("_upriver/") if file.path.endswith(".bin")]
    assert vectors
    snapshot = load(quiet.table)
    assert snapshot is not None
    (hidden,) = (file for file in snapshot.files.values() if file.deletion_vector)
    quiet._foreign_hide(replace(snapshot, files={hidden.path: hidden}))
    quiet.table.delete(vectors)
    quiet.catch_up()
    quiet.check()
    assert quiet.keeper.counts.read_again == 3


def test_without_vectors_a_batch_does_not_mind_a_compaction_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TableRun(tmp_path, is_quiet=True, vectors=False)
    for vbucket in range(3):
        run.cluster.put(vbucket, "k", b'{"n": 1}')
        run.catch_up()
    others = dict(run.keeper.table.snapshot.files)
    first = next(path for path, file in others.items() if file.statistics["maxValues"]["_vbucket"] == 0)
    del others[first]
    monkeypatch.setattr(compactor, "choose", lambda *_, **__: [tuple(others.values())])
    run.cluster.put(0, "k", b'{"n": 2}')

    def compact() -> None:
        run.meanwhile = lambda: None  # type: ignore[method-assign]
        run.compact(LocalWorkers())

    run.meanwhile = compact  # type: ignore[method-assign]
    run.catch_up()
    assert "compacted 2" in run.told
    assert run.keeper.counts.conflicts == 0
    run.check()


# Whose table it is


def test_a_table_of_another_mirror_is_refused_and_left_as_it_is(quiet: TableRun) -> None:
    version = quiet.keeper.table.snapshot.version
    quiet.query = "second"
    with pytest.raises(ForeignData, match="use --adopt to replace what it holds"):
        quiet.start()
    assert Table.open(quiet.table).snapshot.version == version


def test_a_table_is_adopted(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", None)
    quiet.lose_checkpoint()
    assert quiet.keeper.batch_number == -1
    assert not held(quiet.table)
    quiet.catch_up()
    quiet.check()
    quiet.start()  # it is ours now, so the option changes nothing
    assert quiet.keeper.batch_number == 0
    quiet.check()


def test_batches_that_the_checkpoint_has_lost_do_not_hide_others(quiet: TableRun) -> None:
    """Spark numbers batches from 0 again, if its part of the checkpoint was removed."""
    run = quiet
    run.cluster.put(2, "gone", b'{"n": 4}')
    run.catch_up()
    run.lose_log()
    run.cluster.put(2, "gone", None)
    run.cluster.vbuckets[2].purge()  # the stream will not report the deletion
    run.cluster.put(0, "new", b'{"n": 5}')
    run.catch_up()
    run.check()
    assert run.keeper.counts.replayed == 0
    assert run.keeper.batch_number == 0
    version = run.keeper.table.snapshot.version
    run.start()
    assert not run.keeper.starts_over
    assert run.keeper.table.snapshot.version == version
    assert describe_table(run.keeper.table).last_batch == 0


def test_an_old_copy_of_the_checkpoint(quiet: TableRun) -> None:
    """The numbers of later batches come a second time, with other changes."""
    run = quiet
    before = run.number, run.logged, run.offset
    for key in "abc":
        run.cluster.put(1, key, b'{"n": 1}')
        run.catch_up()
    run.cluster.put(1, "d", b'{"n": 1}')
    run.number, run.logged, run.offset = before
    run.start()
    run.catch_up()
    run.check()
    assert operations(run).count("START OVER") == 1


def test_other_batches_under_the_numbers_of_a_running_driver(quiet: TableRun) -> None:
    """Two drivers use copies of one checkpoint. The one that finds batches of the other reads everything again."""
    run = quiet
    run.copy_checkpoint()
    run._other = run._other._replace(keeper=run.keeper)  # type: ignore[union-attr]
    run.start()
    for key in "abc":
        run.cluster.put(1, key, b'{"n": 1}')
        run.catch_up()
    run.other_driver()
    run.cluster.put(1, "d", b'{"n": 1}')
    run.catch_up()
    run.check()
    assert run.keeper.counts.replayed == 0
    assert operations(run).count("START OVER") == 1
    run.cluster.put(1, "e", b'{"n": 1}')
    run.catch_up()
    run.check()
    run.other_driver()
    run.cluster.put(1, "f", b'{"n": 1}')
    with pytest.raises(CheckpointError, match="with a copy of this checkpoint: only one may"):
        run.catch_up()
    assert (1, b"f") not in held(run.table)
    run.start()
    run.catch_up()
    run.check()


@pytest.mark.parametrize("is_restarted", [True, False])
def test_another_batch_with_the_number_of_the_last_one(quiet: TableRun, is_restarted: bool) -> None:
    """As after a power failure that Spark's entry for the batch has not survived, and the table has."""
    run = quiet
    before = run.checkpoint
    run.cluster.put(1, "a", b'{"n": 1}')
    run.catch_up()
    run.cluster.put(1, "b", b'{"n": 1}')
    run.checkpoint = before
    run.logged, run.ends[run.number] = run.number, next_offset(run.offset, run.cluster.states, RULES)
    if is_restarted:
        run.start()
    run.catch_up()
    run.check()
    assert run.keeper.counts.replayed == 0
    assert run.keeper.batch_number == run.number - 1


def test_a_batch_of_another_driver_between_batches_that_changed_nothing(quiet: TableRun) -> None:
    """Such a batch is not in the table, so its number says nothing about the batch of the other driver."""
    run = quiet
    other = run.checkpoint
    run.start()
    run.cluster.put(1, "a", b'{"n": 1}')
    run.catch_up()
    run._other, run.checkpoint = run.checkpoint, other
    run.logged, run.ends[run.number] = run.number, run.offset
    run.number += 1
    run.catch_up()
    run.check()
    assert operations(run).count("START OVER") == 1


# Deletion vectors


def test_vectors_can_be_switched_off_and_on(quiet: TableRun) -> None:
    run = quiet

    def kept_with(vectors: bool | None) -> int:
        """Another batch with this setting; returns the number of files with a vector."""
        run.settings = replace(run.settings, vectors=vectors)
        run.start()
        for key in ("k", "m", f"new {run.number}"):  # a file of which all rows are dead is gone
            run.cluster.put(0, key, b'{"n": %d}' % run.number)
        run.catch_up()
        run.check()
        return sum(file.deletion_vector is not None for file in run.keeper.table.snapshot.files.values())

    assert kept_with(None) > 0
    assert kept_with(None) > 0
    assert kept_with(False) == kept_with(None) == 0  # without the option a table stays as it is
    rows = DeltaTable(run.table.url).to_pandas()  # which refuses tables that may have vectors
    assert sorted(zip(rows["_vbucket"], rows["_key"], strict=True)) == sorted(
        (number, key.decode()) for number, key in run.cluster.held
    )
    assert operations(run).count("DISABLE VECTORS") == 1
    assert kept_with(True) > 0
    assert kept_with(None) > 0
    assert all(row for row in readers(run.table).values())


def test_vectors_are_switched_off_without_a_batch_too(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", b'{"n": 7}')
    quiet.catch_up()
    quiet.settings = replace(quiet.settings, vectors=False)
    quiet.start()
    quiet.keeper.look(LocalWorkers())
    assert not quiet.keeper.table.allows_vectors
    quiet.check()


def bucket(run: TableRun, uuid: str, *, is_in_memory: bool) -> TableKeeper:
    return TableKeeper(
        run.table, run.connect, run.keeper._nodes, run.settings,
        query=run.query, bucket=lambda: BucketIdentity(uuid, is_in_memory), reached=lambda: run.offset,
        logged=run.logged, end_of=lambda _: Offset(()),
    )  # fmt: skip


def test_another_bucket_is_refused(quiet: TableRun) -> None:
    with pytest.raises(OtherBucket):
        bucket(quiet, "other", is_in_memory=False)
    assert Table.open(quiet.table).properties["upriver.bucket"] == "bucket"


def test_a_node_without_a_disk_has_another_bucket_after_each_start(quiet: TableRun) -> None:
    bucket(quiet, "other", is_in_memory=True)
    assert Table.open(quiet.table).properties["upriver.bucket"] == "other"


def test_a_bucket_that_is_replaced_while_the_mirror_runs(quiet: TableRun) -> None:
    quiet.cluster.vbuckets[0].fail_over(1)
    quiet.keeper._bucket = lambda: BucketIdentity("other", is_in_memory=False)
    with pytest.raises(OtherBucket):
        quiet.catch_up()
    quiet.keeper._bucket = lambda: BucketIdentity("other", is_in_memory=True)
    quiet.catch_up()
    quiet.check()


# Columns


def columns(run: TableRun) -> dict[str, str]:
    return dict(run.keeper.table.schema.columns)


def test_fields_that_enough_documents_have_become_columns(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, share=0.5)
    for number in range(10):
        run.cluster.put(number % 3, f"k{number}", b'{"n": %d, "rare%d": 1}' % (number, number))
    run.catch_up()
    assert columns(run) == {"n": "int"}
    assert None not in read(run.table.url, ["_raw"])["_raw"].to_pylist()
    for number in range(30):
        run.cluster.put(number % 3, f"l{number}", b'{"n": %d, "often": true}' % number)
    run.catch_up()
    assert columns(run) == {"n": "int", "often": "bool"}
    assert read(run.table.url, ["_raw"])["_raw"].null_count == 30
    run.check()


def each_range(run: TableRun) -> None:
    """One task per vbucket."""
    run._shares = lambda asked: [[each] for each in asked]  # type: ignore[method-assign]


def test_a_column_that_a_sample_justifies_but_not_all_documents_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TableRun(tmp_path, is_quiet=True, share=0.5)
    each_range(run)
    run.cluster.put(2, "k", b'{"n": 1}')
    run.catch_up()
    for number in range(23):
        run.cluster.put(number < 3, f"k{number}", b'{"n": 1}' if number >= 3 else b'{"n": 1, "x": 2}')
    runs: list[bool] = []
    run.meanwhile = lambda: runs.append(True)  # type: ignore[method-assign]
    run.catch_up()
    assert columns(run) == {"n": "int"}
    assert len(runs) <= 5
    run.check()
    # Later tasks know how many documents there were.
    runs.clear()
    run.cluster.put(0, "one more", b'{"n": 1, "x": 2}')
    run.catch_up()
    assert len(runs) == 2
    run.check()


def test_a_first_document_with_many_fields_leaves_room_for_others(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, share=0.01)
    run.cluster.put(0, "wide", json.dumps({f"f{number}": number for number in range(600)}).encode())
    run.catch_up()
    for number in range(40):
        run.cluster.put(number % 3, f"k{number}", b'{"name": "n", "age": %d}' % number)
    run.catch_up()
    assert {"name", "age"} <= columns(run).keys()
    assert read(run.table.url, ["_raw"])["_raw"].null_count == 40
    run.check()


def test_fields_that_appear_in_each_run_of_the_tasks(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, share=0.01)
    run.cluster.put(0, "k", b'{"n": 1}')

    class Growing(LocalWorkers):
        rounds = 0

        def map(self, *given: Any) -> list[bytes]:
            found = super().map(*given)
            if given[0].__name__ == "repair":
                self.rounds += 1
                run.cluster.put(0, f"k{self.rounds}", b'{"n": %d.5, "f%d": 1}' % (self.rounds, self.rounds))
            return found

    run.keeper.rebuild()
    workers = Growing()
    run.keeper.repair(workers)
    assert workers.rounds <= table_keeper.GROWTHS_MAX + 3
    run.catch_up()
    assert columns(run)["n"] == "float"
    run.check()


@pytest.mark.parametrize(("other", "rounds"), [(b'{"n": 2, "a": "x"}', 1), (b'{"n": 2, "b": "x"}', 2)])
def test_columns_that_tasks_have_chosen(quiet: TableRun, other: bytes, rounds: int) -> None:
    quiet.cluster.put(0, "new", b'{"n": 1, "a": "x"}')
    quiet.cluster.put(1, "new", other)
    end = next_offset(quiet.offset, quiet.cluster.states, RULES)
    asked = [packed_ranges([each]) for each in ranges(quiet.offset, end)]
    assert len(asked) == 2
    ran: list[list[bytes]] = []

    def run(task: RangeTask) -> list[bytes]:
        ran.append([task(item) for item in asked])
        return ran[-1]

    task = quiet.keeper.plan(1, LocalWorkers())
    assert task is not None
    quiet.keeper.commit(run(task), 1, run, LocalWorkers())
    assert len(ran) == rounds  # tasks that disagree run again with the columns of both
    assert quiet.keeper.counts.conflicts == 0
    assert columns(quiet).keys() >= ({"a"} if rounds == 1 else {"a", "b"})
    quiet.offset, quiet.number = end, 2
    quiet.catch_up()
    quiet.check()


def test_an_integer_that_becomes_a_decimal_does_not_become_null(quiet: TableRun) -> None:
    quiet.cluster.put(2, "large", b'{"n": %d}' % (2**53 + 1))
    quiet.catch_up()
    assert columns(quiet)["n"] == "int"
    quiet.cluster.put(2, "decimal", b'{"n": 1.5}')
    quiet.catch_up()
    assert columns(quiet)["n"] == "float"
    assert "WIDEN COLUMNS" in operations(quiet)
    rows = {row["_key"]: row for row in read(quiet.table.url).to_pylist() if row["_vbucket"] == 2}
    assert rows["decimal"]["n"] == 1.5
    assert rows["large"]["n"] is None
    assert json.loads(rows["large"]["_raw"]) == {"n": 2**53 + 1}
    assert read(quiet.table.url)["n"].null_count == 1
    quiet.check()


def test_a_column_of_another_program_survives_growth_and_widening(
    quiet: TableRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Table.commit

    def commit(table: Table, edit: Edit) -> int:
        if edit.schema is not None:
            monkeypatch.setattr(Table, "commit", commits)
            quiet._foreign_column(load(quiet.table))
        return commits(table, edit)

    for field in (b'{"n": 1, "grown": 2}', b'{"n": 1.5, "grown": 2}'):
        monkeypatch.setattr(Table, "commit", commit)
        quiet.choose.seed(len(field))
        quiet.cluster.put(0, "k", field)
        quiet.catch_up()
        quiet.check()
    assert quiet.keeper.table.schema.foreign
    assert columns(quiet) == {"n": "float", "grown": "int"}


def test_the_users_columns(tmp_path: Path) -> None:
    run = TableRun(tmp_path, is_quiet=True, schema=TableSchema([Column("n", "int")]))
    run.cluster.put(0, "k", b'{"n": 1, "other": 2}')
    run.cluster.put(0, "l", b'{"n": 1.5}')
    run.catch_up()
    assert columns(run) == {"n": "int"}
    run.check()
    run.settings = replace(run.settings, schema=TableSchema([Column("n", "int"), Column("other", "int")]))
    run.start()
    run.cluster.put(1, "k", b'{"n": 1, "other": 2}')
    run.catch_up()
    assert columns(run) == {"n": "int", "other": "int"}
    assert read(run.table.url, ["other"])["other"].to_pylist().count(2) == 1
    run.check()
    assert run.keeper.decimals == frozenset()
    run.cluster.put(2, "l", b'{"n": 2.5}')
    run.catch_up()
    assert run.keeper.decimals == {"n"}
    assert read(run.table.url, ["n"])["n"].to_pylist().count(None) == 2
    run.settings = replace(run.settings, schema=TableSchema([Column("n", "float"), Column("more", "text")]))
    run.start()
    run.cluster.put(0, "more", b'{"n": 4}')
    run.catch_up()
    assert columns(run) == {"n": "float", "other": "int", "more": "text"}
    assert sorted(read(run.table.url, ["n"])["n"].to_pylist()) == [1, 1, 1.5, 2.5, 4], "earlier decimals are there too"
    assert run.keeper.decimals == frozenset()
    run.check()
    run.settings = replace(run.settings, schema=TableSchema([Column("n", "text")]))
    with pytest.raises(OptionError, match="already holds double"):
        run.start()


@pytest.mark.parametrize("vectors", [True, False])
def test_every_document_ends_up_in_the_table(tmp_path: Path, vectors: bool) -> None:
    run = TableRun(tmp_path, is_quiet=True, vectors=vectors)
    for vbucket in range(2):  # one key in two vbuckets
        for name, value in ODD.items():
            run.cluster.put(vbucket, name, value)
        run.cluster.put(vbucket, "\udcff\udcfe", b'{"n": 1}')
        run.cluster.put(vbucket, "\x00", b'{"n": 2}')
    run.catch_up()
    run.check()
    assert (1, b"\xff\xfe") in held(run.table)
    for name in ODD:
        run.cluster.put(0, name, b'{"n": 1.5}')
        run.cluster.put(1, name, None)
    run.catch_up()
    run.check()
    assert vacuum_table(run.keeper.table, retention_s=0).paths or vectors


# Crashes


def a_day(run: TableRun) -> None:
    """Something of everything: changes, deletions, a rollback, growth, a repair."""
    run.cluster.put(0, "k", b'{"n": 2.5, "new": "x"}')
    run.cluster.put(0, "l", None)
    run.cluster.vbuckets[1].fail_over(1)
    DeltaTable(run.table.url).delete("_vbucket = 0 and _key = 'l'")


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("history", [True, False])
def test_a_driver_that_ends_before_any_operation_on_files(tmp_path: Path, vectors: bool, history: bool) -> None:
    template = tmp_path / "template"

    def begun(directory: Path) -> TableRun:
        run = TableRun(directory, is_quiet=True, vectors=vectors, history=history)
        for key in "kl":
            run.cluster.put(0, key, b'{"n": 1}')
            run.cluster.put(1, key, b'{"n": 1}')
        return run

    begun(template).catch_up()
    for operation in range(1000):
        directory = tmp_path / str(operation)
        run = begun(directory)
        shutil.copytree(template, directory)
        run.number, run.logged, run.committed = 1, 0, (f"upriver-{run.query}", 0)
        run.offset = next_offset(run.offset, run.cluster.states, RULES)
        a_day(run)
        try:
            run.start(operation)
            run.catch_up()
        except StorageCrash:
            run.start()
            run.catch_up()
            run.check()
        else:
            break
        vacuum_table(run.keeper.table, retention_s=0, now_s=2.0**32)
        run.check()
        files = {path.name for path in (directory / "table").glob("*.parquet")}
        assert files == run.keeper.table.snapshot.files.keys()
    assert operation > 10
    run.check()


def test_an_operation_takes_place_once_for_two_attempts_of_a_task(quiet: TableRun) -> None:
    quiet.cluster.put(0, "k", b"new")
    attempt: Callable[..., bytes] = quiet._attempts
    quiet._attempts = lambda *given: (attempt(*given), attempt(*given))[1]  # type: ignore[method-assign]
    quiet.catch_up()
    quiet.check()
    files = {path.name for path in Path(quiet.table.url).glob("*.parquet")}
    assert len(files) == len(quiet.keeper.table.snapshot.files) + 1
