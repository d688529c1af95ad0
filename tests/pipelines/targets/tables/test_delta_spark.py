"""Spark with Delta beside a mirror: it reads our tables, it writes to them, and users switch features on with it.

The nodes are modelled; table, tasks and commits are real. The environment of Spark with Delta is made by
``make delta-environment``.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.delta_spark import DeltaSpark, delta_spark, named
from tests.support.table_model import TableRun
from upriver.errors import UnsupportedTable
from upriver.pipelines.core.workers import LocalWorkers
from upriver.tables import Table, read

__all__ = ["delta_spark"]

pytestmark = [pytest.mark.spark, pytest.mark.delta, pytest.mark.slow, pytest.mark.timeout(900)]
VBUCKETS = 3
KEYS = [f"k{number}" for number in range(40)]


class Mirrored(TableRun):
    """A mirror whose table another program writes to, between batches or while one runs."""

    happens: Callable[[], object] | None = None

    def meanwhile(self) -> None:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()

    def write(self, seed: int) -> None:
        """Change some documents, and delete some."""
        choose = random.Random(seed)
        for number in range(VBUCKETS):
            for key in choose.sample(KEYS, 15):
                gone = choose.random() < 0.2
                value = choose.randrange(1000)
                self.cluster.put(number, key, None if gone else b'{"n": %d, "text": "t%d"}' % (value, value))

    @property
    def name(self) -> str:
        return named(self.table.url)


@pytest.fixture
def mirrored(tmp_path: Path, delta_spark: DeltaSpark) -> Callable[..., Mirrored]:
    """A mirror with some batches, so that some of its files have vectors."""

    def make(**settings: Any) -> Mirrored:
        run = Mirrored(tmp_path, is_quiet=True, vbuckets=VBUCKETS, **settings)
        for seed in range(4):
            run.write(seed)
            run.catch_up()
        return run

    return make


def assert_spark_agrees(delta_spark: DeltaSpark, run: TableRun) -> None:
    ours = read(run.table.url)
    theirs = delta_spark.read(run.table.url).cast(ours.schema)
    order = [("_vbucket", "ascending"), ("_key", "ascending"), ("_raw_key", "ascending")]
    assert theirs.sort_by(order).equals(ours.sort_by(order))


# Reading


@pytest.mark.parametrize("vectors", [True, False])
def test_it_reads_what_we_read(delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored], vectors: bool) -> None:
    run = mirrored(vectors=vectors)
    has_vectors = any(file.deletion_vector for file in Table.open(run.table).snapshot.files.values())
    assert has_vectors == vectors
    run.check()
    assert_spark_agrees(delta_spark, run)
    run.compact(LocalWorkers())
    assert_spark_agrees(delta_spark, run)
    run.cluster.put(0, "k0", b'{"n": 1.5, "more": [1]}')  # a column becomes wider
    run.catch_up()
    for seed in range(10, 25):  # beyond a log checkpoint
        run.write(seed)
        run.catch_up()
    assert Table.open(run.table).snapshot.checkpoint > 0
    run.check()
    assert_spark_agrees(delta_spark, run)


def test_it_reads_documents_and_keys_of_all_kinds(delta_spark: DeltaSpark, tmp_path: Path) -> None:
    run = TableRun(tmp_path, 5, exact=True)
    run.run(batches=8)
    run.check()
    assert_spark_agrees(delta_spark, run)


# Writing

STATEMENTS = {
    "append": "INSERT INTO {0} SELECT * FROM {0} WHERE _vbucket = 0",
    "append a new key": "INSERT INTO {0} (_key, _vbucket, _seqno, _raw) VALUES ('foreign', 1, 5, X'00')",
    "append without a vbucket": "INSERT INTO {0} (_key, _raw) VALUES ('foreign', X'00')",
    "optimize": "OPTIMIZE {0}",
    "purge": "REORG TABLE {0} APPLY (PURGE)",
    "delete": "DELETE FROM {0} WHERE _vbucket = 1 AND n > 300",
    "delete a vbucket": "DELETE FROM {0} WHERE _vbucket = 2",
    "delete all": "DELETE FROM {0}",
    "update": "UPDATE {0} SET n = 5000 WHERE n < 500",
    "merge": "MERGE INTO {0} t USING (SELECT 'k1' AS k) s ON t._key = s.k WHEN MATCHED THEN UPDATE SET n = 0",
    "column": "ALTER TABLE {0} ADD COLUMN theirs DATE",
    "property": "ALTER TABLE {0} SET TBLPROPERTIES ('theirs' = 'x')",
    "comment": "COMMENT ON TABLE {0} IS 'theirs'",
    "restore": "RESTORE TABLE {0} TO VERSION AS OF {1}",
    "vacuum": "VACUUM {0} RETAIN 0 HOURS",
}


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "copies"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_what_it_changes_between_batches_is_repaired(
    delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored], name: str, vectors: bool
) -> None:
    run = mirrored(vectors=vectors)
    version = Table.open(run.table).snapshot.version
    delta_spark.sql(STATEMENTS[name].format(run.name, version - 1))
    for seed in (20, 21):
        run.write(seed)
        run.catch_up()
        run.keeper.look(LocalWorkers())
        run.check()
    assert_spark_agrees(delta_spark, run)
    if name == "column":
        assert "theirs" in read(run.table.url).column_names


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "copies"])
@pytest.mark.parametrize("name", [name for name in STATEMENTS if name != "vacuum"])
def test_what_it_changes_during_a_batch_is_repaired(
    delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored], name: str, vectors: bool
) -> None:
    run = mirrored(vectors=vectors)
    version = Table.open(run.table).snapshot.version
    run.write(20)
    run.happens = lambda: delta_spark.sql(STATEMENTS[name].format(run.name, version - 1))
    run.catch_up()
    assert run.happens is None
    run.write(21)
    run.catch_up()
    run.keeper.plan(2**62, LocalWorkers())
    run.check()
    assert_spark_agrees(delta_spark, run)


def test_everything_it_does_one_after_the_other(delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored]) -> None:
    run = mirrored()
    names = [name for name in STATEMENTS if name != "column"] * 2
    random.Random(7).shuffle(names)
    delta_spark.sql(STATEMENTS["column"].format(run.name))
    for seed, name in enumerate(names, 30):
        version = Table.open(run.table).snapshot.version
        statement = STATEMENTS[name].format(run.name, max(5, version - 3))
        if seed % 3 or name == "vacuum":
            delta_spark.sql(statement)
        else:
            run.happens = lambda statement=statement: delta_spark.sql(statement)
        if seed % 4 == 0:
            run.compact(LocalWorkers())
        run.write(seed)
        run.catch_up()
        run.keeper.plan(2**62, LocalWorkers())
        run.check()
    assert_spark_agrees(delta_spark, run)


def test_a_restore_of_the_time_before_a_running_mirror(
    delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored]
) -> None:
    """The mirror does not run while the table goes back several batches."""
    run = mirrored()
    version = Table.open(run.table).snapshot.version
    run._keeper = None
    delta_spark.sql(STATEMENTS["restore"].format(run.name, version - 2))
    run.start()
    run.write(20)
    run.catch_up()
    run.check()


# Features


@pytest.mark.parametrize(
    ("properties", "named_as"),
    [
        ("'delta.enableRowTracking' = 'true'", "rowTracking"),
        ("'delta.enableChangeDataFeed' = 'true'", "delta.enableChangeDataFeed"),
        ("'delta.columnMapping.mode' = 'name'", "delta.columnMapping.mode"),
        ("'delta.enableInCommitTimestamps' = 'true'", "inCommitTimestamp"),
        ("'delta.appendOnly' = 'true'", "delta.appendOnly"),
        ("'delta.enableTypeWidening' = 'true'", "typeWidening"),
        ("'delta.checkpointPolicy' = 'v2'", "v2Checkpoint"),
    ],
)
@pytest.mark.parametrize("running", [True, False], ids=["running", "started"])
def test_features_that_bind_writers_are_refused_by_name(
    delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored], properties: str, named_as: str, running: bool
) -> None:
    run = mirrored()
    before = read(run.table.url)
    delta_spark.sql(f"ALTER TABLE {run.name} SET TBLPROPERTIES ({properties})")
    if not running:
        run._keeper = None
    run.write(20)
    with pytest.raises(UnsupportedTable, match=named_as):
        run.catch_up()
    rows = delta_spark.read(run.table.url).num_rows
    assert rows == before.num_rows


def test_a_feature_that_is_switched_off_again_is_forgiven(
    delta_spark: DeltaSpark, mirrored: Callable[..., Mirrored]
) -> None:
    run = mirrored()
    for value in ("true", "false"):
        delta_spark.sql(f"ALTER TABLE {run.name} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = '{value}')")
    run.write(20)
    run.catch_up()
    run.check()
    assert pa.types.is_integer(read(run.table.url).schema.field("n").type)
    assert_spark_agrees(delta_spark, run)
