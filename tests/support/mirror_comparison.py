"""Compare a mirror's table with its node."""

from pathlib import Path

from upriver.client import Address
from upriver.model import Difference
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.jobs.mirror import open_table, table_differences
from upriver.spark.options import ReadOptions


def mirror_differences(path: Path, address: str) -> list[Difference]:
    """What the table holds differently from the node."""
    nodes = NodeReader(ReadOptions(address=Address.parse(address)))
    try:
        return list(table_differences(open_table(path), nodes, nodes.vbuckets()))
    finally:
        nodes.close()
