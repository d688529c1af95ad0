"""Tables of the latest state, whatever keeps their files: model, replays, and what a batch rewrites."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.pipeline_model import Contents, converge, row, table
from upriver.pipelines.targets.tables.columns import keys_of
from upriver.pipelines.targets.tables.delta import Delta
from upriver.pipelines.targets.tables.parquet import ParquetTable
from upriver.pipelines.targets.tables.table import FILES_MAX, TableTarget
from upriver.pipelines.targets.target import Target, TargetProgress, Work

FORMATS: list[Callable[[Path], TableTarget]] = [Delta, ParquetTable]


def contents(target: Target) -> Contents:
    """What the table holds; the model's values are raw or have a number."""
    assert isinstance(target, TableTarget)
    held = target.read()
    numbers = held.column("n").to_pylist() if "n" in held.column_names else [None] * held.num_rows
    pairs = zip(held.column("_vbucket").to_pylist(), keys_of(held).to_pylist(), strict=True)
    values = [
        raw or b'{"n": %d, "text": "word%d", "only%d": true}' % (number, number, number % 4)
        for raw, number in zip(held.column("_raw").to_pylist(), numbers, strict=True)
    ]
    found = dict(zip(pairs, values, strict=True))
    assert len(found) == held.num_rows
    return found


def work(rows: list[dict[str, object]], number: int | None = 0, **others: object) -> Work:
    return Work(query="q", number=number, rows=table(rows), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=examples(6))
@given(seed=st.integers(0, 2**32))
def test_a_table_ends_with_the_nodes_contents(kind: Callable[[Path], TableTarget], seed: int) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        converge(lambda: kind(path), contents, seed, exact=bool(seed % 2), policy="emit", vbuckets=20, batches=6)
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_new_keys_rewrite_nothing_and_changed_ones_only_their_file(
    kind: Callable[[Path], TableTarget], tmp_path: Path
) -> None:
    target = kind(tmp_path)
    target.commit(work([row(0, n, "mutation", b"a%d" % n, b'{"n": 1}') for n in range(10)], 0))
    first = {file.path.name for file in target._files}
    target.commit(work([row(1, n, "mutation", b"b%d" % n, b'{"n": 1}') for n in range(10)], 1))
    second = {file.path.name for file in target._files}
    assert first < second
    target.commit(work([row(1, 99, "deletion", b"b3", None), row(1, 98, "mutation", b"b4", b'{"n": 2}')], 2))
    third = {file.path.name for file in target._files}
    assert first < third
    assert not (second - first) & third
    assert target.read().num_rows == 19
    assert kind(tmp_path).read().sort_by("_key").equals(target.read().sort_by("_key"))


@pytest.mark.parametrize("kind", FORMATS)
def test_many_files_of_a_part_are_put_together(kind: Callable[[Path], TableTarget], tmp_path: Path) -> None:
    target = kind(tmp_path)
    for n in range(30):
        target.commit(work([row(0, n, "mutation", b"k%d" % n, b"{}")], n))
        assert len(target._files) <= FILES_MAX
    assert target.read().num_rows == 30
    assert kind(tmp_path).progress() == TargetProgress("q", 29, {})


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_key_in_two_vbuckets_is_two_rows(kind: Callable[[Path], TableTarget], tmp_path: Path) -> None:
    target = kind(tmp_path)
    target.commit(work([row(0, 1, "mutation", b"k", b"x"), row(1, 1, "mutation", b"k", b"y")], 0))
    target.commit(work([row(1, 2, "expiration", b"k", None)], 1))
    assert contents(target) == {(0, b"k"): b"x"}
    target.commit(work([], None, cleared=frozenset({0})))
    assert contents(kind(tmp_path)) == {}


@pytest.mark.parametrize("kind", FORMATS)
def test_an_exchange_that_was_not_finished_leaves_nothing(
    kind: Callable[[Path], TableTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = kind(tmp_path)
    target.commit(work([row(0, 1, "mutation", b"k", b"x")], 0))

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(target, "_exchange_files", fail)
        with pytest.raises(OSError, match="no space"):
            target.commit(work([row(0, 2, "mutation", b"k", b"y")], 1))
    again = kind(tmp_path)
    assert contents(again) == {(0, b"k"): b"x"}
    assert again.progress().number == 0
    again.commit(work([row(0, 2, "mutation", b"k", b"y")], 1))
    assert contents(kind(tmp_path)) == {(0, b"k"): b"y"}


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_that_come_later_are_null_before(kind: Callable[[Path], TableTarget], tmp_path: Path) -> None:
    target = kind(tmp_path)
    target.commit(work([row(0, 1, "mutation", b"a", b'{"x": 1}')], 0))
    target.commit(work([row(0, 2, "mutation", b"b", b'{"y": [1, 2]}')], 1))
    held = kind(tmp_path).read().sort_by("_key")
    assert held.select(["x", "y", "_raw"]).to_pylist() == [
        {"x": 1, "y": None, "_raw": None},
        {"x": None, "y": "[1,2]", "_raw": None},
    ]
    assert isinstance(held, pa.Table)
