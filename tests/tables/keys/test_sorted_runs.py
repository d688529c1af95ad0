"""Sorting in bounded memory."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.tables.keys.entries import is_next_other, no_entries
from upriver.tables.keys.sorted_runs import SortedRuns


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=12), max_size=12), st.integers(1, 12)
)
def test_blocks_are_sorted_and_never_split_a_hash(pieces: list[list[tuple[int, int]]], run_entries: int) -> None:
    with SortedRuns(run_entries, sampled=2) as runs:
        for piece in pieces:
            runs.add(np.array(piece, np.uint64).reshape(-1, 2) << np.uint64(32))
        assert len(runs) == sum(map(len, pieces))
        blocks = [block.copy() for block in runs.blocks()]
    found = np.concatenate([no_entries(), *blocks]) >> np.uint64(32)
    assert list(map(tuple, found.tolist())) == sorted(entry for piece in pieces for entry in piece)
    assert all(len(block) for block in blocks)
    for block, following in pairwise(blocks):
        assert block[-1, 0] < following[0, 0]


def test_blocks_are_about_as_long_as_runs() -> None:
    source = np.random.default_rng(0)
    with SortedRuns(1_000, sampled=50) as runs:
        for _ in range(40):
            runs.add(source.integers(0, 2**63, (500, 2), np.uint64))
        blocks = [len(block) for block in runs.blocks()]
    assert sum(blocks) == 20_000
    assert max(blocks) <= 1_000 + 20 * 50
    assert len(blocks) >= 10


def test_few_entries_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", None)
    with SortedRuns() as runs:
        runs.add(np.array([[3, 1], [1, 1]], np.uint64))
        runs.add(np.array([[2, 1]], np.uint64))
        (block,) = runs.blocks()
    assert block[:, 0].tolist() == [1, 2, 3]
    assert is_next_other(block).all()
