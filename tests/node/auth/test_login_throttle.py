"""The delay after failed logins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.node.auth.login_throttle import LoginThrottle


def test_the_delay_doubles_up_to_a_limit() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=10, forget_s=1e9)
    delays = []
    for _ in range(6):
        throttle.failed("192.0.2.1", 100.0)
        delays.append(throttle.delay_s("192.0.2.1", 100.0))
    assert delays == pytest.approx([1, 2, 4, 8, 10, 10])
    assert throttle.delay_s("192.0.2.2", 100.0) == 0
    assert throttle.delay_s("192.0.2.1", 104.0) == pytest.approx(6)
    assert throttle.delay_s("192.0.2.1", 110.0) == 0
    assert throttle.delay_s("192.0.2.1", 0.0) <= 10  # even if the clock goes back


def test_failures_are_forgotten_one_by_one() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=8, forget_s=60)
    for _ in range(100):
        throttle.failed("192.0.2.1", 0.0)  # counts only as far as the delay grows
    throttle.failed("192.0.2.1", 120.0)
    assert throttle.delay_s("192.0.2.1", 120.0) == pytest.approx(4)
    throttle.failed("192.0.2.1", 1000.0)
    assert throttle.delay_s("192.0.2.1", 1000.0) == pytest.approx(1)
    throttle.failed("192.0.2.1", 0.0)  # a clock that went back counts as no time
    assert throttle.delay_s("192.0.2.1", 0.0) == pytest.approx(2)


def test_a_success_ends_the_wait_but_takes_back_one_failure_only() -> None:
    throttle = LoginThrottle(first_s=1, longest_s=100, forget_s=1e9)
    throttle.succeeded("192.0.2.1")
    throttle.failed("192.0.2.1", 0.0)
    throttle.succeeded("192.0.2.1")
    assert len(throttle) == 0
    for _ in range(3):
        throttle.failed("192.0.2.1", 0.0)
    throttle.succeeded("192.0.2.1")
    assert throttle.delay_s("192.0.2.1", 0.0) == 0
    throttle.failed("192.0.2.1", 0.0)
    assert throttle.delay_s("192.0.2.1", 0.0) == pytest.approx(4)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("[2001:db8::1]", "2001:db8::2", True),
        ("unix", "unix", True),
        ("unix", "", False),
    ],
)
def test_addresses_that_count_as_the_same_peer(one: str, other: str, same: bool) -> None:
    throttle = LoginThrottle()
    throttle.failed(one, 0.0)
    assert (throttle.delay_s(other, 0.0) > 0) is same


def test_the_throttle_is_bounded_and_empties_itself() -> None:
    throttle = LoginThrottle(peers_max=100)
    throttle.failed("10.1.0.0", 0.0)
    for number in range(1000):
        throttle.failed(f"10.0.{number // 256}.{number % 256}", 1.0)
        throttle.failed("10.2.0.0", 1.0)
        assert len(throttle) <= 100
    assert throttle.delay_s("10.1.0.0", 0.0) == 0  # the oldest had to go
    assert throttle.delay_s("10.2.0.0", 1.0) > 0  # who keeps failing stays
    throttle.failed("10.3.0.0", 1e6)
    assert len(throttle) == 1


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans(), st.floats(0, 100)), max_size=50))
def test_delays_stay_within_their_limits(attempts: list[tuple[str, bool, float]]) -> None:
    throttle = LoginThrottle()
    now = 0.0
    for peer, right, passed in attempts:
        now += passed
        if right:
            throttle.succeeded(peer)
            assert throttle.delay_s(peer, now) == 0
        else:
            throttle.failed(peer, now)
            assert throttle.first_s <= round(throttle.delay_s(peer, now), 6) <= throttle.longest_s
