"""The plain twin of ``_parsing``, used where it was not compiled, and the definition of what it returns."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from upriver.tables.documents.field_report import NAMES_MAX, most_frequent
from upriver.tables.schema import NAME_BYTES_MAX, TYPES, Column, Kind

#: Levels of objects and arrays, the document included.
DEPTH_MAX: Final = 1000
#: A longer number is not converted.
NUMBER_BYTES_MAX: Final = 800
#: Decimals with more digits are always more exact than a double.
DIGITS_MAX: Final = 17
#: When there are ``NAMES_MAX`` unknown names, this many stay.
NAMES_KEPT: Final = 2048

_EXACT: Final = 2**53
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_LITERAL: Final = re.compile(r"true|false|null")
_LITERALS: Final = {"true": True, "false": False, "null": None}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _Invalid(Exception):
    """Not a JSON object."""


class _Value(NamedTuple):
    """A value, and the kind of column that can hold it; None if none can."""

    kind: Kind | None
    value: Any = None
    #: Whether the text says more than the value.
    is_rounded: bool = False


class _Names:
    """Counts of unknown names, bounded."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[Kind, int]] = {}
        self._rows: dict[str, int] = {}

    def add(self, row: int, fields: Iterable[tuple[str, Kind]]) -> None:
        for name, kind in fields:
            if name not in self.counts:
                if len(self.counts) == NAMES_MAX:
                    self.counts = {**most_frequent(self.counts, NAMES_KEPT)}  # type: ignore[dict-item]
                    self._rows = {known: self._rows[known] for known in self.counts}
                self.counts[name] = {}
            if self._rows.get(name) != row:
                self.counts[name][kind] = self.counts[name].get(kind, 0) + 1
            self._rows[name] = row


def parse_columns(
    values: pa.Array, columns: Sequence[Column]
) -> tuple[list[pa.Array], pa.Array, int, dict[str, dict[Kind, int]], list[str]]:
    """One array per column, the values to keep, the number of documents, unknown fields with their counts by kind in
    the order of the documents, and the integer columns that met a decimal."""
    kinds = {column.name: column.kind for column in columns}
    cells: dict[str, list[Any]] = {name: [None] * len(values) for name in kinds}
    raw: list[bytes | None] = [None] * len(values)
    names, decimals, documents = _Names(), set[str](), 0
    for row, value in enumerate(values.to_pylist()):
        if value is None:
            continue
        try:
            fields = list(_fields(value))
        except _Invalid:
            raw[row] = value
            continue
        documents += 1
        if not _place(fields, kinds, cells, row, decimals):
            raw[row] = value
        names.add(row, [(name, found.kind) for name, found in fields if found.kind and _is_countable(name, kinds)])
    arrays = [pa.array(cells[column.name], TYPES[column.kind]) for column in columns]
    met = [column.name for column in columns if column.name in decimals]
    return arrays, pa.array(raw, pa.binary()), documents, names.counts, met


def _place(
    fields: list[tuple[str, _Value]],
    kinds: dict[str, Kind],
    cells: dict[str, list[Any]],
    row: int,
    decimals: set[str],
) -> bool:
    """Fill the cells of the fields that fit; returns whether all did."""
    complete, seen = True, set[str]()
    for name, found in fields:
        kind = kinds.get(name)
        cell = None if kind is None or name in seen else _cell(kind, found)
        if kind is not None:
            cells[name][row] = cell  # a second field of this name: neither is shown
        if kind == "int" and found.kind == "float" and name not in seen:
            decimals.add(name)
        complete = complete and cell is not None and not found.is_rounded
        seen.add(name)
    return complete


def _cell(kind: Kind, found: _Value) -> Any:
    if kind == found.kind:
        return found.value
    if kind == "float" and found.kind == "int" and -_EXACT <= found.value <= _EXACT:
        return float(found.value)
    return None


def _is_countable(name: str, kinds: dict[str, Kind]) -> bool:
    return name not in kinds and not _SURROGATE.search(name) and len(name.encode()) <= NAME_BYTES_MAX


def _fields(value: bytes) -> Iterable[tuple[str, _Value]]:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise _Invalid from error
    place = _after_space(text, 0)
    if not text.startswith("{", place):
        raise _Invalid
    place = _after_space(text, place + 1)
    if not text.startswith("}", place):
        while True:
            found = _matched(_STRING, text, place)
            name = json.loads(found[0])
            field, place = _value(text, _after_colon(text, found.end()))
            yield name, field
            place = _after_space(text, place)
            if not text.startswith(",", place):
                break
            place = _after_space(text, place + 1)
    if not text.startswith("}", place) or _after_space(text, place + 1) != len(text):
        raise _Invalid


def _value(text: str, place: int) -> tuple[_Value, int]:
    """The value at this place, and the place after it."""
    first = text[place : place + 1]
    if first == '"':
        found = _matched(_STRING, text, place)
        string = json.loads(found[0])
        return _Value(None if _SURROGATE.search(string) else "text", string), found.end()
    if first in ("{", "["):
        return _nested(text, place)
    if first in ("t", "f", "n"):
        found = _matched(_LITERAL, text, place)
        literal = _LITERALS[found[0]]
        return _Value(None if literal is None else "bool", literal), found.end()
    found = _matched(_NUMBER, text, place)
    return _number(found[0], decimal=bool(found[1])), found.end()


def _number(text: str, *, decimal: bool) -> _Value:
    if decimal:
        if len(text) > NUMBER_BYTES_MAX or math.isinf(real := float(text)):
            return _Value(None)
        return _Value("float", real, is_rounded=not _is_faithful(real, text))
    if len(text) > 20 or not -(2**63) <= (whole := int(text)) < 2**63:
        return _Value(None)
    return _Value("int", whole)


def _is_faithful(real: float, text: str) -> bool:
    """Whether a double, written with as many digits as the text has, gives the text's digits again."""
    digits = re.split("[eE]", text)[0].lstrip("-").replace(".", "").strip("0")
    if len(digits) > DIGITS_MAX:
        return False
    return not digits or f"{abs(real):.{len(digits) - 1}e}".split("e")[0].replace(".", "") == digits


def _nested(text: str, place: int) -> tuple[_Value, int]:
    """An object or array as compact text. It is only checked: its numbers and strings stay as they are."""
    closing: list[str] = []
    parts: list[str] = []
    lone = False

    def string(place: int) -> int:
        nonlocal lone
        found = _matched(_STRING, text, place)
        lone = lone or ("\\u" in found[0] and _SURROGATE.search(json.loads(found[0])) is not None)
        parts.append(found[0])
        return found.end()

    while True:  # at the start of a value
        first = text[place : place + 1]
        if first == '"':
            place = string(place)
        elif first in ("{", "["):
            if len(closing) + 1 == DEPTH_MAX:
                raise _Invalid
            closing.append("}" if first == "{" else "]")
            parts.append(first)
            place = _after_space(text, place + 1)
            if not text.startswith(closing[-1], place):
                if first == "{":
                    place = _after_name(text, string(place), parts)
                continue
        else:
            found = _matched(_LITERAL if first in ("t", "f", "n") else _NUMBER, text, place)
            parts.append(found[0])
            place = found.end()
        place = _after_space(text, place)
        while text.startswith(closing[-1], place):
            parts.append(closing.pop())
            if not closing:
                return _Value(None if lone else "json", "".join(parts)), place + 1
            place = _after_space(text, place + 1)
        if not text.startswith(",", place):
            raise _Invalid
        parts.append(",")
        place = _after_space(text, place + 1)
        if closing[-1] == "}":
            place = _after_name(text, string(place), parts)


def _after_name(text: str, place: int, parts: list[str]) -> int:
    parts.append(":")
    return _after_colon(text, place)


def _after_colon(text: str, place: int) -> int:
    place = _after_space(text, place)
    if not text.startswith(":", place):
        raise _Invalid
    return _after_space(text, place + 1)


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _matched(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    found = pattern.match(text, place)
    if found is None:
        raise _Invalid
    return found
