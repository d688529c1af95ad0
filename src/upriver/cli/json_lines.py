"""Documents as JSON lines: one document per line. Any bytes survive a round trip.

A key or value in UTF-8 is text (``"key"``, ``"value"``); anything else is base64 under another name (``"key_base64"``,
``"value_base64"``). When documents are read, a value may also be any JSON, which is stored as it is.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.consumer import VbucketEvent
from upriver.model import CHANGES, Event
from upriver.wire.codec import key_vbuckets

#: The numbers that a document has beside its key and value.
NUMBERS: Final = ("flags", "expiry", "cas", "seqno", "vbucket", "rev_seqno")
_MAX: Final = {field.name: 2**field.type.bit_width - 1 for field in CHANGES if pa.types.is_integer(field.type)}
#: A column that says that a document lies in another vbucket than its key's: a client put it there.
MISPLACED: Final = pa.field("misplaced", pa.bool_(), nullable=False)
_compact: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class NotADocument(Exception):
    """A line is not a document, and why."""


def with_misplaced(changes: pa.RecordBatch, vbuckets: int) -> pa.RecordBatch:
    """The rows with the column ``MISPLACED``, for a bucket with this number of vbuckets."""
    found = pc.not_equal(changes.column("vbucket"), key_vbuckets(changes.column("key"), vbuckets))
    return changes.append_column(MISPLACED, found)


def lines_of(batch: pa.RecordBatch, *, with_event: bool = False) -> Iterator[str]:
    """A line for each row; ``with_event`` adds the kind of change."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    numbers = [columns.get(name, repeat(0)) for name in NUMBERS]
    rows = zip(
        columns["key"],
        columns.get("value", repeat(None)),
        columns.get("event", repeat(int(Event.MUTATION))),
        columns.get("datatype", repeat(0)),
        columns.get(MISPLACED.name, repeat(False)),
        *numbers,
        strict=False,
    )
    for key, value, event, datatype, misplaced, *others in rows:
        document = text_fields("key", key)
        if with_event:
            document["event"] = Event(event).name.lower()
        if event != Event.MUTATION:
            document["deleted"] = True
        elif value is not None:
            document |= text_fields("value", value)
        document |= zip(NUMBERS, others, strict=True)
        if datatype:
            document["datatype"] = datatype
        if misplaced:
            document[MISPLACED.name] = True
        yield _compact(document)


def event_line(event: VbucketEvent) -> str:
    """The line for an event that concerns a whole vbucket."""
    facts = {field.name: getattr(event, field.name) for field in fields(event)}
    return _compact({**facts, "event": event.event.name.lower()})


def text_fields(name: str, data: bytes) -> dict[str, Any]:
    """A key or value under the name that shows its encoding."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def batches_of(lines: Iterable[bytes], rows_max: int) -> Iterator[pa.RecordBatch]:
    """The documents in these lines as changes; ``NotADocument`` names the first invalid line."""
    rows: list[tuple[Any, ...]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
        except (NotADocument, ValueError, RecursionError) as error:
            raise NotADocument(f"line {number}: {error}") from None
        if len(rows) == rows_max:
            yield _batch(rows)
            rows = []
    if rows:
        yield _batch(rows)


_COLUMNS: Final = ("key", "value", "event", "flags", "expiry", "datatype", "cas", "rev_seqno", "vbucket")
_TYPES: Final = [*(CHANGES.field(name) for name in _COLUMNS), MISPLACED]
#: The version of a document on another node, and its vbucket there. A document may have none, which differs from 0.
_VERSION: Final = ("cas", "rev_seqno", "vbucket")


def _row(line: bytes) -> tuple[Any, ...]:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise NotADocument(f"invalid JSON: {error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}") from None
    if not isinstance(document, dict):
        raise NotADocument("not a JSON object")
    key = _bytes(document, "key")
    if key is None:
        raise NotADocument("the key is missing")
    deleted = document.get("deleted", False)
    value = _bytes(document, "value")
    if value is None and not deleted:
        raise NotADocument("the value is missing")
    event = Event.DELETION if deleted else Event.MUTATION
    numbers = [_number(document, name) for name in _COLUMNS[3:]]
    misplaced = document.get(MISPLACED.name, False)
    if type(misplaced) is not bool or (misplaced and numbers[-1] is None):
        raise NotADocument(f"{MISPLACED.name} must be true or false, and true only beside a vbucket")
    return (key, value or b"", int(event), *numbers, misplaced)


def _bytes(document: Mapping[str, Any], name: str) -> bytes | None:
    encoded = document.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise NotADocument(f"{name}_base64 is not base64") from None
    if name not in document:
        return None
    found = document[name]
    if not isinstance(found, str):
        if name == "key":
            raise NotADocument("the key must be a text")
        found = _compact(found)
    try:
        return found.encode()
    except UnicodeEncodeError:
        raise NotADocument(f"the {name} contains an unpaired surrogate") from None


def _number(document: Mapping[str, Any], name: str) -> int | None:
    if name in _VERSION and name not in document:
        return None
    found = document.get(name, 0)
    if type(found) is not int or not 0 <= found <= _MAX[name]:
        raise NotADocument(f"{name} must be a number from 0 to {_MAX[name]}, not {found!r}")
    return int(found)


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(_TYPES, zip(*rows, strict=True), strict=True)
    return pa.record_batch({field.name: pa.array(values, field.type) for field, values in columns})
