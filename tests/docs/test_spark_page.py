"""The page about Spark: its tables are those of the declarations."""

import dataclasses

import pytest

from docs.spark_page import PAGE, options_table, spark_page
from upriver.spark.options import ReadOptions, spark_name


def test_the_page_is_up_to_date() -> None:
    assert spark_page() == PAGE.read_text()


def test_every_option_has_a_line() -> None:
    table = options_table(ReadOptions)
    assert all(f"| `{spark_name(field.name)}`" in table for field in dataclasses.fields(ReadOptions))
    assert "| `onRollback` fail, rewind, emit | `fail` |" in table


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(AssertionError, match="lost the marks"):
        spark_page("# Spark\n")
