"""The settings that a consumer may send to its producer: one table, each with its check.

A setting counts for the streams that are asked for after it; those of the connection itself (window, noops) at once.
What a filter means only the store knows, so the producer has it look at one before it is taken.
"""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from upriver.errors import InvalidArguments

#: Enough for any filter that somebody writes; what is longer would cost the node more than it tells.
VALUE_BYTES_MAX: Final = 64 * 1024
_SHOWN_CHARACTERS: Final = 80


def _shown(text: str) -> str:
    """As much of what was sent as fits into a refusal."""
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}…"


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidArguments(f"{_shown(value)} is not true or false")
    return value == "true"


def _size(value: str) -> int:
    # The length first: a number of a megabyte of digits is not worth converting.
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) >= 2**32:
        raise InvalidArguments(f"{_shown(value)} is no number of bytes")
    return int(value)


#: Plain decimals: Python's float takes more than anybody means.
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def _seconds(value: str) -> float:
    if not _DECIMAL.fullmatch(value) or not 0.1 <= float(value) <= 86_400:
        raise InvalidArguments(f"{_shown(value)} is no number of seconds from 0.1 to 86400")
    return float(value)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise InvalidArguments(f"{_shown(value)} is none of {', '.join(allowed)}")
        return value

    return check


class Control(NamedTuple):
    """One setting."""

    read: Callable[[str], Any]
    default: Any
    #: What it does, for the documentation.
    meaning: str


_PRIORITY: Final = "its share beside other connections: a quarter with *low*, twice as much with *high*"
_ORDER: Final = "whether backfills take turns or each is finished before the next begins; live changes wait for neither"
_VALUE_FILTER: Final = (
    'a field of a JSON value, also of a compressed one: `{"field": "a.b", "equals": 1}`, or `"contains"`; '
    "a field that is not there is not `null`"
)

#: Every setting by name.
CONTROLS: Final[dict[str, Control]] = {
    "enable_noop": Control(_flag, False, "send noops, and give up on a consumer that stays silent"),
    "set_noop_interval": Control(_seconds, 180.0, "how many seconds lie between two noops"),
    "connection_buffer_size": Control(_size, 0, "how many bytes may be unacknowledged; 0 for any number"),
    "enable_expiry_opcode": Control(_flag, False, "tell expirations as such, not as deletions"),
    "send_stream_end_on_client_close_stream": Control(_flag, False, "end a stream that the consumer closes"),
    "set_priority": Control(_one_of("low", "medium", "high"), "medium", _PRIORITY),
    "backfill_order": Control(_one_of("round-robin", "sequential"), "round-robin", _ORDER),
    # Our own: nobody else understands them.
    "key_filter": Control(str, "", "a regular expression (RE2) that is searched in each key"),
    "value_filter": Control(str, "", _VALUE_FILTER),
    "keys_only": Control(_flag, False, "leave out the values"),
    "persisted_only": Control(_flag, False, "send only what is on disk"),
    "exact_end": Control(_flag, False, "end with the state that was current at the end seqno, and nothing beyond it"),
    "history": Control(_flag, False, "every retained version of a key, not only the newest"),
}


class Controls:
    """The settings of one connection."""

    def __init__(self) -> None:
        self._values = {name: control.default for name, control in CONTROLS.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def read(self, name: bytes, value: bytes) -> tuple[str, Any]:
        """The setting that a message names; refuses what is unknown or makes no sense."""
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidArguments(f"a control has at most {VALUE_BYTES_MAX} bytes, not {len(value)}")
        try:
            text, given = name.decode(), value.decode()
        except UnicodeDecodeError:
            raise InvalidArguments("a control is text") from None
        if text not in CONTROLS:
            raise InvalidArguments(f"there is no control {_shown(text)}; known are {', '.join(CONTROLS)}")
        return text, CONTROLS[text].read(given)

    def set(self, name: str, value: Any) -> None:
        """Take a setting that was read."""
        self._values[name] = value
