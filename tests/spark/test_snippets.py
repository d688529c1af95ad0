"""The examples that need Spark run, with the one Spark that all tests have."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.page_snippets import PAGES, needs_spark, program_of
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start

PROGRAMS = {page.name: program for page in PAGES if needs_spark(program := program_of(page))}


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    with start(vbuckets=64) as node:
        yield node


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_examples_of_a_page_run(
    page: str,
    spark: SparkSession,
    upriver_node: EmbeddedNode,
    other: EmbeddedNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("fruit", '{"name": "apple", "weight": 150}')
    monkeypatch.chdir(tmp_path)
    program = PROGRAMS[page].replace("127.0.0.1:11210", upriver_node.address).replace("127.0.0.1:11211", other.address)
    exec(compile(program, page, "exec"), {"__name__": "__main__"})
