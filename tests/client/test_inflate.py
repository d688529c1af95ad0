"""Batches with compressed values."""

from tests.model.test_compression import deflated
from upriver.client.inflate import inflated_batch
from upriver.model import Change, Event, change_batch, changes_in
from upriver.model.compression import SNAPPY


def test_a_batch_is_inflated_where_it_says_so() -> None:
    rows = [
        Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"a", value=deflated(b"x" * 100), datatype=SNAPPY | 1),
        Change(vbucket=1, event=Event.MUTATION, seqno=2, key=b"b", value=deflated(b"kept as it is"), datatype=1),
    ]
    first, second = changes_in(inflated_batch(change_batch(rows)))
    assert (first.value, first.datatype) == (b"x" * 100, 1)
    assert second == rows[1]
    plain = change_batch(rows[1:])
    assert inflated_batch(plain) is plain
