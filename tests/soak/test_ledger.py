"""The ledger of a soak: what counts as a loss."""

import pytest

from tests.soak.ledger import Ledger, Loss, contents_after, number_in


def written(acknowledged: int, attempted: int) -> Ledger:
    ledger = Ledger()
    for number in range(1, attempted + 1):
        assert ledger.attempt(b"k") == number
        if number <= acknowledged:
            ledger.acknowledge(b"k", number, waited_s=0.5)
    return ledger


def test_each_tenth_write_is_a_deletion() -> None:
    assert [contents_after(number) for number in (0, 1, 9, 10, 11)] == [None, b"1", b"9", None, b"11"]
    assert number_in(b"17      ") == b"17"


@pytest.mark.parametrize(
    ("acknowledged", "attempted", "found", "lost"),
    [
        (3, 3, b"3", False),
        (3, 3, b"2", True),
        (3, 3, None, True),
        (3, 4, b"3", False),
        (3, 4, b"4", False),
        (3, 4, b"5", True),
        (9, 10, None, False),
        (10, 10, None, False),
        (10, 10, b"9", True),
        (10, 11, b"11", False),
        (0, 1, None, False),
    ],
)
def test_what_a_key_may_hold(acknowledged: int, attempted: int, found: bytes | None, lost: bool) -> None:
    ledger = written(acknowledged, attempted)
    ledger.check(b"k", found)
    assert ledger.losses == ([Loss(b"k", found, acknowledged, attempted)] if lost else [])


def test_a_loss_says_what_is_missing() -> None:
    ledger = written(8, 9)
    ledger.check(b"k", None)
    assert str(ledger.losses[0]) == "k holds nothing, write 8 was acknowledged, 9 sent"


def test_acknowledged_writes_and_the_longest_wait_are_counted() -> None:
    ledger = written(4, 5)
    ledger.acknowledge(b"k", 5, waited_s=2.5, happened=lambda: "move")
    assert (ledger.acknowledged, ledger.longest_wait_s, ledger.longest_wait_during) == (5, 2.5, "move")
    assert list(ledger) == [b"k"]
