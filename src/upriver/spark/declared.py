"""How an option is declared once, with its check and its help, and read from text.

A reader of values raises a ``ValueError`` that says what the value must be.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from upriver.client.transport import Address, without_password
from upriver.errors import AddressError, OffsetError, OptionError
from upriver.spark.offsets import read_offset

_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_TIME_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE_UNITS: Final = {"b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


def as_text(value: str) -> str:
    """A text."""
    if not value:
        raise ValueError("a text that is not empty")
    return value


def as_flag(value: str) -> bool:
    """Yes or no."""
    if value.lower() not in (*_YES, *_NO):
        raise ValueError("true or false")
    return value.lower() in _YES


def as_count(value: str) -> int:
    """A number from 1."""
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:20]) < 2**63:
        raise ValueError("a number from 1")
    return int(value)


def as_port(value: str) -> int:
    """A port."""
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:20]) < 2**16:
        raise ValueError("a port, from 1 to 65535")
    return int(value)


def _measure(value: str, units: Mapping[str, float], what: str) -> float:
    number = value.strip().lower().rstrip("".join(units))
    unit = value.strip().lower()[len(number) :]
    try:
        amount = float(number) * units[unit]
    except (KeyError, ValueError):
        raise ValueError(what) from None
    if not 0 <= amount < 2**63:
        raise ValueError(what)
    return amount


def as_seconds(value: str) -> float:
    """A time with its unit, in seconds."""
    return _measure(value, _TIME_UNITS, "a time such as 500ms, 30s or 5m")


def as_size(value: str) -> int:
    """A size, perhaps with its unit, in bytes."""
    size = int(_measure(value, {"": 1, **_SIZE_UNITS}, "a size such as 1000000, 512k or 16m"))
    if not size:
        raise ValueError("a size above 0")
    return size


def one_of(*allowed: str) -> Callable[[str], str]:
    """One of these words."""

    def read(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value.lower()

    return read


def as_address(value: str) -> Address:
    """Where a cluster is."""
    try:
        return Address.parse(value)
    except AddressError as error:
        raise ValueError(f"HOST:PORT or upriver://user@host:port/bucket ({error.why})") from None


def as_offsets(value: str) -> Any:
    """Offsets: a word, or JSON."""
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        return read_offset(value)
    except OffsetError as error:
        raise ValueError(f"earliest, latest or JSON per vbucket ({error})") from None


def as_ends(value: str) -> Any:
    """Offsets at which something ends."""
    offsets = as_offsets(value)
    if "earliest" in (offsets.values() if isinstance(offsets, dict) else [offsets]):
        raise ValueError("latest or JSON with seqnos: there is nothing before the earliest")
    return offsets


def as_vbuckets(value: str) -> tuple[int, ...] | None:
    """Numbers of vbuckets; None for all."""
    if value.lower() == "all":
        return None
    numbers: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or not int(first) <= int(last or first) < 1024:
            raise ValueError("all, or numbers and ranges below 1024 such as 0-511,700")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def as_value_filter(value: str) -> str:
    """A condition on values."""
    try:
        given = json.loads(value, parse_int=str)  # the node decides what a number is, however long
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("field"), str):
        raise ValueError('JSON such as {"field": "a.b", "equals": 1}')
    return value


def option(default: Any, read: Callable[[str], Any], meaning: str, *, values: str = "") -> Any:
    """A field with what reads it from text, and its help."""
    return dataclasses.field(default=default, metadata={"read": read, "meaning": meaning, "values": values})


def read_fields(options: type[Any], given: Mapping[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
    """What these texts mean as fields of ``options``; one clear error for the first that makes no sense.

    Names are found however they are spelled: with hyphens, underscores, humps or in capitals. ``shown`` is how errors
    spell the name of a field.
    """
    fields = {_plain(shown(field.name)): field for field in dataclasses.fields(options)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = fields.get(_plain(name))
        if field is None:
            why = _suggestion(name, [shown(each.name) for each in fields.values()])
            raise OptionError(name, _displayed(name, value), why)
        try:
            found[field.name] = field.metadata["read"](value.strip() if isinstance(value, str) else value)
        except ValueError as error:
            raise OptionError(shown(field.name), _displayed(name, value), f"it must be {error}") from None
    return found


def _displayed(name: str, value: Any) -> str:
    """What an error shows of a value: no password, not even under a name that is misspelled."""
    return "…" if difflib.get_close_matches(_plain(name), ["password"]) else without_password(str(value))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in known], 1)
    if close:
        return f"there is no such option; did you mean {next(each for each in known if each.lower() == close[0])}?"
    return f"there is no such option; known are {', '.join(sorted(known))}"
