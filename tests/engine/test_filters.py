import time

import pyarrow as pa
import pytest

from upriver.engine.filters import KeyPattern, ValueFilter
from upriver.errors import InvalidArguments
from upriver.model import Event
from upriver.model.compression import SNAPPY


def test_patterns_are_searched_in_the_bytes_of_a_key() -> None:
    assert KeyPattern("^user:[0-9]+$").passes(b"user:12")
    assert not KeyPattern("^user:[0-9]+$").passes(b"user:12x")
    assert KeyPattern("b").passes(b"abc")
    assert KeyPattern(r"\xff$").passes(b"\x00\xff")


def test_a_pattern_cannot_take_exponential_time() -> None:
    began = time.process_time()
    assert not KeyPattern("(a+)+$").passes(b"a" * 249 + b"b")
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("pattern", ["(", "a" * 5000, r"(?=a)"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArguments):
        KeyPattern(pattern)


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b'{"a": {"b": 1}}', True),
        (b'{"a": {"b": 2}}', False),
        (b'{"a": {"b": 1.0}}', True),
        (b'{"a": {"b": true}}', False),
        (b'{"a": {"b": "1"}}', False),
        (b'{"a": 1}', False),
        (b"[1]", False),
        (b"", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
    ],
)
def test_a_field_equals(value: bytes, passes: bool) -> None:
    assert ValueFilter(("a", "b"), equals=1).passes(Event.MUTATION, value) is passes


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


@pytest.mark.parametrize("damaged", [b"", b'{"a": 1}', b"\xff" * 8])
def test_what_only_claims_to_be_compressed_does_not_pass(damaged: bytes) -> None:
    assert not ValueFilter(("a",), equals=1).passes(Event.MUTATION, damaged, SNAPPY | 1)


def test_deletions_pass_because_the_key_may_have_been_sent() -> None:
    wanted = ValueFilter(("a",), equals=1)
    assert wanted.passes(Event.DELETION, b"")
    assert wanted.passes(Event.EXPIRATION, b"")


def test_a_filter_names_a_field_and_one_condition() -> None:
    for arguments in (((), 1, None), (("a",), None, None), (("a",), 1, 2)):
        with pytest.raises(InvalidArguments):
            ValueFilter(*arguments)
