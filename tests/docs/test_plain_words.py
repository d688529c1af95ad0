"""Phrases that are hard to read do not come back into the source, the tests, the documents and the README.

The glossary (docs/glossary.md) has the terms. A name that must stay, such as a key of stored JSON, is listed in
``ALLOWED`` with its reason.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = frozenset({".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h", ".md"})

#: Phrase -> what to write instead. Phrases are regular expressions and match across the end of a line.
BANNED: dict[str, str] = {
    r"who(?:m|se)?(?:so)?ever": "name the actor: a consumer that …, the caller",
    r"so many": "this many, or name the quantity",
    r"(?:for|after|within|lasts?|waits?|than) so long": "this long, or name the duration",
    r"(?<!there\s)(?:is|are|was|were) no(?!\s(?:longer|more|newer|later|less|larger|smaller|higher|lower|better)\b)": (
        "is not a …, invalid …, must be …"
    ),
    r"(?<!there\s)(?:is|are) none of": "must be one of …",
    r"anew": "again, from the beginning",
    r"whither": "where to, the owner",
    r"heirs?": "successor",
    r"(?<!/)(?:he|his|him|himself)": "it, its; or name the user",
    r"(?:dies?|died|deaths?)": "becomes dead, is lost, is killed",
    r"nobody(?:'s)?": "no client, no node, no connection; without an owner",
    r"holdings?": "buffer budget, memory held",
    r"homeless": "unowned",
    r"hand(?:s|ed|ing)? out": "return, deliver, provide",
    r"what stands": "what is there, the contents",
    r"(?:stands?|stood) (?:in(?! for)|there|here|at|on|behind|between|beside|below|above|after|before)": (
        "is, is stored, is written"
    ),
    r"it is told": "the node tells it, it gets",
}
#: A sentence whose subject is a clause: "Who stands below the purge seqno rolls back." Questions are allowed.
CLAUSE = re.compile(r"(?:^|[.:;!] |\"\"\"|# |#: |- |\| )Who (?![^.?]*\?)", re.MULTILINE)
CLAUSE_NAME = "Who …"
#: (file, phrase) -> why it stays.
ALLOWED: dict[tuple[str, str], str] = {
    ("src/upriver/engine/vbucket.py", r"heirs?"): "the key under which descriptions on disk store the successor",
    ("tests/node/test_model.py", r"nobody(?:'s)?"): "the user of the system under which memcached runs",
}
#: It quotes all phrases.
ITSELF = Path(__file__)


def texts() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in ("src", "docs", "tests"):
        found += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path != ITSELF)
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _pattern(phrase: str) -> re.Pattern[str]:
    """A phrase may go on in the next line, behind the mark of a comment. An underscore ends a word too."""
    return re.compile(r"(?<![^\W_])(?:" + phrase.replace(" ", r"(?:\s|#:?)+") + r")(?![^\W_])", re.IGNORECASE)


def faults(name: str, text: str) -> Iterator[str]:
    """Where a text has a banned phrase, and what to write instead."""
    for phrase, instead in BANNED.items():
        if (name, phrase) in ALLOWED:
            continue
        for found in _pattern(phrase).finditer(text):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}: write {instead}"
    for found in CLAUSE.finditer(text):
        if (name, CLAUSE_NAME) not in ALLOWED:
            line = text.count("\n", 0, found.end()) + 1
            yield f"{name}:{line}: 'Who …' as a subject: name the actor"


@pytest.mark.parametrize("path", [pytest.param(path, id=name_of(path)) for path in texts()])
def test_every_sentence_is_plain(path: Path) -> None:
    name = name_of(path)
    found = list(faults(name, path.read_text()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "Whoever reads it notices.",
        "Give up if it lasts for\n    # so long.",
        "'x' is no address",
        "'x' is none of a, b",
        "It is read anew.",
        "A client asks for his map.",
        "The source died for it.",
        "Who stands below it rolls back.",
        "#: Who has none may leave it out.",
        "The queue hands out batches.",
        "There nobody listens.",
        "A key stands in one block.",
        "see test_one_heir_and_no_other",
    ],
)
def test_a_banned_phrase_is_found(sentence: str) -> None:
    assert list(faults("some.py", sentence))


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no stream for this vbucket.",
        "It is no longer active.",
        "A dead copy stays dead.",
        "Who owns a vbucket? The node with the active copy.",
        "the help of this theme; whose copy it is",
        "as long as it waits",
        "It stands in for a node.",
        "There is none of this version.",
        "their_heirloom",
    ],
)
def test_a_plain_sentence_is_not(sentence: str) -> None:
    assert not list(faults("some.py", sentence))


def test_every_exception_is_needed() -> None:
    """An allowed phrase that is gone is taken off the list."""
    for name, phrase in ALLOWED:
        pattern = CLAUSE if phrase == CLAUSE_NAME else _pattern(phrase)
        assert pattern.search((ROOT / name).read_text()), f"{name} no longer has {phrase!r}"
