"""Where a query stands, as Spark keeps it in its log.

Spark compares offsets as text, so an offset always names all vbuckets, in one order and in one spelling. 1,024 nested
entries would cost some 60 KB in every batch's log entry and as many objects to parse, so the places are packed: column
by column, each in as many bytes as its largest number needs.
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

#: Of the packed form; a later one is refused rather than misread.
VERSION: Final = 1
_WIDTHS: Final = (0, 1, 2, 4, 8)
_EARLIEST: Final = "earliest"
_LATEST: Final = "latest"


class VbucketOffset(NamedTuple):
    """How far a query has read one vbucket, and what it may be sure of."""

    vbucket: int
    #: The branch of the source's history that it was read on; 0 before anything was read.
    vbucket_uuid: int = 0
    #: Everything up to here was read.
    seqno: int = 0
    #: The last seqno at which what was read is proven whole: a key that changes while a range is read moves beyond it.
    consistent_seqno: int = 0
    #: How many rollbacks this query has seen.
    branch: int = 0
    #: The first seqno held whole since the start at 0; 0 if there was none yet.
    first_consistent: int = 0

    @classmethod
    def consistent_at(
        cls, vbucket: int, vbucket_uuid: int, seqno: int, branch: int = 0, first_consistent: int = 0
    ) -> "VbucketOffset":
        """Everything up to ``seqno`` is held as the source held it."""
        return cls(vbucket, vbucket_uuid, seqno, seqno, branch, first_consistent or seqno)

    @property
    def position(self) -> StreamPosition:
        """What a stream request says of it."""
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(self.consistent_seqno, self.seqno))


_SEQNO, _WHOLE = map(VbucketOffset._fields.index, ("seqno", "consistent_seqno"))


class Offset:
    """The places of all vbuckets of a query, by number."""

    __slots__ = ("places",)

    def __init__(self, places: Iterable[VbucketOffset]) -> None:
        self.places = {place.vbucket: place for place in sorted(places)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offset) and self.places == other.places

    def __hash__(self) -> int:
        return hash(tuple(self.places.values()))

    def __iter__(self) -> Iterator[VbucketOffset]:
        return iter(self.places.values())

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"Offset({list(self)})"

    def packed(self) -> dict[str, Any]:
        """The form that Spark logs: the same text for the same places."""
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
        """Read what ``packed`` has written."""
        version = offset.get("version")
        if version != VERSION:
            raise OffsetError(
                f"the offset has the version {version!r}, and this release reads version {VERSION}: "
                "use the release that wrote the checkpoint, or start with a new checkpoint location"
            )
        try:
            return _unpacked(offset["places"], int(offset["count"]))
        except (KeyError, TypeError, ValueError, IndexError, binascii.Error) as error:
            raise OffsetError(f"the offset is damaged ({error}): start with a new checkpoint location") from None

    def described(self) -> dict[str, dict[str, Any]]:
        """A form for people, which ``read_offset`` and the option ``startingOffsets`` take as well."""
        return {
            str(place.vbucket): {
                "uuid": f"{place.vbucket_uuid:#x}",
                "seqno": place.seqno,
                "whole": place.consistent_seqno,
                "branch": place.branch,
                "first_whole": place.first_consistent,
            }
            for place in self
        }


@lru_cache(maxsize=8)
def _unpacked(packed: str, count: int) -> Offset:
    """Spark gives the end of a micro-batch back when its tasks are planned, and again as the start of the next."""
    rows = _differences(_columns(base64.b64decode(packed, validate=True), count))
    return Offset(VbucketOffset(*row) for row in rows.tolist())


def _differences(rows: np.ndarray) -> np.ndarray:
    """What is whole as the distance from the seqno, which is mostly 0; applied twice it undoes itself."""
    out = rows.copy()
    out[:, _WHOLE] = rows[:, _SEQNO] - rows[:, _WHOLE]
    return out


def _columns(data: bytes, count: int) -> np.ndarray:
    """The numbers of a packed offset, one row a vbucket."""
    rows = np.zeros((count, len(VbucketOffset._fields)), dtype=np.uint64)
    at = 0
    for column in range(rows.shape[1]):
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
    """An offset as people read it: per vbucket uuid, seqno, what is proven whole, and branch.

    Takes an offset as it stands in a checkpoint or in ``query.lastProgress``, as text or as a dictionary.
    """
    return Offset.unpacked(_parsed(offset)).described()


def read_offset(text: str) -> Offset | dict[int, VbucketOffset | str]:
    """The value of ``startingOffsets`` or ``endingOffsets`` that is JSON: packed, or per vbucket for people.

    Per vbucket it is ``"earliest"``, ``"latest"`` or an object as ``describe_offset`` makes it, of which ``uuid`` and
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
            raise OffsetError(f"{_shortened(offset)} is neither earliest, latest nor JSON") from None
    if not isinstance(given, Mapping):
        raise OffsetError(f"{_shortened(str(offset))}: an offset is a JSON object with one entry per vbucket")
    return given


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _entry(name: str, value: Any) -> tuple[int, VbucketOffset | str]:
    if not name.isascii() or not name.isdigit() or int(name) > 0xFFFF:
        raise OffsetError(f"{_shortened(name)} is no vbucket")
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
    except (KeyError, TypeError, ValueError) as error:
        raise OffsetError(f"vbucket {number}: uuid and seqno are needed, as numbers ({error})") from None
    if whole > seqno:
        raise OffsetError(f"vbucket {number}: it cannot be whole at {whole} when it was read up to {seqno}")
    if seqno and not uuid:
        raise OffsetError(f"vbucket {number}: seqno {seqno} means nothing without the uuid that it was read under")
    return number, VbucketOffset(number, uuid, seqno, whole, branch, first_consistent)


def _number(value: Any) -> int:
    """A number; uuids are also written in hexadecimal, because JSON readers round what exceeds 53 bits."""
    number = int(value, 0) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**64:
        raise ValueError(f"{value!r} is no number of 64 bits")
    return number
