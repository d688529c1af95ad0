"""What holds for every declared message of every dialect, without naming one."""

import dataclasses
import random
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import by_depth, examples
from tests.support.message_strategies import any_message, dialects, messages, unknown_messages
from tests.support.transcripts import dialect_of, packets_of, recordings
from upriver.errors import WireError
from upriver.wire import DIALECTS, Dialect, Framer, Message
from upriver.wire.fields import UInt
from upriver.wire.framing import DRAFT, MEMCACHED
from upriver.wire.message import header_spans

DECLARED = [
    pytest.param(dialect, cls, id=f"{dialect.name}.{cls.__name__}")
    for dialect in DIALECTS.values()
    for cls in dialect.messages
]
#: With this many the whole module stays well below 20 s.
BUFFERS = by_depth(quick=20_000, deep=100_000)


def decoded(dialect: Dialect, pieces: list[bytes]) -> list[Message]:
    """Whatever comes out when the pieces are fed one after the other."""
    framer, out = Framer(dialect.framing), list[Message]()
    for piece in pieces:
        framer.feed(piece)
        while packet := framer.next_packet():
            out.append(dialect.decode(packet))
    return out


@pytest.mark.shows("open_issues:packet-parsing")
@pytest.mark.parametrize(("dialect", "cls"), DECLARED)
@settings(max_examples=examples(15))
@given(st.data())
def test_a_message_survives_the_wire(dialect: Dialect, cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(cls))
    packet = message.encode()
    assert dialect.decode(packet) == message
    assert dialect.decode(packet).encode() == packet


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.framing is MEMCACHED])
@settings(max_examples=examples(50))
@given(st.data())
def test_an_undeclared_message_survives_the_wire(name: str, data: st.DataObject) -> None:
    message = data.draw(unknown_messages(DIALECTS[name]))
    assert DIALECTS[name].decode(message.encode()) == message


@settings(max_examples=examples(200))
@given(st.data())
def test_the_fields_of_a_message_cover_its_packet_without_gaps(data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    packet = data.draw(any_message(dialect)).encode()
    cls, at = dialect.class_of(packet), 0
    for span in (*header_spans(cls, packet), *cls.body_spans(packet)):
        assert span.first == at, span
        at = span.last + 1
    assert at == len(packet)


@settings(max_examples=examples(100))
@given(st.data())
def test_any_split_of_the_bytes_gives_the_same_messages(data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    sent = data.draw(st.lists(any_message(dialect), max_size=5))
    whole = b"".join(message.encode() for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert decoded(dialect, pieces) == sent
    assert decoded(dialect, [whole[i : i + 1] for i in range(len(whole))]) == sent


@settings(max_examples=examples(100))
@given(st.data())
def test_any_proper_prefix_needs_more(data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    packet = data.draw(any_message(dialect)).encode()
    for size in range(len(packet)):
        framer = Framer(dialect.framing)
        framer.feed(packet[:size])
        assert framer.next_packet() is None
        assert framer.pending == size


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_packets_raise_nothing_but_wire_errors(data: st.DataObject) -> None:
    dialect = data.draw(dialects())
    packet = bytearray(data.draw(any_message(dialect)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packet)))
    try_to_decode(dialect, bytes(packet[cut:] if data.draw(st.booleans()) else packet[:cut] + packet))


def test_random_and_mutated_buffers_raise_nothing_but_wire_errors() -> None:
    rng = random.Random(2014)
    seeds = [(dialect_of(name), packet.data) for name in recordings() for packet in packets_of(name)]
    seeds += [(dialect, example(cls, rng)) for dialect in DIALECTS.values() for cls in dialect.messages]
    outcomes: Counter[str] = Counter()
    for number in range(BUFFERS):
        dialect, packet = rng.choice(seeds)
        data = random_packet(dialect, rng) if number % 4 == 0 else mutated(dialect, packet, rng)
        outcomes[try_to_decode(dialect, data)] += 1
    # If nearly all had the same fate, the mutations would show little.
    assert set(outcomes) == {"decoded", "incomplete", "bad frame", "bad body"}
    assert min(outcomes.values()) > BUFFERS // 10, outcomes


def try_to_decode(dialect: Dialect, data: bytes) -> str:
    """What becomes of the bytes; an error must say what is wrong, and where inside them."""
    framer, packet_at = Framer(dialect.framing), 0
    framer.feed(data)
    try:
        while packet := framer.next_packet():
            try:
                dialect.decode(packet).encode()
            except WireError as error:
                check_error(error.shifted(packet_at), data)
                return "bad body"
            packet_at = framer.offset
    except WireError as error:
        check_error(error, data)
        return "bad frame"
    return "incomplete" if framer.pending else "decoded"


def check_error(error: WireError, data: bytes) -> None:
    if not (0 <= error.offset <= len(data) and error.expected and error.found):
        raise AssertionError(f"{error} in {data.hex()}") from error


def example(cls: type[Message], rng: random.Random) -> bytes:
    """Some packet of the class: everything optional is left out."""
    kinds = {field.name: field.kind for field in cls.layout.fields}
    needed = [field.name for field in dataclasses.fields(cast(Any, cls)) if field.default is dataclasses.MISSING]
    values: dict[str, Any] = {
        name: rng.randrange(200) if isinstance(kinds[name], UInt) else rng.randbytes(5) for name in needed
    }
    return cls(**values).encode()


def mutated(dialect: Dialect, packet: bytes, rng: random.Random) -> bytes:
    """The packet with a few bytes changed, dropped or doubled; mostly its length is made right again."""
    data = bytearray(packet)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 28))
        what = rng.randrange(5)
        if what < 2:
            data[at] = rng.randrange(256)
        elif what == 2:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 3 and len(data) > 30:
            del data[at : at + rng.randrange(1, 4)]
        else:
            data[at:at] = data[: rng.randrange(1, 9)]
    if rng.random() < 0.8:
        size = dialect.framing.header_size
        data[0] = packet[0]
        data[8:12] = max(0, len(data) - size + rng.choice((0, 0, 0, -1, 1))).to_bytes(4, "big")
    return bytes(data)


def random_packet(dialect: Dialect, rng: random.Random) -> bytes:
    """Random bytes behind a header that is good enough for the body to be looked at."""
    body = rng.randbytes(rng.randrange(60))
    if dialect.framing is DRAFT:
        key_length = rng.randrange(len(body) + 2)
        kind = bytes((rng.randrange(8),))
        return DRAFT.header.pack(rng.randrange(1, 8), 0, key_length, 1, len(body) + 1) + kind + body
    extras = rng.choice((0, 0, 1, 4, 8, 16, 18, 20, 21, 24, 30, 31, 40, 48))
    key = rng.randrange(8)
    magic, sixth = rng.choice((0x80, 0x81)), rng.choice((0, 1, 0x23, rng.randrange(0x10000)))
    return MEMCACHED.header.pack(magic, rng.randrange(256), key, extras, 0, sixth, len(body), 1, 0) + body
