"""JSON values as columns of a table: which columns exist, and how Spark rows become table rows.

A field becomes a column when it is first seen, with the type of most of its values: boolean, integer, number, text, or
JSON text for objects and arrays. The type of a column never changes. If the columns cannot represent a value completely
(another type, a null, not a JSON object), the original value is stored in ``_raw`` as well, so that nothing is lost.
Our own columns start with an underscore.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

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
#: The partition column of a Delta table.
PART: Final = "upriver_part"
#: Maximum number of fields with a column; others are only in ``_raw``.
COLUMNS_MAX: Final = 500
_NUMBERS: Final = ("vbucket", "seqno", "rev_seqno", "cas", "flags", "expiry", "datatype")
_KINDS: Final[dict[type, str]] = {bool: "bool", int: "int", float: "float", str: "text", dict: "json", list: "json"}
_TYPES: Final = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "json": pa.string(),
}
#: The metadata of a column with JSON text.
_MARK: Final = {b"upriver": b"json"}
_FORBIDDEN: Final = frozenset(" ,;{}()\n\t=")
_EXACT: Final = 2**53
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Columns:
    """The columns of a table; new fields add columns."""

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self._kinds: dict[str, str] = {}
        for field in schema or ():
            if field.name not in OWN.names and field.name != PART:
                self._kinds[field.name] = _kind_of(field)
        self._folded = {name.casefold() for name in (*OWN.names, PART, *self._kinds)}

    @property
    def schema(self) -> pa.Schema:
        """All columns, ours first."""
        return pa.schema([*OWN, *(_field(name, kind) for name, kind in self._kinds.items())])

    def table(self, rows: pa.Table, *, grow: bool = True) -> pa.Table:
        """Mutations as rows of the table; new fields become columns if wanted."""
        values = rows.column("value").to_pylist()
        documents = [_document(value) for value in values]
        if grow:
            self._grow(documents)
        cells: dict[str, list[Any]] = {name: [None] * len(values) for name in self._kinds}
        raw: list[bytes | None] = [None] * len(values)
        for place, document in enumerate(documents):
            if document is None or not self._place(document, place, cells):
                raw[place] = values[place]
        own = _own(rows) | {"_raw": pa.array(raw, pa.binary())}
        fields = {name: pa.array(cells[name], _TYPES[kind]) for name, kind in self._kinds.items()}
        return pa.table([{**own, **fields}[name] for name in self.schema.names], schema=self.schema)

    def _place(self, document: Mapping[str, Any], place: int, cells: Mapping[str, list[Any]]) -> bool:
        """Fill the cells of the fields that fit; returns whether all did."""
        whole = True
        for name, value in document.items():
            kind = self._kinds.get(name)
            found = _KINDS.get(type(value))
            if kind is None or found is None:
                whole = False
            elif kind == found == "json":
                cells[name][place] = compact(value)
            elif kind == found and (kind != "int" or -(2**63) <= value < 2**63):
                cells[name][place] = value
            elif kind == "float" and found == "int" and -_EXACT <= value <= _EXACT:
                cells[name][place] = float(value)
            else:
                whole = False
        return whole

    def _grow(self, documents: Iterable[Mapping[str, Any] | None]) -> None:
        known = self._kinds.keys()
        kinds: dict[str, Counter[str]] = defaultdict(Counter)
        for document in documents:
            if document and not document.keys() <= known:
                for name in document.keys() - known:
                    if (kind := _KINDS.get(type(document[name]))) is not None:
                        kinds[name][kind] += 1
        for name in sorted(kinds):
            folded = name.casefold()
            possible = name and folded not in self._folded and not _FORBIDDEN & set(name)
            if possible and len(self._kinds) < COLUMNS_MAX:
                numbers = set(kinds[name]) == {"int", "float"}
                self._kinds[name] = "float" if numbers else kinds[name].most_common(1)[0][0]
                self._folded.add(folded)


def compact(value: Any) -> str:
    """Compact JSON."""
    return _ENCODER.encode(value)


def _own(rows: pa.Table) -> dict[str, pa.Array]:
    keys = rows.column("key").combine_chunks()
    try:
        texts, others = keys.cast(pa.string()), pa.nulls(len(keys), pa.binary())
    except pa.ArrowInvalid:
        is_text = [_is_text(key) for key in keys.to_pylist()]
        nothing = pa.scalar(None, pa.binary())
        texts = pc.if_else(pa.array(is_text), keys, nothing).cast(pa.string())
        others = pc.if_else(pa.array(is_text), nothing, keys)
    numbers = {f"_{name}": rows.column(name).cast(OWN.field(f"_{name}").type) for name in _NUMBERS}
    return {"_key": texts, "_raw_key": others, **numbers}


def keys_of(table: pa.Table) -> pa.ChunkedArray:
    """The keys of a table's rows as bytes."""
    return pc.coalesce(table.column("_key").cast(pa.binary()), table.column("_raw_key"))


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse(_: str) -> NoReturn:
    raise ValueError("not a JSON number")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a duplicate field")
    return document


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_pairs)
#: Only a number with an exponent or hundreds of digits can overflow a float.
_EXPONENT: Final = re.compile(r"[0-9][eE]|[0-9]{300}")


def _document(value: bytes | None) -> dict[str, Any] | None:
    """The JSON object of a value; None if it is not one, or would not survive a round trip."""
    if not value or value[:1] not in (b"{", b" ", b"\n", b"\r", b"\t"):
        return None
    try:
        text = value.decode()
        document = _DECODER.decode(text)
        if "\\u" in text:
            compact(document).encode()  # an unpaired surrogate cannot be stored as text
        if _EXPONENT.search(text):
            json.dumps(document, allow_nan=False)  # nor can an infinite number
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _kind_of(field: pa.Field) -> str:
    if field.metadata and field.metadata.get(b"upriver") == b"json":
        return "json"
    return next(kind for kind, known in _TYPES.items() if known == field.type)


def _field(name: str, kind: str) -> pa.Field:
    return pa.field(name, _TYPES[kind], metadata=_MARK if kind == "json" else None)
