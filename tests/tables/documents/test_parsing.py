"""Documents as columns, by the compiled parser and its plain twin alike."""

import json
import math
import random
import struct
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from tests.support.depth import by_depth, examples
from tests.tables.documents import json_texts
from tests.tables.documents.json_texts import COLUMNS, exact_array
from upriver.tables import schema
from upriver.tables.documents import field_report, parsing, plain_parsing
from upriver.tables.documents.parsing import CODEC, Parsed, parse
from upriver.tables.schema import TYPES, Column

compiled = pytest.mark.skipif(CODEC != "compiled", reason="no C compiler was available")
PARSERS = [pytest.param(parsing._parser, id="compiled", marks=compiled), pytest.param(plain_parsing, id="plain")]


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def column(parser: ModuleType, kind: schema.Kind, *texts: str | bytes) -> tuple[list[Any], list[bool], Parsed]:
    """The cells of a column ``x`` for documents with these values of it, and which rows keep their original."""
    contents = [b'{"x":' + (text.encode() if isinstance(text, str) else text) + b"}" for text in texts]
    found = parse(exact_array(contents), [Column("x", kind)], parser=parser)
    check(found, contents)
    return found.columns[0].to_pylist(), found.raw.is_valid().to_pylist(), found


def check(found: Parsed, contents: list[bytes | None] | list[bytes]) -> None:
    """Arrays are valid, and what is kept is the original."""
    for array in [*found.columns, found.raw]:
        array.validate(full=True)
        assert len(array) == len(contents)
    assert all(kept is None or kept == value for kept, value in zip(found.raw.to_pylist(), contents, strict=True))


def cells_of(found: Parsed) -> list[list[Any]]:
    """Cells for comparison bit by bit: 0.0 is not -0.0, 1 is not True."""
    exact = [
        [cell if cell is None else struct.pack("<d", cell) if isinstance(cell, float) else cell for cell in cells]
        for cells in (array.to_pylist() for array in found.columns)
    ]
    return [[(type(cell), cell) for cell in cells] for cells in exact]


@compiled
@settings(max_examples=examples(400), deadline=None)
@given(json_texts.inputs)
def test_compiled_and_plain_agree(contents: list[bytes | None]) -> None:
    check_parity(contents)


@compiled
@pytest.mark.parametrize("seed", range(by_depth(quick=4, deep=200)))
def test_compiled_and_plain_agree_about_damaged_documents(seed: int) -> None:
    draw = random.Random(seed)
    check_parity([json_texts.random_bytes(draw) for _ in range(1000)])


def check_parity(contents: list[bytes | None] | list[bytes]) -> None:
    values = exact_array(contents)
    fast, plain = parse(values, COLUMNS), parse(values, COLUMNS, parser=plain_parsing)
    check(fast, contents)
    assert cells_of(fast) == cells_of(plain)
    assert [array.type for array in fast.columns] == [array.type for array in plain.columns]
    assert fast.raw.to_pylist() == plain.raw.to_pylist()
    assert fast.report == plain.report
    assert list(fast.report.unknown) == list(plain.report.unknown)


def document_by_json(value: bytes) -> dict[str, Any] | None:
    """What Python's own parser makes of a value; duplicate names become a tuple of their values."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in found]
        return {name: value if names.count(name) == 1 else (value,) for name, value in found}

    def refuse(text: str) -> float:
        raise ValueError(text)

    try:
        found = json.loads(value.decode(), parse_constant=refuse, object_pairs_hook=pairs)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@settings(max_examples=examples(200), deadline=None)
@given(json_texts.inputs)
def test_results_are_those_of_pythons_json(contents: list[bytes | None]) -> None:
    found = parse(exact_array(contents), COLUMNS)
    for row, value in enumerate(contents):
        cells = {name: array[row].as_py() for (name, _), array in zip(COLUMNS, found.columns, strict=True)}
        document = None if value is None else document_by_json(value)
        for name, cell in cells.items():
            if cell is not None:
                assert document is not None
                expected = document[name]
                assert (
                    cell == expected
                    if name != "tags"
                    else document_by_json(b'{"t":%s}' % cell.encode()) == {"t": expected}
                )
        if value is not None and found.raw[row].as_py() is None:
            assert document is not None
            assert document.keys() == {name for name, cell in cells.items() if cell is not None}
    assert found.report.documents == sum(
        value is not None and document_by_json(value) is not None for value in contents
    )


VALID = [
    "{}", " {} ", '{"x":1}', '\t\n\r {\t"x"\n:\r1 }\n', '{"x":[]}', '{"x":{}}', '{"x":[[],{},[{}]]}', '{"x":"\x7f"}',
    '{"":1}', '{"x":"\\u0000"}', '{"x":-0}', '{"x":0.0}', '{"x":1e5}', '{"x":1E+5}', '{"x":1e-05}',
    '{"x":"é\U0010ffff"}',
]  # fmt: skip
INVALID: list[str | bytes] = [
    "", " ", "{", "}", "[]", "[{}]", '"x"', "1", "null", "true", "{}{}", "{} x", "{},", "\ufeff{}", "{\x00}", "{}\x00",
    "\x0b{}", "\xa0{}", "{x:1}", "{'x':1}", '{"x"}', '{"x":}', '{"x":1,}', '{,"x":1}', '{"x":1,,"y":1}', '{"x" 1}',
    '{"x":1 "y":2}', '{"x"::1}', '{"x":1]', '{"x":[1}', '{"x":[1,]}', '{"x":[,1]}', '{"x":[1 2]}', '{"x":{"y"}}',
    '{"x":{"y":1,}}', '{"x":{1:2}}', '{"x":[}', '{"x":[', '{"x":{', '{"x":{"y":', '{"x":01}', '{"x":-}', '{"x":+1}',
    '{"x":.5}', '{"x":1.}', '{"x":1.e5}', '{"x":1e}', '{"x":1e+}', '{"x":1e1.5}', '{"x":0x1}', '{"x":1_000}',
    '{"x":--1}',
    '{"x":-01}', '{"x":1e5e5}', '{"x":[01]}', '{"x":[1.]}', '{"x":[.5]}', '{"x":[-]}', '{"x":[1e]}', '{"x":NaN}',
    '{"x":Infinity}', '{"x":-Infinity}', '{"x":True}', '{"x":tru}', '{"x":truer}', '{"x":nul}', '{"x":[falsey]}',
    '{"x":"}', '{"x":"\\"}', '{"x":"\\x"}', '{"x":"\\u12"}', '{"x":"\\u12g4"}', '{"x":"\\u 123"}', '{"x":"\\U0041"}',
    '{"x":"\n"}', '{"x":"\x1f"}', '{"x":"\x00"}', '{"x\n":1}', '{"x":["\t"]}', '{"x":"a', '{"x', '{"x"', '{"x":',
    '{"x":1', '{"x":1,', '{"x":"a"', '{"x":true', '{"x":t', '{"x\\":1}', "/**/{}", '{"x":1}//',
    b'{"x":"\xff"}', b'{"x":"\xc3"}', b'{"x":"\xc0\x80"}', b'{"x":"\xed\xa0\x80"}', b'{"x":"\xf4\x90\x80\x80"}',
    b'{"x":"\xf5\x80\x80\x80"}', b'{"x":"\xe0\x80\x80"}', b'{"x":"\xf0\x80\x80\x80"}', b'{"\xff":1}', b'{"x":["\x80"]}',
    b"\xff\xfe{\x00}\x00", b'{"x":"\xe2\x82', b'{"x":"\xf0\x9f\x98',
]  # fmt: skip


@pytest.mark.parametrize("text", VALID)
def test_a_valid_document_counts(parser: ModuleType, text: str) -> None:
    assert parse(exact_array([text.encode()]), [], parser=parser).report.documents == 1


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_document_is_kept_and_leaves_no_cells(parser: ModuleType, text: str | bytes) -> None:
    value = text.encode() if isinstance(text, str) else text
    contents = [b'{"x":7,"a":"before"}', value, b'{"x":8,"a":"after"}']
    wanted = [Column("a", "text"), Column("x", "int")]
    found = parse(exact_array(contents), wanted, parser=parser)
    check(found, contents)
    assert [array.to_pylist() for array in found.columns] == [["before", None, "after"], [7, None, 8]]
    assert found.raw.to_pylist() == [None, value, None]
    assert found.report.documents == 2


def test_cells_before_an_error_are_emptied(parser: ModuleType) -> None:
    document = '{"flag":true,"n":1,"price":2.5,"name":"text","tags":[1]'
    contents = [f'{document},"more":1,"größe":1.5,,}}'.encode()]
    found = parse(exact_array(contents), COLUMNS, parser=parser)
    check(found, contents)
    assert all(array.null_count == 1 for array in found.columns)
    assert found.report == field_report.FieldReport()


def test_offsets_after_an_emptied_text_are_right(parser: ModuleType) -> None:
    cells, kept, _ = column(parser, "text", '"long text"}}', '""', '"x"', '"another text', '"y"', '"last"}')
    assert cells == [None, "", "x", None, "y", None]
    assert kept == [True, False, False, True, False, True]


def test_integers_are_exact(parser: ModuleType) -> None:
    numbers = [0, 1, -1, 10**17, 2**53 + 1, 2**63 - 1, -(2**63), 1234567890123456789]
    cells, kept, found = column(parser, "int", *map(str, numbers), "-0")
    assert cells == [*numbers, 0]
    assert not any(kept)
    assert found.raw.null_count == len(numbers) + 1


@pytest.mark.parametrize("kind", ["int", "float"])
def test_integers_beyond_64_bits_are_kept(parser: ModuleType, kind: schema.Kind) -> None:
    texts = [str(2**63), str(-(2**63) - 1), str(2**64), str(10**19), "9" * 30, "1" + "0" * 5000]
    cells, kept, found = column(parser, kind, *texts)
    assert cells == [None] * len(texts)
    assert all(kept)
    assert not found.report.decimals


def test_decimals_have_integers_up_to_2_to_53(parser: ModuleType) -> None:
    cells, kept, _ = column(parser, "float", "7", str(2**53), str(-(2**53)), str(2**53 + 1), str(-(2**53) - 1), "1.5")
    assert cells == [7.0, 2.0**53, -(2.0**53), None, None, 1.5]
    assert kept == [False, False, False, True, True, False]


def nasty_numbers(count: int) -> list[str]:
    draw = random.Random(22)
    found = []
    for _ in range(count):
        bits = draw.getrandbits(64)
        real = struct.unpack("<d", struct.pack("<Q", bits))[0]
        if not math.isfinite(real):
            continue
        exponent = draw.randrange(-350, 320)
        found += [f"{real:.20e}", repr(real), f"{real:.16e}", f"{draw.getrandbits(63)}e{exponent}", f"{real:.15e}"]
        # Exactly between two doubles, and one digit above and below.
        if 1e-30 < abs(real) < 1e30:
            middle = f"{real_between(real)}"
            found += [middle, middle + "1" if "." in middle else middle + ".1"]
    found += [f"{m}e{e}" for m in (1, 5, 9007199254740993, 18446744073709551615) for e in range(-345, 312, 3)]
    found += ["0." + "0" * n + "1" for n in (1, 22, 23, 300, 323, 400)] + [
        "1" + "0" * n + ".0" for n in (15, 22, 23, 308)
    ]
    return [text for text in found if any(mark in text for mark in ".e")]


def real_between(real: float) -> str:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 400
        middle = (Decimal(real) + Decimal(math.nextafter(real, math.inf))) / 2
        return f"{middle:f}" if "." in f"{middle:f}" else f"{middle:f}.0"


def test_decimals_are_rounded_correctly() -> None:
    texts = nasty_numbers(by_depth(quick=3_000, deep=100_000))
    cells, _, _ = column(parsing._parser, "float", *texts)
    wrong = [
        (text, cell)
        for text, cell in zip(texts, cells, strict=True)
        if (None if math.isinf(float(text)) else struct.pack("<d", float(text)))
        != (None if cell is None else struct.pack("<d", cell))
    ]
    assert not wrong[:3]


def test_decimals_that_overflow_are_kept(parser: ModuleType) -> None:
    cells, kept, _ = column(
        parser, "float", "1e308", "1e309", "-1e309", "1e99999999999999999999", "1e-99999999999999999999"
    )
    assert cells == [1e308, None, None, None, 0.0]
    assert kept == [False, True, True, True, True]


def test_very_long_decimals_are_kept(parser: ModuleType) -> None:
    cells, kept, _ = column(parser, "float", "0." + "1" * 798, "0." + "1" * 799, "1" * 100_000 + ".5")
    assert cells == [float("0." + "1" * 798), None, None]
    assert kept == [True, True, True]


EXACT = [
    "0.1", "0.10", "-0.0", "0e5", "1.50000000000000000000000", "123456789012345.6", "0.30000000000000004",
    "0.10000000000000001", "1.7976931348623157e308", "5e-324", "2.2250738585072014e-308", "1000000000000000000000000.0",
    "0.000000000000000000000000000000000000001", "12345678901234500000000.0e-3",
]  # fmt: skip
ROUNDED = [
    "12345678901234567.89", "1e-400", "-1e-400", "0.1234567890123456789012345", "1234567890123456.7",
    "9007199254740993.0", "0.12345678901234567", "3e-324", "1.0000000000000000000000001", "123e-325",
]  # fmt: skip


@pytest.mark.parametrize("text", EXACT)
def test_a_decimal_that_a_double_represents_is_not_kept(parser: ModuleType, text: str) -> None:
    assert column(parser, "float", text)[:2] == ([float(text)], [False])


@pytest.mark.parametrize("text", ROUNDED)
def test_a_decimal_with_more_digits_than_a_double_is_rounded_and_kept(parser: ModuleType, text: str) -> None:
    assert column(parser, "float", text)[:2] == ([float(text)], [True])


def test_decimals_that_programs_write_are_not_kept() -> None:
    draw = random.Random(23)
    reals = [struct.unpack("<d", struct.pack("<Q", draw.getrandbits(64)))[0] for _ in range(5_000)]
    texts = [form(real) for real in reals if math.isfinite(real) for form in (repr, "{:.16e}".format, "{:.14e}".format)]
    texts = [text for text in texts if any(mark in text for mark in ".e")]
    kept = column(parsing._parser, "float", *texts)[1]
    assert not [text for text, is_kept in zip(texts, kept, strict=True) if is_kept][:3]


def test_compiled_and_plain_agree_about_decimals() -> None:
    texts = nasty_numbers(300)
    compiled, plain = (column(each, "float", *texts)[:2] for each in (parsing._parser, plain_parsing))
    assert compiled == plain


def test_a_decimal_in_an_integer_column_is_reported(parser: ModuleType) -> None:
    cells, kept, found = column(parser, "int", "1", "1.0", "2")
    assert cells == [1, None, 2]
    assert kept == [False, True, False]
    assert found.report.decimals == {"x"}
    assert not column(parser, "float", "1", "1.5")[2].report.decimals
    assert not column(parser, "int", "1.5}")[2].report.decimals  # an invalid document says nothing


def test_texts_are_decoded(parser: ModuleType) -> None:
    texts = [
        "",
        "plain",
        "\x00",
        'a"b\\c/d',
        "\b\f\n\r\t",
        "é",
        "€",
        "😀",
        "x" * 5000 + "é",
        "é" * 17,
        "a\\",
        "\\u0041",
    ]
    for ensure_ascii in (True, False):
        written = [json.dumps(text, ensure_ascii=ensure_ascii) for text in texts]
        cells, kept, _ = column(parser, "text", *written)
        assert cells == texts
        assert not any(kept)
    assert column(parser, "text", '"\\/"', '"\\u00E9\\u00e9"')[0] == ["/", "éé"]


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\udc00"', '"\\ud800\\ud800"', '"\\ud800x"', '"\\udc00\\ud800"'])
def test_a_lone_surrogate_is_kept(parser: ModuleType, text: str) -> None:
    contents = [f'{{"a":1,"t":{text},"j":[{text}],"u":{text},{text}:1,"b":2}}'.encode()]
    wanted = [Column("a", "int"), Column("t", "text"), Column("j", "json"), Column("b", "int")]
    found = parse(exact_array(contents), wanted, parser=parser)
    check(found, contents)
    assert [array.to_pylist() for array in found.columns] == [[1], [None], [None], [2]]
    assert found.raw.to_pylist() == contents
    assert not found.report.unknown


def test_nested_values_become_compact_text(parser: ModuleType) -> None:
    cells, kept, _ = column(
        parser,
        "json",
        "[]",
        "[ 1 , 2.50, -0 , 1e400 ]",
        '{ "a b" : [ null, true ] , "c\\n\\" d": "x y" }',
        '[{"a":1,"a":2}]',
    )
    assert cells == ["[]", "[1,2.50,-0,1e400]", '{"a b":[null,true],"c\\n\\" d":"x y"}', '[{"a":1,"a":2}]']
    assert not any(kept)


def test_nesting_is_limited(parser: ModuleType) -> None:
    deep, deeper = "[" * 999 + "]" * 999, "[" * 1000 + "]" * 1000
    objects = '{"a":' * 999 + "1" + "}" * 999
    cells, kept, found = column(parser, "json", deep, deeper, objects, "[" * 200_000, '{"a":' * 100_000)
    assert cells == [deep, None, objects, None, None]
    assert kept == [False, True, False, True, True]
    assert found.report.documents == 2


@pytest.mark.parametrize("kind", schema.KINDS)
def test_other_kinds_are_kept(parser: ModuleType, kind: schema.Kind) -> None:
    values: dict[schema.Kind, str] = {"bool": "true", "int": "7", "float": "1.5", "text": '"t"', "json": "[1]"}
    fitting = {kind, "int"} if kind == "float" else {kind}
    others = [text for other, text in values.items() if other not in fitting]
    cells, kept, _ = column(parser, kind, *others, "null", values[kind])
    assert cells == [None] * (len(others) + 1) + [json.loads(values[kind]) if kind != "json" else "[1]"]
    assert kept == [True] * (len(others) + 1) + [False]


def test_a_conflict_leaves_the_other_columns(parser: ModuleType) -> None:
    contents = [b'{"n":"text","price":1.5,"name":"n","new":1}']
    found = parse(exact_array(contents), COLUMNS, parser=parser)
    cells = {name: array[0].as_py() for (name, _), array in zip(COLUMNS, found.columns, strict=True)}
    assert {name: cell for name, cell in cells.items() if cell is not None} == {"price": 1.5, "name": "n"}
    assert found.raw.to_pylist() == contents


def test_of_two_fields_with_one_name_neither_is_shown(parser: ModuleType) -> None:
    contents = [
        b'{"n":1,"name":"a","n":2,"price":1}', b'{"name":"a","name":"b"}', b'{"n":1,"\\u006e":1,"n":1}',
        b'{"n":1.5,"n":1}', b'{"flag":true,"flag":true}', b'{"tags":[1],"tags":[1]}', b'{"name":"next","n":3}',
    ]  # fmt: skip
    found = parse(exact_array(contents), COLUMNS[:5], parser=parser)
    check(found, contents)
    assert [array.to_pylist() for array in found.columns] == [
        [None] * 7,
        [None, None, None, None, None, None, 3],
        [1.0, *[None] * 6],
        ["a", None, None, None, None, None, "next"],
        [None] * 7,
    ]
    assert found.raw.to_pylist() == [*contents[:6], None]


def test_names_are_found_in_any_order_and_spelling(parser: ModuleType) -> None:
    wanted = [Column(name, "int") for name in json_texts.NAMES]
    draw, contents = random.Random(7), []
    for row in range(200):
        names = draw.sample(json_texts.NAMES, draw.randrange(len(wanted)))
        document = {name: row * 100 + json_texts.NAMES.index(name) for name in names}
        contents.append(json.dumps(document, ensure_ascii=row % 3 == 0).encode())
    found = parse(exact_array(contents), wanted, parser=parser)
    assert found.raw.null_count == len(contents)
    rebuilt = [
        {
            name: array[row].as_py()
            for (name, _), array in zip(wanted, found.columns, strict=True)
            if array[row].is_valid
        }
        for row in range(len(contents))
    ]
    assert rebuilt == [json.loads(value) for value in contents]


def test_a_name_with_a_quote_matches_only_its_escaped_spelling(parser: ModuleType) -> None:
    wanted = [Column('a":1,"b', "int")]
    found = parse(exact_array([b'{"a":1,"b":2}', b'{"a\\":1,\\"b":3}']), wanted, parser=parser)
    assert found.columns[0].to_pylist() == [None, 3]
    assert found.report.unknown == {"a": {"int": 1}, "b": {"int": 1}}


def test_unknown_fields_are_counted_by_kind(parser: ModuleType) -> None:
    contents = [
        b'{"b":true,"i":1,"f":1.5,"t":"x","j":{},"null":null,"big":1e999,"bigger":99999999999999999999}',
        b'{"i":2,"f":2,"t":null,"i":"again"}', b'{"i":3.5}', b'{"i":4,"never":1', b'{"\\u0069":5}',
    ]  # fmt: skip
    report = parse(exact_array(contents), [], parser=parser).report
    assert report.documents == 4
    assert report.unknown == {
        "b": {"bool": 1}, "i": {"int": 3, "float": 1}, "f": {"float": 1, "int": 1}, "t": {"text": 1}, "j": {"json": 1},
    }  # fmt: skip
    assert list(report.unknown) == ["b", "i", "f", "t", "j"]


def test_random_names_do_not_fill_the_memory(parser: ModuleType) -> None:
    wide = {f"wide{n}": n for n in range(5_000)}
    contents = [json.dumps({"frequent": 1, f"random{n}": 1, "also frequent": "x"}).encode() for n in range(6_000)]
    contents += [json.dumps(wide).encode(), json.dumps({"x" * 300: 1, "late": 1}).encode()]
    report = parse(pa.array(contents), [], parser=parser).report
    assert len(report.unknown) <= field_report.NAMES_MAX
    assert report.documents == 6_002
    assert report.unknown["frequent"] == {"int": 6_000}
    assert report.unknown["also frequent"] == {"text": 6_000}
    assert report.unknown["late"] == {"int": 1}
    assert "x" * 300 not in report.unknown
    if parser is not plain_parsing:
        assert report == parse(pa.array(contents), [], parser=plain_parsing).report


def test_nulls_are_not_documents(parser: ModuleType) -> None:
    contents = [None, b'{"x":1}', None, b"bad", None]
    found = parse(exact_array(contents), [Column("x", "int")], parser=parser)
    assert found.columns[0].to_pylist() == [None, 1, None, None, None]
    assert found.raw.to_pylist() == [None, None, None, b"bad", None]
    assert found.report.documents == 1


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 64, 65, 1000])
def test_slices_are_read_in_place(parser: ModuleType, rows: int) -> None:
    contents = [None if n % 7 == 3 else b'{"x":%d,"t":"%d"}' % (n, n) if n % 5 else b"bad%d" % n for n in range(1100)]
    wanted = [Column("x", "int"), Column("t", "text"), Column("b", "bool")]
    for start in (0, 1, 8, 13):
        part = exact_array(contents).slice(start, rows)
        found = parse(part, wanted, parser=parser)
        check(found, contents[start : start + rows])
        good = [value is not None and not value.startswith(b"bad") for value in contents[start : start + rows]]
        assert found.columns[0].is_valid().to_pylist() == good
        assert found.columns[1].to_pylist() == [str(start + n) if fine else None for n, fine in enumerate(good)]
        assert found.raw.null_count == sum(
            value is None or fine for value, fine in zip(part.to_pylist(), good, strict=True)
        )


def test_if_all_are_kept_nothing_is_copied(parser: ModuleType) -> None:
    values = pa.array([b"x", None, b"y"])
    found = parse(values, [], parser=parser)
    assert found.raw.to_pylist() == [b"x", None, b"y"]
    if parser is not plain_parsing:
        assert found.raw.buffers()[2].address == values.buffers()[2].address


@pytest.mark.parametrize("type_", [pa.string(), pa.large_binary(), pa.large_string()])
def test_other_types_of_text_are_read(parser: ModuleType, type_: pa.DataType) -> None:
    values = pa.array(['{"x":1}', None, "bad"], type_)
    found = parse(values, [Column("x", "int")], parser=parser)
    assert found.columns[0].to_pylist() == [1, None, None]
    assert found.raw.to_pylist() == [None, None, b"bad"]
    assert found.raw.type == pa.binary()


def test_more_bytes_than_offsets_can_address_are_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 2**31], "<i8"))
    data = pa.foreign_buffer(offsets.address, 2**31)  # never read
    values = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    with pytest.raises(ValueError, match="parse at most"):
        parse(values, [])


@compiled
@pytest.mark.parametrize("offsets", [[0, 3, 2], [0, 9, 4], [0, -3, 4]])
def test_offsets_outside_of_the_data_are_refused(offsets: list[int]) -> None:
    buffers = [None, pa.py_buffer(np.array(offsets, "<i4")), pa.py_buffer(b"{}{}")]
    values = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
    with pytest.raises(ValueError, match="offsets"):
        parse(values, [])


def test_many_columns_and_many_fields(parser: ModuleType) -> None:
    wanted = [Column(f"field{n}", "int") for n in range(500)]
    wide = json.dumps({f"field{n}": n for n in range(5_000)}).encode()
    found = parse(exact_array([wide, b"{}", b'{"field499":1}']), wanted, parser=parser)
    assert [array.to_pylist() for array in found.columns] == [[n, None, 1 if n == 499 else None] for n in range(500)]
    assert found.raw.to_pylist() == [wide, None, None]
    assert found.columns[3].null_count == 2


def test_a_value_of_20_mib(parser: ModuleType) -> None:
    text = "y" * (20 << 20)
    contents = [json.dumps({"name": text, "tags": [text[:1000]]}).encode()]
    found = parse(exact_array(contents), COLUMNS, parser=parser)
    assert found.columns[3][0].as_py() == text
    assert found.raw.null_count == 1


def test_results_live_longer_than_the_input(parser: ModuleType) -> None:
    values = exact_array([b'{"name":"%d"}' % n for n in range(1000)])
    found = parse(values, COLUMNS, parser=parser)
    del values
    copies = [parse(exact_array([b'{"name":"other"}'] * 1000), COLUMNS, parser=parser) for _ in range(3)]
    assert found.columns[3].to_pylist() == [str(n) for n in range(1000)]
    assert copies[0].columns[3].to_pylist() == ["other"] * 1000


def test_threads_parse_at_the_same_time() -> None:
    contents = [b'{"n":%d,"name":"%d","new%d":1}' % (n, n, n % 50) for n in range(by_depth(quick=5_000, deep=50_000))]
    values, found = exact_array(contents), list[Parsed]()
    threads = [threading.Thread(target=lambda: found.append(parse(values, COLUMNS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.report == found[0].report and one.columns == found[0].columns for one in found)
    assert len(found) == 4


@compiled
def test_parsing_does_not_import_pandas() -> None:
    program = (
        "import sys, pyarrow as pa\n"
        "from upriver.tables.documents import parse\n"
        "from upriver.tables.schema import Column\n"
        "offsets, data = pa.py_buffer(bytes([0, 0, 0, 0, 7, 0, 0, 0, 10, 0, 0, 0])), pa.py_buffer(b'{\"x\":1}bad')\n"
        "values = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, data])\n"
        "found = parse(values, [Column('x', 'int'), Column('y', 'text')])\n"
        "assert found.columns[0].null_count == found.raw.null_count == 1\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_columns_have_the_types_of_the_schema(parser: ModuleType) -> None:
    for contents in ([], [b"{}"], [b'{"flag":true,"n":1,"price":1,"name":"x","tags":[]}']):
        found = parse(exact_array(contents), COLUMNS[:5], parser=parser)
        assert [array.type for array in found.columns] == [TYPES[kind] for _, kind in COLUMNS[:5]]


@pytest.mark.parametrize("bad", [[0], [7], [2, 3, 9], list(range(10))])
def test_values_that_the_parser_fails_on_are_kept_and_do_not_stop_others(bad: list[int]) -> None:
    texts = [b'{"x": %d, "y": 1}' % n for n in range(10)]

    class Failing(ModuleType):
        @staticmethod
        def parse_columns(values: pa.Array, columns: Any) -> Any:
            if {texts[n] for n in bad} & set(values.to_pylist()):
                raise RuntimeError("a bug")
            return parsing._parser.parse_columns(values, columns)

    found = parse(exact_array(texts), [Column("x", "int"), Column("z", "text")], parser=Failing("failing"))
    assert found.columns[0].to_pylist() == [None if n in bad else n for n in range(10)]
    assert found.raw.to_pylist() == texts
    assert found.report.documents == 10 - len(bad)
    assert [array.type for array in found.columns] == [TYPES["int"], TYPES["text"]]
