"""Which peers are dropped when all of them together hold too much."""

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
    budget: BufferBudget[int] = BufferBudget()
    for number, (size, since) in enumerate(held):
        budget.hold(number, size, since)
    total = sum(size for size, _ in held)
    assert budget.total_bytes == total
    going = budget.too_much(bytes_max, 100, lambda number: number not in kept)
    assert len(set(going)) == len(going)
    assert not kept & set(going)
    if total <= bytes_max:
        assert going == []
    for number in going:  # a peer that is dropped held more than its share
        assert held[number][0] >= int(bytes_max * 0.875) / len(held)
    if not kept:
        assert total - sum(held[number][0] for number in going) <= bytes_max
    for number in going:
        budget.release(number)
    assert set(budget) == set(range(len(held))) - set(going)
    assert budget.total_bytes == total - sum(held[number][0] for number in going)


def test_peers_that_have_held_most_for_longest_are_dropped_first() -> None:
    budget: BufferBudget[str] = BufferBudget()
    budget.hold("large and new", 2000, 100)
    budget.hold("as large and old", 2000, 50)
    budget.hold("smaller and old", 1000, 50)
    budget.hold("little for ever", 1, -1e9)
    assert budget.too_much(5001, 100) == []
    assert budget.too_much(4600, 100) == ["as large and old"]
    assert budget.too_much(3000, 100) == ["as large and old", "smaller and old"]
    assert budget.too_much(100, 100) == ["as large and old", "smaller and old", "large and new"]
    assert budget.too_much(4600, 100, lambda holder: "old" not in holder) == ["large and new"]


def test_what_is_held_again_counts_once() -> None:
    budget: BufferBudget[str] = BufferBudget()
    budget.hold("a", 10, 1)
    budget.hold("a", 30, 1)
    budget.hold("b", 5, 1)
    assert budget.total_bytes == 35
    assert "a" in budget
    budget.hold("a", 0, 1)
    budget.release("c")
    assert (list(budget), budget.total_bytes) == (["b"], 5)
