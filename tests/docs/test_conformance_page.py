"""The page of conformance: every statement has its test, and the marks of tests are found in their source."""

from pathlib import Path

from docs.conformance_page import Mark, conformance_page, faults, marks, statements
from tests.conformance import OPEN_ISSUES, TEXTS
from tests.conformance.statement import Statement, Text

SAMPLE = Text("sample", "A sample", {"One": (Statement("a", "Says a."), Statement("b", "Says b.", "Because."))})


def test_every_statement_has_a_test_and_every_mark_a_statement() -> None:
    assert faults() == []


def test_marks_are_read_from_the_source(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "node").mkdir(parents=True)
    (tests / "node" / "test_it.py").write_text(
        "import pytest\n\n"
        '@pytest.mark.parametrize("x", [1])\n@pytest.mark.shows("sample:a", "sample:b")\ndef test_both(x): ...\n\n'
        '@pytest.mark.shows("sample:b")\nasync def test_late(): ...\n\n'
        "def test_nothing(): ...\n"
    )
    path = "tests/node/test_it.py"
    assert marks(tests) == {
        "sample:a": [Mark("sample:a", path, "test_both")],
        "sample:b": [Mark("sample:b", path, "test_both"), Mark("sample:b", path, "test_late")],
    }


def test_what_is_missing_unknown_or_declared_twice_is_named() -> None:
    found = {
        "sample:a": [Mark("sample:a", "tests/x.py", "test_x")],
        "sample:c": [Mark("sample:c", "tests/y.py", "test_y")],
    }
    assert faults(found, [*(name for name, _ in statements([SAMPLE])), "sample:a"]) == [
        "sample:a is declared twice",
        "sample:b has no test: mark one with @pytest.mark.shows",
        "tests/y.py: test_y shows 'sample:c', which no text declares",
    ]


def test_the_page_has_each_statement_with_its_tests_and_reasons() -> None:
    rows = set(conformance_page().splitlines())
    found = marks()
    for name, statement in statements():
        tests = "<br>".join(f"`{mark.path}` `{mark.test}`" for mark in found[name])
        row = f"| {statement.says} | {tests} |"
        assert row in rows or f"{row} {statement.difference} |" in rows, name
        assert row not in rows or not statement.difference, name
    assert len({text.name for text in TEXTS}) == len(TEXTS) == 5
    for issue in OPEN_ISSUES:
        assert any(row.startswith(f"| {issue.number} | {issue.asks} | {issue.became} | `tests/") for row in rows)
