"""How close the columnar codec comes to copying the same bytes.

    python -m bench.columns [--rows N] [--rounds N]

Every figure is the best of several rounds; the ratios compare rounds that alternate in one run.
"""

import argparse
import os
import time
from collections.abc import Callable

import pyarrow as pa

from upriver.model import CHANGES, Event
from upriver.wire import dcp
from upriver.wire.codec import columns, plain_columns
from upriver.wire.codec.columns import ChangeBatch, ChangeDecoder, ChangeEncoder

#: Bytes of one read from a socket.
RECEIVE_BYTES = 256 * 1024
VALUE_BYTES = 127  # with a 16-byte key a mutation of 198 bytes


def batch_of(rows: int) -> pa.RecordBatch:
    value = os.urandom(VALUE_BYTES)
    cells = {
        "vbucket": [3] * rows,
        "event": [int(Event.MUTATION)] * rows,
        "seqno": range(1, rows + 1),
        "rev_seqno": [1] * rows,
        "cas": range(rows),
        "key": [b"key:%012d" % n for n in range(rows)],
        "value": [value] * rows,
    }
    arrays = [pa.array(cells.get(field.name, [0] * rows), field.type) for field in CHANGES]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)


def decode_all(data: memoryview, codec: object) -> int:
    decoder, rows = ChangeDecoder(dcp.dcp, codec=codec), 0  # type: ignore[arg-type]
    for start in range(0, len(data), RECEIVE_BYTES):
        decoder.feed(data[start : start + RECEIVE_BYTES])
        for item in decoder:
            assert isinstance(item, ChangeBatch)
            rows += len(item)
    return rows


def alternate(rounds: int, **works: Callable[[], object]) -> dict[str, float]:
    """The best time of each piece of work, measured in turns so that noise affects all of them."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows: int = options.rows
    batch, small = batch_of(rows), batch_of(rows // 20)
    encoder = ChangeEncoder(dcp.dcp, opaque=1, vbucket=3)
    plain_encoder = ChangeEncoder(dcp.dcp, opaque=1, vbucket=3, codec=plain_columns)
    data = memoryview(bytes(encoder.encode(batch)))
    small_data = data[: len(data) // 20]
    target = memoryview(bytearray(len(data)))

    def copy() -> None:
        target[:] = data

    best = alternate(
        options.rounds,
        copy=copy,
        decode=lambda: decode_all(data, columns._codec),
        encode=lambda: encoder.encode(batch),
    )
    plain = alternate(
        3,
        decode=lambda: decode_all(small_data, plain_columns),
        encode=lambda: plain_encoder.encode(small),
    )
    print(f"codec: {columns.CODEC}; {rows:,} mutations of {len(data) // rows} bytes, {RECEIVE_BYTES >> 10} KiB a read")
    print(f"copying the buffer once     {len(data) / best['copy'] / 1e9:7.2f} GB/s")
    for name in ("decode", "encode"):
        speed, plain_speed = rows / best[name] / 1e6, rows / 20 / plain[name] / 1e6
        print(
            f"{name}  {speed:7.2f} M/s  {len(data) / best[name] / 1e9:6.2f} GB/s"
            f"  {best['copy'] / best[name]:5.2f} of copying  {speed / plain_speed:6.0f} x the plain codec"
        )


if __name__ == "__main__":
    main()
