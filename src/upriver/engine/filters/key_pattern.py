"""A filter by a pattern of the key, in linear time.

RE2 expands counted repetitions before it looks at its limits: a pattern of four kilobytes takes it a fifth of a second,
only to be refused. So the expanded size is estimated first, from the text.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import re2

from upriver.errors import InvalidArguments

PATTERN_BYTES_MAX: Final = 4096
#: Repetitions make large programs of short patterns. This is the limit for RE2's steps; a byte may cost that many.
PROGRAM_SIZE_MAX: Final = 2000
#: The same limit before a pattern is compiled, for letters and classes after repetitions were expanded; a class counts
#: as many times as it has letters.
EXPANDED_SIZE_MAX: Final = 4 * PROGRAM_SIZE_MAX
#: With more steps than this, the time per key is measured.
PROGRAM_SIZE_SMALL: Final = 40
#: A character of a pattern that stands for itself.
_LETTER: Final = re.compile(r"\\x[0-9a-fA-F]{2}|\\[^\w\s]|[^\\^$.|?*+()\[\]{}]", re.ASCII)


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
        if (size := expanded_size(self.pattern)) > EXPANDED_SIZE_MAX:
            raise InvalidArguments(
                f"the key pattern {self.pattern!r} has about {size} steps, more than {EXPANDED_SIZE_MAX}: use fewer"
                " repetitions"
            )
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


#: An escape, a class, a counted repetition, or any other character.
_TOKEN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|\{(\d+)(,(\d*))?\}|.", re.DOTALL)


def expanded_size(pattern: str) -> int:
    """About how many letters and classes a pattern has once its counted repetitions are written out.

    It need not understand every pattern: RE2 compiles only what stays small by this measure, and decides then.
    """
    sizes = [0]  # of each open group
    last = 0  # the size of what a repetition would repeat
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token[1] is not None:
            least, most = int(token[1][:9]), int((token[3] or token[1])[:9])
            sizes[-1] += last * (max(least, most) - 1)
            last *= max(least, most, 1)
        elif text == "(":
            sizes.append(0)
        elif text == ")" and len(sizes) > 1:
            last = max(1, sizes.pop())
            sizes[-1] += last
        elif text not in "*+?|^$":
            last = len(text) if text.startswith("[") else 1
            sizes[-1] += last
        if sizes[-1] > EXPANDED_SIZE_MAX:
            break
    return max(sum(sizes), 0)
