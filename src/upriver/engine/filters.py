"""Filters of streams: by key prefix, by key pattern in linear time, by a field of a JSON value.

A filter never looks at time or order, so a filtered stream is a filtered view of the full one. Deletions have no value:
a value filter lets them pass, because an earlier version of the key may have been sent. It also lets values pass that
are nested too deeply to be parsed, at some hundreds of levels: the consumer can still drop them.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

import re2

from upriver.errors import InvalidArguments
from upriver.model import Event, plain

PATTERN_BYTES_MAX: Final = 4096
#: Repetitions make large programs of short patterns. This is the limit for RE2's steps; a byte may cost that many.
PROGRAM_SIZE_MAX: Final = 2000
#: With more steps than this, the time per key is measured.
PROGRAM_SIZE_SMALL: Final = 40
#: The value that a field is compared with has at most this many levels.
WANTED_LEVELS_MAX: Final = 100
#: Marks an option that was not given; None means JSON null.
_UNSAID: Final = object()


@dataclass(frozen=True)
class KeyPattern:
    """A regular expression searched in the key; RE2, so that no pattern can take exponential time."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            if len(self.pattern.encode()) > PATTERN_BYTES_MAX:
                raise InvalidArguments(f"a key pattern has at most {PATTERN_BYTES_MAX} bytes")
        except UnicodeEncodeError:
            raise InvalidArguments(f"the key pattern {self.pattern!r} cannot be encoded as UTF-8") from None
        if "\\p" in (escapes := self.pattern.replace("\\\\", "")) or "\\P" in escapes:
            # RE2 takes ten milliseconds to compile one that ignores case, and a pattern has room for a thousand.
            raise InvalidArguments("a key pattern cannot use Unicode classes: use ranges such as [a-z]")
        try:
            assert self._compiled is not None
        except re2.error as error:
            why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
            raise InvalidArguments(f"invalid key pattern {self.pattern!r}: {why}") from None
        if self._compiled.programsize > PROGRAM_SIZE_MAX:
            raise InvalidArguments(
                f"the key pattern {self.pattern!r} has {self._compiled.programsize} steps, more than {PROGRAM_SIZE_MAX}"
                ": use fewer repetitions"
            )

    @cached_property
    def _compiled(self) -> Any:
        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # keys are bytes, not text
        options.log_errors = False
        return re2.compile(self.pattern.encode("utf-8"), options)

    @property
    def may_take_long(self) -> bool:
        """Whether matching a key may be slow, so that its time must be limited."""
        return int(self._compiled.programsize) > PROGRAM_SIZE_SMALL

    def passes(self, key: bytes) -> bool:
        return self._compiled.search(key) is not None


@dataclass(frozen=True)
class ValueFilter:
    """Compares a field of a JSON object, named by its path.

    A field that is null equals null; a missing field does not.
    """

    path: tuple[str, ...]
    equals: Any = _UNSAID
    contains: Any = _UNSAID

    def __post_init__(self) -> None:
        if not self.path or (self.equals is _UNSAID) == (self.contains is _UNSAID):
            raise InvalidArguments("a value filter needs a field and either 'equals' or 'contains'")
        if isinstance(self.contains, list | dict):
            raise InvalidArguments("'contains' must be a string, a number, true, false or null")
        _check(self.contains if self.equals is _UNSAID else self.equals)

    def passes(self, event: int, value: bytes, datatype: int = 0) -> bool:
        if event != Event.MUTATION:
            return True
        try:
            found = read_json(plain(value, datatype))
        except RecursionError:
            return True
        except ValueError:
            return False
        for name in self.path:
            if not isinstance(found, dict) or name not in found:
                return False
            found = found[name]
        if self.equals is not _UNSAID:
            return _equal(found, self.equals)
        if isinstance(found, str):
            return isinstance(self.contains, str) and self.contains in found
        if isinstance(found, list):
            return any(_equal(each, self.contains) for each in found)
        return isinstance(found, dict) and self.contains in found


def read_json(document: bytes | str) -> Any:
    """Parse a document; integers with more digits than Python converts become decimals."""
    try:
        return json.loads(document)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # more digits than Python converts
        return json.loads(document, parse_int=Decimal)


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


def _equal(found: Any, wanted: Any) -> bool:
    """Compare as JSON does: 1.0 equals 1, but true does not, as it does in Python."""
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[name], each) for name, each in wanted.items())
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_equal, found, wanted))
    return isinstance(found, bool) is isinstance(wanted, bool) and bool(found == wanted)
