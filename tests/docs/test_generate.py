"""The generated documentation is up to date and complete."""

import re
from pathlib import Path

import pytest

from docs import generate
from docs.byte_boxes import draw
from docs.field_comments import comment_on
from docs.inserts import filled
from docs.protocol_pages import anchor, in_order, rules
from upriver.wire import DIALECTS, Dialect, dcp, memcached, tap, upr, upr_draft1

PAGES = generate.pages()
PROTOCOL = generate.DOCS / "protocol"


def test_nothing_is_stale() -> None:
    assert [str(path.relative_to(generate.DOCS)) for path in generate.stale()] == []


def test_generating_twice_gives_the_same() -> None:
    assert generate.pages() == PAGES


@pytest.mark.shows("open_issues:examples")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_every_message_is_documented(dialect: Dialect) -> None:
    page = PAGES[PROTOCOL / f"{dialect.name}.md"]
    assert set(in_order(dialect)) == set(dialect.messages)
    for cls in dialect.messages:
        assert cls.__doc__, f"{cls.__name__} has no docstring"
        assert not cls.__doc__.startswith(f"{cls.__name__}("), f"{cls.__name__} has only a generated docstring"
        assert page.count(f"`{dialect.name}.{cls.__name__}`, ") == 1


def test_every_link_leads_somewhere() -> None:
    for path, text in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, fragment = target.partition("#")
            goal = (path.parent / file).resolve() if file else path
            assert goal.exists(), f"{path.name}: {target}"
            if fragment:
                found = PAGES[goal] if goal in PAGES else goal.read_text()
                assert fragment in _anchors(found), f"{path.name}: {target}"


def _anchors(text: str) -> set[str]:
    found = [anchor(line) for line in re.findall(r"^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text), re.M)]
    assert len(found) == len(set(found)), "two headlines are alike"
    return set(found)


def test_check_names_what_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    (docs / "protocol").mkdir(parents=True)
    (docs / "protocol" / "forgotten.md").write_text("old")
    monkeypatch.setattr(generate, "DOCS", docs)
    assert generate.main(["--check"]) == 1
    assert "docs/protocol/dcp.md is stale: run `make docs`" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert not (docs / "protocol" / "forgotten.md").exists()
    capsys.readouterr()
    assert generate.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_rules() -> None:
    assert list(rules(dcp.Open)) == ["Must have extras", "Must have key", "Must not have value"]
    assert list(rules(memcached.GetMeta)) == ["May have extras", "Must have key", "Must not have value"]
    assert list(rules(tap.Mutation))[:2] == ["Must have extras", "May have an engine-private part"]
    assert next(rules(upr_draft1.StreamStart)) == "Must not have a body"
    assert next(rules(upr.RollbackRequired)) == "Must have extras; the same bytes are also accepted as value"
    assert list(rules(dcp.RollbackRequired))[2] == "Must have value; the same bytes are also accepted as extras"


def test_comments_are_read_from_the_source() -> None:
    assert comment_on(dcp.Mutation, "by_seqno") == "order inside the vbucket"
    assert comment_on(upr.Expiration, "by_seqno") == "order inside the vbucket", "inherited"
    assert comment_on(dcp.Mutation, "value") == ""
    assert comment_on(upr_draft1.StreamMessageType, "FLUSH") == "only in the second draft"


def test_boxes() -> None:
    assert draw([("type", 1), ("cas", 8), ("by seqno", 8)]).splitlines()[4:] == [
        "   0| type          | cas                                           |",
        "    +---------------+---------------+---------------+---------------+",
        "    |                                                               |",
        "    +---------------+---------------+---------------+---------------+",
        "   8|               | by seqno                                      |",
        "    +---------------+---------------+---------------+---------------+",
        "    |                                                               |",
        "    +---------------+---------------+---------------+---------------+",
        "    |               |",
        "    +---------------+",
        "    Total 17 bytes",
    ]


def test_a_page_without_its_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- part: generated, run `make docs` -->\nold\n<!-- end of part -->\nafter\n")
    expected = "before\n<!-- part: generated, run `make docs` -->\n\nnew\n\n<!-- end of part -->\nafter\n"
    assert filled(page, {"part": "new"}) == expected
    with pytest.raises(AssertionError, match=r"page.md has lost the marks of its generated part other"):
        filled(page, {"other": "new"})
