"""What ``upriver table show`` knows about a table."""

import time
from pathlib import Path

from tests.support.table_parts import PartTable, number
from upriver.pipelines.targets.tables.description import describe_table
from upriver.tables import Edit, Table, TableStorage


def test_a_table_is_described_without_reading_its_data(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add([(0, b"a", number(1)), (1, b"b", number(2))])
    table.add([(0, b"a", number(3))])
    table.table.commit(
        Edit(
            "BATCH",
            properties={
                "upriver.query": "q",
                "upriver.bucket": "uuid",
                "upriver.ahead": '{"3": [1, 2, 3, 4]}',
                "upriver.due": "[2, 1]",
            },
            txn=("upriver-q", 4),
        )
    )
    for path in table.storage.list():
        if path.path.endswith(".parquet"):
            table.storage.delete([path.path])
    found = describe_table(Table.open(table.storage))
    assert (found.path, found.kind, found.version) == (table.storage.url, "latest state", 3)
    assert (found.rows, found.dead_rows, found.files, found.deletion_vectors) == (2, 1, 2, True)
    assert found.size == sum(file.size for file in table.table.snapshot.files.values())
    assert (found.query, found.bucket, found.last_batch) == ("q", "uuid", 4)
    assert (found.reads_ahead, found.foreign_changes) == ([3], [1, 2])
    assert list(found.columns.items())[-1] == ("n", "long")
    assert (found.log_files, found.log_size > 0) == (4, True)
    assert abs(found.changed_s - time.time()) < 600


def test_columns_of_other_programs_are_shown(tmp_path: Path) -> None:
    class Foreign:
        def delta(self) -> str:
            return (
                '{"type": "struct", "fields": [{"name": "a", "type": {"type": "array", "elementType": "long"}}, '
                '{"name": "b", "type": "string", "metadata": {"upriver": "json"}}]}'
            )

    found = describe_table(Table.create(TableStorage.of(tmp_path), Foreign(), {"upriver.history": "true"}))
    assert (found.kind, found.columns) == ("history", {"a": "array", "b": "json"})
    assert (found.query, found.bucket, found.last_batch, found.rows) == (None, None, None, 0)
    assert found.reads_ahead == []
