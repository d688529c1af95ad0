"""Every command that the README and the pages show can be typed: its options and arguments are the program's."""

import dataclasses
import shlex
from pathlib import Path

import click
import pytest

from tests.support.page_snippets import PAGES, commands
from upriver.cli import main
from upriver.cli.parameters import PASSWORD_VARIABLE
from upriver.pipelines.core.registry import find

COMMANDS = [
    pytest.param(words, id=f"{page.stem}-{shlex.join(words)}"[:90]) for page in PAGES for words in commands(page)
]


@pytest.fixture(autouse=True)
def user_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the files that the pages name, and a password."""
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *_where: Path(value))


def typed(words: list[str]) -> click.Context:
    """The command that these words name, with what they say to it; it is not carried out."""
    command: click.Command = main
    context, rest = None, words
    while isinstance(command, click.Group) and not rest[0].startswith("-"):
        context = click.Context(command, parent=context, info_name=command.name)
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(command.name, list(rest), parent=context)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_can_be_typed(words: list[str]) -> None:
    context = typed(words)
    if words[0] == "run":
        options = find(context.info_name or "").options_type
        fields = {field.name for field in dataclasses.fields(options)}
        given = {name: value for name, value in context.params.items() if name in fields and value is not None}
        assert options.read(given)


@pytest.mark.parametrize(
    "words", [["serves"], ["serve", "--prot", "1"], ["mirror", "check"], ["run", "mirror", "--too"]]
)
def test_what_does_not_exist_cannot(words: list[str]) -> None:
    with pytest.raises((KeyError, click.UsageError)):
        typed(words)


@pytest.mark.parametrize("page", ["README", "operate", "pipelines", "production"])
def test_the_pages_show_some(page: str) -> None:
    assert any(commands(each) for each in PAGES if each.stem == page)
