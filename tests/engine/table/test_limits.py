"""The limits in Python are those of the compiled table."""

import pytest

from tests.support.manual_clock import Clock
from upriver.engine.table import KEY_BYTES_MAX, LOCKED_CAS, RELATIVE_EXPIRY_S_MAX, VALUE_BYTES_MAX, Ledger, Table
from upriver.engine.table.limits import EXPIRY_MAX, absolute
from upriver.errors import InvalidArguments, TooBig


@pytest.fixture
def table(clock: Clock) -> Table:
    made = Table(0, Ledger(clock))
    made.active = True
    return made


def test_keys_and_values(table: Table) -> None:
    table.set(b"k" * KEY_BYTES_MAX, b"v" * VALUE_BYTES_MAX)
    with pytest.raises(InvalidArguments):
        table.set(b"k" * (KEY_BYTES_MAX + 1), b"")
    with pytest.raises(TooBig):
        table.set(b"k", b"v" * (VALUE_BYTES_MAX + 1))


@pytest.mark.parametrize("expiry", [0, 1, RELATIVE_EXPIRY_S_MAX, RELATIVE_EXPIRY_S_MAX + 1, EXPIRY_MAX])
@pytest.mark.parametrize("now", [0.0, 1_700_000_000.9, EXPIRY_MAX - 1.0])
def test_expiries(table: Table, clock: Clock, expiry: int, now: float) -> None:
    clock.now = now
    table.set(b"k", b"v", 0, expiry)
    item = table.find(b"k")
    assert item is not None
    assert item.expiry == absolute(expiry, now)


def test_the_cas_of_a_locked_item(table: Table, clock: Clock) -> None:
    cas, _ = table.set(b"k", b"v")
    table.lock(b"k", cas, clock() + 10)
    assert table.get(b"k").cas == LOCKED_CAS
