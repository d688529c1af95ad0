"""The columnar codec gives what the message layer gives, compiled or plain, however the bytes are cut."""

import gc
import random
import resource
import shutil
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import by_depth, examples
from upriver.errors import WireError
from upriver.model import CHANGES, Change, Event, change_batch, changes_in
from upriver.wire import DIALECTS, Dialect, Framer, Message, dcp, memcached, tap, upr, upr_draft2
from upriver.wire.codec import columns, plain_columns
from upriver.wire.codec.columns import ChangeBatch, ChangeDecoder, ChangeEncoder
from upriver.wire.codec.row_layout import field_column, row_layouts
from upriver.wire.message import DraftMessage

CODECS: list[ModuleType] = [plain_columns]
if columns.CODEC == "compiled":
    from upriver.wire.codec import _columns

    CODECS.append(_columns)

STREAM_DIALECTS = [DIALECTS[name] for name in ("dcp", "upr", "tap", "upr_draft3", "upr_draft2", "upr_draft1")]
BINARY_HEADER = [dialect for dialect in STREAM_DIALECTS if not dialect.name.endswith(("1", "2"))]

dialects = pytest.mark.parametrize("dialect", STREAM_DIALECTS, ids=lambda dialect: dialect.name)
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.__name__.rpartition(".")[2])

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))


@st.composite
def changes(draw: st.DrawFn) -> Change:
    event = draw(st.sampled_from([Event.MUTATION, Event.DELETION, Event.EXPIRATION]))
    return Change(
        vbucket=7,
        event=event,
        seqno=draw(u64),
        rev_seqno=draw(u64),
        cas=draw(u64),
        flags=draw(u32),
        expiry=draw(u32),
        lock_time=draw(u32),
        datatype=draw(u8),
        key=draw(st.binary(min_size=1, max_size=40)),
        value=draw(st.binary(max_size=200)) if event is Event.MUTATION else b"",
    )


#: A control message of each dialect, so that runs of changes are broken.
CONTROL: dict[str, bytes] = {
    "dcp": dcp.SnapshotMarker(start_seqno=3, end_seqno=9, opaque=7).encode(),
    "upr": upr.SnapshotMarker(opaque=7).encode(),
    "tap": tap.Opaque(control=tap.Control.CLOSE_BACKFILL).encode(),
    "upr_draft3": bytes.fromhex("805500000000000c000000000000002d0000000000000000"),
    "upr_draft2": bytes.fromhex("040000000000002d0000000102"),
    "upr_draft1": bytes.fromhex("040000000000002d0000000102"),
}


def reference(dialect: Dialect, data: bytes) -> tuple[list[Any], WireError | None]:
    """What the message layer makes of the bytes: rows as dictionaries, other messages as they are, and the error."""
    framer = Framer(dialect.framing)
    items: list[Any] = []
    framer.feed(data)
    try:
        while True:
            offset = framer.offset
            packet = framer.next_packet()
            if packet is None:
                return items, None
            try:
                message = dialect.decode(packet)
            except WireError as error:
                return items, error.shifted(offset)
            items.append(row_of(message) if is_change(message) else message)
    except WireError as error:
        return items, error


def opaque_of(message: Any) -> int:
    return int(message.request_id if isinstance(message, DraftMessage) else message.opaque)


def is_change(message: Message) -> bool:
    return hasattr(type(message), "declaration") and message.declaration.change is not None


def row_of(message: Any) -> dict[str, Any]:
    row = dict.fromkeys(CHANGES.names, 0) | {"value": b"", "event": int(message.declaration.change)}
    for name in ("cas", "vbucket", "datatype"):
        row[name] = getattr(message, name, 0)
    for field in message.layout.fields:
        column = field_column(field.name)
        if column in row and getattr(message, field.name) is not None:
            row[column] = getattr(message, field.name)
    return row


def decoded(decoder: ChangeDecoder, pieces: Iterable[bytes | bytearray]) -> tuple[list[Any], WireError | None]:
    """What a decoder makes of the pieces, in the form of ``reference``."""
    items: list[Any] = []
    try:
        for piece in pieces:
            decoder.feed(piece)
            for item in decoder:
                items += item.records.to_pylist() if isinstance(item, ChangeBatch) else [item]
    except WireError as error:
        return items, error
    return items, None


def cut(data: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for place in sorted({place % (len(data) + 1) for place in cuts}):
        yield data[start:place]
        start = place
    yield data[start:]


def same(left: tuple[list[Any], WireError | None], right: tuple[list[Any], WireError | None]) -> bool:
    return left[0] == right[0] and str(left[1]) == str(right[1])


def stream(dialect: Dialect, rows: list[Change], *, controls: int = 2) -> bytes:
    """Packets of the changes with a control message after every few."""
    parts = []
    for index in range(0, len(rows), controls):
        encoder = ChangeEncoder(dialect, opaque=9, vbucket=7, codec=plain_columns)
        parts += [bytes(encoder.encode(change_batch(rows[index : index + controls]))), CONTROL[dialect.name]]
    return b"".join(parts)


@dialects
@codecs
@given(rows=st.lists(changes(), max_size=8), cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_decodes_as_the_message_layer_does_however_the_bytes_are_cut(
    dialect: Dialect, codec: ModuleType, rows: list[Change], cuts: list[int]
) -> None:
    data = stream(dialect, rows)
    assert same(decoded(ChangeDecoder(dialect, codec=codec), cut(data, cuts)), reference(dialect, data))


@dialects
@codecs
def test_one_byte_at_a_time_gives_the_same(dialect: Dialect, codec: ModuleType) -> None:
    rows = [Change(vbucket=7, event=Event(1 + n % 3), seqno=n, key=b"k%d" % n) for n in range(1, 8)]
    data = stream(dialect, rows)
    pieces = [data[n : n + 1] for n in range(len(data))]
    assert same(decoded(ChangeDecoder(dialect, codec=codec), pieces), reference(dialect, data))


@dialects
@codecs
@settings(max_examples=examples(200))
@given(
    rows=st.lists(changes(), min_size=1, max_size=6),
    damage=st.lists(st.tuples(st.integers(0, 5000), u8), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 10_000), max_size=3),
)
def test_damaged_bytes_give_the_same_error_at_the_same_offset_after_the_same_good_messages(
    dialect: Dialect, codec: ModuleType, rows: list[Change], damage: list[tuple[int, int]], cuts: list[int]
) -> None:
    data = bytearray(stream(dialect, rows))
    for place, byte in damage:
        data[place % len(data)] = byte
    expected = reference(dialect, bytes(data))
    assert same(decoded(ChangeDecoder(dialect, codec=codec), cut(bytes(data), cuts)), expected)


@pytest.mark.skipif(len(CODECS) == 1, reason="the compiled codec was not built")
def test_both_codecs_agree_on_random_and_mutated_buffers() -> None:
    rng = random.Random(20_261_115)
    rows = [
        Change(vbucket=7, event=Event(1 + n % 3), seqno=n, key=rng.randbytes(1 + n % 9), value=b"") for n in range(1, 4)
    ]
    seeds = {dialect.name: stream(dialect, rows, controls=3) for dialect in BINARY_HEADER}
    readers = {
        dialect.name: [ChangeDecoder(dialect, codec=codec)._reader for codec in CODECS] for dialect in BINARY_HEADER
    }
    for number in range(by_depth(quick=20_000, deep=100_000)):
        name = BINARY_HEADER[number % len(BINARY_HEADER)].name
        data = bytearray(seeds[name] if number % 5 else rng.randbytes(rng.randrange(120)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        plain, compiled = (reader.read(b"", bytes(data), 0, 100, 1 << 20) for reader in readers[name])
        assert plain[:2] == compiled[:2], (name, data.hex())
        assert plain[2:] == compiled[2:] or not plain[0], (name, data.hex())


@dialects
@given(rows=st.lists(changes(), max_size=8), keys_only=st.booleans(), delete_times=st.booleans())
def test_both_codecs_encode_the_same_bytes_and_they_decode_to_the_changes(
    dialect: Dialect, rows: list[Change], keys_only: bool, delete_times: bool
) -> None:
    batch = change_batch(rows)
    first, *others = (
        bytes(
            ChangeEncoder(
                dialect, opaque=9, vbucket=7, keys_only=keys_only, delete_times=delete_times, codec=codec
            ).encode(batch)
        )
        for codec in CODECS
    )
    assert all(other == first for other in others)
    items, error = reference(dialect, first)
    assert error is None
    assert [item["key"] for item in items] == [row.key for row in rows]
    assert [item["value"] for item in items] == [b"" if keys_only else row.value for row in rows]


@dialects
@codecs
@pytest.mark.parametrize("event", [Event.MUTATION, Event.DELETION, Event.EXPIRATION])
def test_encoding_is_what_the_message_layer_encodes(dialect: Dialect, codec: ModuleType, event: Event) -> None:
    value = b"v" if event is Event.MUTATION else b""
    change = Change(vbucket=7, event=event, seqno=5, rev_seqno=2, cas=8, flags=3, expiry=4, key=b"k", value=value)
    packet = bytes(ChangeEncoder(dialect, opaque=9, vbucket=7, codec=codec).encode(change_batch([change])))
    message: Any = dialect.decode(packet)
    assert message.encode() == packet
    assert (opaque_of(message), message.cas, message.key, getattr(message, "value", b"")) == (9, 8, b"k", value)
    assert getattr(message, "vbucket", 7) == 7
    assert getattr(message, "by_seqno", 5) == 5
    if event is Event.MUTATION:
        assert (message.flags, message.expiration) == (3, 4)


@dialects
@codecs
def test_no_message_is_made_for_each_change(
    dialect: Dialect, codec: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that did so in a turn would keep everybody else waiting."""
    encoder = ChangeEncoder(dialect, opaque=9, vbucket=7, codec=codec)
    rows = [Change(vbucket=7, event=Event(1 + n % 3), seqno=n, key=b"k%d" % n) for n in range(9)]
    made: list[Message] = []
    for message in dialect.change_messages():
        monkeypatch.setattr(message, "encode", made.append)
    assert len(encoder.encode(change_batch(rows))) > 0
    assert not made


@codecs
def test_the_short_drafts_cannot_tell_an_empty_key_from_none(codec: ModuleType) -> None:
    encoder = ChangeEncoder(upr_draft2.upr_draft2, opaque=1, vbucket=1, codec=codec)
    with pytest.raises(ValueError, match="row 0 cannot be a packet: event 2, a key of 0 bytes"):
        encoder.encode(change_batch([Change(vbucket=1, event=Event.DELETION, seqno=1, key=b"")]))


@codecs
def test_expirations_go_out_as_deletions_where_they_are_not_wanted(codec: ModuleType) -> None:
    batch = change_batch([Change(vbucket=1, event=Event.EXPIRATION, seqno=5, expiry=77, key=b"k")])
    wanted = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, codec=codec).encode(batch)
    unwanted = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, expirations=False, codec=codec).encode(batch)
    timed = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, expirations=False, delete_times=True, codec=codec).encode(batch)
    assert dcp.dcp.decode(bytes(wanted)) == dcp.Expiration(
        opaque=1, vbucket=1, by_seqno=5, rev_seqno=0, delete_time=77, key=b"k"
    )
    assert dcp.dcp.decode(bytes(unwanted)) == dcp.Deletion(opaque=1, vbucket=1, by_seqno=5, rev_seqno=0, key=b"k")
    assert dcp.dcp.decode(bytes(timed)) == dcp.Deletion(
        opaque=1, vbucket=1, by_seqno=5, rev_seqno=0, delete_time=77, key=b"k"
    )


@codecs
def test_tap_messages_are_numbered_across_batches_and_carry_their_time_to_live(codec: ModuleType) -> None:
    batch = change_batch([Change(vbucket=1, event=Event.MUTATION, seqno=0, key=b"k")] * 3)
    encoder = ChangeEncoder(
        tap.tap, opaque=2**32 - 2, vbucket=1, opaque_step=1, ttl=9, tap_flags=tap.TapFlag.ACK, codec=codec
    )
    decoder = ChangeDecoder(tap.tap, codec=codec)
    decoder.feed(bytes(encoder.encode(batch)) + bytes(encoder.encode(batch)))
    (decoded_batch,) = decoder
    assert isinstance(decoded_batch, ChangeBatch)
    assert decoded_batch.transport.to_pydict() == {
        "opaque": [2**32 - 2, 2**32 - 1, 0, 1, 2, 3],
        "tap_flags": [1] * 6,
        "ttl": [9] * 6,
    }


@codecs
def test_metadata_is_split_off_the_value(codec: ModuleType) -> None:
    packet = dcp.Mutation(by_seqno=1, key=b"k", value=b"value", meta=b"meta").encode()
    decoder = ChangeDecoder(dcp.dcp, codec=codec)
    decoder.feed(packet)
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    assert batch.records.column("value").to_pylist() == [b"value"]
    assert batch.wire_bytes == len(packet)


@codecs
def test_only_the_columns_asked_for_are_decoded(codec: ModuleType) -> None:
    decoder = ChangeDecoder(dcp.dcp, columns=("key", "seqno"), codec=codec)
    decoder.feed(dcp.Mutation(by_seqno=4, key=b"k", value=b"v").encode())
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    assert batch.records.to_pylist() == [{"key": b"k", "seqno": 4}]


@codecs
def test_a_batch_ends_at_the_limit_of_rows_or_bytes(codec: ModuleType) -> None:
    packet = dcp.Mutation(by_seqno=4, key=b"k", value=b"v" * 100).encode()
    by_rows = ChangeDecoder(dcp.dcp, batch_rows_max=4, codec=codec)
    by_rows.feed(packet * 10)
    assert [len(batch) for batch in by_rows if isinstance(batch, ChangeBatch)] == [4, 4, 2]
    by_bytes = ChangeDecoder(dcp.dcp, batch_bytes_max=3 * len(packet), codec=codec)
    by_bytes.feed(packet * 7)
    assert [len(batch) for batch in by_bytes if isinstance(batch, ChangeBatch)] == [3, 3, 1]


@codecs
def test_control_messages_and_responses_come_at_their_place(codec: ModuleType) -> None:
    mutation = dcp.Mutation(by_seqno=4, key=b"k")
    marker = dcp.SnapshotMarker(start_seqno=0, end_seqno=5)
    answer = memcached.GetResponse(value=b"v")
    decoder = ChangeDecoder(dcp.dcp, codec=codec)
    decoder.feed(b"".join(message.encode() for message in (marker, mutation, mutation, answer, mutation)))
    items = [len(item) if isinstance(item, ChangeBatch) else item for item in decoder]
    assert items == [marker, 2, answer, 1]


@codecs
def test_a_body_over_the_limit_is_refused_at_its_header(codec: ModuleType) -> None:
    good = dcp.Mutation(by_seqno=4, key=b"k").encode()
    decoder = ChangeDecoder(dcp.dcp, codec=codec, body_bytes_max=1000)
    decoder.feed(good + good[:8] + (0xFFFFFFF0).to_bytes(4, "big") + good[12:])
    assert isinstance(decoder.next(), ChangeBatch)
    for _ in range(2):  # it stays broken
        with pytest.raises(WireError, match="at most 1000 bytes") as caught:
            decoder.next()
        assert caught.value.offset == len(good) + 8


@codecs
def test_what_cannot_be_a_packet_is_refused_by_its_row(codec: ModuleType) -> None:
    good = Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k")
    flush = Change(vbucket=1, event=Event.FLUSH, seqno=2, key=b"")
    long_key = Change(vbucket=1, event=Event.MUTATION, seqno=3, key=b"k" * 65_536)
    encoder = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, codec=codec)
    with pytest.raises(ValueError, match="row 1 cannot be a packet: event 4"):
        encoder.encode(change_batch([good, flush]))
    with pytest.raises(ValueError, match="a key of 65536 bytes"):
        encoder.encode(change_batch([good, good, long_key]))


@codecs
def test_a_batch_with_other_columns_or_types_is_cast_to_the_schema(codec: ModuleType) -> None:
    row = Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k", value=b"v")
    batch = change_batch([row])
    wide = pa.RecordBatch.from_arrays(
        [batch.column("key").cast(pa.large_binary()), *(batch.column(n) for n in CHANGES.names if n != "key")],
        names=["key", *(n for n in CHANGES.names if n != "key")],
    )
    encoder = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, codec=codec)
    assert bytes(encoder.encode(wide)) == bytes(encoder.encode(batch))


@codecs
def test_sliced_batches_encode_their_own_rows(codec: ModuleType) -> None:
    rows = [Change(vbucket=1, event=Event.MUTATION, seqno=n, key=b"key%d" % n, value=b"v" * n) for n in range(9)]
    encoder = ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, codec=codec)
    sliced = bytes(encoder.encode(change_batch(rows).slice(3, 4)))
    assert sliced == bytes(encoder.encode(change_batch(rows[3:7])))


@codecs
def test_batches_outlive_the_fed_buffer_and_the_decoder(codec: ModuleType) -> None:
    received = bytearray(dcp.Mutation(by_seqno=4, key=b"key", value=b"value").encode())
    decoder = ChangeDecoder(dcp.dcp, codec=codec)
    decoder.feed(received)
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    received[:] = bytes(len(received))
    del decoder
    (change,) = changes_in(batch.records)
    assert (change.key, change.value) == (b"key", b"value")


def test_released_batches_give_their_memory_back() -> None:
    packet = dcp.Mutation(by_seqno=4, key=b"k", value=b"v" * 100_000).encode()
    decoder = ChangeDecoder(dcp.dcp)

    def run(times: int) -> None:
        for _ in range(times):
            decoder.feed(packet * 10)
            for item in decoder:
                assert len(item) if isinstance(item, ChangeBatch) else False

    run(20)
    gc.collect()
    before = resident_bytes()
    run(200)  # 200 MB in all
    gc.collect()
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    """The memory that this process holds at this moment."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def lonely_packets() -> Iterator[tuple[Dialect, bytes]]:
    """Each kind of change alone, with every length in it at the edges of what it may be, and every prefix of it.

    Under AddressSanitizer a read beyond the last byte shows, because no memory follows it.
    """
    for dialect in BINARY_HEADER:
        for layout in row_layouts(dialect):
            whole = bytearray(24 + layout.fixed_length + 3)
            whole[0:2] = 0x80, layout.opcode
            whole[4] = layout.extras_length
            places = [(2, 2), (4, 1), (8, 4)]
            places += [(place.offset, 2) for place in (layout.private, layout.trailer) if place is not None]
            extras, fixed = layout.extras_length, layout.fixed_length
            for body in (0, extras - 1, extras, fixed - 1, fixed, fixed + 2, fixed + 3, 0xFFFF):
                whole[8:12] = body.to_bytes(4, "big")
                for offset, size in places:
                    for number in (0, 1, extras, fixed - extras, fixed, 0xFF, 0xFFFF):
                        packet = bytearray(whole)
                        packet[offset : offset + size] = min(number, 256**size - 1).to_bytes(size, "big")
                        yield dialect, bytes(packet[: 24 + min(body, fixed + 3)])
            for length in range(len(whole)):
                yield dialect, bytes(whole[:length])


@codecs
def test_memory_that_is_used_again_never_belongs_to_a_batch_that_lives(codec: ModuleType) -> None:
    """Threads make and drop batches of all sizes; each one that is kept holds what was put in."""

    def work(thread: int) -> bool:
        order = random.Random(thread)
        decoder = ChangeDecoder(dcp.dcp, batch_rows_max=1 << 20, batch_bytes_max=1 << 30, codec=codec)
        kept: list[tuple[int, pa.RecordBatch]] = []
        for number in range(60):
            value = b"%d:%d" % (thread, number) * order.choice((1, 3_000, 9_000))
            decoder.feed(b"".join(dcp.Mutation(by_seqno=i, key=b"k", value=value).encode() for i in range(1, 30)))
            (batch,) = list(decoder)
            assert isinstance(batch, ChangeBatch)
            kept.append((number, batch.records))
            if len(kept) > 4:
                kept.pop(order.randrange(len(kept)))
            for mark, records in kept:
                values = set(records.column("value").to_pylist())
                if len(values) != 1 or not values.pop().startswith(b"%d:%d" % (thread, mark)):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@codecs
def test_a_change_alone_is_never_read_beyond_its_last_byte(codec: ModuleType) -> None:
    for dialect, packet in lonely_packets():
        decoder = ChangeDecoder(dialect, codec=codec)
        assert same(decoded(decoder, [bytearray(packet)]), reference(dialect, packet)), (dialect.name, packet.hex())


def test_the_compiled_codec_is_in_use_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    assert columns.CODEC == "compiled"


@codecs
def test_a_stream_that_ends_inside_a_packet_is_told_at_its_end(codec: ModuleType) -> None:
    packet = dcp.Mutation(by_seqno=4, key=b"key").encode()
    decoder = ChangeDecoder(dcp.dcp, codec=codec)
    decoder.feed(packet + packet[:30])
    assert len(list(decoder)) == 1
    with pytest.raises(WireError, match=f"expected a packet of {len(packet)} bytes, found 30") as caught:
        decoder.finish()
    assert caught.value.offset == len(packet)
    decoder.feed(packet[30:])
    assert len(list(decoder)) == 1
    decoder.finish()


@codecs
def test_what_makes_no_sense_is_refused_alike(codec: ModuleType) -> None:
    row = Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k")
    with pytest.raises(ValueError, match="at least one row"):
        ChangeDecoder(dcp.dcp, batch_rows_max=0, codec=codec)
    with pytest.raises(ValueError, match="32 bits"):
        ChangeEncoder(dcp.dcp, opaque=2**32, vbucket=1, codec=codec)
    with pytest.raises(TypeError, match="ttll"):
        ChangeEncoder(tap.tap, opaque=1, vbucket=1, ttll=9, codec=codec)
    batch = change_batch([row])
    nulls = batch.set_column(2, "seqno", pa.array([None], pa.uint64()))
    with pytest.raises(ValueError, match="seqno"):
        ChangeEncoder(dcp.dcp, opaque=1, vbucket=1, codec=codec).encode(nulls)


@codecs
def test_rows_without_columns_still_count(codec: ModuleType) -> None:
    decoder = ChangeDecoder(dcp.dcp, columns=(), codec=codec)
    decoder.feed(memoryview(dcp.Mutation(by_seqno=4, key=b"k").encode() * 2))
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    assert batch.transport.num_rows == 2


def test_drafts_refuse_what_is_no_change_and_may_send_deletions_for_expirations() -> None:
    draft = DIALECTS["upr_draft2"]
    flush = Change(vbucket=1, event=Event.FLUSH, seqno=2, key=b"")
    with pytest.raises(ValueError, match="row 0 cannot be a packet: event 4"):
        ChangeEncoder(draft, opaque=1, vbucket=1).encode(change_batch([flush]))
    expired = change_batch([Change(vbucket=1, event=Event.EXPIRATION, seqno=5, key=b"k")])
    packet = ChangeEncoder(draft, opaque=1, vbucket=1, expirations=False).encode(expired)
    assert isinstance(draft.decode(bytes(packet)), upr_draft2.Deletion)


@pytest.mark.parametrize("codec", CODECS)
def test_a_packet_that_stands_elsewhere_is_in_one_batch_with_what_follows(codec: ModuleType) -> None:
    first, *rest = (dcp.Mutation(by_seqno=n, key=b"key%d" % n, value=b"v").encode() for n in range(1, 4))
    decoder = ChangeDecoder(dcp.dcp, codec=codec)
    for data in (b"".join(rest), b""):
        decoder.feed_behind(first, data)
        batch = decoder.next()
        assert isinstance(batch, ChangeBatch)
        assert batch.records.column("seqno").to_pylist() == ([1, 2, 3] if data else [1])
        assert batch.wire_bytes == len(first) + len(data)
        assert decoder.next() is None


# Engine-private data of any length, from servers that we do not know


class Odd(NamedTuple):
    """A TAP message as another engine sends it, laid out by hand."""

    opcode: int
    private: bytes
    key: bytes
    value: bytes
    number: int

    @property
    def packet(self) -> bytes:
        """The length of the private data, flags, time to live; then flags and expiry of a mutation."""
        extras = struct.pack(">HHB3x", len(self.private), 0, 255)
        if self.opcode == 0x41:
            extras += struct.pack(">II", self.number, 9)
        body = extras + self.private + self.key + self.value
        return (
            struct.pack(">BBHBBHIIQ", 0x80, self.opcode, len(self.key), len(extras), 0, 5, len(body), self.number, 3)
            + body
        )

    def check(self, found: Any) -> None:
        """What our side must have made of it."""
        if self.opcode in (0x41, 0x42):
            revision = int.from_bytes(self.private[:8], "big") if len(self.private) >= 8 else 0
            assert (found["key"], found["value"], found["vbucket"]) == (self.key, self.value, 5)
            assert (found["rev_seqno"], found["cas"]) == (revision, 3)
            assert (found["flags"], found["expiry"]) == ((self.number, 9) if self.opcode == 0x41 else (0, 0))
            return
        assert (found.code, found.opaque) == (self.opcode, self.number)
        if self.opcode == 0x43:
            assert found.private == self.private
        elif self.opcode == 0x44:
            assert found.control == (int.from_bytes(self.private[:4], "big") if len(self.private) >= 4 else None)
        else:
            assert found.checkpoint == (int.from_bytes(self.private[:8], "big") if len(self.private) >= 8 else None)


@st.composite
def odd_messages(draw: st.DrawFn) -> Odd:
    opcode = draw(st.sampled_from([0x41, 0x41, 0x42, 0x43, 0x44, 0x46, 0x47]))
    private = draw(st.integers(0, 40).flatmap(lambda size: st.binary(min_size=size, max_size=size)))
    has_key = opcode in (0x41, 0x42)
    key = draw(st.binary(min_size=1, max_size=20)) if has_key else b""
    value = draw(st.binary(max_size=40)) if has_key else b""
    return Odd(opcode, private, key, value, draw(u32))


@codecs
@settings(max_examples=examples(300))
@given(odd=st.lists(odd_messages(), max_size=8), cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_engine_private_data_of_any_length_is_skipped(codec: ModuleType, odd: list[Odd], cuts: list[int]) -> None:
    data = b"".join(message.packet for message in odd)
    found, error = decoded(ChangeDecoder(tap.tap, codec=codec), cut(data, cuts))
    assert error is None
    assert len(found) == len(odd)
    for message, item in zip(odd, found, strict=True):
        message.check(item)
    assert same((found, error), reference(tap.tap, data))


@codecs
@pytest.mark.parametrize("opcode", [0x41, 0x42])
def test_changes_with_private_data_of_every_length_are_one_batch(codec: ModuleType, opcode: int) -> None:
    odd = [Odd(opcode, bytes(range(size)), b"k%d" % size, b"v", size) for size in range(41)]
    decoder = ChangeDecoder(tap.tap, codec=codec)
    decoder.feed(b"".join(message.packet for message in odd))
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    for message, row in zip(odd, batch.records.to_pylist(), strict=True):
        message.check(row)
    assert batch.transport.column("opaque").to_pylist() == list(range(41))
    assert set(batch.transport.column("ttl").to_pylist()) == {255}
