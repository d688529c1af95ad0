"""The group of commands: help, versions and complaints."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.support.terminal import COMMAND, PATIENCE_S
from upriver import __version__
from upriver.cli import main


def test_every_command_has_a_help_text() -> None:
    for name, command in main.commands.items():
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert command.help
        assert result.stdout.startswith(f"Usage: main {name}")


def test_version_option() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"main {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["explian"], "main: No such command 'explian'."),
        (["explain", "--dialect", "tcp", "80"], "main explain: Invalid value for '-d' / '--dialect': 'tcp' is not one"),
        (["version", "--all"], "main version: No such option"),
    ],
)
def test_a_usage_error_is_one_line(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(" --help)\n")


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["explain", "80 0a" + " 00" * 22]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (1, b"upriver: No space left on device\n")


def test_the_shell_completes_commands_and_options() -> None:
    def completed(words: str, place: int) -> list[str]:
        environment = {"_UPRIVER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        code = "from upriver.cli import main; main(prog_name='upriver')"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | environment
        )
        return [line.removeprefix("plain,") for line in done.stdout.splitlines()]

    assert completed("upriver fail", 1) == ["failover-log"]
    assert "--until-now" in completed("upriver tail --un", 2)
