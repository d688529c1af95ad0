from upriver.engine.consistent_points import RANGES_MAX, ConsistentPoints


def test_the_empty_state_is_whole() -> None:
    assert ConsistentPoints().at_or_below(100, 0) == 0
    assert ConsistentPoints().newest == 0


def test_written_history_is_whole_everywhere_received_only_at_ends() -> None:
    whole = ConsistentPoints()
    whole.extend(10)
    whole.add(20)
    whole.add(35)
    assert [whole.at_or_below(s, 0) for s in (5, 10, 15, 20, 34, 35, 99)] == [5, 10, 10, 20, 20, 35, 35]


def test_nothing_below_the_floor_can_be_restored() -> None:
    whole = ConsistentPoints()
    whole.extend(10)
    whole.add(20)
    assert whole.at_or_below(15, 10) == 10
    assert whole.at_or_below(15, 11) == 0
    assert whole.at_or_below(20, 20) == 20


def test_truncation_cuts_ranges() -> None:
    whole = ConsistentPoints([(0, 10), (20, 30), (40, 40)])
    whole.truncate(25)
    assert whole.ranges == [(0, 10), (20, 25)]
    whole.truncate(15)
    assert whole.ranges == [(0, 10)]


def test_the_list_is_bounded() -> None:
    whole = ConsistentPoints()
    for seqno in range(1, 2000, 2):
        whole.add(seqno)
    assert len(whole.ranges) == RANGES_MAX
    assert whole.newest == 1999
    assert whole.at_or_below(3, 0) == 0
