from upriver.engine.consistent_points import RANGES_MAX, ConsistentPoints


def test_the_empty_state_is_whole() -> None:
    assert ConsistentPoints().at_or_below(100, 0) == 0
    assert ConsistentPoints().newest == 0


def test_written_history_is_whole_everywhere_received_only_at_ends() -> None:
    points = ConsistentPoints()
    points.extend(10)
    points.add(20)
    points.add(35)
    assert [points.at_or_below(s, 0) for s in (5, 10, 15, 20, 34, 35, 99)] == [5, 10, 10, 20, 20, 35, 35]


def test_nothing_below_the_floor_can_be_restored() -> None:
    points = ConsistentPoints()
    points.extend(10)
    points.add(20)
    assert points.at_or_below(15, 10) == 10
    assert points.at_or_below(15, 11) == 0
    assert points.at_or_below(20, 20) == 20


def test_truncation_cuts_ranges() -> None:
    points = ConsistentPoints([(0, 10), (20, 30), (40, 40)])
    points.truncate(25)
    assert points.ranges == [(0, 10), (20, 25)]
    points.truncate(15)
    assert points.ranges == [(0, 10)]


def test_the_list_is_bounded() -> None:
    points = ConsistentPoints()
    for seqno in range(1, 2000, 2):
        points.add(seqno)
    assert len(points.ranges) == RANGES_MAX
    assert points.newest == 1999
    assert points.at_or_below(3, 0) == 0
