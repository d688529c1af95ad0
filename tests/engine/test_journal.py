from upriver.engine.journal import Journal


def test_the_lowest_cut_counts() -> None:
    journal = Journal()
    journal.trim(3, 10)
    journal.trim(3, 4)
    journal.trim(3, 7)
    journal.change(5)
    assert journal.take() == ({3, 5}, {3: 4})
    assert journal.take() == (set(), {})


def test_what_did_not_reach_the_disk_comes_back() -> None:
    journal = Journal()
    journal.trim(1, 10)
    taken = journal.take()
    journal.trim(1, 12)
    journal.change(2)
    journal.give_back(*taken)
    assert journal.take() == ({1, 2}, {1: 10})


def test_changes_wake_the_flusher() -> None:
    journal, woken = Journal(), []
    journal.wake = lambda: woken.append(1)
    journal.change(1)
    assert woken == [1]


def test_watchers_of_a_vbucket_are_told_once() -> None:
    journal = Journal()
    assert journal.take_watched([1, 2, 3]) == []
    journal.watched |= {2, 3, 9}
    assert journal.take_watched([1, 2, 3]) == [2, 3]
    assert journal.take_watched([1, 2, 3]) == []
    assert journal.watched == {9}
