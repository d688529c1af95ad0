"""Deletion vectors: the format, and what is refused."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from upriver.errors import CorruptData, FilesLost
from upriver.tables.actions import DeletionVector
from upriver.tables.deletion_vectors import (
    HIDDEN,
    decode_bitmap,
    decode_z85,
    encode_bitmap,
    encode_z85,
    read_vector,
    vector_path,
    write_vectors,
)
from upriver.tables.storage import TableStorage


@given(st.sets(st.integers(0, 2**32 - 1)))
def test_bitmaps_survive(dead: set[int]) -> None:
    assert decode_bitmap(encode_bitmap(BitMap(dead)), "test") == BitMap(dead)


def test_an_inline_vector(tmp_path: Path) -> None:
    data = encode_bitmap(BitMap([3, 4, 7]))
    vector = DeletionVector("i", encode_z85(data), len(data), 3)
    assert read_vector(TableStorage.of(tmp_path), vector) == BitMap([3, 4, 7])


def test_the_inline_vector_of_the_protocol_document_is_in_the_old_format(tmp_path: Path) -> None:
    vector = DeletionVector("i", "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L", 40, 6)
    with pytest.raises(CorruptData, match="portable"):
        read_vector(TableStorage.of(tmp_path), vector)


def test_the_path_of_the_protocol_document(tmp_path: Path) -> None:
    vector = DeletionVector("u", "ab^-aqEH.-t@S}K{vb[*k^", 40, 6, 4)
    path = "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert vector_path(vector, TableStorage.of(tmp_path)) == path


@given(st.binary(max_size=40))
def test_z85(data: bytes) -> None:
    assert decode_z85(encode_z85(data))[: len(data)] == data


def test_the_vectors_of_a_commit_share_a_hidden_file(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    dead = {"a": BitMap([1, 5]), "b": BitMap(range(100_000)), "c": BitMap([70_000])}
    found = write_vectors(storage, dead)
    (file,) = storage.list()
    assert {vector_path(vector, storage) for vector in found.values()} == {file.path}
    assert file.path.startswith(f"{HIDDEN}/")
    assert storage.read(file.path, 0, 1) == b"\x01"
    for path, vector in found.items():
        assert read_vector(storage, vector) == dead[path]
        assert vector.cardinality == len(dead[path])
        assert vector.offset is not None
        assert storage.read(file.path, vector.offset, 4) == struct.pack(">i", vector.size_bytes)


def test_no_vectors_no_file(tmp_path: Path) -> None:
    assert write_vectors(TableStorage.of(tmp_path), {}) == {}
    assert not list(tmp_path.iterdir())
    assert read_vector(TableStorage.of(tmp_path), None) == BitMap()


def test_an_absolute_path(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    vector = write_vectors(storage, {"a": BitMap([7])})["a"]
    path = vector_path(vector, storage)
    for absolute in (f"{tmp_path}/{path}", f"file://{tmp_path}/{path}"):
        other = DeletionVector("p", absolute, vector.size_bytes, 1, vector.offset)
        assert read_vector(storage, other) == BitMap([7])
    with pytest.raises(CorruptData, match="outside"):
        read_vector(storage, DeletionVector("p", "/elsewhere/x.bin", 34, 1, 1))


def test_a_damaged_vector_is_refused(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    vector = write_vectors(storage, {"a": BitMap([1, 2, 3])})["a"]
    path = vector_path(vector, storage)
    assert path is not None
    content = storage.read(path)
    for place in (5, 20, len(content) - 1):
        storage.write(path, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CorruptData, match="damaged"):
            read_vector(storage, vector)
    storage.write(path, content[:-3])
    with pytest.raises(CorruptData, match="damaged"):
        read_vector(storage, vector)
    storage.delete([path])
    with pytest.raises(FilesLost, match="missing"):
        read_vector(storage, vector)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "portable"),
        (struct.pack("<IQ", 1681511376, 0), "portable"),
        (struct.pack("<IQI", 1681511377, 1, 1) + BitMap([1]).serialize(), "32 bits"),
        (struct.pack("<IQI", 1681511377, 2, 0) + BitMap([1]).serialize(), "32 bits"),
        (struct.pack("<IQI", 1681511377, 1, 0) + b"nonsense", "damaged"),
    ],
)
def test_bytes_that_are_not_a_vector(data: bytes, why: str) -> None:
    with pytest.raises(CorruptData, match=why):
        decode_bitmap(data, "test")


def test_an_empty_vector_of_another_writer() -> None:
    assert decode_bitmap(struct.pack("<IQ", 1681511377, 0), "test") == BitMap()
