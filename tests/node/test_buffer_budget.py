"""Who has to go when all peers together hold too much."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.node.buffer_budget import BufferBudget

SIZES = st.one_of(st.integers(1, 50), st.integers(1, 100_000))


@given(
    held=st.lists(st.tuples(SIZES, st.integers(0, 100)), min_size=1, max_size=30),
    bytes_max=st.integers(1, 200_000),
    kept=st.sets(st.integers(0, 29)),
)
def test_what_is_left_is_within_the_limit(held: list[tuple[int, int]], bytes_max: int, kept: set[int]) -> None:
    holdings: BufferBudget[int] = BufferBudget()
    for number, (size, since) in enumerate(held):
        holdings.hold(number, size, since)
    total = sum(size for size, _ in held)
    assert holdings.total_bytes == total
    going = holdings.too_much(bytes_max, 100, lambda number: number not in kept)
    assert len(set(going)) == len(going)
    assert not kept & set(going)
    if total <= bytes_max:
        assert going == []
    for number in going:  # whoever goes held more than his share
        assert held[number][0] >= int(bytes_max * 0.875) / len(held)
    if not kept:
        assert total - sum(held[number][0] for number in going) <= bytes_max
    for number in going:
        holdings.release(number)
    assert set(holdings) == set(range(len(held))) - set(going)
    assert holdings.total_bytes == total - sum(held[number][0] for number in going)


def test_who_has_held_most_for_longest_goes_first() -> None:
    holdings: BufferBudget[str] = BufferBudget()
    holdings.hold("large and new", 2000, 100)
    holdings.hold("as large and old", 2000, 50)
    holdings.hold("smaller and old", 1000, 50)
    holdings.hold("little for ever", 1, -1e9)
    assert holdings.too_much(5001, 100) == []
    assert holdings.too_much(4600, 100) == ["as large and old"]
    assert holdings.too_much(3000, 100) == ["as large and old", "smaller and old"]
    assert holdings.too_much(100, 100) == ["as large and old", "smaller and old", "large and new"]
    assert holdings.too_much(4600, 100, lambda holder: "old" not in holder) == ["large and new"]


def test_what_is_held_again_counts_once() -> None:
    holdings: BufferBudget[str] = BufferBudget()
    holdings.hold("a", 10, 1)
    holdings.hold("a", 30, 1)
    holdings.hold("b", 5, 1)
    assert holdings.total_bytes == 35
    assert "a" in holdings
    holdings.hold("a", 0, 1)
    holdings.release("c")
    assert (list(holdings), holdings.total_bytes) == (["b"], 5)
