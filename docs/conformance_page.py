"""Every statement of the protocol texts, the tests that show it, and the reason of each deliberate difference.

`tests/conformance` declares the statements. Tests name them with ``@pytest.mark.shows``; the marks are read from the
source of the tests, without running or importing them.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.inserts import filled
from docs.protocol_pages import table
from tests.conformance import OPEN_ISSUES, TEXTS
from tests.conformance.statement import Statement, Text

PAGE = Path(__file__).parent / "conformance.md"
TESTS = Path(__file__).parent.parent / "tests"


@dataclass(frozen=True, slots=True)
class Mark:
    """A test that shows a statement."""

    statement: str
    path: str  #: from the root of the project
    test: str


Marks = Mapping[str, list[Mark]]


def marks(tests: Path = TESTS) -> dict[str, list[Mark]]:
    """The marks of all tests, by the id of their statement."""
    found: dict[str, list[Mark]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        if "mark.shows" in text:
            for mark in _marks_in(ast.parse(text), path.relative_to(tests.parent).as_posix()):
                found.setdefault(mark.statement, []).append(mark)
    return found


def _marks_in(module: ast.Module, path: str) -> Iterator[Mark]:
    for function in module.body:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.shows":
                yield from (Mark(ast.literal_eval(named), path, function.name) for named in decorator.args)


def statements(texts: Iterable[Text] = TEXTS) -> Iterator[tuple[str, Statement]]:
    """Every statement with its id."""
    for text in texts:
        yield from text


def names() -> list[str]:
    """What tests can show: every statement and every open issue."""
    return [*(name for name, _ in statements()), *(issue.id for issue in OPEN_ISSUES)]


def faults(found: Marks | None = None, declared: list[str] | None = None) -> list[str]:
    """Statements without a test, statements that are declared twice, and marks that name no statement."""
    found = marks() if found is None else found
    declared = names() if declared is None else declared
    twice = sorted({name for name in declared if declared.count(name) > 1})
    unknown = sorted(set(found) - set(declared))
    return [
        *(f"{name} is declared twice" for name in twice),
        *(f"{name} has no test: mark one with @pytest.mark.shows" for name in declared if name not in found),
        *(
            f"{mark.path}: {mark.test} shows {name!r}, which no text declares"
            for name in unknown
            for mark in found[name]
        ),
    ]


def conformance_page() -> str:
    """The page: prose that is written by hand, and the tables."""
    found = marks()
    differences = sum(bool(statement.difference) for _, statement in statements())
    total = sum(1 for _ in statements())
    tests = {(mark.path, mark.test) for shown in found.values() for mark in shown}
    summary = (
        f"{total} statements, shown by {len(tests)} tests. In {differences} of them Upriver deliberately does "
        "something else; the last column says why."
    )
    texts = "\n\n".join(block for text in TEXTS for block in _text(text, found))
    return filled(PAGE, {"summary": summary, "statements": texts, "open issues": _open_issues(found)})


def _text(text: Text, found: Marks) -> Iterator[str]:
    yield f"## {text.title}"
    for section, inside in text.sections.items():
        yield f"### {text.name}: {section}"
        rows = ((each.says, _shown_by(found.get(f"{text.name}:{each.name}", ())), each.difference) for each in inside)
        yield table(("statement", "shown by", "difference and its reason"), rows)


def _open_issues(found: Marks) -> str:
    rows = ((each.number, each.asks, each.became, _shown_by(found.get(each.id, ()))) for each in OPEN_ISSUES)
    return table(("number", "open issue", "what became of it", "shown by"), rows)


def _shown_by(shown: Iterable[Mark]) -> str:
    return "<br>".join(f"`{mark.path}` `{mark.test}`" for mark in shown)
