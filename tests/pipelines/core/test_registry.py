"""Pipelines are found by name."""

import pytest

from upriver.errors import OptionError
from upriver.pipelines.core.registry import PIPELINES, find


def test_every_pipeline_bears_its_name() -> None:
    for name, (_, summary) in PIPELINES.items():
        assert find(name).name == name
        assert summary.endswith(".")
        assert "Parquet" not in summary  # no pipeline writes it


def test_an_unknown_name_is_a_clear_error() -> None:
    with pytest.raises(OptionError, match="unknown pipeline"):
        find("replikate")
