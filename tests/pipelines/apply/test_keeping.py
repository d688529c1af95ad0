"""How a pipeline that keeps the latest state opens its target, without Spark."""

from pathlib import Path

import pytest

from tests.support.pipeline_model import row, table
from upriver.errors import TargetBehind
from upriver.node import EmbeddedNode
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.jobs.index import Index
from upriver.pipelines.targets.search.sqlite_index import search


def found(path: Path) -> int:
    return len(search(path, "word", 10, ("", "")))


def test_another_query_empties_the_target_when_it_opens(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    index = Index.of({"from": upriver_node.address}, to=tmp_path / "t.db")
    index.open(RunDirectory(tmp_path / "one"))
    index.apply(table([row(0, 1, "mutation", b"k", b"word")]), 0)
    index.open(RunDirectory(tmp_path / "one"))
    assert found(tmp_path / "t.db") == 1
    index.open(RunDirectory(tmp_path / "two"))
    assert found(tmp_path / "t.db") == 0
    index.idle()
    assert index.counts() == {"replayed": 0, "undone": 0, "read_again": 0}
    index.close()


def test_a_removed_target_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    index = Index.of(to=tmp_path / "t.db")
    index.open(RunDirectory(tmp_path / "run"))
    index.apply(table([row(0, 1, "mutation", b"k", b"word")]), 0)
    for name in ("offsets", "commits"):
        (tmp_path / "run" / "spark" / name).mkdir(parents=True)
        (tmp_path / "run" / "spark" / name / "0").write_text("v1\n{}")
    index.open(RunDirectory(tmp_path / "run"))
    index.close()
    for path in tmp_path.glob("t.db*"):
        path.unlink()
    with pytest.raises(TargetBehind, match=r"completed batches up to 0, but the target holds no batch"):
        index.open(RunDirectory(tmp_path / "run"))
    index.close()


def test_nothing_is_applied_before_the_target_is_open() -> None:
    index = Index.of()
    index.idle()
    assert index.counts() == {}
    with pytest.raises(AssertionError, match="not open"):
        index.apply(table([]), 0)
