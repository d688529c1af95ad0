"""The engine as a producer's source."""

from collections.abc import Callable

import pytest

from tests.support.in_memory_node import InMemoryNode
from upriver.engine import Cursor, Vbucket
from upriver.errors import InvalidArguments, NotMyVbucket
from upriver.model import Snapshot, VbucketState
from upriver.model.position import NO_END
from upriver.node.streams.engine_source import EngineSource, engine_options, value_filter
from upriver.protocol.producer.source import Source, SourceCursor, SourceVbucket, StreamOptions


@pytest.fixture
def node() -> InMemoryNode:
    node = InMemoryNode(vbuckets=4)
    node.bucket.create_vbucket(0)
    node.write(0, b"a", b"b")
    return node


def cursor(node: InMemoryNode, end: int = NO_END, **options: bool) -> Cursor:
    return EngineSource(node.state).cursor(0, "test:0", 0, end, StreamOptions(**options))  # type: ignore[arg-type]


def history_end(place: Cursor) -> str | None:
    assert place.snapshot is None
    return place.end_reason


def counter() -> tuple[list[int], Callable[[], None]]:
    calls: list[int] = []
    return calls, lambda: calls.append(1)


def test_vbuckets_that_are_there_and_others(node: InMemoryNode) -> None:
    source = EngineSource(node.state)
    assert source.vbucket(0) is node.bucket.vbucket(0)
    assert source.vbucket(1) is None
    assert source.vbucket(5000) is None
    with pytest.raises(NotMyVbucket):
        source.cursor(1, "x", 0, NO_END, StreamOptions())


def test_reading_a_history_to_its_end(node: InMemoryNode) -> None:
    place = cursor(node, end=2)
    assert (place.seqno, place.snapshot, place.end_reason) == (0, None, None)
    assert place.next_snapshot() == place.snapshot == Snapshot(0, 2)
    assert (place.begins_checkpoint, place.from_disk) == (True, False)
    assert place.read_columns(1)["key"].to_pylist() == [b"a"]
    assert place.read(1 << 20, 5)[12:16] == b"\0\0\0\5"
    assert [place.seqno, place.changes_read] == [2, 2]
    assert history_end(place) == "ok"
    assert place.next_snapshot() is None


def test_an_end_for_another_reason(node: InMemoryNode) -> None:
    place = cursor(node)
    place.next_snapshot()
    node.bucket.flush()
    assert (place.end_reason, place.snapshot, place.next_snapshot()) == ("flushed", None, None)


def test_subscribing_to_what_comes(node: InMemoryNode) -> None:
    place = cursor(node)
    calls, callback = counter()
    place.subscribe(callback)
    assert len(calls) == 1, "there is something already"
    place.subscribe(callback, fresh=True)
    assert len(calls) == 1
    node.write(0, b"c")
    assert len(calls) == 2


def test_subscribing_to_what_is_on_disk_comes_over_the_scheduler(node: InMemoryNode) -> None:
    place = cursor(node, persisted_only=True)
    calls, callback = counter()
    place.subscribe(callback)
    assert not calls
    node.bucket.sync()
    assert not calls, "the flusher's thread must not run the protocol"
    node.settle()
    assert calls


def test_a_closed_history_frees_its_name(node: InMemoryNode) -> None:
    cursor(node).close()
    assert cursor(node).end_reason is None


def test_a_state_is_on_disk_when_it_says_so_and_clients_are_told(node: InMemoryNode) -> None:
    source, (calls, callback) = EngineSource(node.state), counter()
    before = node.state.cluster.revision
    source.set_state(0, VbucketState.DEAD)
    source.when_durable(callback)
    assert not calls
    node.settle()
    assert calls
    assert node.bucket.vbucket(0).state is VbucketState.DEAD
    assert node.state.cluster.revision > before


def test_every_option_has_its_counterpart() -> None:
    options = engine_options(
        StreamOptions(
            keys_only=True,
            key_filter="^a",
            value_filter='{"field": "x.y", "contains": "z"}',
            persisted_only=True,
            exact_end=True,
            history=True,
        )
    )
    assert options.key_pattern is not None
    assert options.key_pattern.passes(b"ab")
    assert options.value_filter is not None
    assert options.value_filter.path == ("x", "y")
    assert options.value_filter.contains == "z"
    assert options.keys_only
    assert options.persisted_only
    assert options.exact_end
    assert options.history


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"field": 1, "equals": 2}', '{"field": ""}', "[" * 9999])
def test_a_value_filter_has_a_form(text: str) -> None:
    with pytest.raises(InvalidArguments):
        value_filter(text)


def test_the_engine_has_all_that_a_producer_needs() -> None:
    # mypy checks the signatures; this checks that no name is missing.
    for wanted, offered in ((SourceCursor, Cursor), (Source, EngineSource)):
        names = {name for name in vars(wanted) if not name.startswith("_")}
        attributes = {
            "bytes_filtered",
            "begins_checkpoint",
            "changes_read",
            "expirations_read",
            "from_disk",
            "last_read_seqno",
            "seqno",
            "snapshot",
            "undecided",
        }
        assert names - attributes <= set(dir(offered))
    assert {name for name in vars(SourceVbucket) if not name.startswith("_")} - set(dir(Vbucket)) == {
        "flush_marks",
        "flush_ttl",
        "successor",
        "number",
        "state",
        "streamable",
    }  # plain attributes
