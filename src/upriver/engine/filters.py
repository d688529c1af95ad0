"""Filters of streams: by key prefix, by key pattern in linear time, by a field of a JSON value.

A filter never looks at time or order, so a filtered stream is a filtered view of the full one. Deletions have no value:
a value filter lets them pass, because an earlier version of the key may have been sent. It also lets values pass that
are nested too deeply to be parsed, at some hundreds of levels: the consumer can still drop them.
"""

import json
import math
import re
import reprlib
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
#: A character of a pattern that stands for itself.
_LETTER: Final = re.compile(r"\\x[0-9a-fA-F]{2}|\\[^\w\s]|[^\\^$.|?*+()\[\]{}]", re.ASCII)
#: Marks an option that was not given; None means JSON null.
_UNSAID: Final = object()


@dataclass(frozen=True)
class KeyPattern:
    """A regular expression searched in the key; RE2, so that no pattern can take exponential time."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            if (size := len(self.pattern.encode())) > PATTERN_BYTES_MAX:
                raise InvalidArguments(f"the key pattern has {size} bytes: use at most {PATTERN_BYTES_MAX}")
        except UnicodeEncodeError:
            raise InvalidArguments(f"the key pattern {self.pattern!r} cannot be encoded as UTF-8") from None
        if "\\p" in (escapes := self.pattern.replace("\\\\", "")) or "\\P" in escapes:
            # RE2 takes ten milliseconds to compile one that ignores case, and a pattern has room for a thousand.
            raise InvalidArguments(f"the key pattern {self.pattern!r} has a Unicode class: use ranges such as [a-z]")
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

    @cached_property
    def prefix(self) -> bytes:
        """What every key begins with that passes; the table compares it much faster than a pattern."""
        return _literal_prefix(self.pattern)[0]

    @cached_property
    def is_prefix(self) -> bool:
        """Whether every key passes that begins with the prefix."""
        return bool(self.prefix) and not _literal_prefix(self.pattern)[1]

    @property
    def may_take_long(self) -> bool:
        """Whether matching a key may be slow, so that its time must be limited."""
        return int(self._compiled.programsize) > PROGRAM_SIZE_SMALL

    def passes(self, key: bytes) -> bool:
        return self._compiled.search(key) is not None


def _literal_prefix(pattern: str) -> tuple[bytes, str]:
    """The letters that a pattern requires at the start of a key, and the rest of the pattern."""
    if not pattern.startswith("^"):
        return b"", pattern
    found: list[bytes] = []
    at = 1
    while (letter := _LETTER.match(pattern, at)) is not None:
        text = letter[0]
        found.append(bytes([int(text[2:], 16)]) if text.startswith("\\x") else text[-1].encode())
        at = letter.end()
    rest = pattern[at:]
    if "|" in rest:  # perhaps between whole patterns, of which only the first has the prefix
        return b"", pattern
    if rest[:1] in ("*", "+", "?", "{"):  # which may leave out the last letter
        found = found[:-1]
    return b"".join(found), rest


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
