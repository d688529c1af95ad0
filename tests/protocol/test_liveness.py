"""Noops by a clock that is an argument."""

from upriver.protocol.liveness import NOOP_INTERVAL_S, NoopSender, SilenceWatch, Verdict


def sender(now: float = 0.0, interval_s: float = 10.0) -> NoopSender:
    noops = NoopSender(now)
    noops.enabled, noops.interval_s = True, interval_s
    return noops


def test_nothing_happens_unless_enabled() -> None:
    noops = NoopSender(0.0)
    assert noops.interval_s == NOOP_INTERVAL_S
    assert (noops.deadline, noops.check(1e9)) == (None, Verdict.NOTHING)


def test_it_asks_once_in_each_interval_while_it_is_answered() -> None:
    noops = sender()
    assert noops.check(9.9) is Verdict.NOTHING
    for time in (10.0, 20.0, 30.0):
        assert noops.deadline == time
        assert noops.check(time) is Verdict.ASK
        assert noops.check(time) is Verdict.NOTHING
        noops.heard()


def test_a_peer_that_is_silent_for_an_interval_after_a_noop_is_lost() -> None:
    noops = sender()
    assert noops.check(10.0) is Verdict.ASK
    assert noops.check(19.9) is Verdict.NOTHING
    assert noops.check(20.0) is Verdict.DEAD
    assert noops.check(21.0) is Verdict.DEAD


def test_a_new_interval_counts_from_when_it_was_set() -> None:
    noops = sender()
    assert noops.check(10.0) is Verdict.ASK
    noops.interval_s = 2.0
    noops.restart(15.0)
    assert noops.deadline == 17.0
    assert noops.check(17.0) is Verdict.ASK


def test_a_peer_that_promised_noops_and_is_silent_for_two_intervals_is_lost() -> None:
    watch = SilenceWatch(10.0, 0.0)
    watch.heard(5.0)
    assert (watch.deadline, watch.is_dead(24.9), watch.is_dead(25.0)) == (25.0, False, True)


def test_a_peer_that_promised_nothing_may_be_silent() -> None:
    watch = SilenceWatch(0.0, 0.0)
    assert (watch.deadline, watch.is_dead(1e9)) == (None, False)
