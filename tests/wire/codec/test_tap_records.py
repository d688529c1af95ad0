"""Both twins over the same records: what a TAP message says is what the record held."""

import dataclasses
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.change_strategies import CHANGES
from upriver.model import Change, Event
from upriver.model.compression import SNAPPY
from upriver.model.record import Record, pack
from upriver.wire import Framer, Message, tap
from upriver.wire.codec import tap_records
from upriver.wire.codec.tap_records import Laid, inflated_records, lay_out, plain_lay_out
from upriver.wire.dialects.tap import TapFlag
from upriver.wire.framing import MEMCACHED

RECORDS = st.builds(Record, change=CHANGES, time=st.integers(0, 5), ttl=st.sampled_from([0, 1, 7, 255]))
TWINS = pytest.mark.parametrize("twin", [pytest.param(lay_out, id="chosen"), pytest.param(plain_lay_out, id="plain")])
Twin = Callable[..., Laid]
ALL = 2**64 - 1


def decoded(data: bytes) -> list[Message]:
    framer = Framer(MEMCACHED)
    framer.feed(data)
    out: list[Message] = []
    while packet := framer.next_packet():
        out.append(tap.tap.decode(packet))
    assert not framer.pending
    return out


def record(seqno: int, event: Event = Event.MUTATION, time: int = 0, ttl: int = 255) -> bytes:
    change = Change(vbucket=1, event=event, seqno=seqno, rev_seqno=seqno, cas=9, key=b"k%d" % seqno, value=b"")
    return pack(Record(change=change, time=time, ttl=ttl))


@TWINS
@given(records=st.lists(RECORDS, max_size=12), opaque=st.integers(0, 2**32 - 1), flags=st.sampled_from([0, 4, 6]))
def test_a_message_says_what_the_record_held(twin: Twin, records: list[Record], opaque: int, flags: int) -> None:
    laid = twin(b"".join(map(pack, records)), 0, opaque, 100, flags, 0, 0, 1, 0)
    assert laid.sent == len(records)
    assert laid.tired == 0
    for number, (held, message) in enumerate(zip(records, decoded(laid.messages), strict=True)):
        change = held.change
        assert isinstance(message, tap.Mutation | tap.Delete)
        assert message.opaque == (opaque + number) % 2**32
        assert (message.vbucket, message.cas, message.key) == (change.vbucket, change.cas, change.key)
        assert (message.rev_seqno, message.ttl) == (change.rev_seqno, max(held.ttl, 1))
        if change.event is Event.MUTATION:
            assert isinstance(message, tap.Mutation)
            assert (message.flags, message.expiration, message.value) == (change.flags, change.expiry, change.value)
            assert int(message.tap_flags) == flags
        else:
            assert isinstance(message, tap.Delete)
            assert (message.value, int(message.tap_flags)) == (b"", 0)


@given(
    records=st.lists(RECORDS, max_size=12),
    count_max=st.integers(0, 14),
    since=st.integers(0, 6),
    since_upto=st.integers(0, 2**64 - 1),
    ttl_min=st.integers(0, 2),
    ack=st.integers(0, 3),
)
def test_both_twins_agree_to_the_byte(
    records: list[Record], count_max: int, since: int, since_upto: int, ttl_min: int, ack: int
) -> None:
    data = b"".join(map(pack, records))
    at = 0
    while at < len(data):
        arguments = data, at, 7, count_max, 4, since, since_upto, ttl_min, ack
        found = lay_out(*arguments)
        assert found == plain_lay_out(*arguments)
        if found.at == at:
            assert count_max == 0
            break
        at = found.at


@TWINS
def test_a_run_ends_after_so_many_and_goes_on_there(twin: Twin) -> None:
    data = b"".join(record(seqno) for seqno in range(1, 6))
    first = twin(data, 0, 1, 2, 0, 0, 0, 0, 1)
    rest = twin(data, first.at, 3, 10, 0, 0, 0, 0, 1)
    assert (first.sent, first.seqno, rest.sent, rest.seqno, rest.at) == (2, 2, 3, 5, len(data))
    marks = [int(message.tap_flags) for message in decoded(first.messages + rest.messages)]  # type: ignore[attr-defined]
    assert marks == [0, int(TapFlag.ACK), 0, 0, 0]


@TWINS
def test_what_happened_before_a_time_is_left_out_up_to_a_seqno(twin: Twin) -> None:
    data = b"".join(record(seqno, time=seqno) for seqno in range(1, 6)) + record(6, time=1)
    laid = twin(data, 0, 1, 10, 0, 4, 5, 0, 2)
    assert [message.key for message in decoded(laid.messages)] == [b"k4", b"k5", b"k6"]  # type: ignore[attr-defined]
    assert decoded(laid.messages)[-1].tap_flags == TapFlag.ACK  # type: ignore[attr-defined]


@TWINS
def test_a_record_without_hops_left_stays(twin: Twin) -> None:
    data = record(1, ttl=0) + record(2, Event.DELETION, ttl=0) + record(3, ttl=1)
    laid = twin(data, 0, 1, 10, 0, 0, 0, 0, 0)
    assert (laid.sent, laid.tired, laid.seqno) == (1, 2, 3)
    assert twin(data, 0, 1, 10, 0, 0, 0, 1, 0).sent == 3


def test_the_marks_are_those_that_the_dialect_declares() -> None:
    assert tuple(map(int, TapFlag)) == (tap_records.ACK, tap_records.NO_VALUE, tap_records.NETWORK_BYTE_ORDER)
    assert tap.Mutation.declaration.opcode == tap_records.MUTATION
    assert tap.Delete.declaration.opcode == tap_records.DELETE


def compressed(change: Change) -> Change:
    """The same change with its value compressed; a deletion keeps its own."""
    if change.event is not Event.MUTATION:
        return change
    value = pa.Codec("snappy").compress(change.value, asbytes=True)
    return dataclasses.replace(change, value=value, datatype=change.datatype | SNAPPY)


@given(records=st.lists(st.tuples(RECORDS, st.booleans()), max_size=12))
def test_what_was_compressed_is_inflated_and_all_else_stays(records: list[tuple[Record, bool]]) -> None:
    stored = b"".join(
        pack(dataclasses.replace(held, change=compressed(held.change)) if packs else held) for held, packs in records
    )
    assert inflated_records(stored) == b"".join(pack(held) for held, _ in records)
    found = any(packs and held.change.event is Event.MUTATION for held, packs in records)
    for twin in (lay_out, plain_lay_out):
        laid = twin(stored, 0, 7, 100, 0, 0, 0, 1, 0)
        assert laid.compressed == found
        assert laid.sent == (0 if found else len(records))


@TWINS
def test_a_compressed_value_that_is_left_out_delays_no_other(twin: Twin) -> None:
    held = Record(
        change=compressed(Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k", value=b"v")), time=1, ttl=9
    )
    assert twin(pack(held), 0, 0, 10, 0, 2, 5, 0, 0) == Laid(b"", 0, len(pack(held)), 1, 0)


def test_what_only_claims_to_be_compressed_is_the_value() -> None:
    change = Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k", value=b"\xff" * 9, datatype=SNAPPY)
    data = pack(Record(change=change, time=1, ttl=255))
    assert inflated_records(data) == pack(Record(change=dataclasses.replace(change, datatype=0), time=1, ttl=255))
