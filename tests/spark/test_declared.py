"""Options, declared once and read from text."""

import dataclasses

import pytest

from upriver.errors import OptionError
from upriver.spark.declared import as_count, as_flag, as_seconds, as_size, option, read_fields


@dataclasses.dataclass(frozen=True)
class Table:
    """Options of an example."""

    rows_max: int = option(1, as_count, "how many rows")
    pause: float = option(1.0, as_seconds, "how long", values="TIME")
    size: int = option(1, as_size, "how large")
    password: bool = option(False, as_flag, "what nobody shall read")


@pytest.mark.parametrize("name", ["rowsMax", "rows-max", "rows_max", "ROWSMAX"])
def test_a_name_is_found_however_it_is_spelled(name: str) -> None:
    assert read_fields(Table, {name: " 7 "}, str) == {"rows_max": 7}


def test_values_come_with_their_units() -> None:
    assert read_fields(Table, {"pause": "5m", "size": "2k"}, str) == {"pause": 300.0, "size": 2048}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rows": "7"}, r"option rows = '7': there is no such option; did you mean ROWS_MAX\?"),
        ({"colour": "red"}, "known are PASSWORD, PAUSE, ROWS_MAX, SIZE"),
        ({"pause": "soon"}, "option PAUSE = 'soon': it must be a time such as"),
        ({"password": "secret"}, "option PASSWORD = '…': it must be true or false"),
    ],
)
def test_an_error_names_the_option_as_its_reader_writes_it(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        read_fields(Table, given, str.upper)
