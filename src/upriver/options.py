"""Options, each declared once: a field of a dataclass with its default, its reader and its help.

Command line parameters, environment variables, keys of TOML files, Spark options and the tables in the documentation
follow from the declaration. A reader takes a text, or a value from a TOML file or a call, and returns the value of the
option. It raises a ``ValueError`` that completes the sentence "it must be …".
"""

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from upriver.errors import OptionError, StorageError, without_password

#: As in ``upriver.model``, which imports Arrow: ``--help`` must not wait for that. A test compares the two.
VBUCKETS_MAX: Final = 1024
#: The compiled parts count in 64 bits; this leaves room for sums.
NUMBER_MAX: Final = 2**62

YES: Final = ("true", "1", "yes", "on")
_NO: Final = ("false", "0", "no", "off")
_TIME_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_JVM_SIZE_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


class Reader:
    """Reads the value of an option. ``values`` shows users what they may write."""

    def __init__(self, convert: Callable[[Any], Any], wanted: str, values: str = "") -> None:
        self._convert, self._wanted, self.values = convert, wanted, values

    def __call__(self, value: Any) -> Any:
        try:
            return self._convert(value)
        except (ValueError, TypeError, LookupError, OverflowError):
            raise ValueError(self._wanted) from None


def one_of(*allowed: str) -> Reader:
    """Reads one of a few words, in any case."""
    words = {word: word for word in allowed}
    return Reader(lambda value: words[str(value).lower()], f"one of {', '.join(allowed)}", ", ".join(allowed))


def number(least: float, most: float = NUMBER_MAX, *, whole: bool = False, values: str = "N") -> Reader:
    """Reads a number between two bounds."""
    kind = int if whole else float

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        if (isinstance(value, float) and value != kind(value)) or not least <= kind(value) <= most:
            raise ValueError
        return kind(value)

    bound = "2^62" if most == NUMBER_MAX else f"{most:g}"
    return Reader(convert, f"a {'whole ' if whole else ''}number from {least:g} to {bound}", values)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | os.PathLike | int):
        raise TypeError
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _some_text(value: Any) -> str:
    if value == "":
        raise ValueError
    return _text(value)


def _flag(value: Any) -> bool:
    return dict.fromkeys(YES, True)[str(value).lower()] if str(value).lower() not in _NO else False


def _measure(value: Any, units: Mapping[str, float], least: float = 0) -> float:
    (amount, unit) = re.findall(r"^(.*?)([a-z]*)$", str(value).strip().lower())[0]
    if not least <= float(amount) * units[unit] <= NUMBER_MAX:
        raise ValueError
    return float(amount) * units[unit]


#: A text with at least one character, or a path.
as_text: Final = Reader(_some_text, "a text that is not empty", "TEXT")
as_any_text: Final = Reader(_text, "a text", "TEXT")
as_flag: Final = Reader(_flag, "true or false")
as_count: Final = number(1, whole=True)
as_port: Final = number(1, 65535, whole=True, values="PORT")
#: A text with a unit, or a number of seconds.
as_seconds: Final = Reader(
    lambda value: float(value) if isinstance(value, int | float) else _measure(value, _TIME_UNITS),
    "a time such as 500ms, 30s or 5m",
    "TIME",
)
#: A number of bytes, perhaps with a unit: 1kB is 1,000 bytes and 1KiB is 1,024.
as_size: Final = Reader(
    lambda value: int(_measure(value, _SIZE_UNITS)), "a size such as 512MiB, 1GiB or a number of bytes", "SIZE"
)
#: A number of bytes above 0, perhaps with a unit as Spark uses it: 1k and 1kb are 1,024 bytes.
as_jvm_size: Final = Reader(
    lambda value: int(_measure(value, _JVM_SIZE_UNITS, 1)), "a size above 0 such as 1000000, 512k or 16m", "SIZE"
)


def as_vbuckets(value: str, vbuckets: int = VBUCKETS_MAX) -> tuple[int, ...]:
    """Numbers and ranges of vbuckets, such as ``0-511,700``: each number once, in ascending order."""
    numbers: set[int] = set()
    for part in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (0, vbuckets) if found is None else (int(found[1]), int(found[2] or found[1]))
        if last < first < vbuckets:
            raise ValueError(f"vbuckets with ascending ranges: write {last}-{first}, not {part.strip()}")
        if not first <= last < vbuckets:
            raise ValueError(f"vbuckets below {vbuckets} such as 7, 0-511 or 0-511,700")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def option(default: Any, read: Callable[[Any], Any], help_text: str, values: str = "") -> Any:
    """Declare an option. ``values`` replaces what the reader shows to users."""
    values = values or getattr(read, "values", "")
    return dataclasses.field(default=default, metadata={"read": read, "help": help_text, "values": values})


def shown_default(field: "dataclasses.Field[Any]") -> str:
    """The default as users would write it; empty where there is none, and for a flag that is off."""
    if field.default is None or field.default is False or field.default == "":
        return ""
    if isinstance(field.default, float):
        return f"{field.default:g}{'s' if field.metadata['read'] is as_seconds else ''}"
    return "true" if field.default is True else str(field.default)


def hyphenated(name: str) -> str:
    """The name of a field as the command line spells it."""
    return name.replace("_", "-")


def find_field(options: type[Any], name: str, value: Any, spell: Callable[[str], str]) -> "dataclasses.Field[Any]":
    """The option of this name, however it is spelled: with hyphens, underscores or capitals."""
    fields = {_plain(spell(field.name)): field for field in dataclasses.fields(options)}
    if _plain(name) not in fields:
        known = {spell(field.name).lower(): spell(field.name) for field in fields.values()}
        close = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"did you mean {known[close[0]]}?" if close else f"choose from {', '.join(sorted(known.values()))}"
        raise OptionError(name, _shown(name, value), f"unknown option; {hint}")
    return fields[_plain(name)]


def read_fields(options: type[Any], given: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, Any]:
    """The values of fields of ``options``, from texts by name. ``spell`` is how errors spell the name of a field."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = find_field(options, name, value, spell)
        try:
            found[field.name] = field.metadata["read"](value.strip() if isinstance(value, str) else value)
        except ValueError as error:
            raise OptionError(spell(field.name), _shown(name, value), f"it must be {error}") from None
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; ``StorageError`` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(str(path), error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StorageError(str(path), str(error)) from None


def _shown(name: str, value: Any) -> str:
    """A value as an error shows it, without a password: not even under a misspelled name."""
    return "…" if difflib.get_close_matches(_plain(name), ["password"]) else without_password(str(value))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
