"""Small files beside a checkpoint: on the local disk, and through Spark's file systems."""

from pathlib import Path

import pytest

from upriver.errors import CheckpointError
from upriver.pipelines.core.checkpoint_files import CheckpointFiles, LocalFiles, SparkFiles

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession


def check(files: CheckpointFiles) -> None:
    assert files.read("a/b") is None
    assert files.names("a") == []
    files.write("a/b", b"one")
    files.write("a/b", b"two")
    files.write("c", b"\x00\xff")
    assert (files.read("a/b"), files.read("c")) == (b"two", b"\x00\xff")
    assert files.names("a") == ["b"]


def test_a_local_directory(tmp_path: Path) -> None:
    files = CheckpointFiles.of(tmp_path / "here")
    assert isinstance(files, LocalFiles)
    assert files.path == tmp_path / "here"
    assert CheckpointFiles.of(f"file://{tmp_path}/here").root == files.root
    check(files)


@pytest.mark.spark
def test_a_directory_on_a_file_system_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    files = SparkFiles(f"file://{tmp_path}/there")
    check(files)
    with pytest.raises(CheckpointError, match="choose another --checkpoint"):
        _ = files.path
    # A crash between the removal of the old file and the new name.
    (tmp_path / "there" / "c").rename(tmp_path / "there" / "c.unfinished")
    assert files.read("c") == b"\x00\xff"


@pytest.mark.spark
def test_a_file_system_that_spark_does_not_have_is_named(spark: SparkSession) -> None:
    files = CheckpointFiles.of("nosuch://host/here")
    assert isinstance(files, SparkFiles)
    with pytest.raises(CheckpointError, match=r"Spark cannot reach it: .*nosuch"):
        files.read("x")
