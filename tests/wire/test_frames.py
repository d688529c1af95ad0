"""Both twins over the same frames: what they change and what they leave alone."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import Change, Event
from upriver.model.record import PREFIX, Record, pack
from upriver.wire import Framer, Message, dcp, frames
from upriver.wire.framing import MEMCACHED

EVENTS = (Event.MUTATION, Event.DELETION, Event.EXPIRATION)
CHANGES = st.builds(
    Change,
    vbucket=st.integers(0, 1023),
    event=st.sampled_from(EVENTS),
    seqno=st.integers(1, 2**64 - 1),
    rev_seqno=st.integers(1, 2**64 - 1),
    cas=st.integers(0, 2**64 - 1),
    expiry=st.integers(0, 2**32 - 1),
    key=st.binary(min_size=1, max_size=20),
    value=st.binary(max_size=40),
)


def frame(change: Change) -> bytes:
    return pack(Record(change=change))[PREFIX.size :]


def decoded(data: bytes) -> list[Message]:
    framer = Framer(MEMCACHED)
    framer.feed(data)
    out: list[Message] = []
    while packet := framer.next_packet():
        out.append(dcp.dcp.decode(packet))
    assert not framer.pending
    return out


TWINS = [
    pytest.param(frames.expirations_as_deletions, frames.last_seqno, id="chosen"),
    pytest.param(frames.plain_expirations_as_deletions, frames.plain_last_seqno, id="plain"),
]
Twin = Callable[[bytes], bytes]
Last = Callable[[bytes], int]


@pytest.mark.parametrize(("rewrite", "last"), TWINS)
@given(changes=st.lists(CHANGES, max_size=12))
def test_each_expiration_becomes_a_deletion_and_nothing_else_changes(
    rewrite: Twin, last: Last, changes: list[Change]
) -> None:
    data = b"".join(map(frame, changes))
    for change, message in zip(changes, decoded(rewrite(data)), strict=True):
        if change.event is not Event.EXPIRATION:
            assert isinstance(message, dcp.Mutation | dcp.Deletion)
            assert message.encode() == frame(change)
            continue
        assert isinstance(message, dcp.Deletion)
        assert message.delete_time is None
        assert (message.by_seqno, message.rev_seqno, message.cas, message.vbucket, message.key, message.value) == (
            change.seqno,
            change.rev_seqno,
            change.cas,
            change.vbucket,
            change.key,
            change.value,
        )
    assert last(data) == (changes[-1].seqno if changes else 0)


@pytest.mark.parametrize(("rewrite", "last"), TWINS)
def test_frames_without_an_expiration_are_not_even_copied(rewrite: Twin, last: Last) -> None:
    data = frame(Change(vbucket=1, event=Event.MUTATION, seqno=5, key=b"k", value=b"v" * 100))
    assert rewrite(data) is data


@given(changes=st.lists(CHANGES, max_size=12))
def test_both_twins_agree_to_the_byte(changes: list[Change]) -> None:
    data = b"".join(map(frame, changes))
    assert frames.expirations_as_deletions(data) == frames.plain_expirations_as_deletions(data)
