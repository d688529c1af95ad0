"""The files that the page about pipelines shows can be run, and every option stands there."""

import dataclasses
import re
import tomllib

import pytest

from docs.pipelines_page import PAGE, options_table, pipelines_page
from upriver.pipelines.core.options import shown_name
from upriver.pipelines.core.registry import PIPELINES, find

TEXT = PAGE.read_text()
FILES = re.findall(r"^```toml\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", FILES)
def test_a_file_can_be_run(text: str) -> None:
    given = tomllib.loads(text)
    kind = find(given.pop("pipeline"))
    given.pop("checkpoint")
    assert kind.of(given).name in PIPELINES


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_has_a_section_with_its_options(name: str) -> None:
    assert f"\n## {name}\n" in TEXT
    table = options_table(find(name).options_type)
    assert table in TEXT
    assert all(f"`--{shown_name(field.name)}`" in table for field in dataclasses.fields(find(name).options_type))


def test_a_page_without_marks_is_a_clear_error() -> None:
    with pytest.raises(AssertionError, match="no marks for the options of"):
        pipelines_page("# Pipelines\n")
    assert FILES
