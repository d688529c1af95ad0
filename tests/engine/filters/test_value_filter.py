"""Filters by a field of a JSON value."""

import json
from decimal import Decimal

import pyarrow as pa
import pytest

from upriver.engine.filters import ValueFilter, read_json
from upriver.engine.filters.value_filter import WANTED_LEVELS_MAX
from upriver.errors import InvalidArguments
from upriver.model import Event
from upriver.model.compression import SNAPPY


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b'{"a": {"b": 1}}', True),
        (b'{"a": {"b": 2}}', False),
        (b'{"a": {"b": 1.0}}', True),
        (b'{"a": {"b": null}}', False),
        (b'{"a": {"b": true}}', False),
        (b'{"a": {"b": "1"}}', False),
        (b'{"a": 1}', False),
        (b"[1]", False),
        (b"", False),
        (b"\xff", False),
        (b'{"a": {"b": 1, "c": NaN}}', True),  # no JSON, but there are writers of it
    ],
)
def test_a_field_equals(value: bytes, passes: bool) -> None:
    assert ValueFilter(("a", "b"), equals=1).passes(Event.MUTATION, value) is passes


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        ("[1]", [1], True),
        ("[1]", [True], False),
        ("[true]", [1], False),
        ("[1, 2]", [1], False),
        ("[2, 1]", [1, 2], False),
        ('{"x": [0]}', {"x": [False]}, False),
        ('{"x": [0]}', {"x": [0.0]}, True),
        ('{"x": 1, "y": 2}', {"y": 2, "x": 1}, True),
        ('{"x": 1, "y": 2}', {"x": 1}, False),
        ("[]", {}, False),
        ("{}", [], False),
        ("null", None, True),
        ("0", None, False),
        ("null", False, False),
        ("[null]", [None], True),
    ],
)
def test_what_is_nested_is_compared_as_json_has_it(found: str, wanted: object, equal: bool) -> None:
    assert ValueFilter(("a",), equals=wanted).passes(Event.MUTATION, b'{"a": %s}' % found.encode()) is equal


def test_a_field_that_is_not_there_is_not_null() -> None:
    assert not ValueFilter(("a",), equals=None).passes(Event.MUTATION, b'{"b": null}')
    assert ValueFilter(("a",), contains=None).passes(Event.MUTATION, b'{"a": [1, null]}')
    assert not ValueFilter(("a",), contains=None).passes(Event.MUTATION, b'{"a": [1, 0]}')


@pytest.mark.parametrize("digits", [10, 4_300, 4_301, 1_000_000])
def test_a_number_may_have_any_length(digits: int) -> None:
    value = b'{"long": -%s, "short": 1, "list": [1]}' % (b"7" * digits)
    assert ValueFilter(("short",), equals=1).passes(Event.MUTATION, value)
    assert ValueFilter(("short",), equals=1.0).passes(Event.MUTATION, value)
    assert not ValueFilter(("short",), equals=True).passes(Event.MUTATION, value)
    assert ValueFilter(("list",), contains=1).passes(Event.MUTATION, value)
    wanted = read_json(b"[-%s, -%s]" % (b"7" * digits, b"7" * digits + b"0"))
    assert ValueFilter(("long",), equals=wanted[0]).passes(Event.MUTATION, value)
    assert not ValueFilter(("long",), equals=wanted[1]).passes(Event.MUTATION, value)


def test_what_is_too_deep_to_be_looked_at_passes() -> None:
    deep = b'{"a": 1, "b": %s}' % (b"[" * 100_000 + b"]" * 100_000)
    assert ValueFilter(("a",), equals=1).passes(Event.MUTATION, deep)
    assert ValueFilter(("a",), equals=2).passes(Event.MUTATION, deep)
    compressed = bytes(pa.Codec("snappy").compress(deep))
    assert ValueFilter(("a",), equals=2).passes(Event.MUTATION, compressed, SNAPPY)


@pytest.mark.parametrize(
    "wanted",
    [
        float("nan"),
        Decimal("NaN"),
        Decimal("sNaN"),
        float("inf"),
        [float("nan")],
        {"x": float("-inf")},
        b"bytes",
        (1,),
        {1},
    ],
)
def test_what_json_does_not_have_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidArguments):
        ValueFilter(("a",), equals=wanted)


def test_what_a_field_is_compared_with_has_a_depth() -> None:
    wanted: object = 1
    for _ in range(WANTED_LEVELS_MAX - 1):
        wanted = [wanted]
    value = b'{"a": %s}' % json.dumps(wanted).encode()
    assert ValueFilter(("a",), equals=wanted).passes(Event.MUTATION, value)
    with pytest.raises(InvalidArguments, match="levels"):
        ValueFilter(("a",), equals=[wanted])


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b'{"a": "xyz"}', True),
        (b'{"a": ["y", "z"]}', True),
        (b'{"a": {"y": 1}}', True),
        (b'{"a": ["yy"]}', False),
        (b'{"a": 5}', False),
    ],
)
def test_a_field_contains(value: bytes, passes: bool) -> None:
    assert ValueFilter(("a",), contains="y").passes(Event.MUTATION, value) is passes


@pytest.mark.parametrize(
    ("value", "contains", "passes"),
    [
        (b'{"a": [2, 1]}', 1, True),
        (b'{"a": [1.0]}', 1, True),
        (b'{"a": [true]}', 1, False),
        (b'{"a": [1]}', True, False),
        (b'{"a": [0, true]}', True, True),
    ],
)
def test_a_list_contains_a_number_or_a_truth_value(value: bytes, contains: object, passes: bool) -> None:
    assert ValueFilter(("a",), contains=contains).passes(Event.MUTATION, value) is passes


@pytest.mark.parametrize(("value", "passes"), [(b'{"a": 1}', True), (b'{"a": 2}', False), (b"", False)])
def test_a_value_may_be_compressed(value: bytes, passes: bool) -> None:
    compressed = bytes(pa.Codec("snappy").compress(value))
    assert ValueFilter(("a",), equals=1).passes(Event.MUTATION, compressed, SNAPPY | 1) is passes


@pytest.mark.parametrize(("value", "passes"), [(b"", False), (b'{"a": 1}', True), (b"\xff" * 8, False)])
def test_what_only_claims_to_be_compressed_is_looked_at_as_it_is(value: bytes, passes: bool) -> None:
    assert ValueFilter(("a",), equals=1).passes(Event.MUTATION, value, SNAPPY | 1) is passes


def test_deletions_pass_because_the_key_may_have_been_sent() -> None:
    wanted = ValueFilter(("a",), equals=1)
    assert wanted.passes(Event.DELETION, b"")
    assert wanted.passes(Event.EXPIRATION, b"")


def test_a_filter_names_a_field_and_one_condition() -> None:
    for path, wanted, why in (
        ((), {"equals": 1}, "has no field"),
        (("a", "b"), {}, "field 'a.b' has neither 'equals' nor 'contains': give one"),
        (("a",), {"equals": 1, "contains": 2}, "field 'a' has both 'equals' and 'contains': give one"),
        (("a",), {"contains": [1]}, r"contains = \[1\]: it must be a string"),
    ):
        with pytest.raises(InvalidArguments, match=why):
            ValueFilter(path, **wanted)
