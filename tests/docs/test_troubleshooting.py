"""The page about trouble leaves no error out, and every message that it explains is one that the program prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from upriver import errors
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


@cache
def templates() -> frozenset[str]:
    """Every text in the source; the parts that vary are an ellipsis."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def is_printed(message: str) -> bool:
    """Whether one text of the source has all fixed parts of the message, in their order."""
    parts = [re.escape(part) for part in message.split(ELLIPSIS) if part.strip(" :,")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(template) for template in templates())


def first_byte_of_tls() -> str:
    framer = Framer(MEMCACHED)
    framer.feed(b"\x16\x03\x01")
    with pytest.raises(errors.WireError) as caught:
        framer.next_packet()
    return str(caught.value)


#: Messages that are composed of several texts, and how to provoke them.
PROVOKED = {"at byte 0: expected magic 0x80 or 0x81, found 0x…": first_byte_of_tls}


@pytest.mark.parametrize("message", list(dict.fromkeys(explained())))
def test_every_message_is_printed(message: str) -> None:
    if message in PROVOKED:
        assert re.fullmatch(re.escape(message).replace(ELLIPSIS, ".*"), PROVOKED[message]())
    else:
        assert is_printed(message), f"the program never says {message!r}: rewrite docs/troubleshooting.md"


@pytest.mark.parametrize("message", ["nobody listens there", "… is no address: …"])
def test_a_message_that_nothing_prints_is_noticed(message: str) -> None:
    assert not is_printed(message)
