"""Read bytes from hexadecimal text in its many forms, dumps, recordings, or raw bytes.

A packet starts with 0x80, 0x81 or 0x01 to 0x07 and text never does, so the first byte tells raw bytes from text. Text
is read line by line; everything after a ``#`` is a comment. A line is one of

- a line of a recording: time, connection, direction, digits (``0.004 p C>S 8050…``, none when it was closed);
- a line of ``xxd``, ``hexdump -C`` or the like: offset, digits, perhaps the characters again;
- plain digits, optionally with ``0x`` or ``\\x`` before bytes and spaces, colons or commas between them.
"""

import re
from collections.abc import Iterator
from typing import Final

_PACKET_BEGINS: Final = frozenset({0x80, 0x81, *range(1, 8)})

_RECORDED: Final = re.compile(r"\s*\d+\.\d+\s+\S+\s+(?:C>S|S>C)\b\s*(?P<digits>.*)")
#: ``xxd`` and ``tcpdump`` separate the characters by two spaces, ``hexdump -C`` by a bar.
_COLON_DUMP: Final = re.compile(
    r"\s*(?:0x)?[0-9a-f]{4,16}:\s+(?P<digits>[0-9a-f]+(?: [0-9a-f]+)*)(?:\s{2}.*|\s*)", re.I
)
_BAR_DUMP: Final = re.compile(r"[0-9a-f]{6,16}\s+(?P<digits>[0-9a-f]{2}(?: {1,2}[0-9a-f]{2})*)\s*\|.*\|\s*", re.I)
#: The offset alone ends a ``hexdump -C``.
_BAR_DUMP_END: Final = re.compile(r"[0-9a-f]{6,16}\s*", re.I)

_BETWEEN: Final = re.compile(r"[\s:,]+")
_PREFIX: Final = re.compile(r"0x|\\x", re.I)


class NotHexadecimal(ValueError):
    """Text that is not hexadecimal."""


def read_hexdump(data: bytes) -> bytes:
    """The bytes themselves, or the bytes that this text describes."""
    if data and data[0] in _PACKET_BEGINS:
        return data
    try:
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise NotHexadecimal(f"neither packets nor text: it starts with 0x{data[0]:02x}") from None


def parse(text: str) -> bytes:
    """The bytes that this text describes, in any of the forms above."""
    digits = "".join(_digits(text))
    if len(digits) % 2:
        raise NotHexadecimal(f"an odd number of hexadecimal digits: {len(digits)}")
    return bytes.fromhex(digits)


def _digits(text: str) -> Iterator[str]:
    in_bar_dump = False
    for number, line in enumerate(text.splitlines(), 1):
        if bar := _BAR_DUMP.fullmatch(line):
            in_bar_dump = True
            yield _joined(bar["digits"], number)
        elif in_bar_dump and _BAR_DUMP_END.fullmatch(line):
            in_bar_dump = False
        else:
            yield _joined(_payload(line), number)


def _payload(line: str) -> str:
    """A line without comment, offset, time and characters."""
    for form in (_COLON_DUMP, _RECORDED):
        if found := form.fullmatch(line):
            return found["digits"]
    return line.partition("#")[0]


def _joined(payload: str, line_number: int) -> str:
    return "".join(_word(word, line_number) for word in _BETWEEN.split(payload) if word)


def _word(word: str, line_number: int) -> str:
    """The digits of one word; ``0x4`` is one byte."""
    parts = _PREFIX.split(word)
    digits = "".join(part.zfill(len(part) + len(part) % 2) for part in parts) if len(parts) > 1 else word
    if wrong := re.search(r"[^0-9a-fA-F]", digits):
        raise NotHexadecimal(f"line {line_number}: {wrong[0]!r} is not a hexadecimal digit")
    return digits
