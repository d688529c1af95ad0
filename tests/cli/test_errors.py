"""Errors of commands are one line, whatever they say."""

import io

import click

from upriver.cli.errors import Failure, InputError


def test_outside_of_a_command() -> None:
    written = io.StringIO()
    InputError("two\nlines").show(written)
    assert written.getvalue() == "upriver: two lines\n"


def test_the_command_is_named() -> None:
    written = io.StringIO()
    with click.Context(click.Command("explain"), info_name="upriver explain"):
        InputError("nothing to explain").show(written)
    assert written.getvalue() == "upriver explain: nothing to explain\n"


def test_exit_code() -> None:
    assert (InputError("").exit_code, Failure("").exit_code) == (2, 1)
