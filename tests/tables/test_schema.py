"""Columns of a table: growth, widening, what a user writes, and Delta's description."""

import json
import pickle
from typing import Any

import pyarrow as pa
import pytest

from upriver.errors import ForeignData, OptionError
from upriver.tables.documents import FieldReport
from upriver.tables.schema import COLUMNS_MAX, KINDS, OWN, Column, Kind, TableSchema

EVERY = TableSchema(
    [Column("b", "bool"), Column("i", "int"), Column("f", "float"), Column("t", "text"), Column("j", "json")]
)


def names(schema: TableSchema) -> list[str]:
    return [column.name for column in schema.columns]


def report(documents: int, **unknown: dict[Kind, int]) -> FieldReport:
    return FieldReport(documents, unknown)


def delta_field(name: str, type_: Any, *, nullable: bool = True, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, "nullable": nullable, "metadata": metadata}


def with_fields(*fields: dict[str, Any]) -> str:
    found = json.loads(TableSchema().delta())
    return json.dumps(found | {"fields": [*found["fields"], *fields]})


def test_a_data_file_has_our_columns_first() -> None:
    assert EVERY.arrow.names == [*OWN.names, "b", "i", "f", "t", "j"]
    assert EVERY.arrow.types[len(OWN) :] == [pa.bool_(), pa.int64(), pa.float64(), pa.string(), pa.string()]
    assert EVERY.arrow.field("j").metadata == {b"upriver": b"json"}
    assert EVERY.arrow.field("t").metadata is None


def test_delta_describes_the_same_columns() -> None:
    fields = {field["name"]: field for field in json.loads(EVERY.delta())["fields"]}
    assert list(fields) == EVERY.arrow.names
    assert [fields[name]["type"] for name in "biftj"] == ["boolean", "long", "double", "string", "string"]
    assert fields["j"]["metadata"] == {"upriver": "json"}
    assert all(field["nullable"] for field in fields.values())
    assert TableSchema.of_delta(EVERY.delta()) == EVERY
    assert TableSchema.of_delta(EVERY.delta()).columns == EVERY.columns


def test_delta_rs_understands_the_description() -> None:
    deltalake = pytest.importorskip("deltalake")
    found = deltalake.Schema.from_json(EVERY.delta())
    assert pa.schema(found.to_arrow()).names == EVERY.arrow.names
    assert TableSchema.of_delta(found.to_json()) == EVERY


def test_columns_of_other_programs_keep_place_and_description() -> None:
    struct = {"type": "struct", "fields": [delta_field("x", "date")]}
    text = with_fields(
        delta_field("a", "long", comment="a comment"),
        delta_field("day", "date", comment="theirs"),
        delta_field("nested", struct),
        delta_field("c", "string"),
        delta_field("small", "integer"),
    )
    found = TableSchema.of_delta(text)
    assert found.columns == (Column("a", "int"), Column("c", "text"))
    assert found.foreign == ("day", "nested", "small")
    assert found.arrow.names == [*OWN.names, "a", "c"]
    assert json.loads(found.delta()) == json.loads(text)
    changed = json.loads(found.widened(["a", "small"]).with_columns([Column("new", "json")]).delta())["fields"]
    assert changed[len(OWN)] == delta_field("a", "double", comment="a comment")
    assert changed[len(OWN) + 1 : -1] == json.loads(text)["fields"][len(OWN) + 1 :]
    assert changed[-1] == delta_field("new", "string", upriver="json")
    assert "day" not in names(found.grown(report(1, day={"text": 1}, Nested={"json": 1})))


def test_our_columns_may_stand_anywhere() -> None:
    text = json.loads(with_fields(delta_field("a", "long")))
    text["fields"].reverse()
    text["fields"][-1]["metadata"] = {"comment": "theirs"}
    found = TableSchema.of_delta(json.dumps(text))
    assert found.columns == (Column("a", "int"),)
    assert json.loads(found.delta()) == text


def test_a_table_without_our_columns_is_refused() -> None:
    fields = json.loads(TableSchema().delta())["fields"]
    with pytest.raises(ForeignData, match="column _raw is missing"):
        TableSchema.of_delta(json.dumps({"type": "struct", "fields": [f for f in fields if f["name"] != "_raw"]}))
    other = [f | {"type": "string"} if f["name"] == "_seqno" else f for f in fields]
    with pytest.raises(ForeignData, match="/data: not an Upriver table: column _seqno"):
        TableSchema.of_delta(json.dumps({"type": "struct", "fields": other}), "/data")
    with pytest.raises(ForeignData, match="column strict must not be null"):
        TableSchema.of_delta(with_fields(delta_field("strict", "long", nullable=False)))


def test_a_field_becomes_a_column_when_enough_documents_have_it() -> None:
    found = report(1000, often={"int": 10}, rarely={"int": 9}, mixed={"text": 5, "int": 5})
    assert names(TableSchema().grown(found)) == ["often", "mixed"]
    assert names(TableSchema().grown(found, 0.5)) == []
    assert names(TableSchema().grown(found, 0)) == ["often", "rarely", "mixed"]
    assert names(TableSchema().grown(report(1, a={"int": 1}))) == ["a"]
    assert names(TableSchema().grown(report(3, a={"int": 1}, b={"int": 2}), at_least=2)) == ["b"]


def test_growth_keeps_the_columns_that_exist() -> None:
    grown = EVERY.grown(report(1, new={"text": 1}))
    assert grown.columns == (*EVERY.columns, Column("new", "text"))
    assert EVERY.grown(FieldReport(1000)) is EVERY
    assert EVERY.grown(report(1, t={"int": 1})) == EVERY


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ({"int": 5}, "int"),
        ({"int": 9, "float": 1}, "float"),
        ({"int": 3, "float": 3, "text": 5}, "float"),
        ({"int": 5, "text": 6}, "text"),
        ({"bool": 2, "json": 3, "text": 1}, "json"),
        ({"bool": 1}, "bool"),
    ],
)
def test_the_kind_is_that_of_most_values(counts: dict[Kind, int], kind: Kind) -> None:
    assert TableSchema().grown(report(20, x=counts)).columns == (Column("x", kind),)


@pytest.mark.parametrize(
    "name",
    [
        *("", "a b", "a,b", "a;b", "a{b", "a}b", "a(b", "a)b", "a\nb", "a\tb", "a=b", "a\x00b", "x" * 256, "é" * 128),
        *("_key", "_KEY", "_raw", "_Seqno", "_change_type", "_metadata", "T"),
    ],
)
def test_a_name_that_cannot_be_a_column_stays_in_raw(name: str) -> None:
    assert EVERY.grown(FieldReport(1, {name: {"int": 1}})) == EVERY
    with pytest.raises(OptionError):
        EVERY.with_columns([Column(name, "int")])


@pytest.mark.parametrize("name", ["_id", "_class", "a.b", "größe", "日本", "x" * 255, 'a"b', "a`b", "$ref", "😀", "-"])
def test_other_names_can_be_columns(name: str) -> None:
    grown = EVERY.grown(FieldReport(1, {name: {"int": 1}}))
    assert names(grown) == [*"biftj", name]
    assert TableSchema.of_delta(grown.delta()) == grown


def test_of_names_that_differ_in_case_the_first_becomes_a_column() -> None:
    assert names(TableSchema().grown(report(1, Name={"int": 1}, name={"int": 1}, NAME={"int": 1}))) == ["Name"]


def test_the_number_of_columns_is_limited_and_the_most_frequent_win() -> None:
    counts: dict[str, dict[Kind, int]] = {f"rare{n}": {"int": 10} for n in range(COLUMNS_MAX)}
    counts |= {"late": {"text": 11}}
    grown = EVERY.grown(FieldReport(100, counts))
    assert len(grown.columns) == COLUMNS_MAX
    assert names(grown)[-1] == "late"
    assert names(grown)[5:8] == ["rare0", "rare1", "rare2"]
    assert grown.grown(report(1, more={"int": 1})) == grown
    with pytest.raises(OptionError, match="at most 500"):
        grown.with_columns([Column("more", "int")])


def test_integer_columns_can_be_widened() -> None:
    assert EVERY.widened(["i", "t", "absent"]).columns == (
        Column("b", "bool"), Column("i", "float"), Column("f", "float"), Column("t", "text"), Column("j", "json"),
    )  # fmt: skip
    assert EVERY.widened([]) == EVERY
    assert EVERY.columns[1] == Column("i", "int")  # unchanged


def test_a_user_names_columns_as_in_spark() -> None:
    found = TableSchema.parse(
        "name string, age LONG,price: double ,ok boolean , tags json,`a``.b` bigint, n int, x float"
    )
    assert found.columns == (
        Column("name", "text"), Column("age", "int"), Column("price", "float"), Column("ok", "bool"),
        Column("tags", "json"), Column("a`.b", "int"), Column("n", "int"), Column("x", "float"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write 'name type"),
        ("a long,", "write 'name type"),
        ("a long b string", "write 'name type"),
        (",a long", "write 'name type"),
        ("a", "'a': the column has no type"),
        ("a long, b", "'b': the column has no type"),
        ("a number", "'a': unknown type 'number'"),
        ("a decimal(10,2)", "'a': unknown type 'decimal"),
        ("a array<int>", "'a': unknown type 'array<int>'"),
        ("a long, A string", "'A': the name is in use"),
        ("a long, a string", "'a': the column already holds long"),
        ("_key string", "'_key': the name is in use or reserved"),
        ("`a b` long", "'a b': Delta allows no spaces"),
        ("`a long", "write 'name type"),
        ("`` long", "write 'name type"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(OptionError) as refused:
        TableSchema.parse(text)
    assert why in str(refused.value)
    assert "--schema" in str(refused.value)


def test_a_user_schema_extends_a_table() -> None:
    wanted = TableSchema.parse("i long, extra string").columns
    assert EVERY.with_columns(wanted).columns == (*EVERY.columns, Column("extra", "text"))
    with pytest.raises(OptionError, match="'i': the column already holds long"):
        EVERY.with_columns([Column("i", "text")])
    with pytest.raises(OptionError, match="--columns"):
        EVERY.with_columns([Column("i", "text")], "--columns")


def test_schemas_are_values() -> None:
    same = TableSchema(EVERY.columns)
    assert same == EVERY
    assert hash(same) == hash(EVERY)
    assert TableSchema() != EVERY
    assert EVERY != "schema"
    assert "i int" in repr(EVERY)
    assert pickle.loads(pickle.dumps(EVERY)) == EVERY
    assert KINDS == ("bool", "int", "float", "text", "json")
