"""A Spark that runs already is used as it is, with the cores that it has."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from upriver.pipelines.core import session
from upriver.pipelines.core.session import (
    LOCAL_SETTINGS,
    SETTINGS,
    address_towards,
    is_remote,
    spark_session,
    task_cores,
)


@pytest.mark.spark
def test_the_spark_of_this_process_is_used(spark: SparkSession, tmp_path: Path) -> None:
    assert spark_session(tmp_path / "spark.log") is spark
    assert not is_remote(spark)
    assert not (tmp_path / "spark.log").exists()


def test_nothing_is_shown_and_nothing_listens_to_the_world() -> None:
    assert SETTINGS["spark.ui.enabled"] == SETTINGS["spark.ui.showConsoleProgress"] == "false"
    assert LOCAL_SETTINGS["spark.driver.bindAddress"] == LOCAL_SETTINGS["spark.driver.host"] == "127.0.0.1"


class _Cluster:
    """A session whose executors come one by one, with four cores each."""

    master = "spark://127.0.0.1:7077"

    def __init__(self, executors: int) -> None:
        self.sparkContext = self._jsc = self
        self._left = executors
        self.count = 0

    def sc(self) -> Any:
        return SimpleNamespace(getExecutorMemoryStatus=lambda: SimpleNamespace(size=self._next))

    def _next(self) -> int:
        if self.count < self._left:
            self.count += 1
        return 1 + self.count

    @property
    def defaultParallelism(self) -> int:  # noqa: N802
        return max(2, 4 * self.count)


def test_the_executors_of_a_cluster_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_QUIET_S", 0.2)
    found: Any = _Cluster(3)
    assert task_cores(found) == 12
    monkeypatch.setattr(session, "_EXECUTORS_S", 0.2)
    none: Any = _Cluster(0)
    assert task_cores(none) == 2


@pytest.mark.spark
def test_a_local_spark_has_its_cores(spark: SparkSession) -> None:
    assert task_cores(spark) == spark.sparkContext.defaultParallelism


def test_the_client_of_a_server_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An active client of Spark Connect counts as the session that exists."""
    client: Any = SimpleNamespace(SparkSession=SimpleNamespace(getActiveSession=lambda: client))
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", client)
    assert spark_session(tmp_path / "spark.log") is client
    assert not (tmp_path / "spark.log").exists()


@pytest.mark.parametrize(
    ("master", "address"),
    [
        ("spark://127.0.0.1:7077", "127.0.0.1"),
        ("spark://127.0.0.1:7077,127.0.0.2:7077", "127.0.0.1"),
        ("spark://localhost:7077", "127.0.0.1"),
        ("spark://no-such-host.invalid:7077", None),
        ("yarn", None),
        ("k8s://https://127.0.0.1:443", None),
    ],
)
def test_a_driver_advertises_an_address_that_the_cluster_can_reach(master: str, address: str | None) -> None:
    assert address_towards(master) in (address, "::1" if "localhost" in master else address)


def test_without_java_one_line_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "upriver", "run", "mirror", "--once", "--to", str(tmp_path / "table")]
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name and name != "JAVA_HOME"}
    environment |= {"XDG_STATE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    for more, where in (({}, "on this machine"), ({"JAVA_HOME": "/nowhere"}, "in JAVA_HOME, /nowhere")):
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"Spark needs Java, which is not {where}: install Java 17 or newer" in line
