"""Spark starts from the recorded classes, and Java says nothing about it."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from tests.support.class_archive import archive, environment, java_options
from tests.support.spark_processes import script

pytestmark = pytest.mark.spark


def version_of_spark(log: Path, options: str) -> str:
    """What the smallest Spark program prints; the log has the classes that Java loaded."""
    variables = {**os.environ, **environment(), "SPARK_SUBMIT_OPTS": f"{options} -Xlog:class+load:file={log}"}
    command = [script("spark-submit"), "--version"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


def test_classes_come_from_the_archive(tmp_path: Path) -> None:
    path = archive()
    if path is None or not path.exists():
        pytest.skip("the classes of Spark are not recorded: run make class-archive")
    assert version_of_spark(tmp_path / "log", java_options()) == ""
    (loaded,) = [line for line in (tmp_path / "log").read_text().splitlines() if "deploy.SparkSubmit source" in line]
    assert "shared objects file (top)" in loaded


def test_an_archive_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(b"not an archive")
    assert version_of_spark(tmp_path / "log", java_options() + f" -XX:SharedArchiveFile={tmp_path / 'damaged'}") == ""
    assert "jars/spark-core" in (tmp_path / "log").read_text()
