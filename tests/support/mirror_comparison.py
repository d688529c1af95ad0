"""Compare a mirror's table with its node."""

from collections.abc import Mapping
from pathlib import Path

from upriver.model import Difference
from upriver.pipelines.core.workers import LocalWorkers
from upriver.pipelines.targets.tables.verification import table_differences
from upriver.spark import ReadOptions
from upriver.tables import Table, TableStorage


def mirror_differences(
    path: Path | str, address: str, storage_options: Mapping[str, str] | None = None
) -> list[Difference]:
    """What the table holds differently from the node."""
    table = Table.open(TableStorage.of(path, storage_options))
    return list(table_differences(table, ReadOptions.read({"address": address}), LocalWorkers()))
