"""The settings that a consumer may send to its producer: one table, with a check for each.

A setting of streams applies to the streams that are requested after it; a setting of the connection (window, noops)
applies at once. Only the store can check a filter, so the producer asks it to.
"""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from upriver.errors import InvalidArguments

#: Enough for any filter; a longer one would be slow to evaluate.
VALUE_BYTES_MAX: Final = 64 * 1024
_SHOWN_CHARACTERS: Final = 80


def _shown(text: str) -> str:
    """As much of a value as fits into an error message."""
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}…"


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidArguments(f"invalid value {_shown(value)}: use true or false")
    return value == "true"


def _size(value: str) -> int:
    # The length first: converting a megabyte of digits takes long.
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) >= 2**32:
        raise InvalidArguments(f"invalid number of bytes {_shown(value)}: use 0 to 4294967295")
    return int(value)


#: Plain decimals: float() accepts more, such as nan and 1_0.
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def _seconds(value: str) -> float:
    if not _DECIMAL.fullmatch(value) or not 0.1 <= float(value) <= 86_400:
        raise InvalidArguments(f"invalid number of seconds {_shown(value)}: use 0.1 to 86400")
    return float(value)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise InvalidArguments(f"invalid value {_shown(value)}: use {', '.join(allowed)}")
        return value

    return check


class Control(NamedTuple):
    """One setting."""

    read: Callable[[str], Any]
    default: Any
    #: A description for the documentation.
    meaning: str


_PRIORITY: Final = "the share of this connection: a quarter with *low*, twice as much with *high*"
_ORDER: Final = "backfills take turns, or each is finished before the next begins; live changes wait for neither"
_VALUE_FILTER: Final = (
    'a field of a JSON value, compressed or not: `{"field": "a.b", "equals": 1}`, or `"contains"`; '
    "a missing field is not `null`"
)

#: Every setting by name.
CONTROLS: Final[dict[str, Control]] = {
    "enable_noop": Control(_flag, False, "send noops, and close the connection of a consumer that stays silent"),
    "set_noop_interval": Control(_seconds, 180.0, "seconds between two noops"),
    "connection_buffer_size": Control(_size, 0, "maximum number of unacknowledged bytes; 0 for no limit"),
    "enable_expiry_opcode": Control(_flag, False, "send expirations as such, not as deletions"),
    "send_stream_end_on_client_close_stream": Control(
        _flag, False, "send a stream end when the consumer closes a stream"
    ),
    "set_priority": Control(_one_of("low", "medium", "high"), "medium", _PRIORITY),
    "backfill_order": Control(_one_of("round-robin", "sequential"), "round-robin", _ORDER),
    # Extensions: other servers do not know these.
    "key_filter": Control(str, "", "a regular expression (RE2) that must match somewhere in the key"),
    "value_filter": Control(str, "", _VALUE_FILTER),
    "keys_only": Control(_flag, False, "send no values"),
    "persisted_only": Control(_flag, False, "send only what is on disk"),
    "exact_end": Control(_flag, False, "end with the state at the end seqno, and nothing beyond it"),
    "history": Control(_flag, False, "send every retained version of a key, not only the newest"),
}


class Controls:
    """The settings of one connection."""

    def __init__(self) -> None:
        self._values = {name: control.default for name, control in CONTROLS.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def read(self, name: bytes, value: bytes) -> tuple[str, Any]:
        """Return the setting that a message names. Refuse an unknown name and an invalid value."""
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidArguments(f"the value has {len(value)} bytes, the maximum is {VALUE_BYTES_MAX}")
        try:
            text, given = name.decode(), value.decode()
        except UnicodeDecodeError:
            raise InvalidArguments("name and value of a control must be UTF-8") from None
        if text not in CONTROLS:
            raise InvalidArguments(f"unknown control {_shown(text)}: use {', '.join(CONTROLS)}")
        return text, CONTROLS[text].read(given)

    def set(self, name: str, value: Any) -> None:
        """Apply a setting that was read."""
        self._values[name] = value
