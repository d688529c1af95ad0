"""``upriver run mirror --once`` as it is typed first, for documents of all kinds."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.command_runner import Run, node, run
from tests.support.odd_documents import ODD
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.tables import read

__all__ = ["node", "run"]

pytestmark = [pytest.mark.spark, pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and checkpoints are in a directory of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_every_document_is_in_the_table(spark: SparkSession, run: Run, node: EmbeddedNode) -> None:
    with SyncKvClient(node.address) as kv:
        assert kv.set_many(ODD) == {}
        kv.set(b"\xff\xfe", b'{"whole": 1}')
        assert kv.set_many({f"k{n}": b'{"whole": %d}' % n for n in range(100)}) == {}
        for number in (2, 5):
            node.call(node.bucket.vbucket(number).set, b"in two vbuckets", b'{"whole": 7}')
        first = run("run", "mirror", "--once")
        assert (first.exit_code, first.stderr) == (0, "")
        kv.set("decimal", b'{"whole": 1.5}')  # in a field that has been an integer
        kv.set_many({"empty": b'{"whole": 2.5}', "large": b""})
    second = run("run", "mirror", "--once")
    assert (second.exit_code, second.stderr) == (0, "")
    assert json.loads(second.stdout.splitlines()[-1])["restarts"] == 0
    rows = read("mirror", ["_key", "_raw_key", "whole"]).to_pylist()
    assert len(rows) == len(ODD) + 1 + 100 + 2 + 1
    assert [row["whole"] for row in rows if row["_raw_key"] == b"\xff\xfe"] == [1]
    numbers = [row["whole"] for row in rows if row["_raw_key"] is None and row["_key"] not in ODD.keys() - {"empty"}]
    assert sorted(numbers) == sorted([*range(100), 7, 7, 1.5, 2.5]), "none is null"
    checked = run("table", "verify", "mirror")
    assert (checked.exit_code, checked.stderr) == (0, "no differences\n")


def test_decimals_in_a_declared_column_of_whole_numbers(spark: SparkSession, run: Run, node: EmbeddedNode) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({"a": b'{"n": 1, "m": 2}', "b": b'{"n": 1.5}', "c": b'{"n": 2.5}'})
    declared = run("run", "mirror", "--once", "--schema", "n long, m long")
    (warning,) = declared.stderr.splitlines()
    assert warning.startswith("warning: column n: some documents have decimals")
    assert "'n double'" in warning
    assert json.loads(declared.stdout.splitlines()[-1])["warnings"] == [warning.removeprefix("warning: ")]
    held = {row["_key"]: (row["n"], row["_raw"]) for row in read("mirror").to_pylist()}
    assert held == {"a": (1, None), "b": (None, b'{"n": 1.5}'), "c": (None, b'{"n": 2.5}')}
    with SyncKvClient(node.address) as kv:
        kv.set("d", b'{"n": 3}')
    widened = run("run", "mirror", "--once", "--schema", "n double, m long")
    assert (widened.exit_code, widened.stderr) == (0, "")
    held = {row["_key"]: (row["n"], row["_raw"]) for row in read("mirror").to_pylist()}
    assert held == {"a": (1, None), "b": (1.5, None), "c": (2.5, None), "d": (3, None)}
