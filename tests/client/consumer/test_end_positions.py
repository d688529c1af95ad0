"""What lies beyond the end of a range is left out, whatever the source sends."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.client.consumer.end_positions import EndPositions
from upriver.model import Change, Event, Snapshot, StreamPosition, change_batch
from upriver.model.position import NO_END
from upriver.protocol.consumer import Run

UUID = 7


def run_of(vbucket: int, seqnos: list[int], snapshot: Snapshot) -> tuple[list[Change], Run]:
    rows = [Change(vbucket=vbucket, event=Event.MUTATION, seqno=seqno, key=b"%d" % seqno) for seqno in seqnos]
    return rows, Run(vbucket, len(rows), StreamPosition(UUID, seqnos[-1], snapshot))


@given(st.data())
def test_only_what_is_wanted_is_kept_and_who_is_there_is_finished(data: st.DataObject) -> None:
    vbuckets = [0, 1, 2]
    ends = {number: data.draw(st.integers(1, 30)) for number in vbuckets}
    finished: list[int] = []
    ranges = EndPositions(finished.append)
    ranges.start(vbuckets, ends)
    rows, runs = [], []
    for number in vbuckets:
        start = data.draw(st.integers(0, ends[number] - 1))
        seqnos = sorted(data.draw(st.sets(st.integers(start + 1, 40), min_size=1)))
        snapshot = Snapshot(start, data.draw(st.integers(seqnos[-1], 50)))
        some, run = run_of(number, seqnos, snapshot)
        rows += some
        runs.append(run)
    kept, kept_runs, beyond = ranges.cut(change_batch(rows), tuple(runs))
    found = list(zip(kept.column("vbucket").to_pylist(), kept.column("seqno").to_pylist(), strict=True))
    assert found == [(row.vbucket, row.seqno) for row in rows if row.seqno <= ends[row.vbucket]]
    assert sum(run.rows for run in kept_runs) == len(found)
    assert all(run.position.seqno <= ends[run.vbucket] for run in kept_runs)
    gone_beyond = [run.vbucket for run in runs if run.position.seqno > ends[run.vbucket]]
    assert list(beyond) == finished == gone_beyond
    assert ranges.unfinished == set(vbuckets) - set(gone_beyond)
    for run in runs:  # its position is its end, inside the snapshot that goes beyond it
        position = beyond.get(run.vbucket, run.position)
        assert position.seqno == min(run.position.seqno, ends[run.vbucket])
        assert position.snapshot == run.position.snapshot


def test_a_stream_that_cannot_be_closed_ends_where_it_should() -> None:
    ranges = EndPositions(print)
    ranges.start([0, 1], {0: 0, 1: 5})
    for number in (0, 1):
        ranges.stop_listening_at_end(number)
    assert ranges.unfinished == {1}  # nothing was wanted of the other
    assert ranges.may_overshoot
    rows, run = run_of(1, [3, 5], Snapshot(0, 5))
    kept, _, beyond = ranges.cut(change_batch(rows), (run,))
    assert (kept.num_rows, beyond, ranges.unfinished, ranges.may_overshoot) == (2, {}, set(), False)


def test_no_source_is_asked_for_an_end_before_where_we_stand() -> None:
    ranges = EndPositions(print)
    ranges.start([0, 1], {0: 5})
    assert [ranges.end_to_request(0, seqno) for seqno in (0, 5, 9)] == [5, 5, 9]
    assert ranges.end_to_request(1, 9) == NO_END
    assert ranges.has_ends
    assert (ranges.has_end(0), ranges.has_end(1)) == (True, False)
