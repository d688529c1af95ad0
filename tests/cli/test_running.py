"""How commands fail."""

import click
import pytest

from upriver.cli.complaint import Complaint, Failure
from upriver.cli.running import complaints, run
from upriver.errors import AddressError, NotMyVbucket, Unreachable


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Unreachable("host:1", "nobody"), Failure, "host:1: nobody"),
        (AddressError("x", "no"), Complaint, "x"),
        (NotMyVbucket(vbucket=7), Failure, "vbucket 7: Not my vbucket"),
        (FileNotFoundError(2, "No such file", "here"), Failure, "here: No such file"),
        (ExceptionGroup("several", [Unreachable("host:1", "nobody")]), Failure, "host:1: nobody"),
    ],
)
def test_each_error_is_a_line(error: Exception, kind: type[click.ClickException], text: str) -> None:
    with pytest.raises(kind) as caught, complaints():
        raise error
    assert type(caught.value) is kind
    assert text in caught.value.message


def test_what_nobody_expected_is_not_hidden() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(work())


def test_a_closed_pipe_is_left_to_who_knows_what_to_do() -> None:
    with pytest.raises(BrokenPipeError), complaints():
        raise BrokenPipeError
