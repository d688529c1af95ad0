"""Layouts: what a declaration may say, what it may not, and how fields lie in bytes."""

import enum
from typing import Annotated, ClassVar

import pytest

from upriver.errors import WireError
from upriver.wire.codes import OpenEnum
from upriver.wire.dialect import Dialect
from upriver.wire.fields import (
    IN_VALUE,
    U8,
    U16,
    U32,
    U64,
    Counted,
    Key,
    Only,
    Repeat,
    Reserved,
    UInt,
    Value,
    When,
    count_of,
)
from upriver.wire.framing import MEMCACHED
from upriver.wire.layout import Layout, Span, record
from upriver.wire.message import Request

example = Dialect("example", framing=MEMCACHED, document="the tests")


class Colour(OpenEnum):
    """A code."""

    RED = 1


class Option(enum.IntFlag):
    """Flags."""

    LIST = 1
    NOTE = 2


@record
class Pair:
    """A record with a length inside."""

    number: U16
    size: U8 = count_of("name")
    name: Counted


@example.request(0x01, extras=(7, 11))
class Everything(Request):
    """One field of each kind."""

    option: Annotated[Option, UInt(1)] = Option(0)
    reserved: ClassVar[Reserved] = Reserved(3)
    colour: Annotated[Colour, UInt(1)] = Colour.RED
    nmeta: U16 = count_of("meta")
    more: Annotated[int | None, UInt(4), Only(11)] = None
    key: Key
    pairs: Annotated[tuple[Pair, ...] | None, Repeat(Pair, count_size=1), When("option", Option.LIST)] = None
    note: Annotated[int | None, UInt(2), When("option", Option.NOTE)] = None
    value: Value = b""
    meta: Counted = b""


@example.request(0x02)
class Tail(Request):
    """A number in the value, and numbers up to the end."""

    first: Annotated[U64, IN_VALUE]
    colours: Annotated[tuple[Colour, ...], Repeat(UInt(2), code=Colour)] = ()


FULL = Everything(
    option=Option.LIST | Option.NOTE,
    colour=Colour(7),
    more=0x01020304,
    key=b"key",
    pairs=(Pair(number=5, name=b"ab"), Pair(number=6, name=b"")),
    note=0x0A0B,
    value=b"value",
    meta=b"meta",
)
FULL_BODY = bytes.fromhex("03 000000 07 0004 01020304") + (
    b"key" + bytes.fromhex("02 0005 02 6162 0006 00") + bytes.fromhex("0a0b") + b"value" + b"meta"
)


def test_fields_lie_in_the_order_of_their_declaration() -> None:
    packet = FULL.encode()
    assert packet[24:] == FULL_BODY
    assert packet[:12] == bytes.fromhex("80 01 0003 0b 00 0000") + len(FULL_BODY).to_bytes(4, "big")
    assert example.decode(packet) == FULL


def test_what_is_absent_takes_no_bytes() -> None:
    message = Everything(key=b"k")
    assert message.encode()[24:] == bytes.fromhex("00 000000 01 0000") + b"k"
    assert example.decode(message.encode()) == message


def test_lengths_are_always_computed() -> None:
    message = Everything(key=b"k")
    assert message.nmeta == 0
    message.meta = b"four"
    assert message.nmeta == 4
    with pytest.raises(TypeError, match="nmeta"):
        Everything(key=b"k", nmeta=4)  # type: ignore[call-arg]


def test_reserved_bytes_are_sent_as_zeros_and_ignored_when_received() -> None:
    packet = bytearray(FULL.encode())
    packet[25:28] = b"\xff\xff\xff"
    assert example.decode(packet) == FULL
    assert example.decode(packet).encode() == FULL.encode()


def test_numbers_in_the_value_are_not_extras() -> None:
    message = Tail(first=1, colours=(Colour.RED, Colour(0x1234)))
    packet = message.encode()
    assert packet[4] == 0
    assert packet[24:] == bytes.fromhex("0000000000000001 0001 1234")
    assert example.decode(packet) == message


@pytest.mark.parametrize(
    ("body", "offset", "expected", "found"),
    [
        ("0000000000000001 00", 32, "2 bytes of colours", "1"),
        ("00000000", 24, "8 bytes of first", "4"),
    ],
)
def test_a_body_that_ends_inside_a_field_is_refused(body: str, offset: int, expected: str, found: str) -> None:
    data = bytes.fromhex(body)
    packet = MEMCACHED.header.pack(0x80, 0x02, 0, 0, 0, 0, len(data), 0, 0) + data
    with pytest.raises(WireError) as caught:
        example.decode(packet)
    assert (caught.value.offset, caught.value.expected, caught.value.found) == (offset, expected, found)


@pytest.mark.parametrize(
    ("damage", "offset", "expected"),
    [
        ((38, 200), 50, "118 bytes of name"),  # what follows the pairs is read as one of them
        ((41, 200), 42, "200 bytes of name"),
        ((30, 50), 49, "50 bytes after value"),
    ],
)
def test_a_count_that_is_too_large_is_refused(damage: tuple[int, int], offset: int, expected: str) -> None:
    packet = bytearray(FULL.encode())
    at, number = damage
    packet[at] = number
    with pytest.raises(WireError) as caught:
        example.decode(packet)
    assert (caught.value.offset, caught.value.expected) == (offset, expected)


def test_bytes_that_nothing_claims_are_refused() -> None:
    data = bytes.fromhex("00 000000 01 0000")
    packet = MEMCACHED.header.pack(0x80, 0x03, 0, 7, 0, 0, 9, 0, 0) + data + b"xy"

    @example.request(0x03)
    class NoValue(Request):
        """Has extras and nothing else."""

        first: U32
        second: U16
        third: U8

    with pytest.raises(WireError) as caught:
        NoValue.decode(packet)
    assert str(caught.value) == "at byte 31: expected the end of NoValue, found 2 more bytes"


@pytest.mark.parametrize(
    "message",
    [
        Everything(key=b"k", option=Option.LIST),
        Everything(key=b"k", note=3),
        Everything(key=b"k" * 0x10000),
        Everything(key=b"k", more=2**32),
        Everything(key=b"k", vbucket=2**16),
        Everything(key=b"k", opaque=-1),
        Everything(key=b"k", option=Option.NOTE, note=2**16),
        Everything(key=b"k", option=Option.LIST, pairs=(Pair(number=1, name=bytes(256)),)),
        Everything(key=b"k", option=Option.LIST, pairs=(Pair(number=1, name=b""),) * 256),
        Tail(first=-1),
        Tail(first=1, colours=(Colour(2**16),)),
    ],
)
def test_what_does_not_fit_is_not_encoded(message: Request) -> None:
    with pytest.raises(ValueError, match=r"Everything|Tail|Pair"):
        message.encode()


def test_spans_say_where_each_field_stands() -> None:
    spans = list(Everything.body_spans(FULL.encode()))
    assert spans[:5] == [
        Span("option", 24, 24, 3, "list, note"),
        Span("reserved", 25, 27, 0),
        Span("colour", 28, 28, 7, "unknown(0x07)"),
        Span("nmeta", 29, 30, 4),
        Span("more", 31, 34, 0x01020304),
    ]
    assert [(span.name, span.first, span.last) for span in spans[5:]] == [
        ("key", 35, 37),
        ("pairs listed", 38, 38),
        ("number", 39, 40),
        ("size", 41, 41),
        ("name", 42, 43),
        ("number", 44, 45),
        ("size", 46, 46),
        ("note", 47, 48),
        ("value", 49, 53),
        ("meta", 54, 57),
    ]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    class Wrong(Request):
        first: U32
        second: U16

    with pytest.raises(TypeError, match="Wrong: a fixed part of 7 bytes is declared, its fields take 6"):
        Layout(Wrong, (7,))
    assert Layout(Wrong, (6,)).lengths == Layout(Wrong).lengths == (6,)


def test_a_field_that_is_there_only_sometimes_must_add_up_in_every_length() -> None:
    class Wrong(Request):
        first: U32
        second: Annotated[int | None, UInt(2), Only(6)] = None

    with pytest.raises(TypeError, match="a fixed part of 5 bytes is declared, its fields take 4"):
        Layout(Wrong, (6, 5))
    assert Layout(Wrong, (6, 4)).lengths == (6, 4)


def test_counted_bytes_need_a_count() -> None:
    class Wrong(Request):
        meta: Counted = b""

    with pytest.raises(TypeError, match=r"Wrong\.meta: no field is declared as count_of it"):
        Layout(Wrong)


def test_a_count_of_nothing_is_refused() -> None:
    class Wrong(Request):
        nmeta: U16 = count_of("meat")

    with pytest.raises(TypeError, match=r"Wrong\.nmeta: unknown field meat"):
        Layout(Wrong)


def test_a_condition_on_nothing_is_refused() -> None:
    class Wrong(Request):
        key: Key
        note: Annotated[int | None, UInt(2), When("flags", 1)] = None

    with pytest.raises(TypeError, match=r"Wrong\.note: unknown field flags"):
        Layout(Wrong)
