"""How deep the tests go: ``make test`` is quick, ``make test-slow`` sets UPRIVER_TEST_DEPTH=deep."""

import os
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import pytest

DEEP: Final = os.environ.get("UPRIVER_TEST_DEPTH") == "deep"
T = TypeVar("T")


def by_depth(*, quick: T, deep: T) -> T:
    """A size of data, a number of rounds."""
    return deep if DEEP else quick


def examples(deep: int) -> int:
    """How many examples Hypothesis tries: a quarter of them in a quick run."""
    return deep if DEEP else max(deep // 4, 5)


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which only the quick ones run in ``make test``. Tuples are several arguments."""
    kept = list(quick)
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"not among the parameters: {unknown}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in kept else pytest.mark.slow
        )
        for value in values
    ]
