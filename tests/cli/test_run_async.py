"""How commands fail."""

import signal
import socket
import subprocess
from pathlib import Path

import click
import pytest

from tests.support.terminal import COMMAND, PATIENCE_S
from upriver.cli.errors import Failure, InputError
from upriver.cli.run_async import one_line_errors, run
from upriver.errors import AddressError, NotMyVbucket, Unreachable


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Unreachable("host:1", "no answer"), Failure, "host:1: no answer"),
        (AddressError("x", "no"), InputError, "x"),
        (NotMyVbucket(vbucket=7), Failure, "vbucket 7: Not my vbucket"),
        (FileNotFoundError(2, "No such file", "here"), Failure, "here: No such file"),
        (ExceptionGroup("several", [Unreachable("host:1", "no answer")]), Failure, "host:1: no answer"),
    ],
)
def test_each_error_is_a_line(error: Exception, kind: type[click.ClickException], text: str) -> None:
    with pytest.raises(kind) as caught, one_line_errors():
        raise error
    assert type(caught.value) is kind
    assert text in caught.value.message


def test_an_unexpected_error_is_not_hidden() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(work())


def test_a_closed_pipe_is_left_to_who_knows_what_to_do() -> None:
    with pytest.raises(BrokenPipeError), one_line_errors():
        raise BrokenPipeError


@pytest.mark.parametrize(
    ("arguments", "meaning"),
    [
        (("dump",), "the output is incomplete"),
        (("dump", "-o", "all.jsonl"), "all.jsonl is not written"),
        (("dump", "-o", "all.parquet"), "all.parquet is not written"),
        (("load", "--sample", "1000"), "load the file again"),
        (("move", "1", "--to", "127.0.0.1:1"), "run the same command again to continue"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_ctrl_c_says_what_is_not_done(tmp_path: Path, arguments: tuple[str, ...], meaning: str) -> None:
    """The node has taken the connection and does not answer."""
    old = tmp_path / arguments[-1]
    if arguments[0] == "dump":
        old.write_text("whole")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*COMMAND, *arguments, address], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        peer, _ = listener.accept()
        with peer:
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, b"")
    assert errors.startswith(f"upriver {arguments[0]}: interrupted: ".encode()), errors
    assert errors.count(b"\n") == 1
    assert meaning in errors.decode()
    if arguments[0] == "dump":  # half a dump is not taken for a complete one, and the one before is kept
        assert old.read_text() == "whole"
        assert list(tmp_path.iterdir()) == [old]
