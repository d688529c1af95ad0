"""Pipelines as parts of a declarative one: the example, run by Spark's own command."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")
pytest.importorskip("grpc", reason="Spark Connect needs grpcio: install pyspark[connect]")

from tests.support.depth import DEEP
from tests.support.mirror_comparison import mirror_differences
from tests.support.spark_processes import ConnectServer, connect_server, run, script
from tests.support.spark_tables import contents_at
from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.node import EmbeddedNode, start
from upriver.pipelines import declare
from upriver.pipelines.jobs.index import search_index

__all__ = ["connect_server"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "declared-pipelines"
STORAGE = "file:///var/tmp/upriver-declared"


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    with start(vbuckets=4) as node:
        yield node


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.upriver(vbuckets=4)
def test_the_example_keeps_four_targets(
    upriver_node: EmbeddedNode, other: EmbeddedNode, connect_server: ConnectServer, tmp_path: Path
) -> None:
    """From nothing; in a deep run also what has changed since, and everything once more."""
    project, targets = tmp_path / "project", tmp_path / "targets"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    assert spec.read_text().count(STORAGE) == 1
    spec.write_text(spec.read_text().replace(STORAGE, f"file://{tmp_path}/storage"))
    environment = {"SOURCE": upriver_node.address, "COPY": other.address, "TARGETS": str(targets)}

    def update(*arguments: str) -> None:
        command = [
            script("spark-pipelines"),
            "--remote",
            connect_server.address,
            "run",
            "--spec",
            str(spec),
            *arguments,
        ]
        run(command, tmp_path / "pipelines.log", **environment)
        assert mirror_differences(targets / "table", upriver_node.address) == []
        assert contents_at(other.address) == contents_at(upriver_node.address)

    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"name": "salmon %d"}' % n for n in range(100)})
        if DEEP:
            update()
        kv.set("k3", b'{"name": "trout"}')
        kv.delete("k4")
        update()
        assert [hit.key for hit in search_index(str(targets / "index.db"), "trout", 10)] == [b"k3"]
        assert len(search_index(str(targets / "index.db"), "salmon", 200)) == 98
        if DEEP:  # the first window ends with the second run
            assert list((targets / "seen").glob("window-*.parquet"))
            update("--full-refresh-all")
        assert len(search_index(str(targets / "index.db"), "salmon", 200)) == 98


def test_what_makes_no_sense_is_told_where_it_is_declared() -> None:
    with pytest.raises(OptionError, match="it must be one of"):
        declare("mirrow")
