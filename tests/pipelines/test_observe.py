"""Observation in a real Spark: everything is counted, and nothing twice."""

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")


from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.node import EmbeddedNode
from upriver.pipelines.observe import TABLE_COLUMNS, ObserveOptions, table_rows
from upriver.pipelines.windows import Window


def fill(node: EmbeddedNode, first: int) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"user:{n}": b"x" * 10 for n in range(first, first + 30)})
        kv.set_many({f"session:{n}": b"x" * 30 for n in range(first, first + 10)}, expiry=3000)
        for n in range(first, first + 5):
            kv.delete(f"user:{n}")


def test_a_table_shows_prefixes_and_hot_keys() -> None:
    window = Window(0, 10)
    window.add("user", "mutation", (20, 400, 90, 5))
    window.add("user", "expiration", (10, 0, 0, 0))
    window.add("", "mutation", (10, 10, 1, 0))
    window.add("user:7", None, (9, 0, 0, 0))
    rows = list(table_rows(window, 5))
    assert rows == [
        ("(all)", 3.0, 0.0, 1.0, 14, 90, 5),
        ("user", 2.0, 0.0, 1.0, 20, 90, 5),
        ("(none)", 1.0, 0.0, 0.0, 1, 1, 0),
        ("key user:7", 0.9, 0.0, 0.0, 0, 0, 0),
    ]
    assert {len(row) for row in rows} == {len(TABLE_COLUMNS)}


def test_a_window_has_whole_seconds() -> None:
    with pytest.raises(OptionError, match="whole seconds"):
        ObserveOptions.read({"window": "1500ms"})
