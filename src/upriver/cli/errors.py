"""How a command says that it cannot do what was asked, or that it went wrong."""

from typing import IO, Any

import click


class Complaint(click.ClickException):
    """Wrong input: one line on standard error that names the command, and exit code 2."""

    exit_code = 2

    def __init__(self, message: str, ctx: click.Context | None = None) -> None:
        super().__init__(message)
        self.ctx = ctx or click.get_current_context(silent=True)

    def show(self, file: IO[Any] | None = None) -> None:
        command = "upriver" if self.ctx is None else self.ctx.command_path
        line = " ".join(self.format_message().split())
        click.echo(f"{command}: {line}", file=file, err=file is None)


class Failure(Complaint):
    """The input was right and it did not work: one line on standard error as well, and exit code 1."""

    exit_code = 1


def reason(error: OSError) -> str:
    """What the system said, and of which file."""
    text = error.strerror or str(error)
    return text if error.filename is None else f"{error.filename}: {text}"
