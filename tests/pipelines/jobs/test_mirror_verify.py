"""A mirror held against its node."""

from collections.abc import Callable
from pathlib import Path

import pytest

from upriver.client import Address, SyncKvClient
from upriver.model import Difference
from upriver.node import EmbeddedNode
from upriver.pipelines.apply.applying import Applier
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.jobs.mirror import table_differences
from upriver.pipelines.targets.tables.delta import Delta
from upriver.pipelines.targets.tables.parquet import ParquetTable
from upriver.pipelines.targets.tables.table import TableTarget
from upriver.spark.options import ReadOptions


@pytest.mark.parametrize("kind", [Delta, ParquetTable])
def test_what_differs_is_named(kind: Callable[[Path], TableTarget], upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    nodes = NodeReader(ReadOptions(address=Address.parse(upriver_node.address)))
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(50)} | {"raw": b"\xff"})
        kv.set("short", b"{}", expiry=1)
        table = kind(tmp_path)
        rows, _ = nodes.read(nodes.vbuckets())
        Applier(table, nodes, "q").apply(rows, 0)
        assert list(table_differences(table, nodes, nodes.vbuckets())) == []
        kv.set("k7", b'{"n": "text"}')
        kv.delete("k8")
        new = kv.set("new", b"{}").vbucket
    found = {difference.key: difference for difference in table_differences(kind(tmp_path), nodes, nodes.vbuckets())}
    assert found.keys() == {b"k7", b"k8", b"new"}
    assert found[b"new"] == Difference(new, "missing", b"new")
    assert (found[b"k8"].kind, found[b"k7"].kind) == ("extra", "different")
    assert set(found[b"k7"].columns) == {"n", "_raw", "_cas", "_rev_seqno"}
    nodes.close()
