"""The list of a task's keys."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.table_parts import SCHEMA, SEED, number, rows_of
from upriver.errors import CorruptData
from upriver.tables import PartWriter, TableStorage
from upriver.tables.key_index import sidecar_path
from upriver.tables.keys.key_list import KeyList, key_list_path


@pytest.fixture
def storage(tmp_path: Path) -> TableStorage:
    return TableStorage.of(tmp_path / "table")


def listed(storage: TableStorage, path: str, cache: Path) -> list[int]:
    """The hashes of a list, sorted."""
    return sorted(
        int(entry[0]) for hashes in KeyList.open(storage, path, cache).hashes(storage, cache) for entry in hashes
    )


def test_a_list_names_deleted_keys_and_files_with_their_dead_rows(storage: TableStorage, tmp_path: Path) -> None:
    with PartWriter(storage, SCHEMA, SEED, attempt="a1") as writer:
        writer.add(rows_of([(3, b"a", number(1)), (3, b"b", number(1)), (5, b"c", None), (7, b"d", number(1))]))
        writer._write_chunk()
        writer.add(rows_of([(3, b"a", number(2)), (3, b"b", None)]))
        writer.discard(7)
        result = writer.finish({12, 9})
    assert result.keys == key_list_path("a1") == "_upriver/a1.keys"
    found = KeyList.open(storage, result.keys, tmp_path)
    assert found.seed == SEED
    assert [int(high) >> 48 for high in found.deleted[:, 0]] == [3, 5]
    assert (found.deleted[:, 1] & np.uint64(2**32 - 1) == 0).all()
    assert found.replaced == (9, 12)
    (file,) = result.files
    assert found.files == ((file.path, file.dead_rows),)
    hashes = listed(storage, result.keys, tmp_path)
    assert [high >> 48 for high in hashes] == [3, 3, 5]
    # An index that is built again has all rows, the discarded one too.
    storage.delete([sidecar_path(file.path)])
    assert listed(storage, result.keys, tmp_path) == hashes


def test_a_list_cannot_be_built_again(storage: TableStorage, tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match=r"a1\.keys.*missing or damaged"):
        KeyList.open(storage, key_list_path("a1"), tmp_path)
    storage.write(key_list_path("a1"), b"something else")
    with pytest.raises(CorruptData, match=r"a1\.keys.*missing or damaged"):
        KeyList.open(storage, key_list_path("a1"), tmp_path)
