"""One small Spark session for all tests of a process."""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PYTHON = str(Path(__file__).with_name("spark_python.sh"))
#: The Python that plans, that of the workers, and the one which both of them are.
PYTHONS = {"PYSPARK_DRIVER_PYTHON": _PYTHON, "PYSPARK_PYTHON": _PYTHON, "UPRIVER_TEST_PYTHON": sys.executable}
SETTINGS = {
    "spark.ui.enabled": "false",
    # A query of a test handles a few rows: to interpret it is quicker than to compile code for it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
}


def new_session(more: Mapping[str, str]) -> "SparkSession":
    """A local Spark with two cores and some more settings."""
    from pyspark.sql import SparkSession

    os.environ |= PYTHONS
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = SparkSession.builder.master("local[2,3]").appName("upriver-tests")
        for name, value in {**SETTINGS, **more}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    return session


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """The Spark of this process."""
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    session = new_session({})
    yield session
    session.stop()
