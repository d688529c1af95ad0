"""Errors of commands: one line on standard error, and an exit code."""

from typing import IO, Any

import click


class OneLineError(click.ClickException):
    """An error that is shown as one line, after the name of the command."""

    def __init__(self, message: str, ctx: click.Context | None = None) -> None:
        super().__init__(message)
        self.ctx = ctx or click.get_current_context(silent=True)

    def show(self, file: IO[Any] | None = None) -> None:
        command = "upriver" if self.ctx is None else self.ctx.command_path
        line = " ".join(self.format_message().split())
        click.echo(f"{command}: {line}", file=file, err=file is None)


class InputError(OneLineError):
    """Invalid input: exit code 2."""

    exit_code = 2


class Failure(OneLineError):
    """The command failed although its input was valid: exit code 1."""

    exit_code = 1


def reason(error: OSError) -> str:
    """The message of an error of the operating system, with the file."""
    text = error.strerror or str(error)
    return text if error.filename is None else f"{error.filename}: {text}"
