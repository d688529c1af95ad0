"""An example of every message: printed in a text, recorded from a real server, or made up.

Made-up examples are deterministic, so the pages change only when a declaration does.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from upriver.errors import WireError
from upriver.wire import DIALECTS, Framer, Message, Response, read_hexdump
from upriver.wire.fields import CountedBytes, KeyBytes, Repeat, Reserved, RestBytes, UInt
from upriver.wire.layout import Field, Layout
from upriver.wire.message import DraftMessage

DATA = Path(__file__).parent.parent / "tests" / "data"
#: Longer recorded packets are not useful to a reader.
_RECORDED_BYTES_MAX = 128


@dataclass(frozen=True, slots=True)
class Example:
    """A packet and where it comes from."""

    packet: bytes
    source: str


def example_of(cls: type[Message]) -> Example:
    """The best available example."""
    return _printed().get(cls) or _recorded().get(cls) or Example(_made_up(cls).encode(), "An example:")


@cache
def vectors() -> dict[str, dict[str, Any]]:
    """The texts' examples by dialect."""
    files = (json.loads(path.read_text()) for path in sorted((DATA / "vectors").glob("*.json")))
    return {file["dialect"]: file for file in files}


@cache
def _printed() -> dict[type[Message], Example]:
    """The longest example in a text for each message; one with a printing error only if there is no other."""
    found: dict[type[Message], Example] = {}
    for name, file in vectors().items():
        usable = [v for v in file["vectors"] if v["kind"] == "message" and v["wire"] is not None]
        for vector in sorted(usable, key=lambda v: (bool(v["errata"]), -len(v["wire"]))):
            packet = bytes.fromhex(vector["wire"])
            note = " (corrected, see [errata](errata.md))" if vector["errata"] else ""
            found.setdefault(DIALECTS[name].class_of(packet), Example(packet, f"The text's example{note}:"))
    return found


@cache
def _recorded() -> dict[type[Message], Example]:
    """The first recorded packet for each message."""
    found: dict[type[Message], Example] = {}
    for path in sorted((DATA / "transcripts").glob("*.txt")):
        dialect = DIALECTS[{"tap": "tap", "upr2014": "upr"}.get(path.name.partition("_")[0], "dcp")]
        for packet in _packets(read_hexdump(path.read_bytes())):
            try:
                message = dialect.decode(packet)
            except WireError:
                continue  # recordings hold malformed packets on purpose
            if len(packet) <= _RECORDED_BYTES_MAX and message.encode() == packet:
                source = f"Recorded from a deployed server ([{path.stem}](../../tests/data/transcripts/{path.name})):"
                found.setdefault(type(message), Example(packet, source))
    return found


def _packets(data: bytes) -> Iterator[bytes]:
    framer = Framer(DIALECTS["memcached"].framing)
    framer.feed(data)
    while (packet := framer.next_packet()) is not None:
        yield packet


#: The values of made-up fields, by name.
_MADE_UP: dict[str, Any] = {
    "agent": b"upriver",
    "by_seqno": 4,
    "checkpoint": 3,
    "config": b'{"rev":7}',
    "error_map": b'{"version":1}',
    "key": b"hello",
    "log": ({"vbucket_uuid": 0xFEEDDECA, "seqno": 0x5432}, {"vbucket_uuid": 0xDECAFE, "seqno": 0}),
    "mechanism": b"PLAIN",
    "mechanisms": b"SCRAM-SHA512 PLAIN",
    "name": b"replication",
    "names": b"default",
    "seqno": 0x5432,
    "text": b"no such vbucket",
    "value": b"world",
    "vbucket": 5,
    "vbucket_uuid": 0xFEEDDECA,
    "version": b"0.1.0",
}


def _made_up(cls: type[Message]) -> Message:
    header: dict[str, Any] = {"request_id": 0x2D} if issubclass(cls, DraftMessage) else {"opaque": 0x1210}
    if not issubclass(cls, DraftMessage | Response):
        header["vbucket"] = 5
    return cls(**(header | _made_up_fields(cls.layout)))


def _made_up_fields(layout: Layout) -> dict[str, Any]:
    given = (field for field in layout.fields if not isinstance(field.kind, Reserved))
    shown = (field for field in given if field.required or _is_telling(field))
    return {field.name: _made_up_value(field) for field in shown}


def _is_telling(field: Field) -> bool:
    """Optional, but the example should show it."""
    return isinstance(field.kind, KeyBytes | RestBytes | Repeat) and field.when is None


def _made_up_value(field: Field) -> Any:
    wanted, kind = _MADE_UP.get(field.name), field.kind
    if isinstance(kind, Repeat):
        return _made_up_elements(kind, wanted or ({},))
    if isinstance(kind, UInt):
        number = wanted if isinstance(wanted, int) else 1
        return number if field.code is None else field.code(number)
    assert isinstance(kind, KeyBytes | RestBytes | CountedBytes)
    return wanted if isinstance(wanted, bytes) else field.name.encode()


def _made_up_elements(kind: Repeat, wanted: tuple[dict[str, Any], ...]) -> tuple[Any, ...]:
    if isinstance(kind.element, UInt):
        return tuple(kind.code(number) if kind.code else number for number in (1, 7))
    return tuple(kind.element(**(_made_up_fields(kind.element.layout) | given)) for given in wanted)
