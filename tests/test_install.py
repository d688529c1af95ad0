"""The package installs where there is no C compiler, and then the plain codec serves."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_build_without_a_compiler_succeeds_and_builds_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            tmp_path / "lib",
            "--build-temp",
            tmp_path / "temp",
        ],
        cwd=ROOT,
        env={**os.environ, "CC": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
