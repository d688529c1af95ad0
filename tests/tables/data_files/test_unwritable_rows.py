"""Which rows a writer fails on."""

import pyarrow as pa
import pytest

from tests.support.table_parts import number, rows_of
from upriver.tables.data_files.unwritable_rows import change_ids, find_unwritable

ROWS = rows_of([(n % 4, b"k%d" % n, number(n)) for n in range(50)])


@pytest.mark.parametrize("bad", [[], [0], [49], [3, 4, 30], list(range(50))])
def test_exactly_the_rows_at_fault_are_found(bad: list[int]) -> None:
    tried: list[int] = []

    def write(rows: pa.RecordBatch) -> None:
        tried.append(rows.num_rows)
        found = {b"k%d" % n for n in bad} & set(rows.column("key").to_pylist())
        if found:
            raise ValueError(f"cannot write {len(found)}")

    found = find_unwritable([ROWS.slice(0, 20), ROWS.slice(20)], write)
    assert found == {(n % 4, b"k%d" % n, n + 1): "ValueError: cannot write 1" for n in bad}
    assert len(tried) <= 2 + 14 * len(bad)


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_fault_of_the_machine_is_not_the_rows(error: type[Exception]) -> None:
    def write(_: pa.RecordBatch) -> None:
        raise error

    with pytest.raises(error):
        find_unwritable([ROWS], write)


def test_a_change_has_an_identity() -> None:
    assert change_ids(ROWS.slice(5, 2)) == [(1, b"k5", 6), (2, b"k6", 7)]
