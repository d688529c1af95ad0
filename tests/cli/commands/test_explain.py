"""``upriver explain``: where the bytes come from, what is printed, and what happens when they are wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from upriver.cli import main
from upriver.cli.commands.explain import wants_colour
from upriver.wire import DIALECTS, dcp
from upriver.wire.explain import explain_packet, explanation_text

ROOT = Path(__file__).parents[3]
NOOP = dcp.Noop(opaque=1).encode()
MARKER = dcp.SnapshotMarker(start_seqno=0, end_seqno=6).encode()


def _run(*arguments: str, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], input=stdin, prog_name="upriver")


def _messages(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [packet["message"] for packet in json.loads(result.stdout)]


# Where the bytes come from


@pytest.mark.parametrize("words", [[NOOP.hex()], ["0x805c", NOOP[2:].hex(" ")], [NOOP.hex(":")]])
def test_hex_on_the_command_line(words: list[str]) -> None:
    assert _messages(_run("--json", *words)) == ["noop"]


@pytest.mark.parametrize(
    "content", [NOOP + MARKER, (NOOP + MARKER).hex().encode(), b"# two\n" + (NOOP + MARKER).hex(" ").encode()]
)
@pytest.mark.parametrize("arguments", [[], ["-"], ["-f", "-"], ["-f", "packets"]])
def test_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, arguments: list[str]
) -> None:
    (tmp_path / "packets").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert _messages(_run("--json", *arguments, stdin=content)) == ["noop", "snapshot marker"]


def test_a_recording() -> None:
    path = ROOT / "tests" / "data" / "transcripts" / "dcp_03_stream_memory.txt"
    assert "mutation" in _messages(_run("--json", "-f", str(path)))


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "packets").glob("*.hex")), ids=lambda path: path.stem)
def test_the_examples(path: Path) -> None:
    """`make demo` shows one packet of every text, and of what deployed servers speak."""
    result = _run("--dialect", path.stem, "-f", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{path.stem} ")


def test_there_is_an_example_of_every_stream_dialect() -> None:
    assert {path.stem for path in (ROOT / "examples" / "packets").glob("*.hex")} == set(DIALECTS) - {"memcached"}


# What is printed


def test_text() -> None:
    result = _run((NOOP + MARKER).hex())
    assert result.exit_code == 0
    first, second = explain_packet(NOOP, dcp.dcp), explain_packet(MARKER, dcp.dcp, len(NOOP))
    assert result.stdout == f"{explanation_text(first)}\n\n{explanation_text(second)}\n"


def test_json() -> None:
    (packet,) = json.loads(_run("--json", NOOP.hex()).stdout)
    assert {name: packet[name] for name in packet if name != "fields"} == {
        "dialect": "dcp",
        "message": "noop",
        "magic": 0x80,
        "offset": 0,
        "length": 24,
    }
    assert packet["fields"][1] == {"name": "opcode", "first": 1, "last": 1, "value": 0x5C, "meaning": "noop"}


def test_the_dialect_can_be_told() -> None:
    open_hex = dcp.Open(name=b"n").encode().hex()
    assert json.loads(_run("--json", open_hex).stdout)[0]["dialect"] == "dcp"
    assert json.loads(_run("--json", "--dialect", "upr", open_hex).stdout)[0]["dialect"] == "upr"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "wanted"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_when_there_are_colours(stream: io.StringIO, environ: dict[str, str], wanted: bool) -> None:
    assert wants_colour(stream, environ) is wanted


def test_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.cli.commands.explain.wants_colour", lambda *_: True)
    coloured = CliRunner().invoke(main, ["explain", NOOP.hex()], color=True).stdout
    assert "\x1b[1mdcp noop\x1b[0m" in coloured
    assert "\x1b" not in _run(NOOP.hex()).stdout  # the runner, like a pipe, takes the colours away


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "stdin", "why"),
    [
        (["zz"], None, "line 1: 'z' is not a hexadecimal digit"),
        (["805"], None, "an odd number of hexadecimal digits: 3"),
        (["-f", "/no/such/file"], None, "/no/such/file: No such file or directory"),
        (["-f", "packets", "80"], None, "HEX and -f FILE exclude each other: give one of them"),
        ([], "", "nothing to explain: the input is empty"),
        (["00" * 24], None, "at byte 0: expected magic 0x80 or 0x81, or a draft's opcode 0x01 to 0x07, found 0x00"),
        (["8057"], None, "at byte 0: expected a 24-byte memcached header, found 2 bytes"),
        (["-"], b"\xff\xd8", "neither packets nor text: it starts with 0xff"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], stdin: str | bytes | None, why: str) -> None:
    result = _run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"upriver explain: {why}\n"


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.cli.commands.explain.can_prompt", lambda: True)
    result = _run()
    assert result.exit_code == 2
    assert result.stderr == "upriver explain: nothing to explain: give HEX, -f FILE or - for standard input\n"


def test_good_packets_are_printed_before_the_complaint() -> None:
    wrong = (NOOP + MARKER[:-1]).hex()
    result = _run(wrong)
    assert (result.exit_code, result.stdout) == (2, explanation_text(explain_packet(NOOP, dcp.dcp)) + "\n")
    assert result.stderr == "upriver explain: at byte 24: expected a packet of 44 bytes, found 43\n"
    result = _run("--json", wrong)
    assert (result.exit_code, len(json.loads(result.stdout))) == (2, 1)


def test_a_reader_that_leaves_is_no_failure() -> None:
    """As in ``upriver explain -f many | head -1``."""
    explain = subprocess.Popen(
        [sys.executable, "-m", "upriver", "explain", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with explain:
        assert explain.stdin is not None
        assert explain.stdout is not None
        assert explain.stderr is not None
        explain.stdin.write(NOOP * 2000)
        explain.stdin.close()
        assert explain.stdout.readline() == b"dcp noop, 24 bytes at offset 0\n"
        explain.stdout.close()
        assert explain.stderr.read() == b""
