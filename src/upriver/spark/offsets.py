"""The offset of a query, as Spark stores it in its log.

Spark compares offsets as text, so an offset always names all vbuckets, in one order and one spelling. 1,024 nested
entries would take about 60 KB in every batch's log entry, and as many objects to parse. So they are packed by column,
each in as many bytes as its largest number needs.

Spark asks for the initial offset again if it restarts before the first batch is committed, but it keeps the logged end
of that batch. So the initial offset and the end of the first batch also contain the first start, under ``start``.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from upriver.errors import OffsetError
from upriver.model import Snapshot, StreamPosition

#: The version of the packed form; later versions are refused. Version 1 had the first six columns.
VERSION: Final = 2
_COLUMNS: Final = {1: 6, 2: 8}
_WIDTHS: Final = (0, 1, 2, 4, 8)
_EARLIEST: Final = "earliest"
_LATEST: Final = "latest"


class VbucketOffset(NamedTuple):
    """The progress of a query in one vbucket."""

    vbucket: int
    #: The branch that was read; 0 before anything was read.
    vbucket_uuid: int = 0
    #: Everything up to here was read.
    seqno: int = 0
    #: The last proven consistent point: a key that changes while a range is read moves beyond the range.
    consistent_seqno: int = 0
    #: The number of rollbacks that this query has seen.
    branch: int = 0
    #: The first consistent point since the start at 0; 0 before there is one.
    first_consistent: int = 0
    #: 1 if the source had nothing beyond the seqno when it was planned, and the seqno is not proven consistent yet.
    at_high: int = 0
    #: 1 from a rollback until a later batch ends at the source's high seqno. Until then a sink that has repaired its
    #: state may hold versions from beyond the seqno.
    repairing: int = 0

    @classmethod
    def consistent_at(
        cls, vbucket: int, vbucket_uuid: int, seqno: int, branch: int = 0, first_consistent: int = 0
    ) -> "VbucketOffset":
        """An offset at a consistent point."""
        return cls(vbucket, vbucket_uuid, seqno, seqno, branch, first_consistent or seqno)

    @property
    def position(self) -> StreamPosition:
        """The position for a stream request."""
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(self.consistent_seqno, self.seqno))


_SEQNO, _CONSISTENT = map(VbucketOffset._fields.index, ("seqno", "consistent_seqno"))


class Offset:
    """The offsets of all vbuckets of a query, by number."""

    __slots__ = ("vbuckets",)

    def __init__(self, offsets: Iterable[VbucketOffset]) -> None:
        self.vbuckets = {each.vbucket: each for each in sorted(offsets)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offset) and self.vbuckets == other.vbuckets

    def __hash__(self) -> int:
        return hash(tuple(self.vbuckets.values()))

    def __iter__(self) -> Iterator[VbucketOffset]:
        return iter(self.vbuckets.values())

    def __len__(self) -> int:
        return len(self.vbuckets)

    def __repr__(self) -> str:
        return f"Offset({list(self)})"

    def packed(self) -> dict[str, Any]:
        """The form that Spark logs: equal offsets give equal text."""
        rows = np.array(list(self), dtype=np.uint64).reshape(-1, len(VbucketOffset._fields))
        out = bytearray()
        for column in _differences(rows).T:
            width = next(width for width in _WIDTHS if not len(column) or int(column.max()) >> (8 * width) == 0)
            out.append(width)
            if width:
                out += column.astype(f">u{width}").tobytes()
        return {"version": VERSION, "count": len(self), "places": base64.b64encode(bytes(out)).decode()}

    @classmethod
    def unpacked(cls, offset: Mapping[str, Any]) -> "Offset":
        """Read what ``packed`` returned."""
        version = offset.get("version")
        if version not in _COLUMNS:
            raise OffsetError(
                f"the offset has the version {version!r}, and this release reads versions up to {VERSION}: "
                "use the release that wrote the checkpoint, or start with a new checkpoint location"
            )
        try:
            return _unpacked(offset["places"], int(offset["count"]), _COLUMNS[version])
        except (KeyError, TypeError, ValueError, IndexError, binascii.Error) as error:
            raise OffsetError(f"the offset is damaged ({error}): start with a new checkpoint location") from None

    def described(self) -> dict[str, dict[str, Any]]:
        """A readable form, which ``read_offset`` and the option ``startingOffsets`` accept too."""
        return {
            str(each.vbucket): {
                "uuid": f"{each.vbucket_uuid:#x}",
                "seqno": each.seqno,
                "whole": each.consistent_seqno,
                "branch": each.branch,
                "first_whole": each.first_consistent,
                "at_high": each.at_high,
                "repairing": each.repairing,
            }
            for each in self
        }


def starting(offset: Mapping[str, Any]) -> dict[str, Any]:
    """This packed offset as the start of a query."""
    return {**offset, "start": {**offset}}


def first_end(start: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    """The packed end of a batch; if the batch is the query's first, with its start."""
    begun = start.get("start")
    is_first = begun is not None and begun == {name: value for name, value in start.items() if name != "start"}
    return {**end, "start": begun} if is_first else {**end}


def logged_start(start: Mapping[str, Any], end: Mapping[str, Any]) -> Mapping[str, Any]:
    """The start of a batch: the one that is logged with its end, or what Spark says."""
    return start if start == end else end.get("start") or start


@lru_cache(maxsize=8)
def _unpacked(packed: str, count: int, columns: int) -> Offset:
    """Cached, because Spark passes the end of a micro-batch when its tasks are planned and as the start of the next."""
    rows = _differences(_columns(base64.b64decode(packed, validate=True), count, columns))
    return Offset(VbucketOffset(*row) for row in rows.tolist())


def _differences(rows: np.ndarray) -> np.ndarray:
    """Replace the consistent point by its distance from the seqno, which is mostly 0; a second call undoes it."""
    out = rows.copy()
    out[:, _CONSISTENT] = rows[:, _SEQNO] - rows[:, _CONSISTENT]
    return out


def _columns(data: bytes, count: int, columns: int) -> np.ndarray:
    """The numbers of a packed offset, one row per vbucket."""
    rows = np.zeros((count, len(VbucketOffset._fields)), dtype=np.uint64)
    at = 0
    for column in range(columns):
        width = data[at]
        if width not in _WIDTHS:
            raise ValueError(f"a column of {width} bytes")
        at += 1
        if width:
            rows[:, column] = np.frombuffer(data, f">u{width}", count, at)
            at += count * width
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return rows


def describe_offset(offset: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """An offset in readable form: uuid, seqno, consistent points and branch of each vbucket.

    Takes an offset from a checkpoint or from ``query.lastProgress``, as text or as a dictionary.
    """
    return Offset.unpacked(_parsed(offset)).described()


def read_offset(text: str) -> Offset | dict[int, VbucketOffset | str]:
    """Read ``startingOffsets`` or ``endingOffsets`` in JSON: packed, or with an entry per vbucket.

    An entry is ``"earliest"``, ``"latest"`` or an object as ``describe_offset`` returns it, of which ``uuid`` and
    ``seqno`` are enough.
    """
    given = _parsed(text)
    if "places" in given:
        return Offset.unpacked(given)
    return dict(_entry(name, value) for name, value in given.items())


def _parsed(offset: str | Mapping[str, Any]) -> Mapping[str, Any]:
    given: Any = offset
    if isinstance(offset, str):
        try:
            given = json.loads(offset)
        except ValueError:
            raise OffsetError(f"{_shortened(offset)} must be earliest, latest or JSON") from None
    if not isinstance(given, Mapping):
        raise OffsetError(f"{_shortened(str(offset))}: an offset must be a JSON object with one entry per vbucket")
    return given


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _entry(name: str, value: Any) -> tuple[int, VbucketOffset | str]:
    if not name.isascii() or not name.isdigit() or int(name) > 0xFFFF:
        raise OffsetError(f"invalid vbucket {_shortened(name)}: use a number from 0 to 65535")
    number = int(name)
    if value in (_EARLIEST, _LATEST):
        return number, value
    if not isinstance(value, Mapping):
        raise OffsetError(f'vbucket {number}: write "earliest", "latest" or {{"uuid": "0x…", "seqno": …}}')
    try:
        uuid, seqno = _number(value["uuid"]), _number(value["seqno"])
        whole = _number(value.get("whole", seqno))
        branch = _number(value.get("branch", 0))
        first_consistent = _number(value.get("first_whole", whole))
        at_high, repairing = (min(1, _number(value.get(name, 0))) for name in ("at_high", "repairing"))
    except (KeyError, TypeError, ValueError) as error:
        raise OffsetError(f"vbucket {number}: uuid and seqno must be given as numbers ({error})") from None
    if whole > seqno:
        raise OffsetError(f"vbucket {number}: whole is {whole}, but must not exceed the seqno {seqno}")
    if seqno and not uuid:
        raise OffsetError(f"vbucket {number}: seqno {seqno} needs the uuid of its branch")
    return number, VbucketOffset(number, uuid, seqno, whole, branch, first_consistent, at_high, repairing)


def _number(value: Any) -> int:
    """A number, or text in hexadecimal, because JSON readers round numbers above 53 bits."""
    number = int(value, 0) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**64:
        raise ValueError(f"{value!r} is not an unsigned 64-bit number")
    return number
