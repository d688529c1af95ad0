"""Actions and the JSON of the log."""

import json

from upriver.tables.actions import (
    Action,
    Add,
    CommitInfo,
    DeletionVector,
    Metadata,
    Protocol,
    Remove,
    Txn,
    decode,
    encode,
)

VECTOR = DeletionVector("u", "ab^-aqEH.-t@S}K{vb[*k^", 40, 6, 4)


def test_actions_survive_the_log() -> None:
    actions: list[Action] = [
        CommitInfo(5, "WRITE", {"mode": "Append"}, "upriver/1", "id"),
        Protocol(3, 7, ["deletionVectors"], ["deletionVectors"]),
        Metadata("id", "{}", {"delta.x": "1"}, ["p"], 7, "name"),
        Add("a.parquet", 10, 5, stats='{"numRecords":3}', deletion_vector=VECTOR),
        Remove("b.parquet", 9, data_change=False, deletion_vector=VECTOR),
        Txn("app", 3, 8),
    ]
    assert decode(encode(actions)) == actions


def test_the_vector_of_the_protocol_document() -> None:
    assert VECTOR.as_json() == {
        "storageType": "u",
        "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^",
        "offset": 4,
        "sizeInBytes": 40,
        "cardinality": 6,
    }
    assert VECTOR.id == "uab^-aqEH.-t@S}K{vb[*k^@4"
    inline = DeletionVector("i", "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L", 44, 6)
    assert "offset" not in inline.as_json()
    assert inline.id == "iwi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"


def test_paths_are_percent_encoded_in_the_log() -> None:
    file = Add("sub dir/ü %.parquet", 1, 1)
    assert json.loads(file.line())["add"]["path"] == "sub%20dir/%C3%BC%20%25.parquet"
    assert decode(encode([file])) == [file]


def test_unknown_fields_are_kept_and_unknown_kinds_skipped() -> None:
    line = {
        "add": {
            "path": "a",
            "partitionValues": {},
            "size": 1,
            "modificationTime": 2,
            "dataChange": True,
            "tags": {"x": "1"},
        }
    }
    (file,) = decode(json.dumps(line).encode() + b'\n{"domainMetadata":{"domain":"d"}}\n\n')
    assert json.loads(file.line()) == line


def test_nulls_are_like_absent_fields() -> None:
    (file,) = decode(
        b'{"remove":{"path":"a","deletionTimestamp":3,"dataChange":true,"deletionVector":null,"tags":null}}'
    )
    assert file == Remove("a", 3)


def test_a_removed_file_repeats_its_vector() -> None:
    file = Add("a", 10, 5, stats='{"numRecords":3}', deletion_vector=VECTOR)
    removed = Remove.of(file, 99, data_change=False)
    assert removed.file == file.file == ("a", VECTOR.id)
    assert (removed.deleted_ms, removed.data_change, removed.size) == (99, False, 10)


def test_what_statistics_say() -> None:
    assert Add("a", 1, 1).rows is None
    file = Add("a", 1, 1, stats='{"numRecords":30}', deletion_vector=VECTOR)
    assert (file.rows, file.dead) == (30, 6)
