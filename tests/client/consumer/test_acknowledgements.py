"""Progress follows only without a gap."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.client.consumer.acknowledgements import Acknowledgements
from upriver.client.consumer.progress import Progress
from upriver.model import StreamPosition


def at(seqno: int) -> Progress:
    return Progress.at(StreamPosition.at(7, seqno))


@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_only_what_has_no_gap_before_it_counts(order: list[int], count: int) -> None:
    batches = Acknowledgements()
    for number in range(1, 9):
        batches.hand_out(number, {number % 2: at(number)})
    for number in order[:count]:
        batches.done(number)
        batches.done(number)
    whole = next((n for n in range(1, 9) if n not in order[:count]), 9) - 1
    expected = {
        vbucket: at(max(n for n in range(1, whole + 1) if n % 2 == vbucket))
        for vbucket in {n % 2 for n in range(1, whole + 1)}
    }
    assert batches.progress == expected
    assert batches.open == 8 - count


def test_a_batch_that_was_never_handed_out_counts_for_nothing() -> None:
    batches = Acknowledgements()
    assert not batches.done(1)
    batches.hand_out(1, {0: at(5)})
    assert batches.done(1)
    assert not batches.done(1)
    assert batches.progress == {0: at(5)}
