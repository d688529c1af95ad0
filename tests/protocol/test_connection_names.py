"""Names of connections: bounded, and each told from all others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import InvalidArguments
from upriver.protocol.connection_names import (
    NAME_BYTES_MAX,
    checked_name,
    made_up,
    readable,
    successor_by_open,
    successor_by_tap,
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"plain", "plain"),
        ("größe".encode(), "größe"),
        (b"x\xff", r"x\xff"),
        (rb"x\xff", r"x\\xff"),
        (b"\\", r"\\"),
        (b"n" * NAME_BYTES_MAX, "n" * NAME_BYTES_MAX),
    ],
)
def test_how_a_name_is_read(name: bytes, text: str) -> None:
    assert checked_name(name) == text


@pytest.mark.parametrize("name", [b"", b"n" * (NAME_BYTES_MAX + 1), b"n" * 65_530])
def test_what_is_no_name_is_refused(name: bytes) -> None:
    with pytest.raises(InvalidArguments):
        checked_name(name)


PARTS = st.lists(st.sampled_from([b"\\", b"x", b"ff", b"\xff", b"\xc3", b"\xa4", b"\xc3\xa4"]), max_size=6)


@given(PARTS.map(b"".join), PARTS.map(b"".join))
def test_no_two_names_are_taken_for_one(one: bytes, other: bytes) -> None:
    assert (readable(one) == readable(other)) == (one == other)
    readable(one).encode()


@given(PARTS.map(b"".join), PARTS.map(b"".join))
def test_no_name_is_taken_for_one_that_was_made_up(told: bytes, peer: bytes) -> None:
    assert readable(told + peer) != made_up("draft" + readable(peer))
    assert readable(b"\\draft" + peer) != made_up("draft" + readable(peer))
    assert not readable(told).startswith(made_up("draft"))


@given(PARTS.map(b"".join), PARTS.map(b"".join), st.sampled_from([b"", b"tap:", b"\\tap:"]))
def test_no_connection_inherits_from_a_tap_client_nor_from_another(one: bytes, other: bytes, before: bytes) -> None:
    opened, client = readable(before + one), readable(other)
    assert successor_by_open(opened) != successor_by_tap(client)
    assert (successor_by_open(opened) == successor_by_open(client)) == (opened == client)
    assert (successor_by_tap(opened) == successor_by_tap(client)) == (opened == client)
