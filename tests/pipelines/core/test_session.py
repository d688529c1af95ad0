"""A Spark that runs already is used as it is."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from upriver.pipelines.core.session import LOCAL_SETTINGS, SETTINGS, spark_session


@pytest.mark.spark
def test_the_spark_of_this_process_is_used(spark: SparkSession, tmp_path: Path) -> None:
    assert spark_session(tmp_path / "spark.log") is spark
    assert not (tmp_path / "spark.log").exists()


def test_nothing_is_shown_and_nothing_listens_to_the_world() -> None:
    assert SETTINGS["spark.ui.enabled"] == SETTINGS["spark.ui.showConsoleProgress"] == "false"
    assert LOCAL_SETTINGS["spark.driver.bindAddress"] == LOCAL_SETTINGS["spark.driver.host"] == "127.0.0.1"
