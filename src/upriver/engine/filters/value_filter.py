"""A filter by a field of a JSON value.

Deletions have no value: a value filter lets them pass, because an earlier version of the key may have been sent. Values
that are nested too deeply to be parsed, at some hundreds of levels, pass too: the consumer can still drop them.
"""

import math
import reprlib
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from upriver.engine.filters.json_match import Question, matches
from upriver.errors import InvalidArguments
from upriver.model import SNAPPY, Event, inflated_size, plain

#: The value that a field is compared with has at most this many levels.
WANTED_LEVELS_MAX: Final = 100
#: Parsing more than this takes longer than a turn may.
LARGE_BYTES: Final = 64 * 1024
#: Marks an option that was not given; None means JSON null.
_UNSAID: Final = object()


@dataclass(frozen=True)
class ValueFilter:
    """Compares a field of a JSON object, named by its path.

    A field that is null equals null; a missing field does not.
    """

    path: tuple[str, ...]
    equals: Any = _UNSAID
    contains: Any = _UNSAID

    def __post_init__(self) -> None:
        if not self.path:
            raise InvalidArguments("the value filter has no field: give a name or a path such as a.b")
        if (self.equals is _UNSAID) == (self.contains is _UNSAID):
            given = "neither 'equals' nor 'contains'" if self.equals is _UNSAID else "both 'equals' and 'contains'"
            raise InvalidArguments(f"the value filter of field {'.'.join(self.path)!r} has {given}: give one of them")
        if isinstance(self.contains, list | dict):
            raise InvalidArguments(
                f"contains = {reprlib.repr(self.contains)}: it must be a string, a number, true, false or null"
            )
        _check(self.contains if self.equals is _UNSAID else self.equals)

    def passes(self, event: int, value: bytes, datatype: int = 0) -> bool:
        if event != Event.MUTATION:
            return True
        return matches(plain(value, datatype), *self.question)

    @property
    def question(self) -> Question:
        """The arguments of ``matches``."""
        contains = self.equals is _UNSAID
        return self.path, self.contains if contains else self.equals, contains

    @staticmethod
    def takes_long(event: int, value: bytes | memoryview, datatype: int) -> bool:
        """Whether looking at this value takes longer than a turn may."""
        if event != Event.MUTATION:
            return False
        if len(value) > LARGE_BYTES:
            return True
        return bool(datatype & SNAPPY) and inflated_size(bytes(value)) > LARGE_BYTES


def _check(wanted: Any, levels: int = WANTED_LEVELS_MAX) -> None:
    """Raise if the value cannot occur in a JSON document."""
    if not levels:
        raise InvalidArguments(f"a value filter has at most {WANTED_LEVELS_MAX} levels")
    if isinstance(wanted, list):
        for each in wanted:
            _check(each, levels - 1)
    elif isinstance(wanted, dict):
        for each in wanted.values():
            _check(each, levels - 1)
    elif not isinstance(wanted, str | int | float | Decimal | None) or not _is_finite(wanted):
        raise InvalidArguments(f"{wanted!r} is not a JSON value")


def _is_finite(wanted: Any) -> bool:
    if isinstance(wanted, Decimal):
        return wanted.is_finite()
    return not isinstance(wanted, float) or math.isfinite(wanted)
