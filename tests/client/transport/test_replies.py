"""Answers out of received bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.transport.replies import Reply, ReplyReader
from upriver.errors import KeyNotFound, WireError
from upriver.wire.codes import Status
from upriver.wire.message import AnyRequest, AnyResponse

replies = st.builds(
    AnyResponse,
    opcode=st.integers(0, 255),
    status=st.integers(0, 0xFFFF).map(Status),
    opaque=st.integers(0, 2**32 - 1),
    cas=st.integers(0, 2**64 - 1),
    datatype=st.integers(0, 255),
    extras=st.binary(max_size=40),
    key=st.binary(max_size=300),
    value=st.binary(max_size=300),
)


@st.composite
def runs_of_replies(draw: st.DrawFn) -> list[AnyResponse]:
    """Some replies, some of them several times with other opaques."""
    sent: list[AnyResponse] = []
    for reply in draw(st.lists(replies, max_size=6)):
        sent.append(reply)
        opaques = draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
        sent += [replace(reply, opaque=opaque) for opaque in opaques]
    return sent


def single(reply: Reply) -> list[Reply]:
    """Each answer of a run by itself."""
    assert reply.status or not reply.alike
    return [reply._replace(opaque=opaque, alike=()) for opaque in (reply.opaque, *reply.alike)]


@given(runs_of_replies(), st.lists(st.integers(1, 900), min_size=1))
def test_replies_come_out_as_they_went_in(sent: list[AnyResponse], sizes: list[int]) -> None:
    data = memoryview(b"".join(reply.encode() for reply in sent))
    reader, found, at, turn = ReplyReader(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += [one for reply in reader.feed(data[at : at + size]) for one in single(reply)]
        at, turn = at + size, turn + 1
    assert found == [Reply(r.opcode, r.status, r.opaque, r.cas, r.datatype, r.extras, r.key, r.value) for r in sent]


def test_refusals_that_say_the_same_are_one_reply() -> None:
    refusal = AnyResponse(opcode=0xA3, status=Status.KEY_EEXISTS, value=b"our version wins")
    stored = AnyResponse(opcode=0xA3)
    sent = [replace(refusal, opaque=n) for n in (3, 4, 9)]
    sent += [
        replace(refusal, opaque=10, value=b"another text...."),
        replace(stored, opaque=11),
        replace(stored, opaque=12),
    ]
    found = list(ReplyReader().feed(memoryview(b"".join(reply.encode() for reply in sent))))
    assert [(reply.opaque, reply.alike) for reply in found] == [(3, [4, 9]), (10, ()), (11, ()), (12, ())]


def test_what_is_no_answer_is_refused_at_its_place() -> None:
    reader = ReplyReader()
    good = AnyResponse(opcode=0).encode()
    assert len(list(reader.feed(memoryview(good)))) == 1
    with pytest.raises(WireError, match="at byte 24"):
        list(reader.feed(memoryview(AnyRequest(opcode=0).encode())))


def test_a_refusal_is_an_error_with_its_text() -> None:
    reply = Reply(0, Status.KEY_ENOENT, 1, 0, 0, b"", b"", b"it is unknown")
    error = reply.error(3)
    assert isinstance(error, KeyNotFound)
    assert str(error) == "vbucket 3: it is unknown (status 0x01)"
    assert Reply(0, 0, 1, 0, 0, b"", b"", b"x").error() is None
    assert str(Reply(0, 0x999, 1, 0, 0, b"", b"", b"\0\xff").error()) == "Refused (status 0x999)"
