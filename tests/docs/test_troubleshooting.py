"""The page about trouble leaves no error out."""

from pathlib import Path

import pytest

from upriver import errors

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def all_of(kind: type[errors.UpriverError]) -> list[type[errors.UpriverError]]:
    """A class and everything below it that Upriver itself declares."""
    found = [each for below in kind.__subclasses__() for each in all_of(below)]
    return [kind, *found] if kind.__module__ == errors.__name__ else found


@pytest.mark.parametrize("kind", all_of(errors.UpriverError))
def test_every_error_has_a_cause_and_a_cure(kind: type[errors.UpriverError]) -> None:
    assert f"`{kind.__name__}`" in PAGE


@pytest.mark.parametrize("kind", errors.StatusError.__subclasses__())
def test_every_status_is_told_with_its_text_and_number(kind: type[errors.StatusError]) -> None:
    first, number = kind.text.split()[0], f"0x{kind.status:02x}"
    line = next(line for line in PAGE.splitlines() if f"`{kind.__name__}`" in line)
    assert first in line
    assert number in line
