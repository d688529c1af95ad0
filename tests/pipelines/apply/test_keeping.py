"""How a pipeline that keeps the latest state opens its target, without Spark."""

import shutil
from pathlib import Path

import pytest

from tests.support.pipeline_model import row, table
from upriver.errors import TargetAhead, TargetBehind
from upriver.node import EmbeddedNode
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.jobs.index import Index
from upriver.pipelines.targets.search.sqlite_index import search


def log_batches(directory: Path, *numbers: int) -> None:
    """Write what Spark writes about batches that it has completed."""
    for name in ("offsets", "commits"):
        (directory / "spark" / name).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (directory / "spark" / name / str(number)).write_text("v1\n{}")


def found(path: Path) -> int:
    return len(search(path, "word", 10, ("", "")))


def test_another_query_empties_the_target_when_it_opens(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    index = Index.of({"from": upriver_node.address}, to=tmp_path / "t.db")
    index.open(RunDirectory(tmp_path / "one"))
    index.apply(table([row(0, 1, "mutation", b"k", b"word")]), 0)
    log_batches(tmp_path / "one", 0)
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
    log_batches(tmp_path / "run", 0)
    index.open(RunDirectory(tmp_path / "run"))
    index.close()
    for path in tmp_path.glob("t.db*"):
        path.unlink()
    with pytest.raises(TargetBehind, match=r"completed batches up to 0, but the target holds no batch"):
        index.open(RunDirectory(tmp_path / "run"))
    index.close()


def test_batches_that_the_checkpoint_has_lost_do_not_hide_others(tmp_path: Path) -> None:
    """Spark numbers batches from 0 again if its part of the checkpoint was removed. An old copy of it is refused."""
    index = Index.of(to=tmp_path / "t.db")
    index.open(RunDirectory(tmp_path / "run"))
    for number in range(3):
        index.apply(table([row(0, 1 + number, "mutation", b"k%d" % number, b"word")]), number)
    log_batches(tmp_path / "run", 0, 1)
    with pytest.raises(TargetAhead, match=r"batches up to 2, but the checkpoint ends with batch 1: it is an old copy"):
        index.open(RunDirectory(tmp_path / "run"))
    log_batches(tmp_path / "run", 2)
    index.open(RunDirectory(tmp_path / "run"))
    assert found(tmp_path / "t.db") == 3
    shutil.rmtree(tmp_path / "run" / "spark")
    index.open(RunDirectory(tmp_path / "run"))
    assert found(tmp_path / "t.db") == 0
    index.apply(table([row(0, 4, "mutation", b"k", b"word")]), 0)
    assert found(tmp_path / "t.db") == 1
    assert index.counts()["replayed"] == 0
    index.close()


def test_nothing_is_applied_before_the_target_is_open() -> None:
    index = Index.of()
    index.idle()
    assert index.counts() == {}
    with pytest.raises(AssertionError, match="not open"):
        index.apply(table([]), 0)
