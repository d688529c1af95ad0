"""``upriver run mirror`` beside a writer, while Spark with Delta changes the same table."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from tests.support.delta_spark import DeltaSpark, delta_spark, named
from tests.support.mirror_comparison import mirror_differences
from tests.support.mirror_process import MirrorProcess
from tests.support.sample_tables import assert_all_see
from tests.support.spark_processes import settings_variable
from tests.support.spark_tables import contents_at
from tests.support.steady_writer import SteadyWriter
from upriver.node import EmbeddedNode
from upriver.tables import Table, TableStorage

__all__ = ["delta_spark"]

pytestmark = [pytest.mark.spark, pytest.mark.delta, pytest.mark.slow, pytest.mark.timeout(1800)]
STATEMENTS = (
    "INSERT INTO {0} SELECT * FROM {0} WHERE _vbucket = 3",
    "OPTIMIZE {0}",
    "DELETE FROM {0} WHERE _vbucket < 4 AND n % 2 = 0",
    "UPDATE {0} SET n = -1 WHERE _vbucket = 5",
    "REORG TABLE {0} APPLY (PURGE)",
    "RESTORE TABLE {0} TO VERSION AS OF {1}",
)


@pytest.mark.upriver(vbuckets=16)
def test_a_table_that_another_program_changes_all_the_time(
    upriver_node: EmbeddedNode, delta_spark: DeltaSpark, tmp_path: Path
) -> None:
    address, table = upriver_node.address, tmp_path / "table"
    arguments = ["--from", address, "--to", str(table), "--master", "local[2]", "--max-rows", "500"]
    storage = TableStorage.of(table)
    statements = list(STATEMENTS)
    random.Random(1).shuffle(statements)
    with (
        SteadyWriter(address, keys=1000, changes_per_s=200) as writer,
        MirrorProcess(tmp_path / "run", *arguments, **settings_variable()) as mirror,
    ):
        mirror.wait(lambda: mirror.batches >= 3, "three batches")
        delta_spark.sql(f"ALTER TABLE {named(table)} ADD COLUMN theirs DATE")
        first = Table.open(storage).snapshot.version
        for statement in statements:
            before = mirror.batches
            text = statement.format(named(table), max(first, Table.open(storage).snapshot.version - 2))
            try:
                delta_spark.sql(text, attempts=5)
            except AssertionError as error:  # Delta gives up where the mirror adds rows faster than it can commit
                if "CONCURRENT" not in str(error).upper():
                    raise
                writer.pause()
                mirror.wait(lambda: mirror.has_caught_up(address), "all changes")
                delta_spark.sql(text)
                writer.resume()
            mirror.wait(lambda before=before: mirror.batches > before, "a batch")  # type: ignore[misc]
        writer.pause()
        delta_spark.sql(f"DELETE FROM {named(table)} WHERE _vbucket = 7")  # repaired without a batch
        mirror.wait(lambda: mirror.has_caught_up(address), "all changes")
        mirror.wait(lambda: mirror_differences(table, address) == [], "table and node to agree")
        delta_spark.sql(f"VACUUM {named(table)} RETAIN 0 HOURS")
        mirror.stop()
    assert mirror_differences(table, address) == []
    expected = [(int(key[1:]), json.loads(value)["n"]) for key, value in contents_at(address).items()]
    assert_all_see(storage, expected)
    rows = delta_spark.sql(f"SELECT _key, n FROM {named(table)}")
    assert sorted((int(key[1:]), n) for key, n in rows) == sorted(expected)
