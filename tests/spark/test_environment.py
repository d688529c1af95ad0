"""Jobs that are started with the Python of a virtual environment which is not activated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spark_processes import settings_variable
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode

pytestmark = pytest.mark.spark
VARIABLES = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
TELL = f"import json, os, upriver.spark; print(json.dumps([os.environ.get(name) for name in {VARIABLES}]))"


def another_python(directory: Path) -> str:
    """A folder whose ``python3`` is not ours and has no packages, as the system's often is."""
    directory.mkdir()
    other = directory / "python3"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    other.chmod(0o755)
    return str(directory)


def environment(path: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "VIRTUAL_ENV")}
    return kept | {"PATH": path} | more


def told(path: str, **more: str) -> list[str | None]:
    done = subprocess.run(
        [sys.executable, "-c", TELL], env=environment(path, **more), capture_output=True, text=True, check=True
    )
    found: list[str | None] = json.loads(done.stdout)
    return found


def test_the_import_names_the_running_python(tmp_path: Path) -> None:
    other = another_python(tmp_path / "bin")
    assert told(other) == [sys.executable, sys.executable]
    assert told("/nowhere") == [sys.executable, sys.executable]


def test_what_the_user_has_named_stays(tmp_path: Path) -> None:
    other = another_python(tmp_path / "bin")
    assert told(other, PYSPARK_PYTHON="mine") == ["mine", None]
    assert told(other, PYSPARK_DRIVER_PYTHON="mine") == [sys.executable, "mine"]


def test_where_python3_is_the_running_one_nothing_is_named() -> None:
    """On a cluster it may have another path on each machine."""
    assert told(str(Path(sys.executable).parent)) == [None, None]


def test_the_import_is_cheap() -> None:
    script = (
        "import sys, upriver.spark; print([name for name in ('pyspark', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_finds_the_format(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """It is the example of the README, which counts the fields of the documents."""
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({"a": b'{"name": "Ann", "age": 3}', "b": b'{"name": "Bob"}', "gone": b'{"x": 1}', "t": b"text"})
        kv.delete("gone")
    path = f"{another_python(tmp_path / 'bin')}:{os.environ['PATH']}"
    job = Path(__file__).parent.parent.parent / "examples" / "spark_job.py"
    done = subprocess.run(
        [sys.executable, str(job), upriver_node.address],
        env=environment(path, SPARK_LOCAL_IP="127.0.0.1", **settings_variable(spark_master="local[1]")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["age 1", "name 2"], done.stderr
