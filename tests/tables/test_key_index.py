"""Key indexes: finding rows, and building sidecars again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.tables import key_index
from upriver.tables.key_index import KeyIndex, hash_keys, sidecar_path, write_index
from upriver.tables.keys import entry_file
from upriver.tables.keys.entries import Entries, positions_of, sort_entries
from upriver.tables.keys.sorted_runs import SortedRuns
from upriver.tables.storage import TableStorage

SEED = bytes(range(16))
KEYS: list[tuple[int, bytes]] = [(number % 3, b"key%d" % number) for number in range(20)] + [(1, b"\xff\xfe"), (2, b"")]


def entries_of(rows: Sequence[tuple[int, bytes]]) -> Entries:
    vbuckets = np.array([vbucket for vbucket, _ in rows], np.uint16)
    return hash_keys(SEED, vbuckets, pa.array([key for _, key in rows], pa.binary()))


def write_data(
    storage: TableStorage, rows: Sequence[tuple[int, bytes]], path: str = "a.parquet", **options: Any
) -> None:
    texts = [key.decode() if is_text(key) else None for _, key in rows]
    others = [None if is_text(key) else key for _, key in rows]
    table = pa.table(
        {
            "_key": pa.array(texts, pa.string()),
            "_raw_key": pa.array(others, pa.binary()),
            "_vbucket": pa.array([vbucket for vbucket, _ in rows], pa.int32()),
        }
    )
    with storage.new_file(path) as file:
        pq.write_table(table, file, **options)


def is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.fixture
def storage(tmp_path: Path) -> TableStorage:
    return TableStorage.of(tmp_path / "table")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c", b"dd"])), max_size=30),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c", b"x"])), max_size=8, unique=True),
)
def test_find_and_slice(rows: list[tuple[int, bytes]], wanted: list[tuple[int, bytes]]) -> None:
    index = KeyIndex(sort_entries(entries_of(rows)))
    hashes = sort_entries(entries_of(wanted))
    names = [wanted[position] for position in positions_of(hashes).tolist()]
    numbers, positions = index.find(hashes)
    found = sorted(
        (names[number], position) for number, position in zip(numbers.tolist(), positions.tolist(), strict=True)
    )
    assert found == sorted((row, position) for position, row in enumerate(rows) if row in wanted)
    for vbucket in range(5):
        expected = [position for position, row in enumerate(rows) if row[0] == vbucket]
        assert sorted(index.slice(vbucket).tolist()) == expected


def test_the_name_of_a_sidecar() -> None:
    assert sidecar_path("a.parquet") == sidecar_path("b/a.parquet") == "_upriver/a.parquet.idx"


@pytest.mark.parametrize("group", [5, 1000])
def test_an_index_is_built_from_the_key_columns(storage: TableStorage, cache: Path, group: int) -> None:
    write_data(storage, KEYS, row_group_size=group)
    index = KeyIndex.open(storage, "a.parquet", SEED, cache)
    assert (index.entries == sort_entries(entries_of(KEYS))).all()
    assert storage.size(sidecar_path("a.parquet")) == entry_file.HEADER_BYTES + 16 * len(KEYS)


def test_a_sidecar_is_used(storage: TableStorage, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = sort_entries(entries_of(KEYS[:3]))
    write_index(storage, "a.parquet", SEED, [live[:1], live[1:]])
    monkeypatch.setattr(key_index, "_hashed", None)
    assert (KeyIndex.open(storage, "a.parquet", SEED, cache).entries == live).all()


@pytest.mark.parametrize("damage", ["short", "flipped", "foreign seed", "empty"])
def test_a_sidecar_that_cannot_be_used_is_built_again(storage: TableStorage, cache: Path, damage: str) -> None:
    write_data(storage, KEYS)
    expected = sort_entries(entries_of(KEYS))
    write_index(storage, "a.parquet", bytes(16) if damage == "foreign seed" else SEED, [expected])
    path = sidecar_path("a.parquet")
    content = bytearray(storage.read(path))
    if damage == "flipped":
        content[-1] ^= 1
    storage.write(path, {"short": bytes(content[:-16]), "empty": b""}.get(damage, bytes(content)))
    assert (KeyIndex.open(storage, "a.parquet", SEED, cache).entries == expected).all()
    assert (KeyIndex.open(storage, "a.parquet", SEED, cache).entries == expected).all()


def test_a_missing_data_file_is_an_error(storage: TableStorage, cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KeyIndex.open(storage, "a.parquet", SEED, cache)


def test_many_rows_are_sorted_in_pieces(storage: TableStorage, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "SortedRuns", lambda: SortedRuns(8, sampled=2))
    monkeypatch.setattr(key_index, "_ROWS", 3)
    write_data(storage, KEYS)
    assert (KeyIndex.open(storage, "a.parquet", SEED, cache).entries == sort_entries(entries_of(KEYS))).all()


@pytest.mark.parametrize(
    "columns",
    [
        {
            "_vbucket": pa.array([2, None, -1, 70_000], pa.int64()),
            "_key": pa.array(["a", None, "b", "c"], pa.large_string()),
        },
        {"_key": pa.array(["a", "b", None, "c"]).dictionary_encode(), "_vbucket": pa.array([2, None, -1, 70_000])},
        {"_vbucket": pa.array([2, None, None, None], pa.int32())},
        {"other": pa.array([1, 2, 3, 4])},
    ],
    ids=["other types", "dictionary", "no keys", "nothing of ours"],
)
def test_rows_of_foreign_writers_are_found_by_vbucket(
    storage: TableStorage, cache: Path, columns: dict[str, pa.Array]
) -> None:
    with storage.new_file("a.parquet") as file:
        pq.write_table(pa.table(columns), file)
    index = KeyIndex.open(storage, "a.parquet", SEED, cache)
    assert len(index) == 4
    assert index.slice(2).tolist() == ([0] if "_vbucket" in columns else [])
    assert len(index.slice(0xFFFF)) == (3 if "_vbucket" in columns else 4)


def test_another_hash_can_be_injected(storage: TableStorage, cache: Path) -> None:
    write_data(storage, KEYS)

    def hashing(seed: bytes, vbuckets: np.ndarray, keys: pa.Array, first: int) -> Entries:
        return hash_keys(seed, vbuckets, keys, first) & np.uint64(0xFFFFFFFF)

    assert (KeyIndex.open(storage, "a.parquet", SEED, cache, hashing=hashing).entries[:, 1] < 2**32).all()


class Fetching:
    """A storage whose files must be fetched, as from an object store."""

    def __init__(self, inner: TableStorage, copies: Path) -> None:
        self._inner, self._copies = inner, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def local(self, path: str = "") -> None:
        return None

    def fetched(self, path: str, cache: Path) -> Path:
        copy = cache / path
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(self._inner.read(path))
        return copy


def test_a_damaged_copy_in_the_cache_is_fetched_again(
    storage: TableStorage, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching: Any = Fetching(storage, cache)
    live = sort_entries(entries_of(KEYS[:3]))
    write_index(fetching, "a.parquet", SEED, [live])
    monkeypatch.setattr(key_index, "_hashed", None)
    assert (KeyIndex.open(fetching, "a.parquet", SEED, cache).entries == live).all()
    copy = cache / sidecar_path("a.parquet")
    copy.write_bytes(copy.read_bytes()[:-1])
    assert (KeyIndex.open(fetching, "a.parquet", SEED, cache).entries == live).all()
