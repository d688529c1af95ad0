"""The page about trouble leaves no error out, and every message that it explains is one that the program prints."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from upriver import errors
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.scram import Credential
from upriver.wire import MEMCACHED, Framer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCE = ROOT / "src" / "upriver"
ELLIPSIS = "…"
#: Messages of other programs.
FOREIGN = frozenset({"DATA_SOURCE_NOT_FOUND: upriver"})
#: The classes of the tree, which the page also names.
CLASSES = frozenset(name for name, thing in vars(errors).items() if isinstance(thing, type))


def all_of(kind: type[errors.UpriverError]) -> list[type[errors.UpriverError]]:
    """A class and everything below it that Upriver itself declares."""
    found = [each for below in kind.__subclasses__() for each in all_of(below)]
    return [kind, *found] if kind.__module__ == errors.__name__ else found


@pytest.mark.parametrize("kind", all_of(errors.UpriverError))
def test_every_error_has_a_cause_and_a_cure(kind: type[errors.UpriverError]) -> None:
    assert f"`{kind.__name__}`" in PAGE


@pytest.mark.parametrize("kind", errors.StatusError.__subclasses__())
def test_every_status_has_its_text_and_number(kind: type[errors.StatusError]) -> None:
    first, number = kind.text.split()[0], f"0x{kind.status:02x}"
    line = next(line for line in PAGE.splitlines() if f"`{kind.__name__}`" in line)
    assert first in line
    assert number in line


def explained() -> Iterator[str]:
    """The messages in the first column of the page's tables."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(("| message", "|---")):
            for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                if quoted not in CLASSES and quoted not in FOREIGN:
                    yield quoted


#: Methods of a log, whose arguments are printed.
LOGS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
#: The text that each variable of a function, or each constant of a module, may have.
Assigned = dict[str, list[ast.AST]]


def text_of(node: ast.AST) -> str | None:
    """A text in the source; the parts that vary are an ellipsis."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+ #0-9.]*[a-z]", ELLIPSIS, node.value)
    return None


def printed_by(node: ast.AST) -> list[ast.AST]:
    """What a node prints: the error that it raises or makes, the arguments of a log, the sentence of an error."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        return [node.exc]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CLASSES or (isinstance(node.func, ast.Attribute) and name in LOGS):
            return [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node, ast.FunctionDef) and node.name == "__str__":
        return [*node.body]
    return []


def assigned_in(body: Iterable[ast.AST]) -> Assigned:
    found: Assigned = {}
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def printed_in(node: ast.AST, names: Assigned) -> Iterator[str]:
    """The texts that are printed, also if they are assigned to a variable of the function first."""
    for inner in ast.iter_child_nodes(node):
        is_function = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from printed_in(inner, names | assigned_in(ast.walk(inner)) if is_function else names)
        for part in (part for printed in printed_by(inner) for part in ast.walk(printed)):
            variables = names.get(part.id, []) if isinstance(part, ast.Name) else []
            for each in (part, *(below for value in variables for below in ast.walk(value))):
                if (text := text_of(each)) is not None:
                    yield text


@cache
def templates() -> frozenset[str]:
    """Every text that the program may print as an error or into its log."""
    found = {kind.text for kind in errors.StatusError.__subclasses__()}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found.update(printed_in(tree, assigned_in(tree.body)))
    return frozenset(re.sub(f"{ELLIPSIS}+", ELLIPSIS, text) for text in found)


def is_printed(message: str) -> bool:
    """Whether one text of the source has all fixed parts of the message, in their order.

    A message with a single fixed word would be in many texts, so it must be one of them from start to end.
    """
    if len(re.findall(r"[^\W\d_]{2,}", message)) < 2:
        return message in templates()
    parts = [re.escape(part) for part in message.split(ELLIPSIS) if part.strip(" :,")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(template) for template in templates())


def first_byte_of_tls() -> str:
    framer = Framer(MEMCACHED)
    framer.feed(b"\x16\x03\x01")
    with pytest.raises(errors.WireError) as caught:
        framer.next_packet()
    return str(caught.value)


def user_added_twice() -> str:
    users, credentials = Users(), dict[str, Credential]()
    users.add(User("ann", Role.READ, credentials))
    with pytest.raises(errors.UserError) as caught:
        users.add(User("ann", Role.READ, credentials))
    return str(caught.value)


def user_removed_twice() -> str:
    with pytest.raises(errors.UserError) as caught:
        Users().remove("ann")
    return str(caught.value)


#: Messages that are composed of several texts, and how to provoke them.
PROVOKED = {
    "at byte 0: expected magic 0x80 or 0x81, found 0x…": first_byte_of_tls,
    "user … already exists": user_added_twice,
    "user … does not exist": user_removed_twice,
}


@pytest.mark.parametrize("message", list(dict.fromkeys(explained())))
def test_every_message_is_printed(message: str) -> None:
    if message in PROVOKED:
        assert re.fullmatch(re.escape(message).replace(ELLIPSIS, ".*"), PROVOKED[message]())
    else:
        assert is_printed(message), f"the program never says {message!r}: rewrite docs/troubleshooting.md"


@pytest.mark.parametrize(
    "message",
    [
        "nothing listens there",
        "… cannot be parsed as an address: …",
        "option …",  # a single word would be in many texts
        "Path of the users file",  # the help of an option
        "a checkpoint cannot be read or written",  # a docstring
    ],
)
def test_a_message_that_nothing_prints_is_noticed(message: str) -> None:
    assert not is_printed(message)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in all_of(errors.UpriverError) if kind is not errors.UpriverError],
    ids=lambda kind: kind.__name__,
)
def test_every_error_is_listed_with_a_message(kind: type[errors.UpriverError]) -> None:
    """The class alone does not help a reader who has seen the message only."""
    firsts = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    messages = [
        quoted
        for first in firsts
        if f"`{kind.__name__}`" in first
        for quoted in re.findall(r"`([^`]+)`", first)
        if quoted not in CLASSES or quoted == getattr(kind, "text", "")
    ]
    assert messages, f"docs/troubleshooting.md lists no message of {kind.__name__}"
