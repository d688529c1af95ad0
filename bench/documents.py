"""How fast readers turn JSON documents in an Arrow array into columns: ours and the libraries that could replace it.

    python -m bench.documents [--rows N] [--rounds N]

Every reader gets the same Arrow array of documents and returns Arrow columns of the same fields, the nested one as JSON
text where the reader can do that. Only ours also decides for each row whether the columns represent it completely, and
survives an invalid document. Readers that are not installed are left out. Figures are per second of processor time,
because a machine in use treats short and long rounds differently; each is the best of several rounds, which alternate
in one run.
"""

import argparse
import io
import json
import random
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from upriver.tables.documents import CODEC, parse, plain_parsing
from upriver.tables.schema import Column

Reader = Callable[[pa.Array], object]

SMALL = [
    Column("id", "int"), Column("name", "text"), Column("email", "text"), Column("age", "int"),
    Column("balance", "float"), Column("active", "bool"), Column("city", "text"), Column("rating", "float"),
    Column("joined", "text"), Column("tags", "json"),
]  # fmt: skip
LARGE = [*SMALL, Column("body", "text"), Column("orders", "json")]
WORDS = [
    "river", "stream", "bucket", "change", "table", "column", "order", "cloud", "stone", "bridge",
    "valley", "harbour", "ocean", "market", "garden",
]  # fmt: skip
#: Nested fields, for readers that must know their inside.
TAGS = pa.list_(pa.string())
ORDERS = pa.list_(pa.struct({"order": pa.int64(), "item": pa.string(), "price": pa.float64(), "paid": pa.bool_()}))


def small(n: int) -> dict[str, Any]:
    """A document of about 190 bytes."""
    draw = random.Random(n)
    return {
        "id": n,
        "name": " ".join(draw.choices(WORDS, k=2)),
        "email": f"{draw.choice(WORDS)}.{n}@example.com",
        "age": draw.randrange(18, 99),
        "balance": round(draw.uniform(-500, 9000), 2),
        "active": draw.random() < 0.5,
        "city": draw.choice(WORDS).title(),
        "rating": round(draw.uniform(0, 5), 3),
        "joined": f"2026-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}",
        "tags": draw.choices(WORDS, k=3),
    }


def large(n: int) -> dict[str, Any]:
    """A document of about 6 KB: half of it text, half of it nested."""
    draw = random.Random(n)
    orders = [
        {
            "order": draw.randrange(10**9),
            "item": draw.choice(WORDS),
            "price": round(draw.uniform(1, 99), 2),
            "paid": True,
        }
        for _ in range(45)
    ]
    return {**small(n), "body": " ".join(draw.choices(WORDS, k=430)), "orders": orders}


def array_of(documents: list[dict[str, Any]]) -> pa.Array:
    return pa.array([json.dumps(document, separators=(",", ":")).encode() for document in documents], pa.binary())


def with_pyarrow(columns: list[Column]) -> Reader:
    """Needs the inside of nested fields, and fails on the first document that is invalid or has another type."""
    types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
    nested = {"tags": TAGS, "orders": ORDERS}
    schema = pa.schema([(column.name, nested.get(column.name) or types[column.kind]) for column in columns])
    options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def read(values: pa.Array) -> object:
        lines = io.BytesIO(b"\n".join(values.to_pylist()))
        return pa_json.read_json(lines, pa_json.ReadOptions(use_threads=False, block_size=16 << 20), options)

    return read


def with_objects(columns: list[Column], cells: Callable[[bytes], list[Any]]) -> Reader:
    """Python objects of each document, and columns of them."""
    types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "json": pa.string(), "bool": pa.bool_()}

    def read(values: pa.Array) -> object:
        rows = [cells(value) for value in values.to_pylist()]
        return [pa.array(cell, types[kind]) for (_, kind), cell in zip(columns, zip(*rows, strict=True), strict=True)]

    return read


def with_orjson(columns: list[Column]) -> Reader:
    orjson = import_module("orjson")
    loads, dumps = orjson.loads, orjson.dumps

    def cells(value: bytes) -> list[Any]:
        document = loads(value)
        return [dumps(document[name]) if kind == "json" else document.get(name) for name, kind in columns]

    return with_objects(columns, cells)


def with_msgspec(columns: list[Column]) -> Reader:
    """A typed decoder, the fastest way of the library; a document of another type fails."""
    msgspec = import_module("msgspec")
    types = {"int": int, "float": float, "text": str, "bool": bool, "json": msgspec.Raw}
    document_type = msgspec.defstruct("Document", [(name, types[kind]) for name, kind in columns], gc=False)
    decode = msgspec.json.Decoder(document_type).decode

    def cells(value: bytes) -> list[Any]:
        document = decode(value)
        return [bytes(getattr(document, name)) if kind == "json" else getattr(document, name) for name, kind in columns]

    return with_objects(columns, cells)


def with_simdjson(columns: list[Column]) -> Reader:
    parser = import_module("simdjson").Parser()

    def cells(value: bytes) -> list[Any]:
        document = parser.parse(value)
        return [document[name].mini if kind == "json" else document[name] for name, kind in columns]

    return with_objects(columns, cells)


READERS: dict[str, Callable[[list[Column]], Reader]] = {
    "pyarrow.json": with_pyarrow,
    "orjson": with_orjson,
    "msgspec": with_msgspec,
    "pysimdjson": with_simdjson,
}


def readers(columns: list[Column]) -> dict[str, Reader]:
    found: dict[str, Reader] = {CODEC: lambda values: parse(values, columns)}
    for name, make in READERS.items():
        try:
            found[name] = make(columns)
        except ImportError:
            print(f"{name} is not installed")
    return found


def alternate(rounds: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least processor time of each piece of work."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - start)
    return best


def measure(title: str, values: pa.Array, columns: list[Column], rounds: int) -> None:
    rows, size = len(values), pc.sum(pc.binary_length(values)).as_py()
    best = alternate(rounds, {name: partial(read, values) for name, read in readers(columns).items()})
    tenth = values.slice(0, rows // 10)
    best["plain"] = 10 * alternate(2, {"": lambda: plain_parsing.parse_columns(tenth, columns)})[""]
    print(f"\n{title}: {rows:,} documents of {size // rows} bytes, {len(columns)} fields")
    for name, seconds in best.items():
        print(
            f"{name:13} {rows / seconds / 1e6:7.3f} M documents/s {size / seconds / 1e6:7.0f} MB/s"
            f" {seconds / best[CODEC]:7.1f} x the time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measure("small", array_of([small(n) for n in range(options.rows)]), SMALL, options.rounds)
    measure("large", array_of([large(n) for n in range(options.rows // 20)]), LARGE, options.rounds)


if __name__ == "__main__":
    main()
