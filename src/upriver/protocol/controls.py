"""The settings that a consumer may send to its producer: one table, each with its check.

A setting counts for the streams that are asked for after it; those of the connection itself (window, noops) at once.
What a filter means only the store knows, so the producer has it look at one before it is taken.
"""

from collections.abc import Callable
from typing import Any, Final

from upriver.errors import InvalidArguments


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidArguments(f"{value!r} is not true or false")
    return value == "true"


def _size(value: str) -> int:
    # The length first: a number of a megabyte of digits is not worth converting.
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) >= 2**32:
        raise InvalidArguments(f"{value!r} is no number of bytes")
    return int(value)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 86_400:
        raise InvalidArguments(f"{value!r} is no number of seconds from 0.1 to 86400")
    return seconds


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise InvalidArguments(f"{value!r} is none of {', '.join(allowed)}")
        return value

    return check


#: Name, how its value is read, and what holds before it is set.
CONTROLS: Final[dict[str, tuple[Callable[[str], Any], Any]]] = {
    "enable_noop": (_flag, False),
    "set_noop_interval": (_seconds, 180.0),
    "connection_buffer_size": (_size, 0),
    "enable_expiry_opcode": (_flag, False),
    "send_stream_end_on_client_close_stream": (_flag, False),
    # Hints, checked and not followed: all streams take turns, so none of them can be in another's way.
    "set_priority": (_one_of("low", "medium", "high"), "medium"),
    "backfill_order": (_one_of("round-robin", "sequential"), "round-robin"),
    # Our own: nobody else understands them.
    "key_filter": (str, ""),
    "value_filter": (str, ""),
    "keys_only": (_flag, False),
    "persisted_only": (_flag, False),
    "exact_end": (_flag, False),
    "history": (_flag, False),
}


class Controls:
    """The settings of one connection."""

    def __init__(self) -> None:
        self._values = {name: default for name, (_, default) in CONTROLS.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def read(self, name: bytes, value: bytes) -> tuple[str, Any]:
        """The setting that a message names; refuses what is unknown or makes no sense."""
        try:
            text, given = name.decode(), value.decode()
        except UnicodeDecodeError:
            raise InvalidArguments("a control is text") from None
        if text not in CONTROLS:
            raise InvalidArguments(f"there is no control {text!r}; known are {', '.join(CONTROLS)}")
        return text, CONTROLS[text][0](given)

    def set(self, name: str, value: Any) -> None:
        """Take a setting that was read."""
        self._values[name] = value
