"""What the README shows is what the commands print."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from upriver.cli import main
from upriver.node import EmbeddedNode

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def shown_after(command: str) -> list[str]:
    """The lines that the README prints after a command, up to the next command or the end of the block."""
    block = README[README.index(f"$ {command}") :].split("\n", 1)[1]
    return re.split(r"^(?:\$ |```)", block, flags=re.MULTILINE)[0].splitlines()


def assert_shown(shown: list[str], printed: str) -> None:
    """Each line is in the output, in this order; an ellipsis leaves lines out."""
    rest = iter(printed.splitlines())
    for line in shown:
        assert line == "…" or line in rest, f"the README shows a line that is not printed: {line!r}"


def test_the_explained_packet() -> None:
    (command,) = re.findall(r"^\$ upriver (explain .*)$", README, flags=re.MULTILINE)
    assert_shown(shown_after(f"upriver {command}"), CliRunner().invoke(main, command.split()).output)


def test_the_makefile_has_the_two_commands() -> None:
    targets = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:", targets, flags=re.MULTILINE)
    assert re.search(r"^test:", targets, flags=re.MULTILINE)


def test_the_command_line(upriver_node: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_ADDRESS", upriver_node.address)
    monkeypatch.chdir(tmp_path)
    section = README[README.index("## From the command line") :].split("```")[1]
    commands = re.findall(r"^\$ upriver (.*)$", section, flags=re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        arguments = command.replace("127.0.0.1:11210", upriver_node.address).split()
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert_shown(shown_after(f"upriver {command}"), result.output)
