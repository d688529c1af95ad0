"""Solr through a stand-in that checks every request."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import by_depth
from tests.support.pipeline_model import Contents, converge, row, table, value_of
from tests.support.search_servers import FakeSolr, served
from upriver.errors import TargetRefused
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.solr import PROGRESS, Solr
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import TargetProgress, Work

OPENED: list[Solr] = []


@pytest.fixture
def server() -> Iterator[FakeSolr]:
    with served(FakeSolr) as server:
        yield server
        while OPENED:
            OPENED.pop().close()


def opened(server: FakeSolr) -> Solr:
    OPENED.append(Solr(HttpRequests(f"http://127.0.0.1:{server.port}/solr/shop", sleep=lambda _: None)))
    return OPENED[-1]


def work(*rows: dict[str, object], number: int | None = 0, **others: object) -> Work:
    return Work(query="q", number=number, rows=table(rows), **others)  # type: ignore[arg-type]


@settings(max_examples=by_depth(quick=1, deep=8))
@given(seed=st.integers(0, 2**32))
def test_a_collection_ends_with_the_nodes_contents(seed: int) -> None:
    with served(FakeSolr) as server:
        values = {text_of(value_of(n)): value_of(n) for n in range(1000)}

        def held(_: object) -> Contents:
            found = [each for name, each in server.documents.items() if name != PROGRESS]
            return {(each["vbucket_i"], each["key_txt"].encode()): values[each["text_txt"]] for each in found}

        def normal(found: Contents) -> Contents:
            return {name: values[text_of(value)] for name, value in found.items()}

        def reopened() -> Solr:
            server.restart()
            return opened(server)

        converge(reopened, held, seed, exact=bool(seed % 2), policy="rewind", normal=normal)


def test_a_batch_becomes_visible_with_its_progress(server: FakeSolr) -> None:
    solr = opened(server)
    solr.commit(work(row(0, 1, "mutation", b"k", b'{"a": "red shoes"}'), row(1, 1, "mutation", b"\xff", b"red")))
    assert opened(server).progress() == TargetProgress("q", 0)
    assert [(hit.key, hit.snippet) for hit in solr.search("red", 10, ("<", ">"))] == [
        (b"k", "<red>"),
        (b"\xff", "<red>"),
    ]
    solr.commit(work(row(0, 2, "deletion", b"k", None), number=1))
    assert [hit.key for hit in solr.search("red", 10, ("<", ">"))] == [b"\xff"]
    solr.commit(work(cleared=frozenset({1}), number=2))
    assert server.documents.keys() == {PROGRESS}
    solr.close()


def test_a_busy_server_is_asked_again(server: FakeSolr) -> None:
    left = [429, 0, 503]
    server.trouble.append(lambda _, path, __: (left.pop(), None) if left and "update" in path else None)
    solr = opened(server)
    solr.commit(work(row(0, 1, "mutation", b"k", b"v")))
    assert len(server.documents) == 2
    solr.close()


def test_what_is_refused_is_told_and_the_batch_is_not_done(server: FakeSolr) -> None:
    def refuse(method: str, path: str, body: bytes) -> tuple[int, Any] | None:
        wrong = b"wrong" in body
        return (400, {"error": {"msg": "ERROR: [doc=0:k] unknown field", "code": 400}}) if wrong else None

    server.trouble.append(refuse)
    solr = opened(server)
    with pytest.raises(TargetRefused, match=r"1 refused: ERROR: \[doc=0:k\] unknown field"):
        solr.commit(work(row(0, 1, "mutation", b"k", b"wrong")))
    assert opened(server).progress() == TargetProgress()
    solr.close()
