"""The byte diagrams of the texts, and what it means that a dialect agrees with them.

A vector has the bytes as printed, the bytes as we put them on the wire, and the printed list of fields. Lengths,
opcodes and reserved bytes are compared at their place in the encoded packet, everything else with the attributes
of the decoded message.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upriver.errors import WireError
from upriver.wire import Dialect, Framer, Message

_FOLDER = Path(__file__).parent.parent / "data" / "vectors"


@dataclass(frozen=True)
class PrintedField:
    """A line of a field list."""

    name: str
    first: int
    last: int
    value: int | bytes


@dataclass(frozen=True)
class Vector:
    """A byte diagram."""

    id: str
    dialect: str
    kind: str
    printed: bytes
    wire: bytes | None
    wrong_fields: frozenset[str]
    fields: tuple[PrintedField, ...]

    def __str__(self) -> str:
        return self.id


def vectors_of(dialect: str) -> list[Vector]:
    """All diagrams of a dialect's text."""
    document = json.loads((_FOLDER / f"{dialect}.json").read_text())
    return [_vector(dialect, entry) for entry in document["vectors"]]


def messages_of(dialect: str) -> list[Vector]:
    """The diagrams that show a message and have bytes that can be sent."""
    return [vector for vector in vectors_of(dialect) if vector.kind == "message" and vector.wire is not None]


def _vector(dialect: str, entry: dict[str, Any]) -> Vector:
    fields = (_printed_field(line) for line in entry["fields"] if entry["wire"] is not None and line["printed"])
    return Vector(
        id=entry["id"],
        dialect=dialect,
        kind=entry["kind"],
        printed=bytes.fromhex(entry["printed"]),
        wire=None if entry["wire"] is None else bytes.fromhex(entry["wire"]),
        wrong_fields=frozenset(name.lower() for name in entry["wrong_fields"]),
        fields=tuple(fields),
    )


def _printed_field(line: dict[str, str]) -> PrintedField:
    name = line["name"].lower()
    return PrintedField(name, int(line["first"]), int(line["last"]), _printed_value(name, line["printed"]))


def _printed_value(name: str, text: str) -> int | bytes:
    number = re.match(r"0x([0-9a-fA-F]+)", text)
    if number:
        return int(number[1], 16)
    if name in ("ttl", "reserved"):
        return int(text, 16)
    # ``[mykey]`` and ``"mykey"`` are a key in brackets and quotes, ``bucketstream vb[100-105]`` one that has some.
    in_brackets = text[0] + text[-1] in ("[]", '""')
    return (text[1:-1] if in_brackets else text).encode()


#: Fields that no message has as an attribute: compared with the bytes at their place.
_BY_PLACE = frozenset(
    ("magic", "opcode", "key length", "extra length", "total body", "length", "reserved", "type", "request type")
)
#: The texts' names for the fields of a header.
_IN_HEADER = {
    "data type": "datatype",
    "vbucket": "vbucket",
    "status": "status",
    "opaque": "opaque",
    "cas": "cas",
    "request id": "request_id",
}
#: The texts' names for the fields of a body; the first attribute that the message has is meant.
_IN_BODY = {
    "backfill date": ("backfill_date",),
    "by seqno": ("by_seqno",),
    "cas": ("cas",),
    "end by seqno": ("end_seqno",),
    "end seqno": ("end_seqno",),
    "engine priv.": ("private_length",),
    "expiration": ("expiration",),
    "flag": ("reason",),
    "flags": ("tap_flags", "reason", "flags"),
    "group id": ("group_id",),
    "high seqno": ("high_seqno",),
    "item exp": ("expiration",),
    "item expiry": ("expiration",),
    "item flags": ("flags",),
    "key": ("key", "name"),
    "lock time": ("lock_time",),
    "name": ("name",),
    "nmeta": ("nmeta",),
    "opaque": ("stream_opaque",),
    "rev seqno": ("rev_seqno",),
    "rollback #": ("seqno",),
    "rollback seqno": ("seqno",),
    "seqno": ("seqno",),
    "start by seqno": ("start_seqno",),
    "start seqno": ("start_seqno",),
    "state": ("state",),
    "ttl": ("ttl",),
    "value": ("value",),
    "vb state": ("state",),
    "vb uuid": ("vbucket_uuid",),
    "vbucket": ("vbucket",),
    "vbucket uuid": ("vbucket_uuid",),
}


def _values(message: Message, name: str, in_header: bool) -> list[Any]:
    """What the message holds under a printed name: several values where the text prints a list."""
    log = getattr(message, "log", None)
    if log is not None and name in ("vb uuid", "vbucket uuid"):
        return [entry.vbucket_uuid for entry in log]
    if log is not None and name in ("vb seqno", "high seqno"):
        return [entry.seqno for entry in log]
    if name == "# listed":
        return [len(getattr(message, "vbuckets", ()))]
    if in_header:
        # One diagram lists the vbucket of a request under the name of a response's field.
        attribute = _IN_HEADER[name] if hasattr(message, _IN_HEADER[name]) else "vbucket"
        return [getattr(message, attribute)]
    if name == "vbucket" and hasattr(message, "vbuckets"):
        return list(message.vbuckets)
    return [getattr(message, next(a for a in _IN_BODY[name] if hasattr(message, a)))]


def assert_fields_as_printed(message: Message, vector: Vector) -> None:
    """Every field that the text lists, except the ones that it lists wrongly, has the value that it prints."""
    packet, header_size = message.encode(), message.framing.header_size
    seen: dict[tuple[str, bool], list[int | bytes]] = {}
    for field in vector.fields:
        if field.name in vector.wrong_fields:
            continue
        if field.name in _BY_PLACE:
            assert int.from_bytes(packet[field.first : field.last + 1], "big") == field.value, field.name
        else:
            seen.setdefault((field.name, field.first < header_size), []).append(field.value)
    for (name, in_header), printed in seen.items():
        assert _values(message, name, in_header) == printed, name


@dataclass(frozen=True)
class Refused:
    """The bytes are refused at this offset; messages that came before it were delivered."""

    at: int
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Incomplete:
    """The lengths promise more bytes than are printed; whatever completes them is refused at this offset."""

    missing: int
    refused_at: int


@dataclass(frozen=True)
class Tolerated:
    """The bytes are taken as this message."""

    message: Message


Outcome = Refused | Incomplete | Tolerated


def outcome_of(dialect: Dialect, data: bytes) -> Outcome:
    """What becomes of bytes that a peer sends just as they are printed."""
    framer, before = Framer(dialect.framing), list[Message]()
    framer.feed(data)
    try:
        while packet := framer.next_packet():
            before.append(dialect.decode(packet))
    except WireError as error:
        return Refused(error.offset, tuple(type(message).__name__ for message in before))
    if framer.pending:
        return _incomplete(dialect, data)
    (message,) = before
    return Tolerated(message)


def _incomplete(dialect: Dialect, data: bytes) -> Incomplete:
    size = dialect.framing.header_size + dialect.framing.body_length(data, 0, 2**32)
    try:
        dialect.decode(data + bytes(size - len(data)))
    except WireError as error:
        return Incomplete(size - len(data), error.offset)
    raise AssertionError("zeros make a message of it")
