"""The columns of a table: ours, those that documents fill, and those that other programs added.

A ``TableSchema`` is immutable. It is read from the schema of a Delta table, or starts empty; ``grown`` adds columns for
fields that enough documents have, ``widened`` turns integer columns into columns of decimals, and ``delta`` writes the
schema for the log. Columns of other types, added by other programs, keep their place and their description; we never
fill them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import pyarrow as pa

from upriver.errors import ForeignData, OptionError

if TYPE_CHECKING:
    from upriver.tables.documents import FieldReport

Kind = Literal["bool", "int", "float", "text", "json"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: The columns of every table, before the fields.
OWN: Final = pa.schema(
    [
        pa.field("_key", pa.string()),
        #: A key that is not UTF-8; then ``_key`` is null.
        pa.field("_raw_key", pa.binary()),
        #: The original value, if the columns do not represent it completely.
        pa.field("_raw", pa.binary()),
        pa.field("_vbucket", pa.int32()),
        pa.field("_seqno", pa.int64()),
        pa.field("_rev_seqno", pa.int64()),
        pa.field("_cas", pa.int64()),
        pa.field("_flags", pa.int64()),
        pa.field("_expiry", pa.int64()),
        pa.field("_datatype", pa.int32()),
    ]
)
TYPES: Final[Mapping[Kind, pa.DataType]] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "json": pa.string(),
}
#: A field becomes a column when at least this share of a batch's documents has it.
SHARE: Final = 0.01
#: Maximum number of columns that documents fill; other fields are only in ``_raw``.
COLUMNS_MAX: Final = 500
#: Fields that fewer documents than this have become columns only up to this number of columns. Otherwise the first
#: document of a table, if it has many fields, would take all columns for ever.
FEW_DOCUMENTS: Final = 10
FEW_COLUMNS_MAX: Final = 100
NAME_BYTES_MAX: Final = 255

_OWN_TYPES: Final = {pa.string(): "string", pa.binary(): "binary", pa.int32(): "integer", pa.int64(): "long"}
_DELTA_TYPES: Final[Mapping[Kind, str]] = {
    "bool": "boolean",
    "int": "long",
    "float": "double",
    "text": "string",
    "json": "string",
}
_KINDS_BY_DELTA_TYPE: Final[Mapping[str, Kind]] = {
    "boolean": "bool",
    "long": "int",
    "double": "float",
    "string": "text",
}
#: The metadata of a column with JSON text.
_MARK: Final = {"upriver": "json"}
#: Parquet's schema syntax uses these, so Delta refuses them in names.
_FORBIDDEN: Final = frozenset(" ,;{}()\n\t=")
#: Delta's change data feed, and Spark's column of file metadata.
_RESERVED: Final = frozenset({"_change_type", "_commit_version", "_commit_timestamp", "_metadata"})
#: The names of types in ``--schema``, as in Spark's DDL.
_TYPE_NAMES: Final[Mapping[str, Kind]] = {
    "string": "text",
    "text": "text",
    "long": "int",
    "bigint": "int",
    "int": "int",
    "integer": "int",
    "double": "float",
    "float": "float",
    "boolean": "bool",
    "bool": "bool",
    "json": "json",
}
_DECLARED: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\s`:,]+))\s*:?\s*([^\s,]*)\s*")


class Column(NamedTuple):
    """A column that documents fill: the name of their field, and what it holds."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class _Field:
    """A column: its kind, if documents fill it, and its description by Delta."""

    name: str
    kind: Kind | None
    #: JSON, kept as it is, because other programs may have added to it.
    description: str

    @classmethod
    def of(cls, column: Column) -> "_Field":
        metadata = _MARK if column.kind == "json" else {}
        return cls(column.name, column.kind, _described(column.name, _DELTA_TYPES[column.kind], metadata))

    @classmethod
    def of_delta(cls, field: Mapping[str, Any]) -> "_Field":
        name, type_ = field["name"], field["type"]
        kind = _KINDS_BY_DELTA_TYPE.get(type_) if isinstance(type_, str) and name not in OWN.names else None
        if kind == "text" and (field.get("metadata") or {}).get("upriver") == "json":
            kind = "json"
        return cls(name, kind, json.dumps(field))


class TableSchema:
    """All columns of a table; immutable."""

    def __init__(self, columns: Iterable[Column] = ()) -> None:
        own = (_Field(field.name, None, _described(field.name, _OWN_TYPES[field.type], {})) for field in OWN)
        self._fields = (*own, *(_Field.of(column) for column in columns))

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns that documents fill, in order."""
        return tuple(Column(field.name, field.kind) for field in self._fields if field.kind is not None)

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """The columns of other programs, which data files of ours do not have."""
        return tuple(field.name for field in self._fields if field.kind is None and field.name not in OWN.names)

    @cached_property
    def arrow(self) -> pa.Schema:
        """The columns of a data file: ours, then those that documents fill."""
        return pa.schema([*OWN, *(_arrow_field(column) for column in self.columns)])

    def delta(self) -> str:
        """The ``schemaString`` of Delta's metadata."""
        fields = [json.loads(field.description) for field in self._fields]
        return json.dumps({"type": "struct", "fields": fields}, ensure_ascii=False)

    @classmethod
    def of_delta(cls, text: str, where: str = "table") -> "TableSchema":
        """Read a ``schemaString``. ``ForeignData`` if columns of ours are missing, or a column must not be null."""
        fields = {field["name"]: field for field in json.loads(text)["fields"]}
        for own in OWN:
            if own.name not in fields or fields[own.name]["type"] != _OWN_TYPES[own.type]:
                raise ForeignData(where, f"not an Upriver table: column {own.name} is missing or has another type")
        for name, field in fields.items():
            if not field.get("nullable", True):
                raise ForeignData(where, f"column {name} must not be null, but rows may lack it")
        return cls._of(_Field.of_delta(field) for field in fields.values())

    @classmethod
    def parse(cls, text: str, option: str = "--schema") -> "TableSchema":
        """Read what a user wrote, like ``name string, age long, tags json``; ``OptionError`` says what is wrong."""
        return cls().with_columns(_declared(text, option), option)

    def with_columns(self, columns: Iterable[Column], option: str = "--schema") -> "TableSchema":
        """Also with these columns; ``OptionError`` if one is impossible or exists with another kind."""
        known = {column.name: column.kind for column in self.columns}
        fields, names = list(self._fields), self._names
        for column in columns:
            if known.get(column.name) == column.kind:
                continue
            if column.name in known:
                raise OptionError(option, column.name, f"the column already holds {_DELTA_TYPES[known[column.name]]}")
            if why := _refusal(column.name, names):
                raise OptionError(option, column.name, why)
            if len(known) == COLUMNS_MAX:
                raise OptionError(option, column.name, f"documents fill at most {COLUMNS_MAX} columns")
            fields.append(_Field.of(column))
            known[column.name] = column.kind
            names.add(column.name.casefold())
        return self._of(fields)

    def grown(self, report: "FieldReport", share: float = SHARE, *, at_least: int = 1) -> "TableSchema":
        """Also with the fields that at least this share, and this number, of the reported documents have.

        If there are too many, the most frequent become columns; rare fields leave room for others. New columns are in
        the order of the report, which is that of the documents.
        """
        needed = max(share * report.documents, at_least)
        names, candidates = self._names, []
        for name, counts in report.unknown.items():
            if sum(counts.values()) >= needed and _refusal(name, names) is None:
                candidates.append(name)
                names.add(name.casefold())  # the first of two names that differ in case becomes a column
        counts_of = {name: sum(report.unknown[name].values()) for name in candidates}
        frequent = set[str]()
        for name in sorted(candidates, key=lambda name: -counts_of[name]):
            if len(self.columns) + len(frequent) >= (
                COLUMNS_MAX if counts_of[name] >= FEW_DOCUMENTS else FEW_COLUMNS_MAX
            ):
                break
            frequent.add(name)
        added = [Column(name, _majority(report.unknown[name])) for name in candidates if name in frequent]
        return self._of([*self._fields, *map(_Field.of, added)]) if added else self

    def widened(self, names: Iterable[str]) -> "TableSchema":
        """With these integer columns as decimals; other names are ignored."""
        wanted = set(names)
        return self._of(_as_decimal(field) if field.name in wanted else field for field in self._fields)

    def widens(self, before: "TableSchema") -> bool:
        """Whether files with the columns of ``before`` must be written again, because types differ."""
        return not dict(before.columns).items() <= dict(self.columns).items()

    @classmethod
    def _of(cls, fields: Iterable[_Field]) -> "TableSchema":
        schema = cls()
        schema._fields = tuple(fields)
        return schema

    @property
    def _names(self) -> set[str]:
        """All names in use; readers do not distinguish upper and lower case."""
        return {name.casefold() for name in (*_RESERVED, *(field.name for field in self._fields))}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableSchema) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)

    def __repr__(self) -> str:
        return f"TableSchema({', '.join(f'{name} {kind}' for name, kind in self.columns)})"


def _described(name: str, type_: str, metadata: Mapping[str, str]) -> str:
    return json.dumps({"name": name, "type": type_, "nullable": True, "metadata": metadata})


def _arrow_field(column: Column) -> pa.Field:
    return pa.field(column.name, TYPES[column.kind], metadata=_MARK if column.kind == "json" else None)


def _as_decimal(field: _Field) -> _Field:
    if field.kind != "int":
        return field
    return _Field(field.name, "float", json.dumps(json.loads(field.description) | {"type": "double"}))


def _majority(counts: Mapping[Kind, int]) -> Kind:
    """The kind of most values. Integers and decimals are both numbers."""
    merged = dict(counts)
    if "float" in merged:
        merged["float"] += merged.pop("int", 0)
    return max(merged, key=lambda kind: (merged[kind], KINDS.index(kind)))


def _refusal(name: str, used: Iterable[str]) -> str | None:
    """Why a field of this name cannot become a column; None if it can."""
    if not name:
        return "a column needs a name"
    if name.casefold() in used:
        return "the name is in use or reserved; upper and lower case are not distinguished"
    if any(character in _FORBIDDEN or character < " " for character in name):
        return "Delta allows no spaces, control characters, or ,;{}()= in names"
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        return f"a name has at most {NAME_BYTES_MAX} bytes"
    return None


def _declared(text: str, option: str) -> Iterable[Column]:
    place = 0
    while True:
        found = _DECLARED.match(text, place)
        if found is None or (found.end() < len(text) and text[found.end()] != ","):
            raise OptionError(
                option, text[place:].strip(), "write 'name type, name type', as in 'name string, age long'"
            )
        name, type_ = found[1].replace("``", "`") if found[1] else found[2], found[3]
        if not type_:
            raise OptionError(option, name, f"the column has no type; write one of {', '.join(_TYPE_NAMES)}")
        if type_.lower() not in _TYPE_NAMES:
            raise OptionError(option, name, f"unknown type {type_!r}; use one of {', '.join(_TYPE_NAMES)}")
        yield Column(name, _TYPE_NAMES[type_.lower()])
        place = found.end() + 1
        if place > len(text):
            return
