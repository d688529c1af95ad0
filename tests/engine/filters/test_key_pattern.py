"""Patterns of keys."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.engine.filters import KeyPattern
from upriver.engine.filters.key_pattern import expanded_size
from upriver.errors import InvalidArguments


def test_patterns_are_searched_in_the_bytes_of_a_key() -> None:
    assert KeyPattern("^user:[0-9]+$").passes(b"user:12")
    assert not KeyPattern("^user:[0-9]+$").passes(b"user:12x")
    assert KeyPattern("b").passes(b"abc")
    assert KeyPattern(r"\xff$").passes(b"\x00\xff")


@pytest.mark.parametrize(
    ("pattern", "prefix", "is_prefix"),
    [
        ("^user:", b"user:", True),
        (r"^a\.b\x3a\xff", b"a.b:\xff", True),
        ("^né", "né".encode(), True),
        ("^user:1$", b"user:1", False),
        ("^user:[0-9]", b"user:", False),
        ("^users?", b"user", False),
        ("^a{2}", b"", False),
        ("^ab|cd", b"", False),
        ("^a(?:b|c)", b"", False),
        (r"^\d", b"", False),
        (r"^a\b", b"a", False),
        ("user:", b"", False),
        ("(?i)^user", b"", False),
        ("^", b"", False),
    ],
)
def test_what_a_pattern_requires_at_the_start(pattern: str, prefix: bytes, is_prefix: bool) -> None:
    assert (KeyPattern(pattern).prefix, KeyPattern(pattern).is_prefix) == (prefix, is_prefix)


@given(st.text("ab.|^$*?+(){}[]\\x0", min_size=1, max_size=8), st.lists(st.binary(max_size=6), max_size=20))
def test_the_prefix_says_the_same_as_the_pattern(text: str, keys: list[bytes]) -> None:
    try:
        pattern = KeyPattern("^" + text)
    except InvalidArguments:
        return
    for key in [*keys, b"a", b"b", b"ab", b"a.b", b"a|b", text.encode(), pattern.prefix, pattern.prefix + b"b"]:
        begins = key.startswith(pattern.prefix)
        assert begins or not pattern.passes(key)
        assert not pattern.is_prefix or begins == pattern.passes(key)


def test_an_escaped_backslash_is_no_class() -> None:
    assert KeyPattern(r"\\p").passes(rb"a\p")


def test_a_pattern_cannot_take_exponential_time() -> None:
    began = time.process_time()
    assert not KeyPattern("(a+)+$").passes(b"a" * 249 + b"b")
    assert time.process_time() - began < 0.5


MUCH_OF_LITTLE = "|".join(f"a[ab]{{{count}}}c" for count in range(100, 150))


@pytest.mark.parametrize("pattern", ["(", "a" * 5000, r"(?=a)", MUCH_OF_LITTLE, r"(?i)\pL|\pL", r"\\\P{Greek}"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArguments):
        KeyPattern(pattern)


REPEATED = [
    "a{1000}",
    "(a{1000})?",
    ".{1000}",
    "[^a]{999}",
    "(?i)k{1000}",
    "(a|b){1000}",
    "((a{30}){30})",
    r"\w{1000}",
    "[[:^alpha:]]{1000}",
    "(?:a?){1000}",
    "(?:a{9}b{9}){9}",
    "[acegikmoqsuwy]{99}",
    r"\Qx\E{500}",
    "a{0,900}",
]


@pytest.mark.parametrize("unit", REPEATED)
def test_a_pattern_is_refused_before_it_takes_long(unit: str) -> None:
    pattern = unit * (4096 // len(unit))
    best_s = 1.0
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(InvalidArguments, match="use fewer"):
            KeyPattern(pattern)
        best_s = min(best_s, time.perf_counter() - start)
    assert best_s < 0.02


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("^a{3}$", 3),
        ("(?:ab){3}c", 11),
        ("((ab){2}){3}", 12),
        ("a{2,5}", 5),
        ("a{2,}", 2),
        (r"\{3}", 1),
        ("[{3}]", 5),
        ("[]{3}]{2}", 12),
        (r"[\]{3}]", 7),
        ("a|b", 2),
        ("a{", 2),
    ],
)
def test_the_size_after_repetitions(pattern: str, size: int) -> None:
    assert abs(expanded_size(pattern) - size) <= 2  # a group's own characters may count


@given(st.text(alphabet="ab{}()[]\\^,0123456789:?*", max_size=30))
def test_any_text_has_a_size(pattern: str) -> None:
    assert expanded_size(pattern) >= 0
