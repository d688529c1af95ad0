"""A type checker finds mistakes in the use of the clients, and only those."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)


def errors_in(*files: Path) -> set[tuple[str, int, str]]:
    """File, line and code of each error that mypy finds, with the settings of the repository."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--no-error-summary", *map(str, files)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^([^:\n]+):(\d+): error: .*\[([\w-]+)\]$", output, re.M)
    return {(file, int(line), code) for file, line, code in found}


def marked_in(file: Path) -> set[tuple[str, int, str]]:
    """File, line and code of each error that the comments announce."""
    lines = enumerate((ROOT / file).read_text().splitlines(), 1)
    found = ((number, re.search(r"# error: ([\w-]+)$", line)) for number, line in lines)
    return {(str(file), number, match[1]) for number, match in found if match}


def test_each_mistake_is_found_and_nothing_else() -> None:
    mistakes = HERE / "mistakes.py"
    assert len(marked_in(mistakes)) > 40
    assert errors_in(mistakes, HERE / "correct_uses.py") == marked_in(mistakes)
