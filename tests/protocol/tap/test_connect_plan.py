"""What the flags of a connect mean together."""

import pytest

from tests.support.tap_peer import ACK, BACKFILL, BYTE_ORDER, DUMP, FUTURE, KEYS_ONLY, LIST, REGISTERED, TAKEOVER
from tests.support.tap_peer import connect_with as request
from upriver.errors import InvalidArguments
from upriver.protocol.tap.connect_plan import plan_of
from upriver.wire import tap
from upriver.wire.codec.tap_records import NETWORK_BYTE_ORDER, NO_VALUE
from upriver.wire.dialects.tap import ConnectFlag

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("flags", "date", "since", "future_only"),
    [
        (0, 0, 0, False),
        (BACKFILL, 0, 0, False),
        (BACKFILL, 5, 5, False),
        (BACKFILL, int(NOW), int(NOW), False),
        (BACKFILL, int(NOW) + 1, int(NOW) + 1, True),
        (BACKFILL, FUTURE, int(NOW) + 1, True),
        (DUMP, 0, 0, False),
        (DUMP | BACKFILL, 0, 0, False),
        (DUMP | BACKFILL, 5, 5, False),
        (DUMP | BACKFILL, FUTURE, int(NOW) + 1, True),
        (TAKEOVER | LIST, 0, 0, False),
        (TAKEOVER | LIST | BACKFILL, FUTURE, 0, False),
        (TAKEOVER | LIST | BACKFILL, 5, 0, False),
    ],
)
def test_where_a_stream_begins(flags: int, date: int, since: int, future_only: bool) -> None:
    plan = plan_of(request(b"n", flags, date), NOW)
    assert (plan.since, plan.future_only) == (since, future_only)


def test_a_takeover_is_more_than_a_dump() -> None:
    plan = plan_of(request(b"n", TAKEOVER | LIST | DUMP, vbuckets=(1,)), NOW)
    assert (plan.takeover, plan.dump, plan.ends, plan.copies) == (True, False, True, True)


def test_marks_of_mutations() -> None:
    assert plan_of(request(b"n", 0), NOW).tap_flags == 0
    assert plan_of(request(b"n", KEYS_ONLY), NOW).tap_flags == NO_VALUE
    assert plan_of(request(b"n", BYTE_ORDER), NOW).tap_flags == NETWORK_BYTE_ORDER


def test_an_empty_list_means_all() -> None:
    assert plan_of(request(b"n", LIST), NOW).vbuckets is None
    assert plan_of(request(b"n", LIST, vbuckets=(3, 1)), NOW).vbuckets == (3, 1)


def test_a_takeover_is_of_everything_and_with_values() -> None:
    plan = plan_of(request(b"", TAKEOVER | KEYS_ONLY | REGISTERED | ACK), NOW)
    assert (plan.vbuckets, plan.keys_only, plan.tap_flags, plan.registered) == (None, False, 0, True)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(InvalidArguments, match="0x200"):
        plan_of(tap.Connect(name=b"n", flags=ConnectFlag(0x200)), NOW)
