"""The page about the node says everything that there is."""

import dataclasses

import pytest

from docs.node_page import BEGIN, END, PAGE, node_page, options_table
from upriver.node.options import NodeOptions
from upriver.node.state import Limits


def test_every_option_is_in_the_table() -> None:
    page = PAGE.read_text()
    for field in dataclasses.fields(NodeOptions):
        assert f"| `--{field.name.replace('_', '-')}" in page, f"{field.name} is not documented: run `make docs`"
        assert field.metadata["help"] in page
        assert field.metadata["help"][0] != field.metadata["help"][0].upper() or field.name == "stall_s"


def test_the_table_is_up_to_date() -> None:
    assert PAGE.read_text() == node_page()


def test_a_stale_table_is_replaced_and_the_rest_is_kept() -> None:
    assert node_page(f"before\n{BEGIN}old{END}after\n") == f"before\n{BEGIN}\n{options_table()}\n{END}after\n"
    with pytest.raises(AssertionError, match="lost the marks"):
        node_page("nothing")


def test_the_fixed_limits_are_as_written() -> None:
    page, limits = PAGE.read_text(), Limits()
    assert f"fixed: {limits.turn_work_max} requests outside the compiled loop" in page
    assert f"fixed: {limits.login_bytes_max // 1024} KiB" in page
    assert f"fixed: {limits.waiting_answers_max:,}, or" in page
