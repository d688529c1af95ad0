"""How fast batches of changes become tables and indexes.

    python -m bench.targets [--rows N]

One batch of new documents, then one in which a tenth of them changes, into each target, without Spark and without a
node; beside them the same rows as one plain Parquet file, and as a `MERGE` of delta-rs. Ratios are to the
plain file.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from upriver.pipelines.apply.applying import latest
from upriver.pipelines.targets.search.sqlite_index import SqliteIndex
from upriver.pipelines.targets.tables.delta import Delta
from upriver.pipelines.targets.tables.parquet import ParquetTable
from upriver.pipelines.targets.target import Target, Work
from upriver.spark.rows import FIELDS

SCHEMA = pa.schema([pa.field(name, kind) for name, kind in FIELDS.items()])
VBUCKETS = 1024


def batch(numbers: range, first_seqno: int) -> pa.Table:
    """Changes of documents with five fields, in 1,024 vbuckets."""
    rows = [
        {
            "vbucket": n * 31 % VBUCKETS, "seqno": first_seqno + place, "rev_seqno": 1, "cas": first_seqno + place,
            "event": "mutation", "key": b"document:%08d" % n, "flags": 0, "expiry": 0, "lock_time": 0, "datatype": 1,
            "value": b'{"name":"document %d","price":%d.5,"stock":%d,"open":true,"tags":["a","b"]}' % (n, n % 100, n),
            "vbucket_uuid": 1, "branch": 0, "snapshot_start": 0, "snapshot_end": 0,
        }
        for place, n in enumerate(numbers)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, SCHEMA)


@contextmanager
def directory() -> Iterator[Path]:
    """A directory for one round."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def measure(make: Callable[[Path], Target], batches: list[pa.Table]) -> list[float]:
    """Seconds for each batch."""
    with directory() as path:
        target = make(path)
        spent = []
        for number, rows in enumerate(batches):
            started = time.perf_counter()
            target.commit(Work(query="q", number=number, rows=latest(rows)))
            spent.append(time.perf_counter() - started)
        target.close()
        return spent


def merged(batches: list[pa.Table]) -> list[float]:
    """The same through the MERGE of delta-rs, without columns from JSON."""
    with directory() as path:
        spent = []
        for number, rows in enumerate(batches):
            started = time.perf_counter()
            if not number:
                write_deltalake(str(path), rows)
            else:
                merge = DeltaTable(str(path)).merge(rows, "t.key = s.key", source_alias="s", target_alias="t")
                merge.when_matched_update_all().when_not_matched_insert_all().execute()
            spent.append(time.perf_counter() - started)
        return spent


def plain(rows: pa.Table) -> float:
    """Seconds for one plain file."""
    with directory() as path:
        started = time.perf_counter()
        pq.write_table(rows, path / "plain.parquet", compression="zstd", compression_level=1)
        return time.perf_counter() - started


def main() -> None:
    """Print rows/s and the ratio to a plain file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    batches = [batch(range(rows), 1), batch(range(0, rows, 10), rows + 1)]
    limit = rows / plain(batches[0])
    print(f"plain Parquet file: {limit:,.0f} rows/s")
    kinds: dict[str, Callable[[], list[float]]] = {
        "Delta": lambda: measure(Delta, batches),
        "Parquet": lambda: measure(ParquetTable, batches),
        "SQLite FTS5": lambda: measure(lambda path: SqliteIndex(path / "index.db"), batches),
        "MERGE of delta-rs": lambda: merged(batches),
    }
    for name, spent in kinds.items():
        new, changed = (table.num_rows / seconds for table, seconds in zip(batches, spent(), strict=True))
        print(f"{name}: new {new:,.0f} rows/s ({new / limit:.2f}), a tenth changed {changed:,.0f} rows/s")


if __name__ == "__main__":
    main()
