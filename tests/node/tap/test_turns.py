"""One piece of work in each turn of the event loop."""

from collections.abc import Callable

from upriver.node.tap.turns import TapTurns


class Later:
    """A scheduler whose turns the test takes."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def later(self, _: float, call: Callable[[], object]) -> None:
        self.calls.append(call)


def test_work_is_done_in_order_one_piece_per_turn_and_may_add_more() -> None:
    scheduler = Later()
    turns = TapTurns(scheduler)  # type: ignore[arg-type]
    done: list[int] = []

    def first() -> None:
        done.append(1)
        turns.add(lambda: done.append(3))

    turns.add(first)
    turns.add(lambda: done.append(2))
    seen = []
    while scheduler.calls:
        (call,) = scheduler.calls
        scheduler.calls.clear()
        call()
        seen.append(list(done))
    assert seen == [[1], [1, 2], [1, 2, 3]]
    assert turns.idle
