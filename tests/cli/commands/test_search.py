"""``upriver search``."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the pipelines extra is not installed")

from click.testing import CliRunner, Result

from tests.support.pipeline_model import row, table
from tests.support.search_servers import FakeOpenSearch, served
from tests.support.terminal import Terminal
from upriver.cli import main
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.opensearch import OpenSearch
from upriver.pipelines.targets.search.sqlite_index import SqliteIndex
from upriver.pipelines.targets.target import Work

BATCH = Work(
    query="q",
    number=0,
    rows=table([row(0, 1, "mutation", b"shoes", b'{"name": "red shoes"}'), row(0, 2, "mutation", b"h\x1bt", b"red")]),
)


@pytest.fixture
def index(tmp_path: Path) -> str:
    made = SqliteIndex(tmp_path / "i.db")
    made.commit(BATCH)
    made.close()
    return str(tmp_path / "i.db")


def search(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["search", *arguments], prog_name="upriver")


def test_in_a_pipe_hits_are_json_lines(index: str) -> None:
    result = search(index, "shoes")
    assert result.exit_code == 0
    (line,) = map(json.loads, result.stdout.splitlines())
    assert (line["key"], line["snippet"]) == ("shoes", "red [shoes]")
    assert line["score"] >= 0
    assert len(search("-n", "1", index, "red").stdout.splitlines()) == 1


def test_nothing_found_and_nonsense(index: str, tmp_path: Path) -> None:
    assert (search(index, "green").exit_code, search(index, "green").output) == (1, "")
    for arguments, words in (((index, '"half'), "invalid query"), ((str(tmp_path / "no"), "x"), "no such index")):
        result = search(*arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert words in result.stderr
    result = search("ftp://x/y", "x")
    assert "opensearch+http://HOST:PORT/NAME" in result.stderr


def test_a_server_is_searched(index: str) -> None:
    with served(FakeOpenSearch) as server:
        target = OpenSearch(HttpRequests(f"http://127.0.0.1:{server.port}/shop"))
        target.commit(BATCH)
        target.close()
        result = search(f"opensearch+http://127.0.0.1:{server.port}/shop", "red shoes")
    assert json.loads(result.stdout) == {"key": "shoes", "snippet": "[red] [shoes]", "score": 1.5}


def test_on_a_terminal_words_are_coloured_and_nothing_plays_with_it(index: str) -> None:
    with Terminal("search", index, "red") as terminal:
        assert terminal.finish() == 0
        output = terminal.output
    assert b"shoes" in output
    assert b"\x1b[33m\x1b[1mred\x1b[0m" in output
    assert b"h\\x1bt" in output
    assert b"h\x1bt" not in output
