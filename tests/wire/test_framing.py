"""Packets out of a stream of bytes: whole ones come out, wrong ones are refused at their header."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import WireError
from upriver.wire.framing import BODY_BYTES_MAX, DRAFT, MEMCACHED, VALUE_BYTES_MAX, Framer, Framing, packet_size

NOOP = bytes.fromhex("800a00000000000000000000000000010000000000000000")
DRAFT_OK = bytes.fromhex("02000000000000070000000101")


def header(*, magic: int = 0x80, key: int = 0, extras: int = 0, body: int = 0) -> bytes:
    return MEMCACHED.header.pack(magic, 0x0A, key, extras, 0, 0, body, 0, 0)


def draft_header(*, opcode: int = 2, body: int = 0) -> bytes:
    return DRAFT.header.pack(opcode, 0, 0, 0, body)


def refusal(framing: Framing, data: bytes, limit: int = BODY_BYTES_MAX) -> WireError:
    framer = Framer(framing, limit)
    framer.feed(data)
    with pytest.raises(WireError) as caught:
        framer.next_packet()
    return caught.value


def test_the_headers_have_24_and_12_bytes() -> None:
    assert (MEMCACHED.header_size, DRAFT.header_size) == (24, 12)
    for framing in (MEMCACHED, DRAFT):
        for fields in (framing.request_fields, framing.response_fields):
            assert sum(field.size for field in fields) == framing.header_size


@pytest.mark.parametrize(("framing", "packet"), [(MEMCACHED, NOOP), (DRAFT, DRAFT_OK)])
def test_whole_packets_come_out_one_by_one(framing: Framing, packet: bytes) -> None:
    framer = Framer(framing)
    framer.feed(packet + packet + packet[:5])
    assert framer.next_packet() == packet
    assert framer.offset == len(packet)
    assert framer.next_packet() == packet
    assert framer.next_packet() is None
    assert framer.pending == 5
    framer.feed(packet[5:])
    assert framer.next_packet() == packet
    assert (framer.pending, framer.offset) == (0, 3 * len(packet))


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 40))
def test_bodies_of_any_size_come_out_of_pieces_of_any_size(bodies: list[bytes], piece: int) -> None:
    packets = [header(body=len(body)) + body for body in bodies]
    stream, framer, out = b"".join(packets), Framer(MEMCACHED), []
    for at in range(0, len(stream), piece):
        framer.feed(stream[at : at + piece])
        while (packet := framer.next_packet()) is not None:
            out.append(packet)
    assert out == packets


def test_a_packet_is_a_copy_that_later_bytes_do_not_change() -> None:
    framer, received = Framer(MEMCACHED), bytearray(NOOP)
    framer.feed(memoryview(received))
    packet = framer.next_packet()
    received[:] = bytes(24)
    assert packet == NOOP


def test_the_limit_is_20_mebibytes_of_value_plus_key_and_extras() -> None:
    assert VALUE_BYTES_MAX == 20 * 1024 * 1024
    assert BODY_BYTES_MAX == 20 * 1024 * 1024 + 65535 + 255


@pytest.mark.parametrize("framing", [MEMCACHED, DRAFT])
def test_a_body_of_exactly_the_limit_is_taken(framing: Framing) -> None:
    head = header(body=100) if framing is MEMCACHED else draft_header(body=100)
    framer = Framer(framing, 100)
    framer.feed(head + bytes(100))
    assert framer.next_packet() == head + bytes(100)


@pytest.mark.parametrize(("framing", "head"), [(MEMCACHED, header(body=101)), (DRAFT, draft_header(body=101))])
def test_a_body_beyond_the_limit_is_refused(framing: Framing, head: bytes) -> None:
    error = refusal(framing, head, limit=100)
    assert (error.offset, error.expected, error.found) == (8, "a body of at most 100 bytes", "a length of 101")


@pytest.mark.parametrize(
    ("framing", "head"), [(MEMCACHED, header(body=2**32 - 1)), (DRAFT, draft_header(body=2**32 - 1))]
)
def test_four_gigabytes_are_refused_at_the_header_before_anything_is_allocated(framing: Framing, head: bytes) -> None:
    tracemalloc.start()
    try:
        error = refusal(framing, head)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.found == "a length of 4294967295"
    assert peak < 1_000_000


@pytest.mark.parametrize(("key", "extras", "body"), [(1, 0, 0), (0, 1, 0), (3, 8, 10), (65535, 255, 65789)])
def test_a_body_too_small_for_key_and_extras_is_refused(key: int, extras: int, body: int) -> None:
    error = refusal(MEMCACHED, header(key=key, extras=extras, body=body))
    assert error.offset == 8
    assert error.expected == f"a body that holds the key ({key} bytes) and the extras ({extras} bytes)"
    assert error.found == f"a length of {body}"


def test_a_body_that_just_holds_key_and_extras_is_taken() -> None:
    framer = Framer(MEMCACHED)
    framer.feed(header(key=3, extras=8, body=11) + bytes(11))
    assert framer.next_packet() is not None


@given(st.integers(0, 255).filter(lambda byte: byte not in (0x80, 0x81)))
def test_an_unknown_magic_is_refused_at_its_first_byte(magic: int) -> None:
    error = refusal(MEMCACHED, bytes((magic,)))
    assert str(error) == f"at byte 0: expected magic 0x80 or 0x81, found 0x{magic:02x}"


@given(st.integers(0, 255).filter(lambda byte: not 1 <= byte <= 7))
def test_an_unknown_opcode_of_the_drafts_is_refused_at_its_first_byte(opcode: int) -> None:
    error = refusal(DRAFT, bytes((opcode,)))
    assert (error.offset, error.found) == (0, f"0x{opcode:02x}")


@given(st.lists(st.integers(1, 60), max_size=12))
def test_offsets_count_from_the_first_byte_ever_fed(pieces: list[int]) -> None:
    good = NOOP * 10
    framer, at = Framer(MEMCACHED), 0
    for size in (*pieces, len(good)):
        framer.feed(good[at : at + size])
        at += size
        while framer.next_packet():
            pass
    framer.feed(header(key=5))
    with pytest.raises(WireError) as caught:
        framer.next_packet()
    assert caught.value.offset == len(good) + 8


def test_good_packets_before_a_bad_one_are_delivered() -> None:
    framer = Framer(MEMCACHED)
    framer.feed(NOOP + b"\x00" + NOOP)
    assert framer.next_packet() == NOOP
    with pytest.raises(WireError) as caught:
        framer.next_packet()
    assert caught.value.offset == 24


def test_after_an_error_the_framer_stays_broken_and_keeps_nothing() -> None:
    framer = Framer(MEMCACHED)
    framer.feed(b"\x00")
    for _ in range(2):
        with pytest.raises(WireError) as caught:
            framer.next_packet()
        assert caught.value.offset == 0
        framer.feed(NOOP)
    assert framer.pending == 1


@given(st.binary(max_size=30), st.integers(0, 40))
def test_the_size_of_a_packet_is_known_once_its_header_is_complete(before: bytes, cut: int) -> None:
    packet = header(key=3, body=5) + b"abcde"
    data = before + packet[:cut]
    expected = len(packet) if cut >= MEMCACHED.header_size else None
    assert packet_size(data, len(before)) == expected


def test_the_size_of_what_is_not_a_packet_is_an_error() -> None:
    with pytest.raises(WireError):
        packet_size(b"GET / HTTP/1.1", 0)
