"""The positions of a client that is away, packed.

A node remembers up to a thousand clients, each with a position in every vbucket. As objects these are some hundred
megabytes; packed, a client takes about ten kilobytes, mostly the uuids of the vbuckets.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from upriver.model import Snapshot, StreamPosition
from upriver.protocol.tap.position import TapPosition

#: Number, uuid, seqno, reached, known, since, until and flags: eight columns, because equal values pack well.
Row = tuple[int, ...]
_COLUMNS: Final = 8
_ACKS, _KEYS_ONLY, _DUMPING = 1, 2, 4


class PositionTable(Mapping[int, TapPosition]):
    """Positions by vbucket. Reading unpacks them for as long as this object lives; ``packed`` makes a small copy."""

    __slots__ = ("_rows", "packed")

    def __init__(self, packed: bytes = b"") -> None:
        """``packed`` is what another table had."""
        self.packed = packed
        self._rows: dict[int, Row] | None = None

    @classmethod
    def of(cls, positions: Mapping[int, TapPosition]) -> "PositionTable":
        """Pack positions."""
        return cls(_packed([_row(number, each) for number, each in positions.items()]))

    def with_positions(self, positions: Mapping[int, TapPosition]) -> "PositionTable":
        """A packed table in which these positions replace older ones."""
        kept = [row for row in _rows(self.packed) if row[0] not in positions]
        return PositionTable(_packed([*kept, *(_row(number, each) for number, each in positions.items())]))

    def check(self) -> None:
        """Raise a ValueError if the packed bytes are damaged; they have a checksum."""
        _numbers(self.packed)

    def _unpacked(self) -> dict[int, Row]:
        if self._rows is None:
            self._rows = {row[0]: row for row in _rows(self.packed)}
        return self._rows

    def __getitem__(self, number: int) -> TapPosition:
        return _position(self._unpacked()[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())


def _row(number: int, position: TapPosition) -> Row:
    at = position.position
    flags = position.acks * _ACKS | position.keys_only * _KEYS_ONLY | position.dumping * _DUMPING
    return (
        number,
        at.vbucket_uuid,
        at.seqno,
        position.reached,
        position.known,
        position.since,
        position.until,
        flags,
    )


def _position(row: Row) -> TapPosition:
    _, vbucket_uuid, seqno, reached, known, since, until, flags = row
    return TapPosition(
        position=StreamPosition(vbucket_uuid, seqno, Snapshot(seqno, reached)),
        known=known,
        since=since,
        until=until,
        acks=bool(flags & _ACKS),
        keys_only=bool(flags & _KEYS_ONLY),
        dumping=bool(flags & _DUMPING),
    )


def _packed(rows: list[Row]) -> bytes:
    if not rows:
        return b""
    columns = (number for column in zip(*rows, strict=True) for number in column)
    return zlib.compress(struct.pack(f">{len(rows) * _COLUMNS}Q", *columns), 1)


def _numbers(packed: bytes) -> bytes:
    """All numbers, column by column."""
    try:
        numbers = zlib.decompress(packed) if packed else b""
    except zlib.error as error:
        raise ValueError(f"damaged positions: {error}") from None
    if len(numbers) % (_COLUMNS * 8):
        raise ValueError(f"damaged positions: {len(numbers)} bytes")
    return numbers


def _rows(packed: bytes) -> Iterable[Row]:
    numbers = _numbers(packed)
    count = len(numbers) // (_COLUMNS * 8)
    columns = struct.unpack(f">{count * _COLUMNS}Q", numbers)
    return list(zip(*(columns[count * c : count * (c + 1)] for c in range(_COLUMNS)), strict=True))
