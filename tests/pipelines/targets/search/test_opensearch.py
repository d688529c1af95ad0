"""OpenSearch through a stand-in that checks every request."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import by_depth
from tests.support.pipeline_model import Contents, converge, row, table, value_of
from tests.support.search_servers import FakeOpenSearch, served
from upriver.errors import TargetRefused, Unreachable
from upriver.pipelines.targets.search import opensearch
from upriver.pipelines.targets.search.http_requests import HttpRequests
from upriver.pipelines.targets.search.opensearch import OpenSearch, id_of
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import ReadAhead, TargetProgress, Work

OPENED: list[OpenSearch] = []


@pytest.fixture
def server() -> Iterator[FakeOpenSearch]:
    with served(FakeOpenSearch) as server:
        yield server
        while OPENED:
            OPENED.pop().close()


def opened(server: FakeOpenSearch, **options: Any) -> OpenSearch:
    OPENED.append(OpenSearch(HttpRequests(f"http://127.0.0.1:{server.port}/shop", sleep=lambda _: None, **options)))
    return OPENED[-1]


def work(*rows: dict[str, object], number: int | None = 0, **others: object) -> Work:
    return Work(query="q", number=number, rows=table(rows), **others)  # type: ignore[arg-type]


@settings(max_examples=by_depth(quick=1, deep=8))
@given(seed=st.integers(0, 2**32))
def test_an_index_ends_with_the_nodes_contents(seed: int) -> None:
    with served(FakeOpenSearch) as server:
        values = {text_of(value_of(n)): value_of(n) for n in range(1000)}

        def held(_: object) -> Contents:
            sources = [source for _, source in server.documents.values()]
            return {(each["vbucket"], each["key"].encode()): values[each["text"]] for each in sources}

        def normal(found: Contents) -> Contents:
            return {name: values[text_of(value)] for name, value in found.items()}

        converge(lambda: opened(server), held, seed, exact=bool(seed % 2), policy="emit", normal=normal)


def test_documents_come_with_versions_and_progress_last(server: FakeOpenSearch) -> None:
    index = opened(server)
    index.commit(work(row(3, 7, "mutation", b"k", b'{"a": "red"}', cas=5), ahead={3: ReadAhead(1, 2, 3)}))
    assert server.documents == {
        "3:k": (7, {"key": "k", "text": "red", "vbucket": 3, "generation": 0, "cas": "5", "document": {"a": "red"}})
    }
    assert opened(server).progress() == TargetProgress("q", 0, {3: ReadAhead(1, 2, 3)})
    assert [path for _, path in server.requests[-3:]] == ["/shop/_bulk", "/shop/_mapping", "/shop/_mapping"]
    index.commit(work(row(3, 8, "deletion", b"k", None), row(3, 9, "expiration", b"never", None), number=1))
    assert server.documents == {}
    index.close()


def test_what_is_older_changes_nothing(server: FakeOpenSearch) -> None:
    index = opened(server)
    index.commit(work(row(0, 7, "mutation", b"k", b"new")))
    index.commit(work(row(0, 5, "mutation", b"k", b"old"), row(0, 6, "deletion", b"k", None), number=1))
    assert server.documents["0:k"][1]["text"] == "new"
    index.close()


def test_a_vbucket_that_is_read_again_wins_over_everything_before(server: FakeOpenSearch) -> None:
    index = opened(server)
    index.commit(work(row(0, 70, "mutation", b"k", b"lost"), row(0, 71, "mutation", b"gone", b"lost")))
    index.commit(work(row(0, 9, "mutation", b"k", b"right"), cleared=frozenset({0}), number=None))
    assert {name: source["text"] for name, (_, source) in server.documents.items()} == {"0:k": "right"}
    again = opened(server)
    again.commit(work(row(0, 10, "mutation", b"gone", b"back"), number=1))
    assert server.documents["0:gone"][1]["text"] == "back"
    again.commit(work(clear_all=True, number=None))
    assert server.documents == {}
    index.close()
    again.close()


def test_parts_of_a_bulk_that_are_busy_are_sent_again(server: FakeOpenSearch) -> None:
    index = opened(server)
    server.refused = {"0:b": [429, 503], "0:c": [429]}
    index.commit(work(*(row(0, n, "mutation", bytes([key]), b"v") for n, key in enumerate(b"abc"))))
    assert server.documents.keys() == {"0:a", "0:b", "0:c"}
    index.close()


def test_parts_of_a_bulk_that_are_refused_for_good_are_named_and_the_batch_is_not_done(
    server: FakeOpenSearch,
) -> None:
    index = opened(server)
    server.refused = {"0:b": [400]}
    batch = work(row(0, 1, "mutation", b"a", b"v"), row(0, 2, "mutation", b"b", b"v"))
    with pytest.raises(TargetRefused, match=r"/shop: 1 refused: 0:b: .*on purpose"):
        index.commit(batch)
    assert opened(server).progress() == TargetProgress()
    opened(server).commit(batch)
    assert server.documents.keys() == {"0:a", "0:b"}
    server.refused = {"0:b": [429] * 100}
    with pytest.raises(Unreachable, match="too busy for 1 documents"):
        opened(server).commit(batch)
    index.close()


def test_a_bulk_without_an_answer_is_sent_again(server: FakeOpenSearch) -> None:
    index = opened(server)
    left = [0, 429]
    server.trouble.append(lambda _, path, __: (left.pop(), None) if left and path.endswith("_bulk") else None)
    index.commit(work(row(0, 1, "mutation", b"a", b"v")))
    assert server.documents.keys() == {"0:a"}
    index.close()


def test_bulks_are_bounded(server: FakeOpenSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opensearch, "BULK_ROWS_MAX", 3)
    index = opened(server)
    index.commit(work(*(row(0, n, "mutation", b"k%d" % n, b"v") for n in range(10))))
    assert sum(path.endswith("_bulk") for _, path in server.requests) == 4
    assert len(server.documents) == 10
    index.close()


def test_a_search_has_keys_and_snippets(server: FakeOpenSearch) -> None:
    index = opened(server)
    index.commit(work(row(0, 1, "mutation", b"k", b'{"a": "Red shoes"}'), row(0, 2, "mutation", b"\xff", b"red")))
    assert [(hit.key, hit.snippet) for hit in index.search("red", 10, ("<", ">"))] == [
        (b"\xff", "<red>"),
        (b"k", "<Red> shoes"),
    ]
    index.close()


@given(st.integers(0, 1023), st.binary(min_size=1, max_size=250))
def test_ids_are_short_enough_and_never_the_same(vbucket: int, key: bytes) -> None:
    name = id_of(vbucket, key)
    assert len(name.encode()) <= 512
    assert name != id_of(vbucket, key + b"x")
