"""A real cluster: a master and two workers whose Python does not have the package, which comes with the job."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spark_processes import cluster, run, script, settings
from tests.support.spark_session import PYTHONS
from tests.support.spark_tables import contents_at
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start

pytestmark = [pytest.mark.spark, pytest.mark.heavy, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The wheel under a name that Spark hands on to workers; without compiled parts, which do not load out of it."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build"), "bdist_wheel"]
    places = ["--dist-dir", str(tmp_path / "dist"), "--bdist-dir", str(tmp_path / "bdist")]
    environment = {**os.environ, "CC": "false"}
    done = subprocess.run([*command, *places], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return Path(shutil.copy(wheel, tmp_path / "upriver.zip"))


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """This Python with all that the package depends on, but without the package, which is installed in place."""
    (site,) = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    executable = tmp_path / "bare-python"
    python = f"UPRIVER_TEST_PYTHON={sys.executable} exec {PYTHONS['PYSPARK_PYTHON']} -S"
    executable.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" {python} "$@"\n')
    executable.chmod(0o755)
    done = subprocess.run(
        [executable, "-c", "import pyspark, upriver"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if "No module named 'upriver'" not in done.stderr:
        pytest.skip("upriver is not installed in place, and would be found without the job's own")
    return str(executable)


@pytest.mark.upriver(vbuckets=16)
def test_a_cluster_gets_the_package_with_the_job(
    upriver_node: EmbeddedNode, package: Path, bare_python: str, tmp_path: Path
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v%d" % n for n in range(1500)})
        kv.delete("k7")
    pythons = {"PYSPARK_PYTHON": bare_python, "PYSPARK_DRIVER_PYTHON": bare_python}
    with start(vbuckets=8) as other, cluster(tmp_path, 2, cores=2, **pythons) as processes:
        command = [
            script("spark-submit"),
            "--master",
            processes.master,
            "--py-files",
            str(package),
            *settings(spark_cores_max="4"),
        ]
        job = [str(Path(__file__).parent / "cluster_job.py"), upriver_node.address, other.address, str(tmp_path)]
        # The planning of a stream runs in a Python of the driver's that gets nothing of --py-files.
        said = run([*command, *job], tmp_path / "job.log", PYTHONPATH=str(package), **pythons)
        told = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        assert len(told["executors"]) == 2
        assert all("/upriver.zip/" in file for file in told["files"]), told
        assert told["cores"] == 4
        assert told["batch"] == 1500
        assert told["first"] >= 1500
        assert 301 <= told["after"] < 700
        assert told["seqnos"] == 1501 + 301
        assert contents_at(other.address) == contents_at(upriver_node.address)
        assert len(contents_at(other.address)) == 1698
