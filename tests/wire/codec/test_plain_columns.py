"""What only the plain codec does: the 12-byte drafts. Everything else is compared with the compiled one elsewhere."""

import pytest

from upriver.model import Change, Event, change_batch
from upriver.wire import DIALECTS
from upriver.wire.codec.columns import ChangeBatch, ChangeDecoder, ChangeEncoder


@pytest.mark.parametrize("name", ["upr_draft1", "upr_draft2"])
def test_changes_of_the_drafts_find_their_vbucket_by_the_request_that_they_answer(name: str) -> None:
    rows = [Change(vbucket=0, event=Event.MUTATION, seqno=n, key=b"k", value=b"v") for n in (1, 2)]
    encoder = ChangeEncoder(DIALECTS[name], opaque=45, vbucket=12)
    decoder = ChangeDecoder(DIALECTS[name], vbuckets={45: 12})
    decoder.feed(encoder.encode(change_batch(rows)))
    (batch,) = decoder
    assert isinstance(batch, ChangeBatch)
    assert batch.records.column("vbucket").to_pylist() == [12, 12]
    assert batch.transport.to_pydict() == {"opaque": [45, 45]}


def test_the_first_draft_drops_the_lock_time_of_a_deletion_and_the_second_keeps_it() -> None:
    batch = change_batch([Change(vbucket=0, event=Event.DELETION, seqno=1, lock_time=5, key=b"k")])
    sizes = [
        len(ChangeEncoder(DIALECTS[name], opaque=1, vbucket=0).encode(batch)) for name in ("upr_draft1", "upr_draft2")
    ]
    assert sizes[1] - sizes[0] == 4


def test_keys_only_leaves_the_value_out() -> None:
    batch = change_batch([Change(vbucket=0, event=Event.MUTATION, seqno=1, key=b"k", value=b"value")])
    packet = ChangeEncoder(DIALECTS["upr_draft2"], opaque=1, vbucket=0, keys_only=True).encode(batch)
    assert b"value" not in bytes(packet)
