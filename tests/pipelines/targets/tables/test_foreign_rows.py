"""Which vbuckets other programs have touched."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyroaring import BitMap

from tests.support.mirrored_tables import mirror_now
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.targets.tables.foreign_rows import touched_vbuckets
from upriver.tables import NO_VBUCKET, ChangedRows, TableStorage, read


def test_rows_name_their_vbuckets(tmp_path: Path) -> None:
    pq.write_table(pa.table({"_vbucket": pa.array([3, 5, 5, 9], pa.int32())}), tmp_path / "a.parquet")
    storage = TableStorage.of(tmp_path)
    assert touched_vbuckets(storage, []) == set()
    assert touched_vbuckets(storage, [ChangedRows("a.parquet", None)]) == {3, 5, 9}
    assert touched_vbuckets(storage, [ChangedRows("a.parquet", BitMap([1, 2]))]) == {5}


def test_rows_without_a_valid_vbucket_have_their_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"_vbucket": pa.array([3, None, -1, 70_000], pa.int32())}), tmp_path / "odd.parquet")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "other.parquet")
    storage = TableStorage.of(tmp_path)
    assert touched_vbuckets(storage, [ChangedRows("odd.parquet", None)]) == {3, NO_VBUCKET}
    assert touched_vbuckets(storage, [ChangedRows("odd.parquet", BitMap([0]))]) == {3}
    assert touched_vbuckets(storage, [ChangedRows("other.parquet", None)]) == {NO_VBUCKET}


def test_a_file_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert touched_vbuckets(TableStorage.of(tmp_path), [ChangedRows("gone.parquet", None)]) is None


def test_rows_that_belong_to_no_vbucket_of_the_source_are_hidden(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("k", b'{"n": 1}')
    path = tmp_path / "t"
    mirror_now(upriver_node.address, path)
    rows = read(path)
    place = rows.column_names.index("_vbucket")
    odd = [rows.set_column(place, "_vbucket", pa.array([each], pa.int32())) for each in (None, 5000, -1, 70_000, 0)]
    write_deltalake(path, pa.concat_tables(odd), mode="append")
    table = mirror_now(upriver_node.address, path)
    assert read(path).column("_vbucket").to_pylist() == rows.column("_vbucket").to_pylist()
    assert table.properties["upriver.due"] == "[]"
