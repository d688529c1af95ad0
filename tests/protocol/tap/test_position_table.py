"""Packed positions: nothing is lost, and a thousand clients need little memory."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import Snapshot, StreamPosition
from upriver.protocol.tap.position import TapPosition
from upriver.protocol.tap.position_table import PositionTable

numbers = st.integers(0, 2**64 - 1)


@st.composite
def positions(draw: st.DrawFn) -> TapPosition:
    seqno, reached = sorted((draw(numbers), draw(numbers)))
    return TapPosition(
        position=StreamPosition(draw(numbers), seqno, Snapshot(seqno, reached)),
        known=draw(numbers),
        since=draw(numbers),
        until=draw(numbers),
        acks=draw(st.booleans()),
        keys_only=draw(st.booleans()),
        dumping=draw(st.booleans()),
    )


tables = st.dictionaries(st.integers(0, 1023), positions(), max_size=5)


@given(old=tables, new=tables)
def test_positions_come_back_and_newer_ones_replace_older_ones(
    old: dict[int, TapPosition], new: dict[int, TapPosition]
) -> None:
    table = PositionTable.of(old)
    assert PositionTable(table.packed) == old
    assert PositionTable(table.with_positions(new).packed) == old | new


def test_a_client_of_all_vbuckets_takes_few_kilobytes() -> None:
    chance = random.Random(1)
    found = {}
    for number in range(1024):
        seqno = chance.randrange(10_000)
        found[number] = TapPosition(
            position=StreamPosition(chance.getrandbits(48), seqno, Snapshot(seqno, seqno)),
            known=seqno,
            since=0,
            until=seqno,
            acks=True,
            keys_only=False,
            dumping=False,
        )
    assert len(PositionTable.of(found).packed) < 16_000


@pytest.mark.parametrize("damaged", [b"x", b"\0" * 100, zlib.compress(bytes(63))])
def test_damaged_bytes_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="damaged positions"):
        PositionTable(damaged).check()
