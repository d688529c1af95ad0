"""The pages with tables of options: every option is there, and the examples on the pages are valid."""

import dataclasses
import re
import tomllib

import pytest

from docs.options_pages import DOCS, options_pages, tables
from upriver.node.options import NodeOptions
from upriver.node.state import Limits
from upriver.pipelines.core.registry import PIPELINES, find
from upriver.spark.options import ReadOptions, spark_name

PIPELINES_PAGE = (DOCS / "pipelines.md").read_text()
FILES = re.findall(r"^```toml\n(.*?)^```", PIPELINES_PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_pages_are_up_to_date() -> None:
    for path, text in options_pages().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make docs`"


def test_every_option_has_a_line_with_its_values_default_and_help() -> None:
    node, spark = tables()["node.md"]["node"], tables()["spark.md"]["read"]
    for field in dataclasses.fields(NodeOptions):
        assert f"| `--{field.name.replace('_', '-')}`" in node
        assert field.metadata["help"] in node
    assert all(f"| `{spark_name(field.name)}`" in spark for field in dataclasses.fields(ReadOptions))
    assert "| `onRollback` fail, rewind, emit | `fail` |" in spark
    assert "| `maxTriggerDelay` TIME | `900s` |" in spark


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_has_a_section_with_its_options(name: str) -> None:
    assert f"\n## {name}\n" in PIPELINES_PAGE
    assert "| `--from` " in tables()["pipelines.md"][name]


@pytest.mark.parametrize("text", FILES)
def test_a_file_on_the_page_about_pipelines_can_be_run(text: str) -> None:
    given = tomllib.loads(text)
    kind = find(given.pop("pipeline"))
    given.pop("checkpoint")
    assert kind.of(given).name in PIPELINES


def test_the_fixed_limits_of_the_node_are_as_written() -> None:
    page, limits = (DOCS / "node.md").read_text(), Limits()
    assert f"fixed: {limits.turn_work_max} requests outside the compiled loop" in page
    assert f"fixed: {limits.login_bytes_max // 1024} KiB" in page
    assert f"fixed: {limits.waiting_answers_max:,}, or" in page
