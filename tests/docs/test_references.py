"""Modules and tests that the pages name exist."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SOURCE = ROOT / "src" / "upriver"
TESTS = frozenset(
    chain.from_iterable(re.findall(r"def (test_\w+)", path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_every_module_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.pyx?)`", page.read_text()))
    missing = [name for name in sorted(named) if not (SOURCE / name).exists() and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES if page.stem == "semantics"])
def test_every_test_exists(page: Path) -> None:
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", page.read_text()))
    assert len(named) > 10
    assert named <= TESTS


def test_the_tree_of_the_architecture_is_that_of_the_source() -> None:
    """Two levels: the modules beside the packages, the packages, and the packages inside them."""
    drawn = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    first = re.findall(r"^  (\w+(?:/|\.py))", drawn, re.MULTILINE)
    second = re.findall(r"^    (\w+/)", drawn, re.MULTILINE)
    packages = [path.parent for path in SOURCE.rglob("__init__.py")]
    modules = [path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")]
    assert sorted(first) == sorted([*modules, *(f"{path.name}/" for path in packages if path.parent == SOURCE)])
    assert sorted(second) == sorted(f"{path.name}/" for path in packages if path.parent.parent == SOURCE)
