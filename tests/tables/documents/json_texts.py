"""Strategies for JSON texts, valid and damaged, and arrays of them without room at their end."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from upriver.tables.schema import Column

COLUMNS = [
    Column("flag", "bool"), Column("n", "int"), Column("price", "float"), Column("name", "text"),
    Column("tags", "json"), Column("größe", "int"), Column('quo"te', "int"), Column("sixteen_letters_", "int"),
    Column("a_name_of_more_than_sixteen_bytes", "text"), Column("fifteen_letters", "float"),
]  # fmt: skip
NAMES = [column.name for column in COLUMNS]

numbers = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**19]).flatmap(
        lambda n: st.sampled_from([str(n), str(-n), str(-n - 1), f"{n}.0", f"{n}e0"])
    ),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?\Z"),
    st.sampled_from(["-0", "-0.0", "0e0", "1e400", "-1e400", "1e-400", "5e-324", "2.2250738585072011e-308", "1E22"]),
    st.integers(790, 810).map(lambda n: "0." + "3" * (n - 2)),
)
_ESCAPES = ["\\n", "\\\\", '\\"', "\\/", "\\b\\f\\r\\t", "\\u00e9", "\\u0000", "\\ud83d\\ude00", "\\uD83D\\uDE00"]
_LONE = ["\\ud800", "\\udc00", "\\ud800x", "\\ud800\\ud800", "\\udc00\\ud800", "\\ud800\\u0041", "\\ud800\\n"]
strings = st.lists(
    st.one_of(
        st.text(max_size=20).map(lambda text: json.dumps(text, ensure_ascii=False)[1:-1]),
        st.text(max_size=4).map(lambda text: json.dumps(text)[1:-1]),
        st.sampled_from(["x" * 15, "x" * 16, "y" * 40, "é" * 9, "\x7f", "ÿ", "\U0010ffff"]),
        st.sampled_from(_ESCAPES),
        st.sampled_from(_LONE),
    ),
    max_size=3,
).map(lambda parts: '"' + "".join(parts) + '"')
space = st.sampled_from(["", "", "", "", " ", "\n", "\t\r "])
names = st.one_of(
    st.sampled_from(NAMES).map(lambda name: json.dumps(name, ensure_ascii=False)),
    st.sampled_from(NAMES).map(lambda name: json.dumps(name)),
    st.sampled_from(['"\\u006e"', '"n"', '"n "', '"N"', '""', '"nam"', '"names"', '"sixteen_letters"', '"other"']),
    st.sampled_from(["x" * 255, "x" * 256]).map(lambda name: f'"{name}"'),
    strings,
)


def _joined(opening: str, parts: list[str], closing: str) -> st.SearchStrategy[str]:
    return space.map(lambda gap: opening + gap + f"{gap},{gap}".join(parts) + gap + closing)


def _object(values: st.SearchStrategy[str], size: int) -> st.SearchStrategy[str]:
    pairs = st.tuples(names, space, values).map(lambda pair: f"{pair[0]}{pair[1]}:{pair[1]}{pair[2]}")
    return st.lists(pairs, max_size=size).flatmap(lambda parts: _joined("{", parts, "}"))


def _nested(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arrays = st.lists(values, max_size=4).flatmap(lambda parts: _joined("[", parts, "]"))
    return st.one_of(arrays, _object(values, 3))


values = st.recursive(st.one_of(numbers, strings, st.sampled_from(["true", "false", "null"])), _nested, max_leaves=6)
documents = _object(values, 6).map(lambda text: text.encode(errors="surrogatepass"))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A document with a few bytes changed, removed, repeated or added."""
    data = bytearray(draw(documents))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                del data[place : place + draw(st.integers(1, 3))]
            case 1:
                data[place:place] = draw(st.sampled_from(_INSERTED))
            case 2:
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case 3:
                del data[place:]
            case _:
                data[place:place] = data[place : place + draw(st.integers(1, 8))]
    return bytes(data)


_INSERTED = [
    b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"{", b"}", b"[",
    b"]", b",", b":", b'"', b"\\", b"\\u12", b"\\x", b"-", b"+", b".", b"e", b"0", b"1", b"NaN", b"Infinity", b"tru",
    b"nul", b"\x1f", b"\x0b", b"//", b"'",
]  # fmt: skip
_VALUES = [
    "1", "-1", "0", "1.5", "-0.0", "1e5", "12345678901234567890", "9007199254740993", "1e999", "true", "false", "null",
    '"text"', '""', '"sixteen letters!"', '"a longer text with more than 16"', '"é€😀"', '"\\n\\u00e9"', '"\\ud800"',
    "[]", "{}",
    '[1,"a",{"b":[null]}]', '{"a b": 1 , "c":[ ]}', '"\\ud83d\\ude00"', "[[[]]]",
]  # fmt: skip


def random_bytes(draw: random.Random) -> bytes:
    """Much faster than a strategy: a document, most often with changed, removed, repeated or inserted bytes."""
    names = draw.choices([*NAMES, "other", "x", "größe"], k=draw.randrange(6))
    gap = draw.choice(["", "", " ", "\n"])
    fields = [f"{json.dumps(name)}{gap}:{gap}{draw.choice(_VALUES)}" for name in names]
    data = bytearray(("{" + gap + f"{gap},".join(fields) + "}" + gap).encode())
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                del data[place : place + draw.randrange(1, 4)]
            case 1:
                data[place:place] = draw.choice(_INSERTED)
            case 2:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 3:
                other = draw.randrange(len(data) + 1)
                data[place:place] = data[other : other + draw.randrange(1, 12)]
            case _:
                data[place : place + 1] = bytes([data[place] ^ (1 << draw.randrange(8))]) if place < len(data) else b""
    return bytes(data)


inputs = st.lists(st.one_of(documents, documents, damaged(), st.binary(max_size=12), st.none()), max_size=8)


def exact_array(contents: Sequence[bytes | None]) -> pa.Array:
    """A binary array whose memory ends with its last byte, so that a sanitizer sees every access beyond it."""
    found = pa.array(contents, pa.binary())
    if not len(found):
        return found
    validity, offsets, data = found.buffers()
    size = offsets.to_pybytes()[: 4 * (len(found) + 1)]
    end = int(np.frombuffer(size, "<i4")[-1])
    copied: Any = np.frombuffer((data.to_pybytes() if data else b"")[:end], np.uint8).copy()
    return pa.Array.from_buffers(
        pa.binary(),
        len(found),
        [validity, pa.py_buffer(np.frombuffer(size, np.uint8).copy()), pa.py_buffer(copied)],
        found.null_count,
    )
