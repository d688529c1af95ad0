"""Both twins over the same frames: what they change and what they leave alone."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.change_strategies import CHANGES
from upriver.model import Change, Event
from upriver.model.record import PREFIX, Record, pack
from upriver.wire import Framer, Message, dcp
from upriver.wire.codec import frame_runs
from upriver.wire.framing import MEMCACHED


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
    pytest.param(frame_runs.expired_as_deleted, id="chosen"),
    pytest.param(frame_runs.plain_expired_as_deleted, id="plain"),
]
Twin = Callable[[bytes], bytes]
Run = Callable[..., tuple[int, int, int]]


@pytest.mark.parametrize("rewrite", TWINS)
@given(changes=st.lists(CHANGES, max_size=12))
def test_each_expiration_becomes_a_deletion_and_nothing_else_changes(rewrite: Twin, changes: list[Change]) -> None:
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


@given(changes=st.lists(CHANGES, max_size=12))
def test_both_twins_agree_to_the_byte(changes: list[Change]) -> None:
    data = b"".join(map(frame, changes))
    assert frame_runs.expired_as_deleted(data) == frame_runs.plain_expired_as_deleted(data)


@given(
    runs=st.lists(st.tuples(CHANGES, st.integers(1, 4)), max_size=4),
    opaques=st.lists(st.integers(0, 2**32 - 1), min_size=1),
    at=st.integers(0, 300),
    cut=st.integers(0, 60),
    flips=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=2),
)
def test_both_twins_find_the_same_packets_alike(
    runs: list[tuple[Change, int]], opaques: list[int], at: int, cut: int, flips: list[tuple[int, int]]
) -> None:
    data, taken = bytearray(), itertools.cycle(opaques)
    for change, count in runs:
        for _ in range(count):
            packet = bytearray(frame(change))
            packet[12:16] = next(taken).to_bytes(4, "big")
            data += packet
    if not flips and not cut and runs:
        size, count = len(frame(runs[0][0])), runs[0][1]
        end, found = frame_runs.alike_run(data, 0)
        assert end >= size * count
        assert found[:count] == list(itertools.islice(itertools.cycle(opaques), count))
    for place, value in flips:
        if place < len(data):
            data[place] = value
    del data[len(data) - min(cut, len(data)) :]
    for start in (0, at):
        assert frame_runs.alike_run(data, start) == frame_runs.plain_alike_run(data, start)


@given(
    changes=st.lists(CHANGES, max_size=8),
    ordered=st.booleans(),
    after=st.integers(0, 2**64 - 1),
    upto=st.integers(0, 2**64 - 1),
    modern=st.booleans(),
    cut=st.integers(0, 60),
    flips=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=2),
)
def test_both_twins_find_the_same_run(
    changes: list[Change],
    ordered: bool,
    after: int,
    upto: int,
    modern: bool,
    cut: int,
    flips: list[tuple[int, int]],
) -> None:
    if ordered:
        changes = sorted((replace(change, vbucket=3) for change in changes), key=lambda change: change.seqno)
        after, upto = min(after, 5), 2**64 - 1
    data = bytearray(b"".join(map(frame, changes)))
    for place, byte in flips:
        if place < len(data):
            data[place] = byte
    data = data[: len(data) - cut] if cut < len(data) else data
    found = frame_runs.change_run(bytes(data), 0, after, upto, modern)
    assert found == frame_runs.plain_change_run(bytes(data), 0, after, upto, modern)


@pytest.mark.parametrize("run", [frame_runs.change_run, frame_runs.plain_change_run])
def test_a_run_ends_where_something_does_not_belong_to_it(run: Run) -> None:
    def mutation(seqno: int, vbucket: int = 1, opaque: int = 7, key: bytes = b"k") -> bytes:
        return dcp.Mutation(by_seqno=seqno, vbucket=vbucket, opaque=opaque, key=key, value=b"v").encode()

    one = mutation(5)
    size = len(one)
    deletion = dcp.Deletion(by_seqno=9, vbucket=1, opaque=7, key=b"k").encode()
    marker = dcp.SnapshotMarker(start_seqno=0, end_seqno=9, vbucket=1, opaque=7).encode()
    assert run(one + mutation(6) + deletion, 0, 4, 9, True) == (2 * size + len(deletion), 9, 3)
    for other in (
        mutation(6, vbucket=2),
        mutation(6, opaque=8),
        mutation(5),  # it does not follow
        mutation(10),  # it lies beyond the end
        mutation(6, key=b""),
        mutation(6)[:-1],
        marker,
        b"\x81" + one[1:],
        b"",
    ):
        assert run(one + other, 0, 4, 9, True) == (size, 5, 1)
    assert run(one, 0, 5, 9, True) == (0, 5, 0)
    assert run(one, 0, 4, 9, False) == (size, 5, 1)  # the first builds of `upr` sent 31 bytes too
    assert run(b"x" * 10 + one, 10, 0, 9, True) == (10 + size, 5, 1)
    assert run(b"", 0, 0, 9, True) == (0, 0, 0)
    assert run(one, 0, 0, 9, True, 10) == (0, 0, 0)  # too large


@pytest.mark.parametrize("end", [frame_runs.changes_end, frame_runs.plain_changes_end])
@given(changes=st.lists(CHANGES, max_size=6), cut=st.integers(0, 200))
def test_changes_end_where_something_else_begins_even_if_the_last_is_not_whole(
    end: Callable[[bytes, int], int], changes: list[Change], cut: int
) -> None:
    data = b"".join(map(frame, changes))
    marker = dcp.SnapshotMarker(start_seqno=0, end_seqno=9).encode()
    assert end(data + marker, 0) == end(b"\x81" * 24 + data, 24) - 24 == len(data)
    sizes = [len(frame(change)) for change in changes]
    whole = data[: max(0, len(data) - cut)]
    begun = sum(size for at, size in enumerate(sizes) if sum(sizes[:at]) + 24 <= len(whole))
    assert end(whole, 0) == begun
