"""The demo runs from its beginning to its end, and everything agrees."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deltalake", reason="the pipelines extra is not installed")

ROOT = Path(__file__).parent.parent


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, and the width of a table's cells."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.,:]*\d", "N", line)).strip()


@pytest.mark.spark
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_small_demo(tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    command = [sys.executable, "-m", "demo", "--documents", "3000", "--picture", str(picture)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=850)
    assert result.returncode == 0, result.stdout
    assert "differences: 0" in result.stdout
    readme = (ROOT / "README.md").read_text()
    shown = readme[readme.index("$ make demo\n") : readme.index("$ make test")].splitlines()[1:]
    printed = iter([shape(line) for line in result.stdout.replace(str(picture), "demo/report.png").splitlines()])
    for line in shown:
        assert line == "…" or shape(line) in printed, f"the README shows a line that is not printed: {line!r}"
    assert picture.read_bytes().startswith(b"\x89PNG")
