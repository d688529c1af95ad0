"""Messages: headers, undeclared ones, and the two framings."""

import pytest

from upriver.errors import WireError
from upriver.wire import AnyRequest, AnyResponse, dcp, memcached, upr_draft1
from upriver.wire.codes import Magic, Status
from upriver.wire.message import DraftOpcode, Message, header_spans


def test_the_header_of_a_request_is_that_of_memcached() -> None:
    message = memcached.Set(
        vbucket=0x0102,
        opaque=0x03040506,
        datatype=0x07,
        cas=0x08090A0B0C0D0E0F,
        flags=1,
        expiration=2,
        key=b"k",
        value=b"v",
    )
    assert message.encode().hex(" ", -4) == (
        "80010001 08070102 0000000a 03040506 08090a0b 0c0d0e0f 00000001 00000002 6b76"
    )


def test_the_header_of_a_response_has_a_status_in_the_place_of_the_vbucket() -> None:
    message = memcached.GetResponse(opaque=1, cas=2, flags=3, value=b"v")
    assert message.encode().hex(" ", -4) == ("81000000 04000000 00000005 00000001 00000000 00000002 00000003 76")


def test_the_header_of_a_draft_has_the_length_of_the_key_in_its_reserved_bytes() -> None:
    message = upr_draft1.Mutation(request_id=0x2D, by_seqno=1, key=b"key", value=b"v")
    packet = message.encode()
    assert packet[:12].hex(" ", -4) == "04000003 0000002d 00000029"
    assert len(packet) == 12 + 0x29
    assert packet[12] == 3
    assert packet.endswith(b"keyv")


def test_a_draft_mutation_without_a_key_cannot_be_told_from_one_without_a_value() -> None:
    with pytest.raises(ValueError, match="a mutation needs a key"):
        upr_draft1.Mutation(by_seqno=1, key=b"", value=b"v").encode()
    packet = bytearray(upr_draft1.Mutation(by_seqno=1, key=b"k", value=b"v").encode())
    packet[2:4] = b"\x00\x00"
    with pytest.raises(WireError) as caught:
        upr_draft1.upr_draft1.decode(packet)
    assert str(caught.value) == "at byte 2: expected the length of the key in the reserved bytes 2-3, found 0"


def test_a_draft_key_longer_than_the_body_is_refused() -> None:
    packet = bytearray(upr_draft1.Mutation(by_seqno=1, key=b"k", value=b"v").encode())
    packet[2:4] = b"\x00\x03"
    with pytest.raises(WireError) as caught:
        upr_draft1.upr_draft1.decode(packet)
    assert str(caught.value) == "at byte 49: expected 3 bytes of key, found 2"


def test_an_undeclared_request_is_kept_completely() -> None:
    request = AnyRequest(opcode=0xEE, vbucket=1, opaque=2, datatype=3, cas=4, extras=b"ex", key=b"key", value=b"val")
    again = dcp.dcp.decode(request.encode())
    assert again == request
    assert again.code == 0xEE
    assert [(span.name, span.first, span.last) for span in AnyRequest.body_spans(request.encode())] == [
        ("extras", 24, 25),
        ("key", 26, 28),
        ("value", 29, 31),
    ]


def test_a_refusal_reads_as_a_sentence() -> None:
    refusal = AnyResponse(opcode=0x00, status=Status.KEY_ENOENT, value=b"Not found")
    assert refusal.text == "Not found"
    assert AnyResponse(opcode=0x00, value=b"\xff").text == "�"


def test_a_key_where_none_belongs_is_refused() -> None:
    packet = bytearray(memcached.Noop().encode() + b"key")
    packet[3] = packet[11] = 3
    with pytest.raises(WireError) as caught:
        memcached.memcached.decode(packet)
    assert str(caught.value) == "at byte 2: expected no key in noop, found a key of 3 bytes"


def test_a_value_where_none_belongs_is_refused() -> None:
    packet = bytearray(memcached.Get(key=b"k").encode() + b"value")
    packet[11] = 6
    with pytest.raises(WireError) as caught:
        memcached.memcached.decode(packet)
    assert str(caught.value) == "at byte 25: expected the end of Get, found 5 more bytes"


@pytest.mark.parametrize(
    ("cls", "title"),
    [
        (dcp.SnapshotMarker, "snapshot marker"),
        (dcp.Open, "open"),
        (memcached.GetK, "get k"),
        (upr_draft1.FailoverLogRequest, "failover log request"),
    ],
)
def test_a_title_is_the_name_as_words(cls: type[Message], title: str) -> None:
    assert cls.title() == title


def test_the_spans_of_a_header_cover_it_without_gaps() -> None:
    for message in (memcached.Get(key=b"k"), memcached.GetResponse(), upr_draft1.StreamStart()):
        spans = list(header_spans(type(message), message.encode()))
        at = 0
        for span in spans:
            assert span.first == at
            at = span.last + 1
        assert at == message.framing.header_size


def test_the_spans_of_a_header_say_what_codes_mean() -> None:
    refusal = AnyResponse(opcode=0x53, status=Status.ROLLBACK)
    meanings = {span.name: span.meaning for span in header_spans(AnyResponse, refusal.encode())}
    assert meanings["magic"] == "response"
    assert meanings["status"] == "rollback"
    spans = {span.name: span for span in header_spans(upr_draft1.StreamStart, upr_draft1.StreamStart().encode())}
    assert spans["opcode"].value is DraftOpcode.STREAM_START
    assert spans["opcode"].meaning == "stream start"
    assert "magic" not in spans


def test_the_type_of_a_draft_message_is_a_span_of_its_body() -> None:
    packet = upr_draft1.SnapshotEnd().encode()
    (span,) = upr_draft1.SnapshotEnd.body_spans(packet)
    assert (span.name, span.first, span.last, span.value, span.meaning) == ("type", 12, 12, 2, "snapshot end")


def test_magics_are_those_of_memcached() -> None:
    assert (Magic.REQUEST, Magic.RESPONSE) == (0x80, 0x81)
