"""The Python examples and the commands of the README and of the pages."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """What a page shows as typed after ``upriver``."""
    return commands_in(page.read_text())


def commands_in(text: str) -> list[list[str]]:
    """The same of a text; a backslash at the end of a line goes on with the next one."""
    shown = re.findall(r"^\$ upriver ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line.replace("\\\n", " "), comments=True) for line in shown]


def shown_tests(page: Path) -> list[str]:
    """Those that are tests."""
    return [block for block in examples(page) if "def test_" in block]


def program_of(page: Path) -> str:
    """All others, as one program."""
    return "\n".join(block for block in examples(page) if "def test_" not in block)


def needs_spark(program: str) -> bool:
    """It starts a Spark, of which one is enough for all tests."""
    return "pyspark" in program


def sessions(page: Path) -> list[list[list[str]]]:
    """The blocks in which a page shows commands, each with its commands."""
    blocks = re.findall(r"^```(?:console)?\n(\$ .*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [found for block in blocks if (found := commands_in(block))]
