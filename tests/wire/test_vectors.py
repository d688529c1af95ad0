"""Every byte diagram of the five texts, held against the declared messages."""

import pytest

from tests.support.vectors import (
    Incomplete,
    Outcome,
    Refused,
    Tolerated,
    Vector,
    assert_fields_as_printed,
    messages_of,
    outcome_of,
    vectors_of,
)
from upriver.wire import DIALECTS, Framer, upr_draft1, upr_draft3
from upriver.wire.codes import Status

TEXTS = ("tap", "upr_draft1", "upr_draft2", "upr_draft3", "upr")
ALL = [vector for text in TEXTS for vector in vectors_of(text)]
MESSAGES = [vector for text in TEXTS for vector in messages_of(text)]
HEADERS = [vector for vector in ALL if vector.kind == "header"]
MISPRINTED = [vector for vector in ALL if vector.printed != vector.wire]

#: What becomes of the diagrams that contradict themselves when a peer sends them as they are printed:
#: consistent lengths are sent and inconsistent ones refused; what it says to accept is accepted.
PRINTED: dict[str, Outcome] = {
    # An engine-private length of 4 before an id of 8 bytes.
    "tap:881": Refused(at=36, after=("CheckpointStart",)),
    "tap:930": Refused(at=36, after=("CheckpointEnd",)),
    # A total body of 0: an answer without its log, and then bytes that are not a packet.
    "upr:618": Refused(at=24, after=("StreamRequestResponse",)),
    # A length that ends inside the fixed fields.
    "upr_draft1:82": Refused(at=13),
    "upr_draft2:109": Refused(at=13),
    # A length that leaves no room for the rollback seqno.
    "upr_draft1:196": Refused(at=13),
    "upr_draft2:223": Refused(at=13),
    # Diagram and field list disagree on the request id; it is the client's own, any will do.
    "upr_draft1:233": Tolerated(upr_draft1.FailoverLogRequest(request_id=0x0400002D)),
    "upr_draft2:260": Tolerated(upr_draft1.FailoverLogRequest(request_id=0x0400002D)),
    # Left over from another protocol.
    "upr_draft1:309": Refused(at=0),
    "upr_draft1:348": Refused(at=0),
    # No key length where key and value follow each other.
    "upr_draft2:418": Refused(at=2),
    # A length that is one short: a shorter key, and then a byte that is not a packet.
    "upr_draft2:475": Refused(at=53, after=("Deletion",)),
    "upr_draft2:527": Refused(at=53, after=("Expiration",)),
    # A request type printed in the place of the data type.
    "upr_draft3:158": Tolerated(
        upr_draft3.StreamRequest(
            vbucket=12, opaque=45, datatype=1, vbucket_uuid=247178, high_seqno=2680, group_id=b"replication_12"
        )
    ),
    "upr_draft3:346": Tolerated(upr_draft3.FailoverLogRequest(vbucket=12, opaque=45, datatype=2)),
    # Not my vbucket, printed with status 1.
    "upr_draft3:269": Tolerated(upr_draft3.NotMyVbucket(status=Status.KEY_ENOENT, opaque=45)),
    # A total body that leaves no room for the rollback seqno.
    "upr_draft3:301": Refused(at=24),
    "upr_draft3:380": Refused(at=24, after=("FailoverLogResponse",)),
    # Extras of 36 bytes for fields of 28: the body seems to go on.
    "upr_draft3:538": Incomplete(missing=8, refused_at=4),
    "upr_draft3:597": Incomplete(missing=8, refused_at=4),
    "upr_draft3:653": Incomplete(missing=8, refused_at=4),
    # No extras where the flags stand.
    "upr_draft3:752": Refused(at=4),
    "upr_draft3:787": Refused(at=4),
    # No extras and the magic of a response: an answer, and then a byte that is not a packet.
    "upr_draft3:834": Refused(at=24, after=("AnyResponse",)),
}


def test_the_texts_have_74_diagrams() -> None:
    assert len(ALL) == 74
    assert len(MESSAGES) == 68
    assert len(HEADERS) == 4


@pytest.mark.shows("open_issues:examples")
@pytest.mark.parametrize("vector", MESSAGES, ids=str)
def test_a_diagram_decodes_and_encodes_to_the_same_bytes(vector: Vector) -> None:
    assert vector.wire is not None
    message = DIALECTS[vector.dialect].decode(vector.wire)
    assert message.encode() == vector.wire


@pytest.mark.parametrize("vector", MESSAGES, ids=str)
def test_a_diagram_holds_the_fields_that_its_text_lists(vector: Vector) -> None:
    assert vector.wire is not None
    assert_fields_as_printed(DIALECTS[vector.dialect].decode(vector.wire), vector)


@pytest.mark.parametrize("vector", HEADERS, ids=str)
def test_the_diagram_of_a_header_is_a_packet_without_a_body(vector: Vector) -> None:
    assert vector.wire is not None
    framing = DIALECTS[vector.dialect].framing
    framer = Framer(framing)
    framer.feed(vector.wire)
    assert framer.next_packet() == vector.wire
    assert framing.header.pack(*framing.header.unpack(vector.wire)) == vector.wire


@pytest.mark.parametrize("vector", HEADERS, ids=str)
def test_the_diagram_of_a_header_has_its_fields_where_we_look_for_them(vector: Vector) -> None:
    assert vector.wire is not None
    framing = DIALECTS[vector.dialect].framing
    fields = framing.response_fields if vector.wire[0] == 0x81 else framing.request_fields
    ours = {field.name: (field.first, field.first + field.size - 1) for field in fields}
    if len(vector.wire) == 12:
        # Bytes 2-3 are reserved in the drafts' texts; that is where the key length went.
        assert (ours.pop("reserved"), ours.pop("key length")) == ((1, 1), (2, 3))
        ours["reserved"] = (1, 3)
    assert ours == {field.name: (field.first, field.last) for field in vector.fields}
    for field in vector.fields:
        assert int.from_bytes(vector.wire[field.first : field.last + 1], "big") == field.value


def test_every_misprinted_diagram_has_an_outcome() -> None:
    assert {vector.id for vector in MISPRINTED} == set(PRINTED)


@pytest.mark.parametrize("vector", MISPRINTED, ids=str)
def test_a_misprinted_diagram_is_refused_or_tolerated(vector: Vector) -> None:
    assert outcome_of(DIALECTS[vector.dialect], vector.printed) == PRINTED[vector.id]
