"""Everything that a bucket must still know after a stop, as one comparable value."""

from typing import Any

from upriver.engine import Bucket, Vbucket
from upriver.model import VbucketState


def contents(vbucket: Vbucket) -> dict[bytes, tuple[Any, ...]]:
    """Live items and tombstones with all they carry."""
    table, found = vbucket.table, {}
    frames, *_ = table.read(0, 2**63, 2**63, 10**9, keys_only=True)
    assert isinstance(frames, bytes)
    batch, _ = table.read_columns(0, 2**63, 2**63, 10**8, keys_only=True)
    for row in batch.to_pylist():
        item = table.find(row["key"])
        assert item is not None
        assert item.seqno == row["seqno"]
        found[row["key"]] = (item.event, item.value, item.cas, item.rev_seqno, item.flags, item.expiry, item.seqno)
    return found


def digest(bucket: Bucket, *, branched: bool = False) -> dict[int, Any]:
    """``branched``: leave out the entry that an unclean stop adds to the log of an active vbucket."""
    found = {}
    for vbucket in bucket:
        log = [(entry.vbucket_uuid, entry.seqno) for entry in vbucket.failover_log]
        position = vbucket.position
        if branched and vbucket.state is VbucketState.ACTIVE:
            assert log[0][1] == vbucket.high_seqno
            del log[0]
        found[vbucket.number] = {
            "state": vbucket.state,
            "log": log,
            "high": vbucket.high_seqno,
            "snapshot": (position.snapshot.start, position.snapshot.end),
            "purge": vbucket.purge_seqno,
            "floor": vbucket.floor_seqno,
            "streamable": vbucket.streamable,
            "whole": [vbucket.consistent_at_or_below(seqno) for seqno in range(vbucket.high_seqno + 2)],
            "contents": contents(vbucket),
        }
    return found
