"""Tables beside the documents of a node."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mirrored_tables import mirror_now
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start
from upriver.pipelines.core.workers import LocalWorkers
from upriver.pipelines.targets.tables import verification
from upriver.pipelines.targets.tables.verification import table_differences
from upriver.spark import ReadOptions, close_readers
from upriver.tables import Add


@pytest.fixture(autouse=True)
def _connections() -> Iterator[None]:
    yield
    close_readers()


def source(node: EmbeddedNode, **options: str) -> ReadOptions:
    return ReadOptions.read({"address": node.address, **options})


@pytest.mark.parametrize("tasks", [1, 3])
def test_differences_are_found_in_all_tasks(
    upriver_node: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    monkeypatch.setattr(verification, "_SMALL_BYTES", 0)
    monkeypatch.setattr(LocalWorkers, "count", tasks)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(300)})
        table = mirror_now(upriver_node.address, tmp_path / "t")
        done: list[int] = []
        assert list(table_differences(table, source(upriver_node), LocalWorkers(), done.append)) == []
        assert len(done) == tasks
        assert sum(done) == len(upriver_node.bucket)
        changed = {f"k{n}": b'{"n": -1}' for n in range(0, 300, 10)}
        kv.set_many({**changed, **{f"new{n}": b"{}" for n in range(20)}})
        for n in range(1, 300, 10):
            kv.delete(f"k{n}")
    found = list(table_differences(table, source(upriver_node), LocalWorkers()))
    kinds = {each.key: each.kind for each in found}
    assert len(kinds) == len(found) == 80
    assert {key for key, kind in kinds.items() if kind == "different"} == {key.encode() for key in changed}
    assert {key for key, kind in kinds.items() if kind == "missing"} == {b"new%d" % n for n in range(20)}
    assert all("value" in each.columns and "_cas" in each.columns for each in found if each.kind == "different")


def test_rows_of_vbuckets_that_the_source_does_not_have_are_extra(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        vbuckets = {kv.set(f"k{n}", b"{}").vbucket: f"k{n}".encode() for n in range(50)}
    table = mirror_now(upriver_node.address, tmp_path / "t")
    with start(vbuckets=4) as other:
        found = list(table_differences(table, source(other), LocalWorkers()))
        assert {each.vbucket for each in found} == vbuckets.keys()
        assert len(found) == 50
        assert {each.kind for each in found} == {"extra"}
        chosen = list(table_differences(table, source(other, vbuckets="0-3"), LocalWorkers()))
        assert chosen == [each for each in found if each.vbucket < 4]


def test_few_tasks_that_each_fit_into_memory() -> None:
    def groups(rows: int, size: int, workers: int) -> list[list[int]]:
        file = Add("f", size, 0, stats=json.dumps({"numRecords": rows}))
        return verification._groups(range(1024), [file], workers)

    assert len(groups(10, 1000, 8)) == 1
    assert len(groups(1_000_000, 15_000_000, 2)) == 2
    assert len(groups(1_000_000, 15_000_000, 8)) == 8
    assert len(groups(1_000_000, 6_000_000_000, 2)) > 100
    assert len(groups(10**9, 10**11, 2)) == 1024
    assert [number for group in groups(10_000_000, 10**8, 2) for number in group] == list(range(1024))
