"""Pauses between attempts."""

from upriver.client.transport.backoff import Backoff


def test_pauses_grow_to_a_limit_and_start_again() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0)
    pauses = [backoff.pause_s() for _ in range(8)]
    for length, pause in zip((0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0), pauses, strict=True):
        assert length / 2 <= pause <= length
    assert backoff.attempts == 8
    backoff.reset(0.1)
    assert backoff.pause_s() <= 0.1
    assert backoff.attempts == 1


def test_two_clients_do_not_wait_alike() -> None:
    assert len({Backoff().pause_s() for _ in range(10)}) > 1
