"""The same Spark for these tests as for those of the source."""

from tests.spark.conftest import spark

__all__ = ["spark"]
