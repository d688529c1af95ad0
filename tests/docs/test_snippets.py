"""Every Python example of the README and the pages runs: a page's as one program, from its top to its bottom.

Examples that are tests run as such, with the fixture that they show. An example that quotes the source is compared
with it. Those that need Spark run in tests/spark.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_snippets import PAGES, ROOT, examples, needs_spark, program_of, shown_tests
from upriver.node import EmbeddedNode, start

#: A page that quotes declarations, and where they stand.
QUOTED = {"architecture.md": ROOT / "src/upriver/wire/dialects/dcp.py"}
PROGRAMS = {
    page.name: program
    for page in PAGES
    if page.name not in QUOTED and (program := program_of(page)) and not needs_spark(program)
}
TESTS = {page.name: blocks for page in PAGES if (blocks := shown_tests(page))}


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    with start(vbuckets=64) as node:
        yield node


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_examples_of_a_page_run(
    page: str, upriver_node: EmbeddedNode, other: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = PROGRAMS[page].replace("127.0.0.1:11210", upriver_node.address).replace("127.0.0.1:11211", other.address)
    exec(compile(program, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", TESTS)
def test_the_tests_that_a_page_shows_pass(page: str, tmp_path: Path) -> None:
    for number, block in enumerate(TESTS[page]):
        (tmp_path / f"test_{number}.py").write_text(block)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
    ]
    result = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_source_is_the_source(page: str) -> None:
    for block in examples(ROOT / "docs" / page):
        assert block.strip() in QUOTED[page].read_text()
