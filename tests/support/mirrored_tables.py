"""Tables of what a node holds, made by the code of the mirror without Spark."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from upriver.client import Address
from upriver.pipelines.apply.task_source import NodeTaskSource
from upriver.pipelines.core.workers import LocalWorkers, Workers
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings, TableKeeper
from upriver.pipelines.targets.tables.table_task import COLUMNS
from upriver.spark import Offset, ReadOptions
from upriver.tables import Table, TableStorage


def mirror_now(
    address: str,
    where: Path | str | TableStorage,
    settings: KeeperSettings | None = None,
    workers: Workers | None = None,
    options: Mapping[str, str] | None = None,
) -> Table:
    """Bring a table to what the node holds; ``options`` are those of the source."""
    source = dataclasses.replace(ReadOptions.read(options or {}), address=Address.parse(address))
    nodes = NodeTaskSource(source, COLUMNS)
    try:
        keeper = TableKeeper(
            where if isinstance(where, TableStorage) else TableStorage.of(where),
            partial(NodeTaskSource, source),
            nodes,
            settings or KeeperSettings(),
            query="query",
            bucket=nodes.bucket,
            reached=lambda: Offset({}),
            logged=0,
            end_of=lambda _: Offset(()),
        )
        keeper.rebuild()
        keeper.look(workers or LocalWorkers())
    finally:
        nodes.close()
    return keeper.table
