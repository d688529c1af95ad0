"""The five descriptions: each says only what its own dialect can read back, and bears the stream's mark."""

import pytest

from upriver.errors import KeyExists, NotMyVbucket
from upriver.model import FailoverEntry, FailoverLog, Snapshot, VbucketState
from upriver.protocol.producer.dialects import (
    DCP,
    FAILED,
    STREAM_DIALECTS,
    UPR,
    StreamDialect,
    opaque_of,
    put_opaque,
    wire_log,
)
from upriver.wire import AnyResponse, Message, dcp, upr, upr_draft1, upr_draft2

LOG = FailoverLog((FailoverEntry(7, 3), FailoverEntry(5, 0)))
ALL = list(STREAM_DIALECTS.values())
DRAFTS = [dialect for dialect in ALL if dialect.name.startswith("upr_draft")]


def named(dialect: StreamDialect) -> str:
    return dialect.name


def everything(dialect: StreamDialect) -> list[Message]:
    request = dialect.request(vbucket=3)  # type: ignore[call-arg]
    said = [
        dialect.failover_log(wire_log(LOG)),
        dialect.rollback(9),
        dialect.refused(request, NotMyVbucket()),
        dialect.refused(request, KeyExists("there is one")),
        *(dialect.end(reason) for reason in dialect.end_reasons.values()),
    ]
    said += [make() for make in (dialect.start, dialect.snapshot_end, dialect.flush) if make is not None]
    if dialect.advanced is not None:
        said.append(dialect.advanced(4))
    if dialect.set_state is not None:
        said += [dialect.set_state(state) for state in VbucketState]
    return said


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_its_own_dialect_reads_what_it_says(dialect: StreamDialect) -> None:
    for message in everything(dialect):
        put_opaque(message, 0xDEADBEEF)
        read = dialect.wire.decode(message.encode())
        assert read.encode() == message.encode()
        assert opaque_of(read) == 0xDEADBEEF


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_messages_of_a_stream_name_it(dialect: StreamDialect) -> None:
    end = dialect.addressed(dialect.end(0), 0x0102, 0x0A0B0C0D)
    marker = dialect.marker(0x0102, 0x0A0B0C0D)(Snapshot(1, 4), lambda: 5)
    for packet in (end, marker):
        read = dialect.wire.decode(packet)
        assert read.encode() == packet
        assert opaque_of(read) == 0x0A0B0C0D
        if not dialect.by_request_id:
            assert read.vbucket == 0x0102  # type: ignore[attr-defined]


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_every_end_of_a_history_has_a_reason(dialect: StreamDialect) -> None:
    ends = {"ok", "closed", "state changed", "flushed", "rolled back", "too slow", "disconnected", FAILED}
    assert set(dialect.end_reasons) == ends
    assert dialect.end_reasons["ok"] == 0
    assert all(dialect.end_reasons[reason] for reason in ends - {"ok"})


def test_what_the_texts_have_no_message_for() -> None:
    assert {dialect.name for dialect in ALL if dialect.flush is None} == {"upr_draft1"}
    assert {dialect.name for dialect in ALL if dialect.set_state is None} == {"upr_draft1", "upr_draft2"}
    assert {dialect.name for dialect in ALL if dialect.start is not None} == {dialect.name for dialect in DRAFTS}
    assert {dialect.name for dialect in ALL if dialect.snapshot_end is not None} == {d.name for d in DRAFTS}


def test_what_is_packed_by_hand_is_what_is_declared() -> None:
    marker = dcp.SnapshotMarker(vbucket=3, opaque=9, start_seqno=1, end_seqno=2**60, flags=dcp.MarkerFlag(5))
    assert DCP.marker(3, 9)(Snapshot(1, 2**60), lambda: 5) == marker.encode()
    for dialect in (UPR, DCP):
        answer = upr.StreamRequestResponse(opaque=9, log=wire_log(LOG))
        assert dialect.accepted(LOG, 9) == answer.encode()


@pytest.mark.parametrize("dialect", DRAFTS, ids=named)
def test_an_accepted_request_of_a_draft_is_answered_without_a_log(dialect: StreamDialect) -> None:
    answer = dialect.wire.decode(dialect.accepted(LOG, 9))
    assert answer == AnyResponse(opcode=0x50, opaque=9) or answer == upr_draft1.Ok(request_id=9)


@pytest.mark.parametrize("dialect", DRAFTS[:2], ids=named)
def test_what_the_first_drafts_refuse(dialect: StreamDialect) -> None:
    request = dialect.request(vbucket=3)  # type: ignore[call-arg]
    assert dialect.refused(request, NotMyVbucket("gone")) == upr_draft2.NotMyVbucket()
    error = dialect.refused(request, KeyExists("there is one"))
    assert isinstance(error, upr_draft2.RequestError)
    assert (error.status.name, error.text) == ("KEY_EEXISTS", b"there is one")
