"""Old versions of keys in the data files of a table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyroaring import BitMap

from tests.support.object_store import ObjectStore, object_store
from tests.support.table_parts import SCHEMA, SEED, Change, PartTable, number, rows_of
from upriver.errors import CorruptData
from upriver.tables import locating
from upriver.tables.key_index import KeyIndex, sidecar_path
from upriver.tables.locating import locate
from upriver.tables.part_writer import PartWriter

__all__ = ["object_store"]

A, B, C = (1, b"a"), (1, b"b"), (2, b"c")


@pytest.fixture
def table(tmp_path: Path) -> PartTable:
    return PartTable(tmp_path)


def located(table: PartTable, *changes: Change, replaced: tuple[int, ...] = (), given: tuple[int, ...] = ()) -> object:
    """What a part would replace: the numbers of the table's parts, with positions."""
    writer = table.writer()
    writer.add(rows_of(changes))
    keys = writer.finish(replaced).keys
    files = list(table.table.snapshot.files.values())
    found = locate(table.storage, files, keys, given, table.cache)
    return {path.partition("-")[0]: BitMap.deserialize(positions) for path, positions in found.items()}


def test_nothing_replaces_nothing(table: PartTable) -> None:
    table.add([(*A, number(1))])
    assert locate(table.storage, list(table.table.snapshot.files.values()), "", (), table.cache) == {}
    assert located(table) == {}


def test_mutations_and_deletions_replace_rows_of_their_keys(table: PartTable) -> None:
    table.add([(*A, number(1)), (*C, number(2))])
    table.add([(*B, number(3)), (3, b"a", number(4))])
    assert located(table, (*A, number(9)), (*B, None), (9, b"x", number(1))) == {
        "part0": BitMap([0]),
        "part1": BitMap([0]),
    }
    assert located(table, (2, b"a", number(9))) == {}


def test_a_replaced_vbucket_replaces_all_of_its_rows(table: PartTable) -> None:
    table.add([(*A, number(1)), (*C, number(2)), (*B, number(3))])
    expected = {"part0": BitMap([0, 2])}
    assert located(table, replaced=(1,)) == expected
    assert located(table, (9, b"x", None), given=(1,)) == expected
    assert located(table, (*C, None), (*A, number(5)), replaced=(1,)) == {"part0": BitMap([0, 1, 2])}


def test_files_without_the_vbuckets_are_not_opened(table: PartTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.add([(vbucket, b"a", number(1)) for vbucket in (1, 3)])
    table.add([(vbucket, b"a", number(1)) for vbucket in (5, 9)])
    opened = []
    open_index = KeyIndex.open

    def recorded(storage: object, path: str, *rest: object, **options: object) -> KeyIndex:
        opened.append(path)
        return open_index(storage, path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyIndex, "open", recorded)
    assert located(table, (4, b"a", None), (10, b"a", None), (0, b"a", None)) == {}
    assert opened == []
    assert located(table, (2, b"a", None)) == {}
    assert [path.partition("-")[0] for path in opened] == ["part0"]


def test_files_without_statistics_or_sidecars_are_searched(table: PartTable) -> None:
    table.add([(*A, number(1)), (*C, number(2))])
    (file,) = table.table.snapshot.files.values()
    table.storage.delete([sidecar_path(file.path)])
    writer = table.writer()
    writer.add(rows_of([(*C, None)]))
    keys = writer.finish().keys

    for stats in (None, "{}", '{"numRecords":2,"minValues":{},"maxValues":null}'):
        found = locate(table.storage, [replace(file, stats=stats)], keys, (), table.cache)
        assert BitMap.deserialize(found[file.path]) == BitMap([1])


def test_parts_of_several_files_are_located_again_without_their_sidecars(tmp_path: Path) -> None:
    table = PartTable(tmp_path, rows_per_file=7, chunk_bytes=500)
    table.add([(key % 5, b"%d" % key, number(key)) for key in range(50)])
    writer = table.writer()
    writer.add(rows_of([(key % 5, b"%d" % key, number(-key) if key % 3 else None) for key in range(0, 50, 2)]))
    writer.discard(4)
    result = writer.finish()
    assert len(result.files) > 1
    files = list(table.table.snapshot.files.values())
    first = locate(table.storage, files, result.keys, (), table.cache)
    assert sum(len(BitMap.deserialize(positions)) for positions in first.values()) == 20
    table.storage.delete([path for path in table.files() if path.endswith(".idx")])
    assert locate(table.storage, files, result.keys, (), table.cache) == first


def test_a_lost_key_list_is_an_error(table: PartTable) -> None:
    with pytest.raises((CorruptData, FileNotFoundError)):
        locate(table.storage, [], "_upriver/lost.keys", (), table.cache)


def test_an_object_store(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PartTable(tmp_path, storage=object_store.new_storage(), rows_per_file=8, chunk_bytes=1000)
    table.add([(key % 5, b"%d" % key, number(key)) for key in range(20)])
    table.add([(1, b"1", number(-1)), (2, b"2", None)], replaced=[4])
    table.commit_merged(table.merge())
    table.storage.delete([path for path in table.files() if path.endswith(".idx")])
    table.add([(0, b"0", number(-2))])
    expected = {(key % 5, b"%d" % key): number(key) for key in range(20) if key % 5 != 4 and key != 2}
    assert table.contents() == expected | {(1, b"1"): number(-1), (0, b"0"): number(-2)}
    monkeypatch.setattr(locating, "UNUSED_S", -60.0)
    before = {Path(sidecar_path(path)).name for path in table.table.snapshot.files}
    table.add([(0, b"0", number(-3))])
    assert {path.name for path in table.cache.rglob("*") if path.is_file()} == before


def test_a_task_does_not_fetch_what_it_has_just_written(object_store: ObjectStore, tmp_path: Path) -> None:
    storage, cache = object_store.new_storage(), tmp_path / "cache"
    writer = PartWriter(storage, SCHEMA, SEED, attempt="first", cache=cache)
    writer.add(rows_of([(0, b"a", number(1)), (0, b"b", number(2))]))
    part = writer.finish()
    storage.delete([file.path for file in storage.list("_upriver/")])  # only the copies are left
    files = [file.add(0) for file in part.files]
    (positions,) = locate(storage, files, part.keys, (), cache).values()
    assert BitMap.deserialize(positions) == BitMap([0, 1])


def test_the_seed_is_that_of_the_key_list(table: PartTable) -> None:
    table.add([(*A, number(1))])
    (file,) = table.table.snapshot.files.values()
    KeyIndex.open(table.storage, file.path, bytes(16), table.cache)  # builds the sidecar with another seed
    assert located(table, (*A, None)) == {"part0": BitMap([0])}
    assert bytes(16) != SEED


@pytest.mark.parametrize(
    "stats",
    [
        {"minValues": {"_vbucket": 1}, "maxValues": {"_vbucket": 1}, "nullCount": {"_vbucket": 1}},
        {"minValues": {"_vbucket": 1}, "maxValues": {"_vbucket": 1}},
        {"minValues": {"_vbucket": -1}, "maxValues": {"_vbucket": 1}, "nullCount": {"_vbucket": 0}},
        {"minValues": {"_vbucket": 70_000}, "maxValues": {"_vbucket": 70_000}, "nullCount": {"_vbucket": 0}},
    ],
)
def test_statistics_do_not_hide_rows_without_a_valid_vbucket(table: PartTable, stats: dict[str, object]) -> None:
    table.add([(*A, number(1)), (0xFFFF, b"z", number(2))])
    writer = table.writer()
    keys = writer.finish([0xFFFF]).keys
    files = [replace(file, stats=json.dumps(stats)) for file in table.table.snapshot.files.values()]
    (positions,) = locate(table.storage, files, keys, (), table.cache).values()
    assert BitMap.deserialize(positions) == BitMap([1])
