"""The parts of a group that the compiled table has collected."""

import pytest

from tests.support.manual_clock import Clock
from upriver.engine.table import Ledger, Table, collect
from upriver.engine.table.group_format import GROUP_HEADER, group_parts
from upriver.errors import CorruptData


@pytest.fixture
def group(clock: Clock) -> bytes:
    ledger = Ledger(clock)
    active, replica = Table(0, ledger), Table(7, ledger)
    active.active = True
    active.set(b"k", b"v")
    replica.snapshot_end = 5
    replica.store(1, b"k", b"v", seqno=5)
    replica.consistent_seqnos.append(5)
    return bytes(collect([active, replica]))


def test_the_parts_of_a_group(group: bytes) -> None:
    parts = group_parts(1, group)
    assert [(vbucket, high) for vbucket, high, _ in parts] == [(0, 1), (7, 5)]
    assert all(records for _, _, records in parts)


def test_a_group_that_was_cut(group: bytes) -> None:
    with pytest.raises(CorruptData, match="group 3 cannot be read"):
        group_parts(3, group[: GROUP_HEADER.size + 3])
    with pytest.raises(CorruptData, match="group 3 ends too early"):
        group_parts(3, group[:-1])
