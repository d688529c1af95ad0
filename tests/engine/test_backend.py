import os
import subprocess
import sys

import pytest

PROGRAM = "from upriver.engine import backend; print(backend.COMPILED, backend.Table.__module__)"


def run(**environment: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "UPRIVER_PLAIN"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_plain_table_can_be_forced() -> None:
    assert run(UPRIVER_PLAIN="1") == ["False", "upriver.engine.table.plain_table"]


def test_the_compiled_table_serves_where_it_was_built() -> None:
    try:
        from upriver.engine.table import _table
    except ImportError:
        pytest.skip("the compiled table was not built")
    assert run() == ["True", _table.__name__]
