"""Spark with Delta, as a reader and a writer of our tables; in a process and an environment of its own."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from tools.delta_environment import delta_python


class DeltaSpark:
    """A running Spark with Delta."""

    def __init__(self, python: Path, log: Path) -> None:
        self._log = log.open("w")
        self._folder = log.parent
        # A test may have told its own Spark where it is.
        environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("delta_spark_server.py"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert "ready" in self._reply()

    def sql(self, text: str, **how: int) -> list[list[Any]]:
        """Run a statement, ``attempts`` times if other writers are faster; returns its rows."""
        rows: list[list[Any]] = self._ask({"sql": text, **how})["rows"]
        return rows

    def read(self, table: Path | str) -> pa.Table:
        """All rows of a table."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            to = Path(folder) / "rows"
            self._ask({"sql": f"SELECT * FROM {named(table)}", "to": str(to)})
            return feather.read_table(to, memory_map=False)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found = self._reply()
        assert "error" not in found, found["error"]
        return found

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"Spark with Delta has ended: {Path(self._log.name).read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(line)
        return found


def named(table: Path | str) -> str:
    """The name of a table in a statement."""
    return f"delta.`{table}`"


@pytest.fixture(scope="session")
def delta_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeltaSpark]:
    """Spark with Delta; skips where its environment was not made."""
    python = delta_python()
    if python is None:
        pytest.skip("Spark with Delta is not installed: run make delta-environment, or set UPRIVER_DELTA_PYTHON")
    found = DeltaSpark(python, tmp_path_factory.mktemp("delta-spark") / "log")
    yield found
    found.close()
