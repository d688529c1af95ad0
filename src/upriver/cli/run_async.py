"""Run asynchronous work from a command, and turn its errors into one line."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import click

from upriver.cli.errors import Failure, InputError, reason
from upriver.errors import AddressError, OptionError, StatusError, UpriverError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; an expected error becomes one line."""
    with one_line_errors():
        return asyncio.run(work)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn expected errors into one line each."""
    try:
        yield
    except BaseExceptionGroup as group:
        with one_line_errors():
            raise _first(group) from None
    except (AddressError, OptionError) as error:
        raise InputError(str(error)) from None
    except StatusError as error:
        where = "" if error.vbucket is None else f"vbucket {error.vbucket}: "
        raise Failure(f"{where}{error.detail or error.text}") from None
    except UpriverError as error:
        raise Failure(str(error)) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Failure(reason(error)) from None


@contextlib.contextmanager
def interruptible(meaning: str) -> Iterator[None]:
    """On Ctrl-C, print what it means for unfinished work."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"{click.get_current_context().command_path}: interrupted: {meaning}", err=True)
        raise


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
