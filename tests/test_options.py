"""Options, declared once and read from texts, TOML files and calls."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from upriver import model
from upriver.errors import OptionError, StorageError
from upriver.options import (
    VBUCKETS_MAX,
    Reader,
    as_any_text,
    as_count,
    as_flag,
    as_jvm_size,
    as_port,
    as_seconds,
    as_size,
    as_text,
    as_vbuckets,
    hyphenated,
    number,
    one_of,
    option,
    read_fields,
    read_toml,
    shown_default,
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Options of an example."""

    rows_max: int = option(1, as_count, "how many rows")
    pause: float = option(1.5, as_seconds, "how long", "TIME")
    size: int = option(1, as_jvm_size, "how large")
    order: str = option("up", one_of("up", "down"), "which order")
    verify: bool = option(True, as_flag, "whether to check")
    to: str | None = option(None, as_text, "where to")
    password: bool = option(False, as_flag, "what no error may show")


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (as_any_text, "", ""),
        (as_any_text, Path("a/b"), "a/b"),
        (as_any_text, 7, "7"),
        (as_text, "x", "x"),
        (as_flag, "YES", True),
        (as_flag, 0, False),
        (as_flag, True, True),
        (as_count, "7", 7),
        (as_count, 7.0, 7),
        (as_port, 65535, 65535),
        (number(0), "1.5", 1.5),
        (as_seconds, "500ms", 0.5),
        (as_seconds, "1.5 H", 5400.0),
        (as_seconds, 30, 30.0),
        (as_size, 7, 7),
        (as_size, "0", 0),
        (as_size, "1KiB", 1024),
        (as_size, "1.5 MiB", 3 * 2**19),
        (as_size, "2gib", 2**31),
        (as_size, "3 MB", 3_000_000),
        (as_jvm_size, "2k", 2048),
        (as_jvm_size, "1.5GB", 3 * 2**29),
        (one_of("a", "b"), "A", "a"),
        (as_vbuckets, "2, 0-1,1", (0, 1, 2)),
        (as_vbuckets, "1023", (1023,)),
    ],
)
def test_readers(read: Reader, value: Any, expected: Any) -> None:
    assert read(value) == expected
    assert type(read(value)) is type(expected)


@pytest.mark.parametrize(
    ("read", "wrong", "wanted"),
    [
        (as_any_text, [["a"], True, None], "a text"),
        (as_text, ["", ["a"]], "a text"),
        (as_flag, ["", "perhaps", 2], "true or false"),
        (as_count, ["0", "-1", "many", "1.5", 1.5, True, None, "9" * 5000, {}], "a whole number from 1 to 2.62"),
        (as_count, [2**64], "a whole number from 1 to 2.62"),
        (as_port, ["0", 65536, "x"], "a whole number from 1 to 65535"),
        (number(0), ["-1", math.nan, "inf"], "a number from 0 to 2.62"),
        (as_seconds, ["", "soon", "-1s", "5", "1e300h", "nans", [1]], "a time such as 500ms"),
        (as_size, ["", "much", "5 XB", "-1", "99999999999GiB", "9" * 400], "a size such as 512MiB"),
        (as_jvm_size, ["0", "-1m", "16 parsec", "1kib"], "a size above 0 such as"),
        (one_of("a", "b"), ["", "c", None], "one of a, b"),
        (
            as_vbuckets,
            ["", "x", "5-", "-5", "0-1024", "2000-3", "1,,2", "0-" + "9" * 5000],
            "vbuckets below 1024 such as",
        ),
        (as_vbuckets, ["9-3", "1, 9-3 "], "vbuckets with ascending ranges: write 3-9, not 9-3"),
    ],
)
def test_a_reader_says_what_a_value_must_be(read: Reader, wrong: list[Any], wanted: str) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=wanted):
            read(value)


def test_vbuckets_of_a_smaller_bucket() -> None:
    assert VBUCKETS_MAX == model.VBUCKETS_MAX
    assert as_vbuckets("0-3", 4) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="below 4"):
        as_vbuckets("4", 4)


@pytest.mark.parametrize("name", ["rowsMax", "rows-max", "rows_max", "ROWSMAX"])
def test_a_name_is_found_however_it_is_spelled(name: str) -> None:
    assert read_fields(Table, {name: " 7 "}, str) == {"rows_max": 7}


def test_values_come_with_their_units() -> None:
    assert read_fields(Table, {"pause": "5m", "size": "2k"}, str) == {"pause": 300.0, "size": 2048}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rows": "7"}, r"option rows = '7': unknown option; did you mean ROWS_MAX\?"),
        ({"colour": "red"}, "choose from ORDER, PASSWORD, PAUSE, ROWS_MAX, SIZE, TO, VERIFY"),
        ({"pause": "soon"}, "option PAUSE = 'soon': it must be a time such as"),
        ({"password": "secret"}, "option PASSWORD = '…': it must be true or false"),
        ({"pasword": "secret"}, "option pasword = '…': unknown option"),
        ({"size": "//ann:secret@host"}, "option SIZE = '//ann:…@host'"),
    ],
)
def test_an_error_names_the_option_as_its_reader_writes_it(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        read_fields(Table, given, str.upper)


def test_what_help_shows() -> None:
    shown = {hyphenated(field.name): shown_default(field) for field in dataclasses.fields(Table)}
    assert shown == {
        "rows-max": "1",
        "pause": "1.5s",
        "size": "1",
        "order": "up",
        "verify": "true",
        "to": "",
        "password": "",
    }
    values = {field.name: field.metadata["values"] for field in dataclasses.fields(Table)}
    assert (values["order"], values["pause"], values["to"]) == ("up, down", "TIME", "TEXT")


def test_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("rows-max = 7\n")
    assert read_toml(path) == {"rows-max": 7}
    for wrong in (b"rows = ", b"\xff"):
        path.write_bytes(wrong)
        with pytest.raises(StorageError, match=r"options\.toml: "):
            read_toml(path)
    with pytest.raises(StorageError, match="No such file"):
        read_toml(tmp_path / "none.toml")
