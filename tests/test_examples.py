"""The examples do what they say. Those of Spark's declarative pipelines are run where Spark Connect is."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache_servers import CacheServer
from tests.support.command_runner import Run, node, run
from tests.support.node_clusters import push_map
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start

__all__ = ["node", "run"]

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def other() -> Iterator[EmbeddedNode]:
    with start(vbuckets=8, initial_vbuckets="all") as node:
        yield node


def example(*command: str, cwd: Path) -> str:
    """What it prints, in an environment that is activated: Spark starts whichever ``python3`` it finds."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_table_of_sqlite_follows(tmp_path: Path) -> None:
    program = str(EXAMPLES / "consume.py")
    with start(data=tmp_path / "data", vbuckets=8) as node, SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(1000)})
        assert example(program, node.address, "documents.db", cwd=tmp_path) == "1000 documents\n"
        for n in range(10):
            kv.delete(f"k{n}")
        kv.set("new", b"v")
        assert example(program, node.address, "documents.db", cwd=tmp_path) == "991 documents\n"
        # Another history altogether, as after a restored backup: every vbucket starts over.
    with start(vbuckets=8) as node, SyncKvClient(node.address) as kv:
        kv.set_many({f"other{n}": b"v" for n in range(7)})
        assert example(program, node.address, "documents.db", cwd=tmp_path) == "7 documents\n"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_of_spark(node: EmbeddedNode, tmp_path: Path) -> None:
    """In an environment that is activated; tests/spark/test_environment.py runs it in one that is not."""
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    with SyncKvClient(node.address) as kv:
        kv.set_many({"a": b'{"name": "Ann", "age": 3}', "b": b'{"name": "Bob"}', "gone": b'{"x": 1}', "t": b"text"})
        kv.delete("gone")
    assert example(str(EXAMPLES / "spark_job.py"), node.address, cwd=tmp_path).splitlines() == ["age 1", "name 2"]


def filled(name: str, addresses: dict[str, str]) -> str:
    """An example with addresses that there are."""
    return re.sub(
        r"127\.0\.0\.1:1121\d", lambda found: addresses[found[0]], (EXAMPLES / "pipelines" / name).read_text()
    )


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("name", ["replicate", "mirror", "index", "observe"])
def test_a_pipeline_from_a_file(
    name: str, node: EmbeddedNode, other: EmbeddedNode, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"user:{n}": b'{"fish": "salmon"}' for n in range(50)})
    text = filled(f"{name}.toml", {"127.0.0.1:11210": node.address, "127.0.0.1:11211": other.address})
    Path("file.toml").write_text(text)
    done = run("run", "-f", "file.toml")
    assert done.exit_code == 0, done.stderr
    if name == "replicate":
        with SyncKvClient(other.address) as kv:
            assert len(kv.get_many([f"customer:{n}" for n in range(50)])) == 50
    elif name == "mirror":
        assert run("table", "verify", "table", node.address).exit_code == 0
        assert list(Path("history").glob("*.parquet"))
    elif name == "index":
        assert run("search", "documents.db", "salmon").output.count("user:") >= 10
    else:
        assert '"changes": 50' in Path("seen.jsonl").read_text()
        assert Path("seen.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.spark
@pytest.mark.interop
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
def test_a_cache_is_kept_right(node: EmbeddedNode, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = CacheServer("memcached", tmp_path)
    try:
        monkeypatch.chdir(tmp_path)
        with SyncKvClient(node.address) as kv:
            kv.set("k", b"new")
        addresses = {"127.0.0.1:11210": node.address, "127.0.0.1:11212": f"127.0.0.1:{server.port}"}
        Path("file.toml").write_text(filled("invalidate.toml", addresses))
        done = run("run", "-f", "file.toml")
        assert done.exit_code == 0, done.stderr
        assert '"forgotten": 1' in done.output
    finally:
        server.stop()


def test_vbuckets_move(node: EmbeddedNode, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with start(vbuckets=8, initial_vbuckets="none") as destination:
        push_map([node, destination], [0] * 8, rev=1)
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b"v" for n in range(100)})
        addresses = {"127.0.0.1:11210": node.address, "127.0.0.1:11211": destination.address}
        Path("file.toml").write_text(filled("transition.toml", addresses))
        done = run("run", "-f", "file.toml")
        assert done.exit_code == 0, done.stderr
        assert '"verified": 4' in done.output


def test_every_example_is_tried() -> None:
    tried = {"replicate", "mirror", "index", "observe", "invalidate", "transition"}
    assert {path.stem for path in (EXAMPLES / "pipelines").iterdir()} == tried
    known = {"consume.py", "spark_job.py", "pipelines", "packets", "spark-pipelines", "declared-pipelines"}
    assert {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} == known
