"""``upriver mirror``."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("deltalake", reason="the pipelines extra is not installed")

from tests.support.command_runner import Run
from upriver.client import Address, SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.apply.applying import Applier
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.targets.tables.delta import Delta
from upriver.spark.options import ReadOptions


@pytest.fixture
def table(node: EmbeddedNode, tmp_path: Path) -> Path:
    """A table of what the node held."""
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(20)})
    nodes = NodeReader(ReadOptions(address=Address.parse(node.address)))
    rows, _ = nodes.read(nodes.vbuckets())
    Applier(Delta(tmp_path / "t"), nodes, "q").apply(rows, 0)
    nodes.close()
    return tmp_path / "t"


def test_equal_and_not(run: Run, node: EmbeddedNode, table: Path) -> None:
    result = run("mirror", "verify", str(table), node.address)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no differences\n")
    with SyncKvClient(node.address) as kv:
        kv.set("k3", b'{"n": 99}')
        vbucket = kv.set("new", b"{}").vbucket
    result = run("mirror", "verify", str(table))
    assert result.exit_code == 1
    assert f"{vbucket}\tmissing\tnew\n" in result.stdout
    assert result.stderr == "2 differences\n"
    lines = [json.loads(line) for line in run("mirror", "verify", "--json", str(table)).stdout.splitlines()]
    assert {(line["key"], line["difference"]) for line in lines} == {("k3", "different"), ("new", "missing")}
    assert "n" in next(line["columns"] for line in lines if line["key"] == "k3")
    assert run("mirror", "verify", "--key-prefix", "k1", "--vbuckets", str(vbucket), str(table)).exit_code in (0, 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [("key_prefix", "k1"), ("key_filter", "^k[1-3]$"), ("value_filter", '{"field": "n", "equals": 7}')],
)
def test_a_table_of_a_filter_is_compared_with_the_same(
    run: Run, node: EmbeddedNode, tmp_path: Path, name: str, text: str
) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(20)})
    nodes = NodeReader(dataclasses.replace(ReadOptions.read({name: text}), address=Address.parse(node.address)))
    rows, _ = nodes.read(nodes.vbuckets())
    Applier(Delta(tmp_path / "t"), nodes, "q").apply(rows, 0)
    nodes.close()
    assert 0 < rows.num_rows < 20
    option = f"--{name.replace('_', '-')}"
    result = run("mirror", "verify", option, text, str(tmp_path / "t"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no differences\n")
    assert f"{20 - rows.num_rows} differences" in run("mirror", "verify", str(tmp_path / "t")).stderr


def test_filters_that_make_no_sense_are_one_line(run: Run, table: Path) -> None:
    result = run("mirror", "verify", "--value-filter", "{", str(table))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "option valueFilter = '{': it must be JSON" in result.stderr


def test_what_is_no_mirror_is_one_line(run: Run, tmp_path: Path) -> None:
    result = run("mirror", "verify", str(tmp_path))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "not a mirror" in result.stderr
    assert run("mirror", "verify", str(tmp_path / "nowhere")).exit_code == 2
