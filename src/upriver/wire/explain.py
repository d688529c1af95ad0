"""Explain packets byte by byte, with the byte diagram and the field list that the texts print.

This module knows no message by name: names, offsets and meanings come from the declarations. ``explain`` cuts a run
of bytes into packets and decodes each one; ``diagram``, ``field_list`` and ``explanation_json`` show the result.

A user who pastes bytes seldom knows their dialect, so ``guess`` finds the one that fits the whole run best.
``detect`` cannot do this: it judges the first bytes of a client, while these may come from either side and from the
middle of a stream.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from upriver.errors import WireError
from upriver.wire.dialect import Dialect
from upriver.wire.dialects import DIALECTS
from upriver.wire.framing import DRAFT, MEMCACHED, Framer, Framing
from upriver.wire.layout import Span
from upriver.wire.message import AnyRequest, AnyResponse, Message, Request, Response, header_spans

#: Longer packets are shortened in the diagram, longer keys and values in the field list. JSON has everything.
DIAGRAM_BYTES_MAX: Final = 256
TEXT_BYTES_MAX: Final = 64

#: Prefix of binary data in JSON. Text that happens to start with it is written as bytes too.
HEX_MARK: Final = "hex:"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decoded packet."""

    dialect: str
    #: The message's name as words, such as ``snapshot marker``.
    message: str
    #: The first byte, or None in the 12-byte drafts, which have no magic.
    magic: int | None
    #: Offset of the packet in the explained bytes.
    offset: int
    packet: bytes
    #: Header first, then the body, in the order of their bytes.
    fields: tuple[Span, ...]

    @property
    def length(self) -> int:
        return len(self.packet)

    @property
    def header_size(self) -> int:
        return (DRAFT if self.magic is None else MEMCACHED).header_size


def explain(data: bytes, dialect: Dialect | None = None) -> Iterator[Explanation]:
    """Explain packet after packet, in the dialect given or in the one that fits best.

    Everything before invalid bytes is explained first; then they raise a ``WireError``.
    """
    framing = framing_of(data) if dialect is None else dialect.framing
    packets, failure = _cut(data, framing)
    if dialect is None:
        dialect = guess([packet for _, packet in packets], framing)
    for offset, packet in packets:
        try:
            yield explain_packet(packet, dialect, offset)
        except WireError as error:
            raise error.shifted(offset) from None
    if failure is not None:
        raise failure


def explain_packet(packet: bytes, dialect: Dialect, offset: int = 0) -> Explanation:
    """Explain one complete packet. The framing has already checked its lengths."""
    kind = dialect.class_of(packet)
    kind.decode(packet)  # raises for packets that must not be explained
    command = _command(dialect, kind, packet)
    fields = [
        replace(span, meaning=command) if _is_command(span, kind) else span for span in header_spans(kind, packet)
    ]
    return Explanation(
        dialect=dialect.name,
        message=_title(kind, command),
        magic=packet[0] if kind.framing is MEMCACHED else None,
        offset=offset,
        packet=packet,
        fields=(*fields, *kind.body_spans(packet)),
    )


def _command(dialect: Dialect, kind: type[Message], packet: bytes) -> str:
    """The name of the opcode: that of the request, also for its response."""
    if issubclass(kind, Response):
        return dialect.request_title(packet[1]) or "unknown"
    return "unknown" if kind is AnyRequest else kind.title()


def _is_command(span: Span, kind: type[Message]) -> bool:
    return span.name == "opcode" and kind.framing is MEMCACHED


def _title(kind: type[Message], command: str) -> str:
    if kind is AnyRequest:
        return f"{command} request"
    return f"{command} response" if kind is AnyResponse else kind.title()


# Cutting


def framing_of(data: bytes) -> Framing:
    """The kind of header that starts here."""
    for framing in (MEMCACHED, DRAFT):
        if data and data[0] in framing.first_bytes:
            return framing
    found = f"0x{data[0]:02x}" if data else "nothing"
    raise WireError(0, "magic 0x80 or 0x81, or a draft's opcode 0x01 to 0x07", found)


def _cut(data: bytes, framing: Framing) -> tuple[list[tuple[int, bytes]], WireError | None]:
    """The complete packets with their offsets, and the error after the last of them."""
    framer = Framer(framing)
    framer.feed(data)
    packets: list[tuple[int, bytes]] = []
    try:
        while (packet := framer.next_packet()) is not None:
            packets.append((framer.offset - len(packet), packet))
        framer.finish()
    except WireError as error:
        return packets, error
    return packets, None


# Guessing


class Misfit(enum.Enum):
    """Reasons why a packet does not fit a dialect, the strongest first."""

    UNKNOWN = "no message with this opcode is declared"
    REFUSED = "it does not decode"
    UNDECLARED = "the command is declared, but not a response like this"
    OLD_LAYOUT = "the dialect redeclares the command; this is the layout of the dialect that it extends"
    ALTERED = "encoding it again gives different bytes"


#: Among dialects that fit equally well the first in this list wins: plain commands need no stream dialect, an open or
#: an acknowledgement is more likely to be recent, and the first draft is served only on request.
_LIKELY_FIRST: Final = ("memcached", "dcp", "upr", "tap", "upr_draft3", "upr_draft2", "upr_draft1")


def guess(packets: Sequence[bytes], framing: Framing) -> Dialect:
    """The dialect that fits all these packets best, as on one connection."""
    candidates = [DIALECTS[name] for name in _LIKELY_FIRST if DIALECTS[name].framing is framing]
    return min(candidates, key=lambda dialect: _misfits(dialect, packets))


def _misfits(dialect: Dialect, packets: Sequence[bytes]) -> tuple[int, ...]:
    """The evidence against a dialect: the number of packets that it cannot decode, then each reason."""
    found = Counter(misfit(dialect, packet) for packet in packets)
    return found[Misfit.UNKNOWN] + found[Misfit.REFUSED], *(found[reason] for reason in Misfit)


def misfit(dialect: Dialect, packet: bytes) -> Misfit | None:
    """The strongest reason why the packet does not fit the dialect; None if it fits."""
    try:
        kind = dialect.class_of(packet)
        message = kind.decode(packet)
    except WireError:
        return Misfit.REFUSED
    if kind is AnyRequest or (kind is AnyResponse and dialect.request_title(packet[1]) is None):
        return Misfit.UNKNOWN
    if kind is AnyResponse:
        return Misfit.UNDECLARED
    if has_old_layout(dialect, kind):
        return Misfit.OLD_LAYOUT
    return None if message.encode() == packet else Misfit.ALTERED


def has_old_layout(dialect: Dialect, kind: type[Message]) -> bool:
    """Whether a request is inherited although the dialect declares its own layout for the opcode."""
    return (
        issubclass(kind, Request)
        and kind not in dialect.messages
        and any(
            issubclass(own, Request) and own.declaration.opcode == kind.declaration.opcode for own in dialect.messages
        )
    )


# Showing


class Ink(enum.Enum):
    """The parts of the picture, each of which may get a colour."""

    TITLE = enum.auto()
    FRAME = enum.auto()
    HEADER = enum.auto()
    NUMBER = enum.auto()
    TEXT = enum.auto()
    MEANING = enum.auto()


Paint = Callable[[str, Ink], str]


def uncoloured(text: str, ink: Ink) -> str:  # noqa: ARG001
    """No colours."""
    return text


_RULE: Final = "+---------------"
_CELL: Final = len(_RULE) - 1
#: The head of every diagram.
SCALE: Final = (
    "  Byte/     0       |       1       |       2       |       3       |",
    "     /              |               |               |               |",
    "    |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|",
)


def explanation_text(explanation: Explanation, paint: Paint = uncoloured) -> str:
    """A heading, the byte diagram and the field list."""
    return "\n".join((heading(explanation, paint), diagram(explanation, paint), field_list(explanation, paint)))


def heading(explanation: Explanation, paint: Paint = uncoloured) -> str:
    """``dcp mutation, 64 bytes at offset 0``"""
    title = paint(f"{explanation.dialect} {explanation.message}", Ink.TITLE)
    return f"{title}, {explanation.length:,} bytes at offset {explanation.offset:,}"


def diagram(explanation: Explanation, paint: Paint = uncoloured, bytes_max: int = DIAGRAM_BYTES_MAX) -> str:
    """Rows of four bytes, as the texts draw them. Bytes of keys and values also show their character."""
    packet = explanation.packet
    shown = len(packet) if len(packet) <= bytes_max else bytes_max - bytes_max % 4
    inks = _inks(explanation, shown)
    lines = [paint(line, Ink.FRAME) for line in (*SCALE, rule(4))]
    for at in range(0, shown, 4):
        row = range(at, min(at + 4, shown))
        bar = paint("|", Ink.FRAME)
        cells = bar.join(paint(_cell(packet[i], inks[i]), inks[i]) for i in row)
        lines += [f"{paint(f'{at:4}', Ink.FRAME)}{bar}{cells}{bar}", paint(rule(len(row)), Ink.FRAME)]
    if shown < len(packet):
        lines.append(f"     … {len(packet) - shown:,} bytes more")
    return "\n".join(lines)


def rule(cells: int) -> str:
    """The line below a row with this number of bytes."""
    return f"    {_RULE * cells}+"


def _cell(byte: int, ink: Ink) -> str:
    char = f" ('{chr(byte)}')" if ink is Ink.TEXT and 0x20 <= byte < 0x7F else ""
    return f" 0x{byte:02x}{char}".ljust(_CELL)


def _inks(explanation: Explanation, shown: int) -> list[Ink]:
    """The field of each byte that is shown."""
    inks: list[Ink] = []
    for span in explanation.fields:
        inks += [_ink(span, explanation)] * (min(span.last + 1, shown) - len(inks))
    return inks


def _ink(span: Span, explanation: Explanation) -> Ink:
    if isinstance(span.value, bytes):
        return Ink.TEXT
    return Ink.HEADER if span.first < explanation.header_size else Ink.NUMBER


def field_list(explanation: Explanation, paint: Paint = uncoloured) -> str:
    """``Name (first-last): 0x… (meaning)``, one line for each field; the numbers of the body are indented."""
    rows = [(_label(span, explanation), _place(span), span) for span in explanation.fields]
    name_width = max(len(label) for label, _, _ in rows)
    place_width = max(len(place) for _, place, _ in rows)
    lines = [paint(f"    {'Field':{name_width}} (offset) (value)", Ink.FRAME)]
    for label, place, span in rows:
        value = paint(_shown(span), _ink(span, explanation))
        meaning = paint(f" ({gloss})", Ink.MEANING) if (gloss := _gloss(span)) else ""
        lines.append(f"    {label:{name_width}} {place:{place_width}}: {value}{meaning}")
    return "\n".join(lines)


_ABBREVIATIONS: Final = frozenset({"cas", "id", "nru", "ttl", "uuid"})


def _label(span: Span, explanation: Explanation) -> str:
    words = " ".join(word.upper() if word in _ABBREVIATIONS else word for word in span.name.split())
    if _ink(span, explanation) is Ink.NUMBER:
        return f"  {words}"
    return words[0].upper() + words[1:]


def _place(span: Span) -> str:
    return f"({span.first})" if span.first == span.last else f"({span.first}-{span.last})"


def _shown(span: Span) -> str:
    if isinstance(span.value, bytes):
        return _abridged(span.value)
    return f"0x{int(span.value):0{2 * (span.last + 1 - span.first)}x}"


def _abridged(value: bytes) -> str:
    """Text in quotes, other bytes as hexadecimal digits; long ones are shortened."""
    text = readable(value)
    if text is None:
        begin = value[: TEXT_BYTES_MAX // 2]
        shown, rest = f"0x{begin.hex()}", len(value) - len(begin)
    else:
        begin_text = text[:TEXT_BYTES_MAX]
        shown, rest = f'"{begin_text.translate(_ESCAPES)}"', len(value) - len(begin_text.encode())
    return f"{shown} … {rest:,} bytes more" if rest else shown


_ESCAPES: Final = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def readable(value: bytes) -> str | None:
    """The bytes as text, or None if numbers are easier to read."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or ord(char) in _ESCAPES for char in text) else None


def _gloss(span: Span) -> str:
    """The text in parentheses: the meaning of a code, or a small number in decimal."""
    if span.meaning or isinstance(span.value, bytes):
        return "unknown" if span.meaning.startswith("unknown(") else span.meaning  # the number is shown already
    number = int(span.value)
    if number == 2**64 - 1:
        return "2^64-1"
    return str(number) if 9 < number < 2**24 else ""


def explanation_json(explanation: Explanation) -> dict[str, object]:
    """The explanation for JSON: numbers as numbers, keys and values as text, nothing shortened.

    Bytes that are not UTF-8 become ``hex:`` and their digits. Text that itself starts with ``hex:`` does too, so that
    the two can be told apart. ``magic`` is null in the 12-byte drafts; ``meaning`` is empty for plain values.
    """
    return {
        "dialect": explanation.dialect,
        "message": explanation.message,
        "magic": explanation.magic,
        "offset": explanation.offset,
        "length": explanation.length,
        "fields": [
            {
                "name": span.name,
                "first": span.first,
                "last": span.last,
                "value": json_value(span.value) if isinstance(span.value, bytes) else int(span.value),
                "meaning": span.meaning,
            }
            for span in explanation.fields
        ],
    }


def json_value(value: bytes) -> str:
    """Bytes as text if they are UTF-8, else as ``hex:`` and their digits."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return HEX_MARK + value.hex()
    return HEX_MARK + value.hex() if text.startswith(HEX_MARK) else text


def value_bytes(text: str) -> bytes:
    """The bytes that ``json_value`` turned into this JSON value."""
    return bytes.fromhex(text.removeprefix(HEX_MARK)) if text.startswith(HEX_MARK) else text.encode()
