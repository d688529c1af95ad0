"""What mirror and index have in common, without Spark."""

from pathlib import Path

import pytest

from tests.support.pipeline_model import row, table
from upriver.errors import TargetBehind
from upriver.node import EmbeddedNode
from upriver.pipelines.apply.keeping import query_of
from upriver.pipelines.jobs.mirror import Mirror


def test_a_query_keeps_its_name_as_long_as_its_directory_lives(tmp_path: Path) -> None:
    name = query_of(tmp_path / "a")
    assert query_of(tmp_path / "a") == name
    assert query_of(tmp_path / "b") != name


def test_another_query_empties_the_target_when_it_opens(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    mirror = Mirror.of({"from": upriver_node.address}, to=tmp_path / "t", format="parquet")
    mirror.open(tmp_path / "one")
    mirror.apply(table([row(0, 1, "mutation", b"k", b"v")]), 0)
    assert mirror.opened().read().num_rows == 1
    mirror.open(tmp_path / "one")
    assert mirror.opened().read().num_rows == 1
    mirror.open(tmp_path / "two")
    assert mirror.opened().read().num_rows == 0
    mirror.idle()
    assert mirror.counts() == {"replayed": 0, "undone": 0, "read_again": 0}
    mirror.close()


def test_a_target_that_somebody_removed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    mirror = Mirror.of(to=tmp_path / "t", format="parquet")
    mirror.open(tmp_path / "run")
    mirror.apply(table([row(0, 1, "mutation", b"k", b"v")]), 0)
    for name in ("offsets", "commits"):
        (tmp_path / "run" / "spark" / name).mkdir(parents=True)
        (tmp_path / "run" / "spark" / name / "0").write_text("v1\n{}")
    mirror.open(tmp_path / "run")
    (tmp_path / "t").rename(tmp_path / "elsewhere")
    with pytest.raises(TargetBehind, match=r"completed batches up to 0, but the target holds no batch"):
        mirror.open(tmp_path / "run")
    mirror.close()


def test_nothing_is_applied_before_it_is_open() -> None:
    mirror = Mirror.of()
    mirror.idle()
    assert mirror.counts() == {}
    with pytest.raises(AssertionError, match="not open"):
        mirror.apply(table([]), 0)
