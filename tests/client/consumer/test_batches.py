"""Batches, their bounds, and events as rows."""

from upriver.client.consumer.batches import Batch, Flush, Reset, Rollback
from upriver.client.consumer.progress import Progress
from upriver.model import Change, Event, Snapshot, StreamPosition, change_batch
from upriver.protocol.consumer import Run


def test_bounds_are_given_to_each_row() -> None:
    rows = [Change(vbucket=v, event=Event.MUTATION, seqno=s, key=b"k") for v, s in ((1, 3), (1, 4), (2, 9))]
    runs = (
        Run(1, 2, StreamPosition(11, 4, Snapshot(2, 5))),
        Run(2, 1, StreamPosition(22, 9, Snapshot(8, 9))),
    )
    wide = Batch(change_batch(rows), runs).with_bounds()
    assert [(r["seqno"], r["vbucket_uuid"], r["snapshot_start"], r["snapshot_end"]) for r in wide.to_pylist()] == [
        (3, 11, 2, 5),
        (4, 11, 2, 5),
        (9, 22, 8, 9),
    ]
    assert list(Batch(change_batch(rows), runs).changes()) == rows


def test_an_event_is_a_row() -> None:
    progress = Progress.beginning()
    for event, kind, seqno in (
        (Rollback(3, 7, 1, 2), Event.ROLLBACK, 7),
        (Reset(3), Event.RESET, 0),
        (Flush(3), Event.FLUSH, 0),
    ):
        batch = Batch.of_event(event, progress)
        (row,) = batch.changes()
        assert (row.vbucket, row.event, row.seqno, row.key) == (3, kind, seqno, b"")
        assert batch.event is event
        assert batch.with_bounds().num_rows == len(batch) == 1
