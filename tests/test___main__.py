"""``python -m upriver`` is the command ``upriver``."""

import subprocess
import sys

from upriver import __version__


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "upriver", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"upriver {__version__}\n"
