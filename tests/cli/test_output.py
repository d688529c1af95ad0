"""Tables, lines and bars."""

import json

import pytest

from tests.support.terminal import Terminal, piped
from upriver.cli.output import progress, show_table, shown
from upriver.node import EmbeddedNode


def test_in_a_pipe_tabs_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(1, "a"), (2, "b c")]
    show_table(("number", "name"), rows, as_json=False)
    assert capsys.readouterr().out == "1\ta\n2\tb c\n"
    show_table(("number", "name"), rows, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"number": 1, "name": "a"}, {"number": 2, "name": "b c"}]


def test_no_bar_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 10) as advance:
        advance(5)
    assert capsys.readouterr() == ("", "")


def test_a_table_at_a_terminal(node: EmbeddedNode) -> None:
    with Terminal("vbucket", "list", node.address) as terminal:
        assert terminal.finish() == 0
    assert b"high seqno" in terminal.output
    assert b"\t" not in terminal.output
    done = piped("vbucket", "list", node.address)
    assert done.stdout.splitlines()[0].split(b"\t")[:2] == [b"0", b"active"]


def test_a_bar_at_a_terminal(node: EmbeddedNode) -> None:
    with Terminal("load", "--sample", "70000", node.address) as terminal:
        assert terminal.finish() == 0
    assert b"load" in terminal.output
    assert b"70,000 documents are stored" in terminal.output


def test_bytes_for_people() -> None:
    assert shown("grün".encode()) == "grün"
    assert shown(b"a\xff\x1b[2Jb\n") == "a\\xff\\x1b[2Jb\\n"
