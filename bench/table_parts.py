"""What one task of a table pipeline can do in one process: write a part, find keys, build an index again, merge files.

    python -m bench.table_parts [--rows N] [--rounds N]

Writing includes parsing the documents, hashing the keys, Parquet with zstd, sidecars, the key list and all syncs. Rates
are given by elapsed time and by processor time, because machines are shared; the best of several rounds counts. The
reference is pyarrow, which writes the same columns, already parsed, with the same settings.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.documents import LARGE, SMALL, large, small
from upriver.tables import KeyIndex, PartResult, PartWriter, TableSchema, TableStorage, locate, merge
from upriver.tables.key_index import hash_keys, sidecar_path
from upriver.tables.keys.entries import CODEC, sort_entries

SEED = bytes(range(16))
VBUCKETS = 1024
BATCH_ROWS = 8192


class Timed(NamedTuple):
    """The best times of a piece of work, in seconds."""

    elapsed: float
    processor: float


def timed(rounds: int, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Timed:
    elapsed, processor = [], []
    for _ in range(rounds):
        prepare()
        start, used = time.perf_counter(), time.process_time()
        work()
        elapsed.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return Timed(min(elapsed), min(processor))


def changes(documents: list[bytes]) -> list[pa.RecordBatch]:
    rows = len(documents)
    numbers = np.arange(rows)
    table = pa.table(
        {
            "vbucket": pa.array(numbers % VBUCKETS, pa.int32()),
            "seqno": pa.array(numbers // VBUCKETS + 1, pa.int64()),
            "rev_seqno": pa.array(np.ones(rows), pa.int64()),
            "cas": pa.array(1_700_000_000_000_000_000 + numbers * 10_007, pa.int64()),
            "event": pa.array(["mutation"] * rows),
            "key": pa.array([b"key:%012d" % number for number in range(rows)]),
            "value": pa.array(documents),
            "flags": pa.array(np.zeros(rows), pa.int64()),
            "expiry": pa.array(np.zeros(rows), pa.int64()),
            "datatype": pa.array(np.ones(rows), pa.int32()),
        }
    )
    return list(table.to_batches(max_chunksize=BATCH_ROWS))


class Bench:
    """One set of documents in one directory."""

    def __init__(self, folder: Path, name: str, schema: TableSchema, documents: list[bytes], rounds: int) -> None:
        self._folder, self._name, self._schema, self._rounds = folder, name, schema, rounds
        self._batches, self._rows = changes(documents), len(documents)
        self._size = sum(map(len, documents)) // len(documents)
        self._numbers = iter(range(10**6))
        self.storage = TableStorage.of(folder)
        self.result: PartResult | None = None

    def write(self) -> None:
        """Write a part."""
        with PartWriter(self.storage, self._schema, SEED, attempt=f"{self._name}{next(self._numbers)}") as writer:
            for rows in self._batches:
                writer.add(rows)
            self.result = writer.finish()

    def writing(self) -> Iterator[str]:
        self.write()
        written = timed(self._rounds, self.write)
        assert self.result is not None
        parsed = pa.concat_tables([pq.read_table(self._folder / file.path) for file in self.result.files])
        plain = timed(
            self._rounds,
            lambda: pq.write_table(
                parsed, self._folder / "plain", compression="zstd", compression_level=1, use_dictionary=False
            ),
        )
        yield (
            f"part of {self._rows:,} documents of {self._size:,} bytes: {self._rate(written)}; "
            f"{plain.processor / written.processor:.2f} of pyarrow writing the parsed columns"
        )
        data = sum(file.size for file in self.result.files)
        others = sum(self.storage.size(sidecar_path(file.path)) for file in self.result.files)
        others += self.storage.size(self.result.keys)
        yield f"  bytes per row: data {data / self._rows:.1f}, indexes and key list {others / self._rows:.1f}"

    def merging(self) -> Iterator[str]:
        assert self.result is not None
        files = [file.add(0) for file in self.result.files]

        def work() -> None:
            path = f"merged{next(self._numbers)}.parquet"
            merge(self.storage, files, self._schema, SEED, path=path, cache=self._folder)

        yield f"merging {len(files)} files: {self._rate(timed(self._rounds, work))}"

    def finding(self) -> Iterator[str]:
        """Lookups in the index of one file with all rows."""
        assert self.result is not None
        files = [file.add(0) for file in self.result.files]
        path = "one.parquet"
        merge(self.storage, files, self._schema, SEED, path=path, cache=self._folder)
        keys = pa.concat_arrays([rows.column("key") for rows in self._batches])
        vbuckets = (np.arange(self._rows) % VBUCKETS).astype(np.uint16)
        yield f"hashing keys: {self._rate(timed(self._rounds, lambda: hash_keys(SEED, vbuckets, keys)))}"
        hashes = hash_keys(SEED, vbuckets, keys)
        for count in (100, 10_000, 100_000):
            chosen = np.random.default_rng(count).choice(self._rows, min(count, self._rows), replace=False)
            wanted = sort_entries(hashes[chosen])

            def find(wanted: np.ndarray = wanted) -> None:
                found = KeyIndex.open(self.storage, path, SEED, self._folder).find(wanted)
                assert len(found[0]) == len(wanted)

            found = timed(self._rounds, find)
            yield f"opening an index of {self._rows:,} rows and finding {len(wanted):,}: {found.elapsed * 1000:.2f} ms"
        rebuilt = timed(
            self._rounds,
            lambda: KeyIndex.open(self.storage, path, SEED, self._folder),
            lambda: self.storage.delete([sidecar_path(path)]),
        )
        yield f"building the index again: {self._rate(rebuilt)}"
        keys_path = self.result.keys
        whole = timed(self._rounds, lambda: locate(self.storage, files, keys_path, (), self._folder))
        yield f"locating every row: {self._rate(whole)}"

    def _rate(self, found: Timed) -> str:
        elapsed, processor = (self._rows / seconds / 1000 for seconds in found)
        return f"{elapsed:,.0f} k rows/s, {processor:,.0f} k per second of a processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="upriver-bench-"))
    print(f"loops over keys: {CODEC}")
    try:
        documents = [json.dumps(large(number)).encode() for number in range(options.rows // 20)]
        bench = Bench(folder, "large", TableSchema(LARGE), documents, options.rounds)
        for line in (*bench.writing(), *bench.merging()):
            print(line, flush=True)
        documents = [json.dumps(small(number), separators=(",", ":")).encode() for number in range(options.rows)]
        bench = Bench(folder, "small", TableSchema(SMALL), documents, options.rounds)
        for line in (*bench.writing(), *bench.merging(), *bench.finding()):
            print(line, flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"peak memory, with all rows of the benchmark: {peak} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
